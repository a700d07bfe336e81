/* Keeping a CPU busy at a privilege level, and which event to do it for. */
#include "check.h"

u64 counting_event, counts_per_ms;
static u64 rounds_per_ms; /* of known_loop at CPL3 */

/* TSC ticks of the shortest of `runs` at CPL3: the host may take the CPU away during any of them. */
static u64 shortest(u32 runs, u64 rounds)
{
    u64 best = ~0UL;
    while (runs--) {
        u64 t0 = rdtsc(), t;
        run_user(known_loop, rounds);
        t = rdtsc() - t0;
        best = t < best ? t : best;
    }
    return best;
}

/* What `select` counts in a few milliseconds at CPL0, in 1/1024 of TSC ticks. */
static u64 try_event(u64 select)
{
    u64 t0, tsc, count;

    ctr_write(0, 0);
    sel_write(0, select | SEL_USR | SEL_OS | SEL_EN);
    global_write(1);
    t0 = rdtsc();
    delay_us(4000);
    tsc = rdtsc() - t0;
    count = ctr_read(0);
    if (count) {
        /* While it counts, because a stepped CPL3 is as slow as that. */
        u64 rounds = 16;
        for (;; rounds *= 4) {
            u64 t = shortest(5, rounds);
            if (t > tsc_hz / 500) {
                rounds_per_ms = rounds * (tsc_hz / 1000) / t;
                break;
            }
        }
    }
    global_write(0);
    sel_write(0, 0);
    return count * 1024 / tsc;
}

void work_setup(void)
{
    static const enum pmu_event candidates[] = { EV_CYCLES, EV_REF_CYCLES, EV_INSTRUCTIONS };

    for (u32 i = 0; i < ARRAY_LEN(candidates); i++) {
        enum pmu_event e = candidates[i];
        u64 rate = event_exists(e) && !denied(event_select(e)) ? try_event(event_select(e)) : 0;
        if (rate) {
            counting_event = event_select(e);
            counts_per_ms = rate * (tsc_hz / 1000) / 1024;
            return;
        }
    }
}

void busy(u32 cpl, u32 ms)
{
    if (cpl)
        run_user(known_loop, rounds_per_ms * ms + 1);
    else
        delay_us(1000UL * ms);
}

u64 period_of_ms(u32 ms)
{
    /* At least so many that the instructions around it do not matter when each is stepped. */
    u64 p = counts_per_ms * ms;
    return p < 500 ? 500 : p;
}

bool wait_wrapped(u32 i)
{
    u64 end = rdtsc() + tsc_hz;
    while (!counter_wrapped(i)) {
        if ((s64)(end - rdtsc()) < 0)
            return false;
        delay_us(100);
    }
    return true;
}
