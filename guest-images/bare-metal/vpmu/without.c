/* A machine without a PMU: `--pmu off`. */
#include "check.h"

TEST(without_intel, ON_INTEL_WITHOUT, "without a PMU: 0xC1 and 0xC2 read 0 and drop writes, all other registers raise #GP")
{
    static const u32 msrs[] = { MSR_PMC0 + 2, MSR_EVNTSEL0 + 2, MSR_FIXED_CTR0, MSR_FIXED_CTR_CTRL, MSR_GLOBAL_STATUS,
                                MSR_GLOBAL_CTRL, MSR_GLOBAL_OVF_CTRL, MSR_GLOBAL_STATUS_SET, MSR_A_PMC0 };
    u64 v = 1;

    for (u32 i = 0; i < 2; i++) {
        CHECK(!wrmsr_safe(MSR_PMC0 + i, 0x1234), "write of 0x%x", MSR_PMC0 + i);
        CHECK(!rdmsr_safe(MSR_PMC0 + i, &v), "read of 0x%x", MSR_PMC0 + i);
        CHECK(v == 0, "0x%x reads 0x%lx", MSR_PMC0 + i, v);
    }
    for (u32 i = 0; i < ARRAY_LEN(msrs); i++) {
        CHECK(rdmsr_gp(msrs[i]), "RDMSR 0x%x", msrs[i]);
        CHECK(wrmsr_gp(msrs[i], 0), "WRMSR 0x%x", msrs[i]);
    }
}

TEST(without_amd, ON_AMD_WITHOUT, "without a PMU: the K7 registers keep nothing, the core and V2 registers raise #GP")
{
    u64 v = 1;

    for (u32 msr = MSR_K7_EVNTSEL0; msr < MSR_K7_EVNTSEL0 + 8; msr++) {
        CHECK(!wrmsr_safe(msr, 0x1234), "write of 0x%x", msr);
        CHECK(!rdmsr_safe(msr, &v) && v == 0, "0x%x reads 0x%lx", msr, v);
    }
    for (u32 msr = MSR_F15H_CTL0; msr < MSR_F15H_CTL0 + 12; msr++)
        CHECK(rdmsr_gp(msr) && wrmsr_gp(msr, 0), "MSR 0x%x", msr);
    for (u32 msr = MSR_V2_STATUS; msr <= MSR_V2_STATUS_SET; msr++)
        CHECK(rdmsr_gp(msr) && wrmsr_gp(msr, 0), "MSR 0x%x", msr);
}

TEST(without_enumeration, ON_INTEL_WITHOUT | ON_AMD_WITHOUT, "without a PMU: CPUID shows none, RDPMC raises #GP")
{
    u64 v;

    if (cpuid(0, 0).eax >= 0xa)
        CHECK((cpuid(0xa, 0).eax & 0xff) == 0);
    CHECK(!(cpuid(1, 0).ecx & BIT(15)), "PDCM");
    CHECK(!(cpuid(0x80000001, 0).ecx & BIT(23)), "PerfCtrExtCore");
    CHECK(rdpmc_safe(0, &v) && this_cpu()->fault_vector == VEC_GP);
}
