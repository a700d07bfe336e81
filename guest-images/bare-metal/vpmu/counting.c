/* When a counter moves, and when it must not. */
#include "check.h"

#define BOTH (SEL_USR | SEL_OS)

static u64 moved(u32 i, u64 start) { return (ctr_read(i) - start) & width_mask(); }

TEST(cycles_count, ON_ANY, "counting: cycles count if CPUID says that they are available")
{
    if (!event_exists(EV_CYCLES) || denied(event_select(EV_CYCLES)) || backing_is("none"))
        SKIP("no cycles event");
    sel_write(0, event_select(EV_CYCLES) | BOTH | SEL_EN);
    global_write(1);
    busy(0, 2);
    CHECK(ctr_read(0) > 0);
}

TEST(disabled_counter, ON_ANY, "counting: a counter without EN keeps its value")
{
    for (u32 i = 0; i < pmu.gp; i++) {
        ctr_write(i, 0x1234);
        sel_write(i, counting_event | BOTH);
    }
    global_write(global_enabled());
    busy(0, 3);
    busy(3, 3);
    for (u32 i = 0; i < pmu.gp; i++)
        CHECK(ctr_read(i) == 0x1234, "counter %u: 0x%lx", i, ctr_read(i));
}

TEST(no_privilege_level, ON_ANY, "counting: a counter with neither USR nor OS keeps its value")
{
    ctr_write(0, 0x1234);
    sel_write(0, counting_event | SEL_EN);
    global_write(global_enabled());
    busy(0, 3);
    busy(3, 3);
    CHECK(ctr_read(0) == 0x1234, "0x%lx", ctr_read(0));
}

TEST(enabled_counters, ON_ANY, "counting: every enabled counter counts, never backwards, and stops with EN")
{
    NEED_COUNTING();
    for (u32 i = 0; i < pmu.gp; i++) {
        u64 last = 0, now = 0;
        ctr_write(i, 0);
        global_write(BIT(i));
        sel_write(i, counting_event | BOTH | SEL_EN);
        for (u32 k = 0; k < 20; k++) {
            now = ctr_read(i);
            CHECK(now >= last, "counter %u from %lu to %lu", i, last, now);
            last = now;
        }
        busy(0, 1);
        sel_write(i, counting_event | BOTH);
        now = ctr_read(i);
        CHECK(now > last, "counter %u stayed at %lu", i, now);
        busy(0, 1);
        CHECK(ctr_read(i) == now, "counter %u moved while off", i);
    }
}

TEST(start_value, ON_ANY, "counting: a counter counts on from the value it holds")
{
    u64 start = BIT(pmu.width - 2);

    NEED_COUNTING();
    ctr_write(0, start);
    CHECK(ctr_read(0) == start || !pmu.full_width, "0x%lx", ctr_read(0));
    start = ctr_read(0);
    sel_write(0, counting_event | BOTH | SEL_EN);
    global_write(1);
    busy(0, 1);
    CHECK(moved(0, start) > 0 && moved(0, start) < BIT(pmu.width - 3), "0x%lx", ctr_read(0));
}

TEST(write_while_running, ON_ANY, "counting: a write takes effect at once while the counter runs")
{
    u64 v;

    NEED_COUNTING();
    sel_write(0, counting_event | BOTH | SEL_EN);
    global_write(1);
    busy(0, 5);
    ctr_write(0, 0);
    v = ctr_read(0);
    CHECK(v < period_of_ms(4), "%lu after a write of 0", v);
    ctr_write(0, 0x40000000);
    v = ctr_read(0);
    CHECK(v >= 0x40000000 && v < 0x40000000 + period_of_ms(4), "0x%lx", v);
    busy(0, 1);
    CHECK(ctr_read(0) > v);
}

TEST(global_control_gates, ON_INTEL | ON_V2, "counting: a counter counts only with its bit in global control")
{
    if (!pmu.global)
        SKIP("version 1 has no global control");
    NEED_COUNTING();
    for (u32 i = 0; i < pmu.gp; i++)
        sel_write(i, counting_event | BOTH | SEL_EN);
    busy(0, 2);
    for (u32 i = 0; i < pmu.gp; i++)
        CHECK(ctr_read(i) == 0, "counter %u: %lu", i, ctr_read(i));
    global_write(BIT(pmu.gp - 1));
    busy(0, 2);
    for (u32 i = 0; i < pmu.gp; i++)
        CHECK((ctr_read(i) != 0) == (i == pmu.gp - 1), "counter %u: %lu", i, ctr_read(i));
}

TEST(all_together, ON_INTEL | ON_V2, "counting: all counters started by one write count the same")
{
    u64 least = ~0UL, most = 0;

    if (!pmu.global)
        SKIP("version 1 has no global control");
    NEED_COUNTING();
    for (u32 i = 0; i < pmu.gp; i++)
        sel_write(i, counting_event | BOTH | SEL_EN);
    global_write(BIT(pmu.gp) - 1);
    busy(0, 10);
    global_write(0);
    for (u32 i = 0; i < pmu.gp; i++) {
        u64 v = ctr_read(i);
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    CHECK(least > 0 && most - least <= most / 10 + 20, "from %lu to %lu", least, most);
}

TEST(privilege_levels, ON_ANY, "counting: USR counts CPL3 and OS counts CPL0")
{
    NEED_COUNTING();
    if (pmu.gp < 3)
        SKIP("needs three counters");
    for (u32 cpl = 0; cpl <= 3; cpl += 3) {
        u64 user, kernel, both, end = rdtsc() + tsc_hz;
        for (u32 i = 0; i < 3; i++)
            ctr_write(i, 0);
        sel_write(0, counting_event | SEL_USR | SEL_EN);
        sel_write(1, counting_event | SEL_OS | SEL_EN);
        sel_write(2, counting_event | BOTH | SEL_EN);
        global_write(7);
        do /* what busy() takes for 20 ms may be less on a busy host */
            busy(cpl, 20);
        while (ctr_read(2) < 20 * counts_per_ms && (s64)(end - rdtsc()) > 0);
        global_write(0);
        for (u32 i = 0; i < 3; i++)
            sel_write(i, counting_event);
        user = ctr_read(0), kernel = ctr_read(1), both = ctr_read(2);
        /* Where only time is counted the levels are an estimate. */
        if (cpl)
            CHECK(user > both / 2 && kernel < both / 2, "CPL3: user %lu, kernel %lu, both %lu", user, kernel, both);
        else
            CHECK(kernel > both / 2 && user < both / 4, "CPL0: user %lu, kernel %lu, both %lu", user, kernel, both);
    }
}

TEST(fixed_counters_count, ON_INTEL, "counting: fixed counters count as their fields and global control say")
{
    static const enum pmu_event events[] = { EV_INSTRUCTIONS, EV_CYCLES, EV_REF_CYCLES };

    if (!pmu.fixed)
        SKIP("no fixed counters");
    for (u32 i = 0; i < 3; i++) {
        u64 v;
        if (!(pmu.fixed & BIT(i)) || !event_exists(events[i]) || backing_is("none"))
            continue;
        if (fixed_denied(i))
            continue;
        wrmsr(MSR_FIXED_CTR0 + i, 0);
        wrmsr(MSR_FIXED_CTR_CTRL, 3UL << 4 * i);
        busy(0, 1);
        CHECK(rdmsr(MSR_FIXED_CTR0 + i) == 0, "fixed %u counts without global control", i);
        global_write(BIT(32 + i));
        busy(0, 2);
        global_write(0);
        v = rdmsr(MSR_FIXED_CTR0 + i);
        CHECK(v > 0, "fixed %u", i);
        wrmsr(MSR_FIXED_CTR_CTRL, 0);
        global_write(BIT(32 + i));
        busy(0, 1);
        CHECK(rdmsr(MSR_FIXED_CTR0 + i) == v, "fixed %u counts with its field 0", i);
    }
}

TEST(threshold, ON_ANY, "counting: with a counter mask the clock backing counts nothing")
{
    NEED_COUNTING();
    if (!backing_is("clock"))
        SKIP("for the clock backing");
    sel_write(0, counting_event | BOTH | SEL_EN | SEL_CMASK(1));
    global_write(1);
    busy(0, 3);
    CHECK(ctr_read(0) == 0, "%lu", ctr_read(0));
}

TEST(unavailable_events, ON_INTEL, "counting: an event that CPUID calls unavailable keeps its value and does not fault")
{
    for (u32 e = 0; e < EV_COUNT; e++) {
        if (event_exists(e))
            continue;
        ctr_write(0, 0x4321);
        CHECK(!wrmsr_safe(sel_msr(0), event_select(e) | BOTH | SEL_EN), "%s", event_name(e));
        global_write(1);
        busy(0, 2);
        CHECK(ctr_read(0) == 0x4321, "%s: 0x%lx", event_name(e), ctr_read(0));
        global_write(0);
        sel_write(0, 0);
    }
}

/* How many ticks of the local APIC's timer a millisecond has, with divider 16. */
static u32 timer_ticks_per_ms(void)
{
    u32 ticks;
    apic_write(APIC_TIMER_DIV, 3);
    apic_write(APIC_LVT_TIMER, LVT_MASKED | VEC_TIMER);
    apic_write(APIC_TIMER_INIT, 0xffffffff);
    delay_us(2000);
    ticks = (0xffffffff - apic_read(APIC_TIMER_NOW)) / 2;
    apic_write(APIC_TIMER_INIT, 0);
    return ticks;
}

TEST(halted, ON_ANY, "counting: the counters stand still while the CPU halts")
{
    u64 t0, ms, before;
    u32 ticks = timer_ticks_per_ms();

    NEED_COUNTING();
    if (pmu.kind == PMU_INTEL && counting_event == event_select(EV_INSTRUCTIONS))
        SKIP("no cycles event");
    sel_write(0, counting_event | BOTH | SEL_EN);
    global_write(1);
    before = this_cpu()->timer;
    apic_write(APIC_LVT_TIMER, VEC_TIMER);
    apic_write(APIC_TIMER_INIT, ticks * 40);
    t0 = rdtsc();
    while (this_cpu()->timer == before)
        sti_hlt(), cli();
    ms = (rdtsc() - t0) / (tsc_hz / 1000);
    global_write(0);
    sel_write(0, 0);
    apic_write(APIC_LVT_TIMER, LVT_MASKED);
    CHECK(ms >= 20, "halted for %lu ms only", ms);
    CHECK(ctr_read(0) < counts_per_ms * ms / 2 + 500, "%lu in %lu ms of halt", ctr_read(0), ms);
}
