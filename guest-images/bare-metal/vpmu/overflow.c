/* Overflow: the status bit, and what clears it. */
#include "check.h"

#define BOTH (SEL_USR | SEL_OS)

/* Lets counter i overflow without an interrupt. */
static void overflow(u32 i, u32 ms)
{
    ctr_write(i, -period_of_ms(ms));
    sel_write(i, counting_event | BOTH | SEL_EN);
    global_write(BIT(i));
    CHECK(wait_wrapped(i), "counter %u did not overflow", i);
    global_write(0);
    sel_write(i, counting_event | BOTH);
}

TEST(overflow_wraps, ON_ANY, "overflow: the counter goes on from 0 and no interrupt comes without INT")
{
    NEED_COUNTING();
    apic_write(APIC_LVTPC, LVT_NMI);
    for (u32 i = 0; i < pmu.gp; i++) {
        overflow(i, 1);
        CHECK(ctr_read(i) < BIT(pmu.width - 1), "counter %u: 0x%lx", i, ctr_read(i));
    }
    CHECK(this_cpu()->pmi_nmi == 0, "%lu NMIs", this_cpu()->pmi_nmi);
}

TEST(overflow_status, ON_INTEL | ON_V2, "overflow: status shows the counter at once, until its bit is cleared")
{
    if (!pmu.global)
        SKIP("version 1 has no status");
    NEED_COUNTING();
    for (u32 i = 0; i < pmu.gp; i++) {
        overflow(i, 1);
        CHECK(status_read() == BIT(i), "counter %u: 0x%lx", i, status_read());
        status_clear(BIT((i + 1) % 64 < pmu.gp ? i + 1 : 0) & ~BIT(i));
        CHECK(status_read() == BIT(i), "counter %u after clearing another: 0x%lx", i, status_read());
        ctr_write(i, 0);
        sel_write(i, 0);
        CHECK(status_read() == BIT(i), "counter %u after its reset: 0x%lx", i, status_read());
        status_clear(BIT(i));
        CHECK(status_read() == 0, "counter %u after clearing: 0x%lx", i, status_read());
    }
}

TEST(no_status_before_overflow, ON_INTEL | ON_V2, "overflow: status stays 0 while a counter runs below its overflow")
{
    if (!pmu.global)
        SKIP("version 1 has no status");
    NEED_COUNTING();
    sel_write(0, counting_event | BOTH | SEL_EN);
    global_write(1);
    busy(0, 3);
    CHECK(status_read() == 0, "0x%lx", status_read());
}

TEST(overflow_together, ON_INTEL | ON_V2, "overflow: all counters that overflow together show in status")
{
    if (!pmu.global)
        SKIP("version 1 has no status");
    NEED_COUNTING();
    for (u32 i = 0; i < pmu.gp; i++) {
        ctr_write(i, -period_of_ms(1));
        sel_write(i, counting_event | BOTH | SEL_EN);
    }
    global_write(BIT(pmu.gp) - 1);
    for (u32 i = 0; i < pmu.gp; i++)
        CHECK(wait_wrapped(i), "counter %u", i);
    CHECK(status_read() == BIT(pmu.gp) - 1, "0x%lx", status_read());
}

TEST(overflow_while_polled, ON_INTEL | ON_V2, "overflow: a counter that was read after its overflow has its status bit set")
{
    if (!pmu.global)
        SKIP("version 1 has no status");
    NEED_COUNTING();
    /* Polled in a loop, so that the read itself often is what finds the overflow. */
    for (u32 k = 0; k < 5; k++) {
        u64 end = rdtsc() + tsc_hz;
        ctr_write(0, -period_of_ms(1));
        sel_write(0, counting_event | BOTH | SEL_EN);
        global_write(1);
        while (!counter_wrapped(0) && (s64)(end - rdtsc()) > 0)
            ;
        CHECK(status_read() == 1, "0x%lx", status_read());
        global_write(0);
        status_clear(1);
    }
}

TEST(fixed_overflow, ON_INTEL, "overflow: a fixed counter sets bit 32 and up of status")
{
    u32 i = counting_event == event_select(EV_REF_CYCLES) ? 2 : counting_event == event_select(EV_CYCLES) ? 1 : 0;
    u64 end = rdtsc() + tsc_hz;

    if (!(pmu.fixed & BIT(i)) || fixed_denied(i))
        SKIP("no such fixed counter");
    NEED_COUNTING();
    wrmsr(MSR_FIXED_CTR0 + i, -period_of_ms(1) & width_mask());
    wrmsr(MSR_FIXED_CTR_CTRL, 3UL << 4 * i);
    global_write(BIT(32 + i));
    while (!status_read() && (s64)(end - rdtsc()) > 0)
        delay_us(100);
    CHECK(status_read() == BIT(32 + i), "0x%lx", status_read());
    CHECK(rdmsr(MSR_FIXED_CTR0 + i) < BIT(pmu.width - 1), "0x%lx", rdmsr(MSR_FIXED_CTR0 + i));
}

TEST(short_period, ON_ANY, "overflow: a period of 1 overflows")
{
    NEED_COUNTING();
    ctr_write(0, width_mask());
    sel_write(0, counting_event | BOTH | SEL_EN);
    global_write(1);
    CHECK(wait_wrapped(0));
}
