/* Intel: which bits of which register can be written, and which raise #GP. SDM volume 3 chapter 20, volume 4. */
#include "check.h"

static u64 sign_extended(u32 v) { return (u64)(s64)(int)v & width_mask(); }

TEST(selector_bits, ON_INTEL, "intel registers: selector bits 31:0 but 21 keep what is written; 21 and 63:32, but those for transactions, raise #GP")
{
    /* A processor with transactions (CPUID.(07H,0):EBX.HLE or RTM) has IN_TX (32) in each selector, IN_TXCP (33) in the third. */
    bool transactions = cpuid(0, 0).eax >= 7 && (cpuid(7, 0).ebx & (BIT(4) | BIT(11)));

    for (u32 bit = 0; bit < 64; bit++) {
        /* EN is left out of the way: bit 22 alone counts nothing without USR or OS. */
        bool reserved = (bit >= 32 && !(transactions && bit == 32)) || bit == 21;
        wrmsr(MSR_EVNTSEL0, 0);
        CHECK(wrmsr_safe(MSR_EVNTSEL0, BIT(bit)) == reserved, "bit %u", bit);
        CHECK(rdmsr(MSR_EVNTSEL0) == (reserved ? 0 : BIT(bit)), "bit %u: 0x%lx", bit, rdmsr(MSR_EVNTSEL0));
    }
    wrmsr(MSR_EVNTSEL0, 0);
    if (pmu.gp > 2) {
        CHECK(wrmsr_safe(MSR_EVNTSEL0 + 2, BIT(33)) == !transactions, "IN_TXCP of the third");
        wrmsr(MSR_EVNTSEL0 + 2, 0);
    }
}

TEST(every_selector, ON_INTEL, "intel registers: each selector and counter is a register of its own")
{
    for (u32 i = 0; i < pmu.gp; i++) {
        wrmsr(MSR_EVNTSEL0 + i, 0x1100 + i);
        wrmsr(MSR_PMC0 + i, 0x2200 + i);
    }
    for (u32 i = 0; i < pmu.gp; i++) {
        CHECK(rdmsr(MSR_EVNTSEL0 + i) == 0x1100 + i, "selector %u: 0x%lx", i, rdmsr(MSR_EVNTSEL0 + i));
        CHECK(rdmsr(MSR_PMC0 + i) == 0x2200 + i, "counter %u: 0x%lx", i, rdmsr(MSR_PMC0 + i));
    }
}

TEST(missing_counters, ON_INTEL, "intel registers: counters that do not exist raise #GP on RDMSR and WRMSR")
{
    for (u32 i = pmu.gp; i < 8; i++) {
        CHECK(rdmsr_gp(MSR_PMC0 + i) && wrmsr_gp(MSR_PMC0 + i, 0), "counter %u", i);
        CHECK(rdmsr_gp(MSR_EVNTSEL0 + i) && wrmsr_gp(MSR_EVNTSEL0 + i, 0), "selector %u", i);
        CHECK(rdmsr_gp(MSR_A_PMC0 + i) && wrmsr_gp(MSR_A_PMC0 + i, 0), "full-width counter %u", i);
    }
    for (u32 i = 0; i < 4; i++)
        if (!(pmu.fixed & BIT(i)))
            CHECK(rdmsr_gp(MSR_FIXED_CTR0 + i) && wrmsr_gp(MSR_FIXED_CTR0 + i, 0), "fixed counter %u", i);
}

TEST(sign_extension, ON_INTEL, "intel registers: a write of IA32_PMCx is sign-extended from bit 31 to the width")
{
    static const u32 values[] = { 0, 1, 0x7fffffff, 0x80000000, 0xdeadbeef, 0xffffffff };
    for (u32 k = 0; k < ARRAY_LEN(values); k++) {
        wrmsr(MSR_PMC0, values[k]);
        CHECK(rdmsr(MSR_PMC0) == sign_extended(values[k]), "0x%x reads 0x%lx", values[k], rdmsr(MSR_PMC0));
    }
}

TEST(full_width_writes, ON_INTEL, "intel registers: 0x4C1 takes the full width, aliases 0xC1, and raises #GP above the width")
{
    u64 v = 0x123456789abcdefUL & width_mask();

    if (!pmu.full_width) {
        CHECK(rdmsr_gp(MSR_A_PMC0) && wrmsr_gp(MSR_A_PMC0, 0), "without PERF_CAPABILITIES bit 13");
        SKIP("no full-width writes");
    }
    for (u32 i = 0; i < pmu.gp; i++) {
        wrmsr(MSR_A_PMC0 + i, v + i);
        CHECK(rdmsr(MSR_A_PMC0 + i) == v + i, "0x%lx", rdmsr(MSR_A_PMC0 + i));
        CHECK(rdmsr(MSR_PMC0 + i) == v + i, "0x%lx", rdmsr(MSR_PMC0 + i));
    }
    wrmsr(MSR_A_PMC0, 0x80000000);
    CHECK(rdmsr(MSR_PMC0) == 0x80000000, "no sign extension: 0x%lx", rdmsr(MSR_PMC0));
    wrmsr(MSR_A_PMC0, width_mask());
    CHECK(rdmsr(MSR_PMC0) == width_mask(), "0x%lx", rdmsr(MSR_PMC0));
    for (u32 bit = pmu.width; bit < 64; bit++)
        CHECK(wrmsr_gp(MSR_A_PMC0, BIT(bit)), "bit %u", bit);
    CHECK(rdmsr(MSR_PMC0) == width_mask(), "a faulting write changes nothing: 0x%lx", rdmsr(MSR_PMC0));
}

TEST(capabilities_read_only, ON_INTEL, "intel registers: any write of IA32_PERF_CAPABILITIES raises #GP")
{
    u64 v;

    if (!pmu.pdcm)
        SKIP("no PDCM");
    v = rdmsr(MSR_PERF_CAPABILITIES);
    CHECK(wrmsr_gp(MSR_PERF_CAPABILITIES, v), "its own value");
    CHECK(wrmsr_gp(MSR_PERF_CAPABILITIES, 0), "0");
    CHECK(rdmsr(MSR_PERF_CAPABILITIES) == v);
}

TEST(fixed_counters, ON_INTEL, "intel registers: fixed counters take the full width and raise #GP above it")
{
    if (!pmu.fixed)
        SKIP("no fixed counters");
    for (u32 i = 0; i < 32; i++) {
        u64 v = 0xfedcba9876543210UL & width_mask();
        if (!(pmu.fixed & BIT(i)))
            continue;
        wrmsr(MSR_FIXED_CTR0 + i, v);
        CHECK(rdmsr(MSR_FIXED_CTR0 + i) == v, "fixed counter %u: 0x%lx", i, rdmsr(MSR_FIXED_CTR0 + i));
        if (pmu.width < 64)
            CHECK(wrmsr_gp(MSR_FIXED_CTR0 + i, BIT(pmu.width)), "fixed counter %u", i);
        CHECK(rdmsr(MSR_FIXED_CTR0 + i) == v, "fixed counter %u after a fault", i);
    }
}

TEST(fixed_control_bits, ON_INTEL, "intel registers: fixed control takes OS, USR and PMI of existing counters, all else raises #GP")
{
    if (pmu.version < 2) {
        CHECK(rdmsr_gp(MSR_FIXED_CTR_CTRL) && wrmsr_gp(MSR_FIXED_CTR_CTRL, 0), "version 1");
        return;
    }
    for (u32 bit = 0; bit < 64; bit++) {
        bool allowed = (pmu.fixed >> bit / 4 & 1) && bit / 4 < 16 && (0xb >> bit % 4 & 1);
        wrmsr(MSR_FIXED_CTR_CTRL, 0);
        CHECK(wrmsr_safe(MSR_FIXED_CTR_CTRL, BIT(bit)) == !allowed, "bit %u", bit);
        CHECK(rdmsr(MSR_FIXED_CTR_CTRL) == (allowed ? BIT(bit) : 0), "bit %u: 0x%lx", bit, rdmsr(MSR_FIXED_CTR_CTRL));
    }
}

TEST(global_control_bits, ON_INTEL, "intel registers: global control has a bit for each counter, all others raise #GP")
{
    if (pmu.version < 2) {
        CHECK(rdmsr_gp(MSR_GLOBAL_CTRL) && wrmsr_gp(MSR_GLOBAL_CTRL, 0), "version 1");
        return;
    }
    for (u32 bit = 0; bit < 64; bit++) {
        bool allowed = global_enabled() >> bit & 1;
        wrmsr(MSR_GLOBAL_CTRL, 0);
        CHECK(wrmsr_safe(MSR_GLOBAL_CTRL, BIT(bit)) == !allowed, "bit %u", bit);
        CHECK(rdmsr(MSR_GLOBAL_CTRL) == (allowed ? BIT(bit) : 0), "bit %u: 0x%lx", bit, rdmsr(MSR_GLOBAL_CTRL));
    }
}

TEST(status_read_only, ON_INTEL, "intel registers: a write of global status raises #GP; overflow control reads 0")
{
    if (pmu.version < 2) {
        CHECK(rdmsr_gp(MSR_GLOBAL_STATUS) && rdmsr_gp(MSR_GLOBAL_OVF_CTRL), "version 1");
        return;
    }
    CHECK(wrmsr_gp(MSR_GLOBAL_STATUS, 0), "0");
    CHECK(wrmsr_gp(MSR_GLOBAL_STATUS, 1), "1");
    wrmsr(MSR_GLOBAL_OVF_CTRL, global_enabled());
    CHECK(rdmsr(MSR_GLOBAL_OVF_CTRL) == 0, "0x%lx", rdmsr(MSR_GLOBAL_OVF_CTRL));
    /* OvfBuffer and CondChgd can be cleared on every version, the uncore's bit from version 3, those of freezing and ASCI from 4. */
    for (u32 bit = 0; bit < 64; bit++) {
        bool takes = (global_enabled() >> bit & 1) || bit >= 62 || (bit == 61 && pmu.version >= 3) ||
                     (bit >= 58 && bit <= 60 && pmu.version >= 4);
        CHECK(wrmsr_safe(MSR_GLOBAL_OVF_CTRL, BIT(bit)) == !takes, "bit %u", bit);
    }
}

TEST(status_set, ON_INTEL, "intel registers: from version 4 on 0x391 sets and 0x390 clears bits of global status")
{
    u64 all = global_enabled();

    if (pmu.version < 4) {
        CHECK(rdmsr_gp(MSR_GLOBAL_STATUS_SET) && wrmsr_gp(MSR_GLOBAL_STATUS_SET, 0), "before version 4");
        return;
    }
    for (u32 bit = 0; bit < 64; bit++) {
        bool takes = (all >> bit & 1) || (bit >= 58 && bit <= 62);
        CHECK(wrmsr_safe(MSR_GLOBAL_STATUS_SET, BIT(bit)) == !takes, "bit %u", bit);
        if (!takes)
            continue;
        CHECK(rdmsr(MSR_GLOBAL_STATUS) == BIT(bit), "bit %u: 0x%lx", bit, rdmsr(MSR_GLOBAL_STATUS));
        wrmsr(MSR_GLOBAL_OVF_CTRL, BIT(bit));
        CHECK(rdmsr(MSR_GLOBAL_STATUS) == 0, "bit %u: 0x%lx", bit, rdmsr(MSR_GLOBAL_STATUS));
    }
    wrmsr(MSR_GLOBAL_STATUS_SET, all);
    wrmsr(MSR_GLOBAL_OVF_CTRL, all & ~1UL);
    CHECK(rdmsr(MSR_GLOBAL_STATUS) == 1, "only the bits written are cleared: 0x%lx", rdmsr(MSR_GLOBAL_STATUS));
    CHECK(wrmsr_gp(MSR_GLOBAL_STATUS_SET, BIT(pmu.gp)), "a counter that does not exist");
}

TEST(in_use, ON_INTEL, "intel registers: from version 4 on 0x392 shows the counters programmed and is read-only")
{
    if (pmu.version < 4) {
        CHECK(rdmsr_gp(MSR_GLOBAL_INUSE) && wrmsr_gp(MSR_GLOBAL_INUSE, 0), "before version 4");
        return;
    }
    CHECK(rdmsr(MSR_GLOBAL_INUSE) == 0, "0x%lx", rdmsr(MSR_GLOBAL_INUSE));
    for (u32 i = 0; i < pmu.gp; i++) {
        sel_write(i, 0x3c);
        CHECK(rdmsr(MSR_GLOBAL_INUSE) == BIT(i), "selector %u: 0x%lx", i, rdmsr(MSR_GLOBAL_INUSE));
        sel_write(i, 0x3c | SEL_INT);
        CHECK(rdmsr(MSR_GLOBAL_INUSE) == (BIT(i) | BIT(63)), "PMI of %u: 0x%lx", i, rdmsr(MSR_GLOBAL_INUSE));
        sel_write(i, 0);
    }
    for (u32 i = 0; i < 16; i++) {
        if (!(pmu.fixed & BIT(i)))
            continue;
        wrmsr(MSR_FIXED_CTR_CTRL, 1UL << 4 * i);
        CHECK(rdmsr(MSR_GLOBAL_INUSE) == BIT(32 + i), "fixed %u: 0x%lx", i, rdmsr(MSR_GLOBAL_INUSE));
        wrmsr(MSR_FIXED_CTR_CTRL, 0);
    }
    CHECK(wrmsr_gp(MSR_GLOBAL_INUSE, 0), "a write");
}

TEST(no_other_registers, ON_ANY, "registers: model-specific branch records, debug store and version 6 are no one's and raise #GP")
{
    static const u32 absent[] = { 0x40, 0x60, 0x1a6, 0x1c8, 0x3f1, 0x3f6, 0x600, 0x680, 0x6c0, 0xdc0, 0x1900, 0x1980, 0x1984,
                                  0xc0000105, 0xc0010230, 0xc0010240, 0xc0010280, 0xc0010800, 0xc0011030 };
    static const u32 of_branch_records[] = { 0x1c9, 0x1200, 0x14ce, 0x14cf, 0x1500, 0x1600, 0xc000010e, 0xc0010300 };

    for (u32 k = 0; k < ARRAY_LEN(absent); k++)
        CHECK(rdmsr_gp(absent[k]) && wrmsr_gp(absent[k], 0), "MSR 0x%x", absent[k]);
    for (u32 k = 0; k < ARRAY_LEN(of_branch_records) && !pmu.branch_records; k++)
        CHECK(rdmsr_gp(of_branch_records[k]) && wrmsr_gp(of_branch_records[k], 0), "MSR 0x%x", of_branch_records[k]);
}
