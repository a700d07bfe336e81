/* Overflow interrupts: their number, by delivery mode and privilege level, and where they struck. */
#include "selftest.h"

#define RUN_MS 80
#define SLOW_RUN_MS 400
#define TRIES 2
#define LONGEST_PMI_MS 200 /* a PMI that has not come by then is lost */
#define PERIODS_PER_SECOND 1000
#define LEAST_PERIOD 1000 /* so that the handler's own work cannot be all there is */

static u32 lvtpc;
static u64 period, pmis, late, spurious, select;
static u64 by_function[4]; /* hot, warm, cool, anywhere else */
static u64 handler_us;                   /* duration of the handler, if it is a slow one */
static u64 handler_tsc, run_tsc;         /* TSC ticks in the handler, and of the whole run */
static volatile bool ending; /* the handler leaves the counters off */

/* TSC ticks that switching both counters took, one after the other: on and off. */
static struct gap {
    u64 sum, n, least;
} gap_on, gap_off;

static void note(struct gap *gap, u64 ticks)
{
    if (!gap->n || ticks < gap->least)
        gap->least = ticks;
    gap->sum += ticks;
    gap->n++;
}

/* Without global control both are switched in the same order each time, so that they run equally long. */
static void counters_on(void)
{
    u64 t0 = rdtsc();

    if (pmu.global) {
        global_write(3);
        return;
    }
    sel_write(0, select | SEL_EN | SEL_INT);
    if (pmu.gp > 1)
        sel_write(1, select | SEL_EN);
    note(&gap_on, rdtsc() - t0);
}

static void counters_off(void)
{
    u64 t0 = rdtsc();

    if (pmu.global) {
        global_write(0);
        return;
    }
    sel_write(0, select | SEL_INT);
    if (pmu.gp > 1)
        sel_write(1, select);
    note(&gap_off, rdtsc() - t0);
}

/* As a driver does it: counters off, acknowledge, re-arm so that the distance between overflows stays, unmask, on. */
static void on_pmi(struct trap_frame *f)
{
    u64 v, t0 = rdtsc();

    counters_off();
    v = ctr_read(0);
    status_clear(BIT(0));
    if (counter_wrapped(0)) {
        pmis++;
        late += v / period; /* periods that went by before this handler ran */
        ctr_write(0, v % period - period);
        by_function[f->rip < (u64)spin_hot || f->rip >= (u64)spin_end ? 3
                    : f->rip >= (u64)spin_cool                        ? 2
                    : f->rip >= (u64)spin_warm                        ? 1
                                                                      : 0]++;
    } else {
        spurious++;
    }
    apic_write(APIC_LVTPC, lvtpc); /* Intel has masked it */
    if (handler_us)
        delay_us(handler_us);
    if (!ending)
        counters_on();
    handler_tsc += rdtsc() - t0;
}

/* How many rounds of spin_chunk take about 4 ms. */
static u64 calibrate(u32 cpl)
{
    u64 rounds = 4, t0, tsc, target = tsc_hz / 250;

    for (;; rounds *= 4) {
        tsc = ~0UL;
        for (u32 i = 0; i < 3; i++) { /* the shortest: the host may take the CPU away during any */
            t0 = rdtsc();
            run_at(cpl, spin_chunk, rounds);
            t0 = rdtsc() - t0;
            tsc = t0 < tsc ? t0 : tsc;
        }
        if (tsc > target / 8)
            return tsc > target ? rounds : rounds * target / tsc;
    }
}

/*
 * Each period has its PMI, or went by while the one before was on its way (late). None is lost beyond what starting and stopping two counters
 * one after the other explains, and none comes without an overflow. Where most are late, there is little to be told.
 */
static enum verdict pmi_verdict(u64 expected)
{
    const struct gap *gap = pmis + late < expected ? &gap_off : &gap_on;
    u64 slack = expected / 20 + 2, held_up;

    if (spurious > 0)
        return V_FAILED;
    if (near(pmis + late, expected, slack))
        return pmis > late ? V_OK : V_BUSY;
    /* A host that took the CPU away between the two switches had one counter run longer than the other: nothing can be told. */
    held_up = (gap->sum - gap->n * gap->least) / 1024 * cycles_per_1024_tsc / period;
    return held_up && near(pmis + late, expected, slack + held_up) ? V_BUSY : V_FAILED;
}

/* Runs for `ms` and counts the PMIs; how many there had to be. */
static u64 count_pmis(u32 lvt, u32 cpl, u32 ms)
{
    u64 rounds = calibrate(cpl), t0, tsc, total;
    u32 random = 1;

    pmu_reset();
    lvtpc = lvt;
    pmis = late = spurious = handler_tsc = 0;
    gap_on = gap_off = (struct gap){ 0 };
    ending = false;
    this_cpu()->pmi_hook = on_pmi;
    select = event_select(EV_CYCLES) | SEL_USR | SEL_OS;
    if (pmu.global) {
        sel_write(0, select | SEL_EN | SEL_INT);
        if (pmu.gp > 1)
            sel_write(1, select | SEL_EN);
    }
    ctr_write(0, -period);
    apic_write(APIC_LVTPC, lvtpc);
    t0 = rdtsc();
    counters_on();
    do {
        /* Chunks of different lengths, or the interrupts would strike each at the same place. */
        random = random * 1103515245 + 12345;
        sti();
        run_at(cpl, spin_chunk, rounds / 2 + rounds * (random >> 24) / 256);
        cli();
        tsc = rdtsc() - t0;
    } while (tsc < tsc_hz / 1000 * ms);
    run_tsc = tsc;
    /*
     * A PMI that is on its way still belongs to this row. Its handler must not switch the counters on again: where the host is busy the
     * next overflow can come meanwhile, and its vector would be taken in the next row, as one without an overflow. A busy host brings the
     * PMI late, too: as long as there is an overflow that the handler has not seen, it may still come.
     */
    ending = true;
    counters_off();
    sti();
    for (u32 i = 0; i < LONGEST_PMI_MS * 5 && counter_wrapped(0); i++)
        delay_us(200);
    delay_us(200);
    cli();
    this_cpu()->pmi_hook = NULL;
    /* The second counter ran along without interrupts; with one counter only, time must do. */
    total = pmu.gp > 1 ? ctr_read(1) : tsc / 1024 * cycles_per_1024_tsc;
    return total / period;
}

static void overflow_row(const char *mode, u32 lvt, u32 cpl)
{
    u64 usual = period, expected;
    u32 ms = RUN_MS, tries;
    enum verdict v;

    /* Where a PMI takes the host longer than a period most are late: fewer of them, for as long as makes as many. */
    for (tries = 1;; tries++) {
        expected = count_pmis(lvt, cpl, ms);
        v = pmi_verdict(expected);
        if (v != V_BUSY || tries == TRIES)
            break;
        period *= 4;
        ms *= 4;
    }
    if (tables)
        kprintf("    %-20s CPL%u  %'15lu  %'15lu         ", mode, cpl, pmis + late, expected);
    if (tables && tries > 1)
        kprintf("  (one every %'lu)", period);
    period = usual;
    if (tables && late)
        kprintf("  (%lu late)", late);
    if (tables && spurious)
        kprintf("  (%lu more came without an overflow)", spurious);
    verdict(lvt & LVT_NMI ? "pmi-nmi" : "pmi-vector", cpl ? "cpl3" : "cpl0", pmis + late, expected, v);
    if (lines)
        kprintf("result pmis.%s late=%lu spurious=%lu\n", cpl ? "cpl3" : "cpl0", late, spurious);
}

static void profile(void)
{
    static const char *const names[] = { "spin_hot", "spin_warm", "spin_cool", "elsewhere" };
    static const u32 expected[] = { 60, 30, 10, 0 };
    u64 all = by_function[0] + by_function[1] + by_function[2] + by_function[3];

    if (!all)
        return;
    if (tables)
        kprintf("\n  Where the interrupts at CPL3 struck (%lu samples)\n", all);
    for (u32 i = 0; i < 4; i++) {
        u64 percent = (by_function[i] * 100 + all / 2) / all;
        if (tables) {
            kprintf("    %-20s %3lu %%  expected %2u %%  ", names[i], percent, expected[i]);
            for (u32 k = 0; k < percent / 2; k++)
                putchar_raw('#');
            kprintf("\n");
        }
        if (lines)
            kprintf("result samples.%s saw=%lu of=%lu expected_percent=%u\n", names[i], by_function[i], all, expected[i]);
    }
}

void overflows(void)
{
    if (!cycles_per_1024_tsc) {
        if (tables)
            kprintf("\n  Overflow interrupts: not supported, no cycles were counted\n");
        return;
    }
    period = tsc_hz / 1024 * cycles_per_1024_tsc / PERIODS_PER_SECOND;
    if (period < LEAST_PERIOD)
        period = LEAST_PERIOD;
    if (tables)
        kprintf("\n  Overflow interrupts, one every %'lu cycles\n"
                "    delivery             where            PMIs         expected\n", period);
    overflow_row("NMI", LVT_NMI, 0);
    overflow_row("vector 0x40", VEC_PMI, 0);
    for (u32 i = 0; i < 4; i++)
        by_function[i] = 0;
    overflow_row("NMI", LVT_NMI, 3);
    overflow_row("vector 0x40", VEC_PMI, 3);
    profile();
}

/* The handler takes longer than the period, so without a bound each handler returns into the next PMI. */
void slow_handler(u64 us)
{
    u64 expected;

    cycles_per_1024_tsc = 1024;
    period = tsc_hz / 1000000 * 50;
    handler_us = us;
    expected = count_pmis(LVT_NMI, 3, SLOW_RUN_MS);
    kprintf("result slow-handler pmis=%lu late=%lu spurious=%lu expected=%lu handler_percent=%lu\n", pmis, late, spurious, expected,
            handler_tsc * 100 / run_tsc);
}
