/* AMD: nothing faults that is enumerated; what is reserved is dropped. APM volume 2 section 13.2. */
#include "check.h"

#define SELECTOR_DROPPED 0xfffffcf000280000UL

TEST(amd_selector_bits, ON_AMD, "amd registers: reserved selector bits are dropped without a fault, the others kept")
{
    for (u32 bit = 0; bit < 64; bit++) {
        u64 kept = BIT(bit) & ~SELECTOR_DROPPED;
        CHECK(!wrmsr_safe(sel_msr(0), BIT(bit)), "bit %u faults", bit);
        CHECK(rdmsr(sel_msr(0)) == kept, "bit %u: 0x%lx", bit, rdmsr(sel_msr(0)));
    }
    wrmsr(sel_msr(0), ~0UL & ~SEL_EN);
    CHECK(rdmsr(sel_msr(0)) == (~SELECTOR_DROPPED & ~SEL_EN), "0x%lx", rdmsr(sel_msr(0)));
}

TEST(amd_counter_width, ON_AMD, "amd registers: a counter keeps the low 48 bits, without sign extension or fault")
{
    static const u64 values[] = { 0, 1, 0x80000000, 0xffffffff, 0x7fffffffffff, 0xffffffffffff, ~0UL, 1UL << 48 };

    for (u32 i = 0; i < pmu.gp; i++) {
        for (u32 k = 0; k < ARRAY_LEN(values); k++) {
            CHECK(!wrmsr_safe(ctr_msr(i), values[k]), "counter %u, 0x%lx", i, values[k]);
            CHECK(rdmsr(ctr_msr(i)) == (values[k] & width_mask()), "counter %u, 0x%lx reads 0x%lx", i, values[k],
                  rdmsr(ctr_msr(i)));
        }
    }
}

TEST(amd_every_register, ON_AMD, "amd registers: each selector and counter is a register of its own")
{
    for (u32 i = 0; i < pmu.gp; i++) {
        wrmsr(sel_msr(i), 0x1100 + i);
        wrmsr(ctr_msr(i), 0x220000000000 + i);
    }
    for (u32 i = 0; i < pmu.gp; i++) {
        CHECK(rdmsr(sel_msr(i)) == 0x1100 + i, "selector %u: 0x%lx", i, rdmsr(sel_msr(i)));
        CHECK(rdmsr(ctr_msr(i)) == 0x220000000000 + i, "counter %u: 0x%lx", i, rdmsr(ctr_msr(i)));
    }
}

TEST(k7_aliases, ON_CORE | ON_V2, "amd registers: the K7 registers are the first four core counters")
{
    for (u32 i = 0; i < 4; i++) {
        wrmsr(MSR_K7_EVNTSEL0 + i, 0x3300 + i);
        wrmsr(MSR_K7_PERFCTR0 + i, 0x440000000000 + i);
        CHECK(rdmsr(MSR_F15H_CTL0 + 2 * i) == 0x3300 + i, "selector %u: 0x%lx", i, rdmsr(MSR_F15H_CTL0 + 2 * i));
        CHECK(rdmsr(MSR_F15H_CTR0 + 2 * i) == 0x440000000000 + i, "counter %u", i);
        wrmsr(MSR_F15H_CTL0 + 2 * i, 0x5500 + i);
        wrmsr(MSR_F15H_CTR0 + 2 * i, 0x660000000000 + i);
        CHECK(rdmsr(MSR_K7_EVNTSEL0 + i) == 0x5500 + i, "selector %u: 0x%lx", i, rdmsr(MSR_K7_EVNTSEL0 + i));
        CHECK(rdmsr(MSR_K7_PERFCTR0 + i) == 0x660000000000 + i, "counter %u", i);
    }
}

TEST(amd_missing_counters, ON_AMD, "amd registers: registers that are not enumerated raise #GP")
{
    for (u32 i = pmu.kind == PMU_K7 ? 0 : pmu.gp; i < 15; i++) {
        CHECK(rdmsr_gp(MSR_F15H_CTL0 + 2 * i) && wrmsr_gp(MSR_F15H_CTL0 + 2 * i, 0), "selector %u", i);
        CHECK(rdmsr_gp(MSR_F15H_CTR0 + 2 * i) && wrmsr_gp(MSR_F15H_CTR0 + 2 * i, 0), "counter %u", i);
    }
    if (pmu.kind != PMU_V2)
        for (u32 msr = MSR_V2_STATUS; msr <= MSR_V2_STATUS_SET; msr++)
            CHECK(rdmsr_gp(msr) && wrmsr_gp(msr, 0), "MSR 0x%x", msr);
}

TEST(v2_global_control, ON_V2, "amd registers: global control has a bit for each counter, others are dropped")
{
    CHECK(!wrmsr_safe(MSR_V2_CTL, ~0UL));
    CHECK(rdmsr(MSR_V2_CTL) == BIT(pmu.gp) - 1, "0x%lx", rdmsr(MSR_V2_CTL));
    wrmsr(MSR_V2_CTL, 2);
    CHECK(rdmsr(MSR_V2_CTL) == 2, "0x%lx", rdmsr(MSR_V2_CTL));
}

TEST(v2_status, ON_V2, "amd registers: status ignores writes, 0xC0000303 sets it, 0xC0000302 clears it and reads 0")
{
    u64 all = BIT(pmu.gp) - 1;

    CHECK(!wrmsr_safe(MSR_V2_STATUS, all));
    CHECK(rdmsr(MSR_V2_STATUS) == 0, "0x%lx", rdmsr(MSR_V2_STATUS));
    wrmsr(MSR_V2_STATUS_SET, all);
    CHECK((rdmsr(MSR_V2_STATUS) & all) == all, "0x%lx", rdmsr(MSR_V2_STATUS));
    CHECK(!wrmsr_safe(MSR_V2_STATUS, 0));
    CHECK((rdmsr(MSR_V2_STATUS) & all) == all, "a write of 0: 0x%lx", rdmsr(MSR_V2_STATUS));
    wrmsr(MSR_V2_STATUS_CLR, all & ~1UL);
    CHECK(rdmsr(MSR_V2_STATUS) == 1, "only the bits written: 0x%lx", rdmsr(MSR_V2_STATUS));
    CHECK(rdmsr(MSR_V2_STATUS_CLR) == 0, "0x%lx", rdmsr(MSR_V2_STATUS_CLR));
    wrmsr(MSR_V2_STATUS_CLR, 1);
    CHECK(rdmsr(MSR_V2_STATUS) == 0, "0x%lx", rdmsr(MSR_V2_STATUS));
}
