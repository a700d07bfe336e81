/* Registers that are not the PMU's alone: IA32_DEBUGCTL and IA32_MISC_ENABLE. SDM volume 4. */
#include "check.h"

#define MSR_MISC_ENABLE 0x1a0
#define DEBUGCTL_BTF BIT(1)

TEST(debugctl_bits, ON_INTEL, "debugctl: takes LBR, BTF, freeze-on-PMI and what CPUID announces, all else raises #GP")
{
    bool bus_lock = cpuid(7, 0).ecx & BIT(24), rtm = cpuid(7, 0).ebx & BIT(11);

    if (pmu.version < 2)
        SKIP("version 1 cannot freeze");
    for (u32 bit = 0; bit < 64; bit++) {
        bool takes = bit == 0 || bit == 1 || bit == 12 || (bit == 11 && pmu.branch_records) || (bit == 2 && bus_lock) || (bit == 15 && rtm);
        u64 v;

        wrmsr(MSR_DEBUGCTL, 0);
        CHECK(wrmsr_safe(MSR_DEBUGCTL, BIT(bit)) == !takes, "bit %u", bit);
        v = rdmsr(MSR_DEBUGCTL);
        /* A processor without the other two of these keeps them clear. */
        CHECK((v & ~BIT(bit)) == 0 && (v == 0) <= ((bit != 12 && bit != 11) || !takes), "bit %u reads 0x%lx", bit, v);
    }
    /* There are no model-specific branch records to be enabled. */
    wrmsr(MSR_DEBUGCTL, 1 | DEBUGCTL_FREEZE_PMI);
    CHECK(rdmsr(MSR_DEBUGCTL) == DEBUGCTL_FREEZE_PMI, "0x%lx", rdmsr(MSR_DEBUGCTL));
    wrmsr(MSR_DEBUGCTL, 0);
    CHECK(rdmsr(MSR_DEBUGCTL) == 0, "0x%lx", rdmsr(MSR_DEBUGCTL));
}

TEST(misc_enable, ON_INTEL, "misc_enable: says that there is performance monitoring, no branch trace store and no PEBS")
{
    u64 v = 0;

    CHECK(!rdmsr_safe(MSR_MISC_ENABLE, &v));
    CHECK(v & BIT(7), "performance monitoring, 0x%lx", v);
    CHECK((v & BIT(11)) && (v & BIT(12)), "branch trace store and PEBS, 0x%lx", v);
}
