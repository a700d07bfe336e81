/*
 * Test kernel for exact counting: hand-counted blocks, whose instructions, branches, loads and stores must be counted to the
 * last one. For a PMU that counts instructions: `--backing exact`, or hardware.
 *
 * Command line: no-user (CPL3 cannot be counted here), no-syscall, only=PREFIX.
 */
#include "exact.h"

#define REPEATS 5

u64 instructions;

u64 count(u64 select, block *b, u64 argument)
{
    ctr_write(0, 0);
    if (pmu.global) {
        sel_write(0, select | SEL_EN);
        measure(pmu.kind == PMU_INTEL ? MSR_GLOBAL_CTRL : MSR_V2_CTL, 1, b, argument);
    } else {
        measure(sel_msr(0), select | SEL_EN, b, argument);
    }
    return ctr_read(0);
}

void expect(u64 select, block *b, u64 argument, void (*before)(void), u64 expected)
{
    for (u32 i = 0; i < REPEATS; i++) {
        u64 n;
        if (before)
            before();
        n = count(select, b, argument);
        CHECK(n == expected, "run %u: %lu instead of %lu", i, n, expected);
    }
}

static void before(void)
{
    cli();
    pmu_reset();
    interrupts = 0;
    for (u32 v = 0; v < 256; v++)
        if (v < 32 || v == VEC_IPI)
            trap_entry(v, NULL);
}

void kmain(void)
{
    pmu_detect();
    if (pmu.kind == PMU_NONE) {
        kprintf("TAP version 13\n1..0 # SKIP no PMU\n");
        return;
    }
    pmu_reset();
    instructions = event_select(EV_INSTRUCTIONS);
    if (!event_exists(EV_INSTRUCTIONS) || !count(instructions | SEL_OS, block_1000, 0)) {
        kprintf("TAP version 13\n1..0 # SKIP instructions are not counted here\n");
        return;
    }
    if (tap_run(before))
        debug_exit(1);
}
