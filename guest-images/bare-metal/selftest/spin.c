/* A target for profiling from outside: known functions at CPL3, on every CPU. */
#include "selftest.h"

static u64 deadline; /* TSC; 0 for never */
static u64 chunk;

static void spin_cpu(u64 unused)
{
    (void)unused;
    do {
        run_user(spin_chunk, chunk);
    } while (!deadline || (s64)(deadline - rdtsc()) > 0);
}

void spin(u64 seconds)
{
    u32 cpus = smp_start();
    u64 t0, tsc;

    /* A chunk of about 20 ms, so that CPL0 hardly shows in the profile. */
    for (chunk = 64;; chunk *= 4) {
        t0 = rdtsc();
        run_user(spin_chunk, chunk);
        tsc = rdtsc() - t0;
        if (tsc > tsc_hz / 400)
            break;
    }
    chunk = chunk * (tsc_hz / 50) / tsc;
    if (tables)
        kprintf("spinning on %u CPU%s at CPL3: spin_hot 60 %%, spin_warm 30 %%, spin_cool 10 %%\n", cpus,
                cpus > 1 ? "s" : "");
    deadline = seconds ? rdtsc() + seconds * tsc_hz : 0;
    for (u32 i = 1; i < cpus; i++)
        smp_run(i, spin_cpu, 0);
    spin_cpu(0);
    for (u32 i = 1; i < cpus; i++)
        smp_wait(i);
    if (lines)
        kprintf("result spin cpus=%u seconds=%lu\n", cpus, seconds);
}

/* Takes branches of known probability at CPL0 for ever, after a line with the addresses of the branch instructions. */
void branches(void)
{
    extern char branch_round[], branch_quarter[], branch_rare[], branch_enter[], branch_leaf[], branch_again[],
        branch_indirect[], branch_target0[], branch_target1[], branch_target2[], branch_target3[];
    extern void branch_rounds(void) __attribute__((noreturn));

    kprintf("branches round=%lx quarter=%lx rare=%lx enter=%lx leaf=%lx again=%lx indirect=%lx targets=%lx,%lx,%lx,%lx\n",
            (u64)branch_round, (u64)branch_quarter, (u64)branch_rare, (u64)branch_enter, (u64)branch_leaf,
            (u64)branch_again, (u64)branch_indirect, (u64)branch_target0, (u64)branch_target1, (u64)branch_target2,
            (u64)branch_target3);
    branch_rounds();
}

/*
 * Tells every 50 ms how much of its time this CPU was not run: parts in a million that lie in gaps of more than 1 us between two readings
 * of the TSC, and readings per millisecond. Short lines, for each character is an exit.
 */
void show_gaps(void)
{
    static struct gaps g;

    kprintf("gaps\n");
    for (;;) {
        g.length = tsc_hz / 20;
        g.least = tsc_hz / 1000000;
        run_user(spin_gaps, (u64)&g);
        kprintf("%lu %lu\n", g.lost * 1000000 / g.total, g.rounds * (tsc_hz / 1000) / g.total);
    }
}
