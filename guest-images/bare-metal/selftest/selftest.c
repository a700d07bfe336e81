/*
 * The built-in guest of `perfvisor run`. It programs the virtual PMU, counts work whose amount it knows, takes
 * overflow interrupts, and prints what it saw next to what it expected.
 *
 * Command line: selftest (the default), quiet (only the machine-readable lines), lines (table and lines),
 * spin=SECONDS and loop (run known functions at CPL3 on all CPUs, to be profiled from outside), branches (take branches of known
 * probability at CPL0 for ever), gaps (no test:
 * one CPU at CPL3 tells how much of its time it was not run), no-user (CPL3 cannot be counted here), clock (cycles are
 * counted by a clock that runs at the TSC's rate), has-instructions, has-branches (somebody counts them), no-cycles (nothing here
 * counts cycles), denied-EVENT (the event filter denies EVENT: a row's name in the machine-readable lines, or steal-ns), reset=WAY (no test: resets the machine), button (no test: powers off
 * when the power button is pressed), hostile=SEED (no test: does what a VMM should survive, for ever), unemulated (no test:
 * executes an instruction that KVM has to execute itself and cannot), first-count (no test: the time from enabling a
 * counter to its first count; with host-event of a counter that an event of the host's kernel counts), slow-handler=US (no test:
 * PMIs with a handler of US microseconds and a period of 50).
 */
#include "selftest.h"

bool tables = true, lines;
static u32 passed, failed, unsupported, busy, denied;

void verdict(const char *name, const char *where, u64 saw, u64 expected, enum verdict v)
{
    static const char *const words[] = { "ok", "FAILED", "not supported", "host too busy to tell", "denied" };
    static const char *const ids[] = { "ok", "failed", "unsupported", "busy", "denied" };
    static u32 *const scores[] = { &passed, &failed, &unsupported, &busy, &denied };

    *scores[v] += 1;
    if (tables)
        kprintf("  %s\n", words[v]);
    if (lines)
        kprintf("result %s.%s saw=%lu expected=%lu verdict=%s\n", name, where, saw, expected, ids[v]);
}

static void put_name(u32 r)
{
    for (u32 i = 0; i < 32; i += 8)
        putchar_raw(r >> i);
}

static void banner(void)
{
    struct cpuid v = cpuid(0, 0), c = cpuid(1, 0);
    u32 family = c.eax >> 8 & 0xf, model = c.eax >> 4 & 0xf;

    if (family == 6 || family == 15)
        model |= c.eax >> 12 & 0xf0;
    if (family == 15)
        family += c.eax >> 20 & 0xff;
    kprintf("\nPerfvisor built-in guest\n\n  CPU   ");
    put_name(v.ebx);
    put_name(v.edx);
    put_name(v.ecx);
    kprintf(" family %u model %u, TSC %lu.%02lu GHz, %u CPU%s\n", family, model, tsc_hz / 1000000000,
            tsc_hz / 10000000 % 100, fw_cfg_cpus(), fw_cfg_cpus() > 1 ? "s, this test uses one" : "");
    kprintf("  PMU   %s", pmu_name());
    if (pmu.version)
        kprintf(" version %u", pmu.version);
    if (pmu.kind != PMU_NONE)
        kprintf(", %u general", pmu.gp);
    if (pmu.fixed)
        kprintf(" and %u fixed", bit_count(pmu.fixed));
    if (pmu.kind != PMU_NONE)
        kprintf(" counters of %u bits", pmu.width);
    kprintf("\n");
}

static void summary(u64 started)
{
    u64 ms = (rdtsc() - started) / (tsc_hz / 1000);

    if (tables) {
        kprintf("\n  %u of %u checks passed", passed, passed + failed + busy);
        if (busy)
            kprintf(", %u could not be told on a host this busy (that is no failure)", busy);
        if (unsupported)
            kprintf(", %u not supported here", unsupported);
        if (denied)
            kprintf(", %u denied by the event filter", denied);
        kprintf(", in %lu.%02lu s\n\n", ms / 1000, ms / 10 % 100);
    }
    if (lines)
        kprintf("result selftest passed=%u failed=%u unsupported=%u busy=%u denied=%u ms=%lu\n", passed, failed, unsupported, busy,
                denied, ms);
}

/* The paravirtual event that counts context switches of this vCPU's thread, an event of the host's kernel. */
static u64 context_switches(void) { return (pmu.amd_cpu ? 0xf000000ffUL : 0xffUL) | 6 << 8; }

/* Halts for `us` microseconds, in which the host switches to another thread. */
static void halt_us(u64 us)
{
    u64 before = this_cpu()->timer;

    apic_write(APIC_TIMER_DIV, 0xb); /* by 1; KVM's timer counts nanoseconds */
    apic_write(APIC_LVT_TIMER, VEC_TIMER);
    apic_write(APIC_TIMER_INIT, us * 1000);
    while (this_cpu()->timer == before)
        sti_hlt(), cli();
    apic_write(APIC_LVT_TIMER, LVT_MASKED);
}

/*
 * Prints for each counter the duration of the write that enables it and the time from that write until it has counted, the first
 * time and the shortest of 16 later ones. The first time includes whatever the VMM does only once, such as opening a host event.
 */
static void first_count(void)
{
    bool host = option("host-event");
    u64 select = (host ? context_switches() : event_select(EV_CYCLES)) | SEL_OS | SEL_EN;

    global_write(global_enabled());
    for (u32 i = 0; i < pmu.gp; i++) {
        u64 first[2] = { 0, 0 }, least[2] = { ~0UL, ~0UL };

        for (u32 round = 0; round <= 16; round++) {
            u64 t0, took[2];

            ctr_write(i, 0);
            t0 = rdtsc();
            sel_write(i, select);
            took[0] = rdtsc() - t0;
            while (!ctr_read(i)) {
                if (rdtsc() - t0 > tsc_hz) {
                    kprintf("result first-count.%u none within a second\n", i);
                    return;
                }
                if (host)
                    halt_us(100);
            }
            took[1] = rdtsc() - t0;
            sel_write(i, 0);
            for (u32 n = 0; n < 2; n++) {
                took[n] = took[n] * 1000 / (tsc_hz / 1000000);
                if (!round)
                    first[n] = took[n];
                else if (took[n] < least[n])
                    least[n] = took[n];
            }
        }
        kprintf("result first-count.%u first_ns=%lu least_ns=%lu enable_first_ns=%lu enable_least_ns=%lu\n", i, first[1], least[1],
                first[0], least[0]);
    }
}

/* How long to spin; 0 for ever. A time that is none ends the machine, or a slip would run until somebody looks. */
static u64 seconds_to_spin(void)
{
    const char *s = option_value("spin");
    u64 seconds;

    if (option("loop"))
        return 0;
    seconds = parse_number(&s);
    if (!seconds || seconds > 1000000000 || (*s && *s != ' ')) {
        kprintf("spin= takes a number of seconds, 1 to 1000000000, as in spin=10; the word loop runs for ever\n");
        debug_exit(1);
    }
    return seconds;
}

void kmain(void)
{
    u64 started = rdtsc();

    if (option("quiet"))
        tables = false;
    lines = !tables || option("lines");
    if (option("loop") || option_value("spin")) {
        spin(seconds_to_spin());
        return;
    }
    if (option("branches"))
        branches();
    if (option("gaps"))
        show_gaps();
    if (option_value("reset"))
        reset_by(option_value("reset"));
    if (option("button"))
        wait_for_button();
    if (option_value("hostile"))
        hostile(option_number("hostile", 1));
    if (option("unemulated"))
        unemulated();
    pmu_detect();
    if (tables)
        banner();
    if (pmu.kind == PMU_NONE) {
        if (tables)
            kprintf("\n  This machine has no PMU (--pmu off), so there is nothing to count with.\n\n");
        if (lines)
            kprintf("result selftest pmu=none passed=0 failed=0 unsupported=0\n");
        return;
    }
    pmu_reset();
    if (option("first-count")) {
        first_count();
        return;
    }
    if (option_value("slow-handler")) {
        slow_handler(option_number("slow-handler", 500));
        return;
    }
    counting();
    overflows();
    pmu_reset();
    summary(started);
    /* What could not be told is said to be so and is no failure, unless that is all. */
    if (failed || (busy && !passed))
        debug_exit(1);
}
