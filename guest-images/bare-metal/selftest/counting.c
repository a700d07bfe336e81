/* Counts a loop of known length at CPL0 and CPL3 and compares. */
#include "selftest.h"

#define RUNS 5
#define RUN_MS 8
#define LEVEL_MS 60
#define TRIES 3
#define OVERHEAD 250 /* instructions around the loop that may count: register writes, the way to CPL3 and back */

u64 cycles_per_1024_tsc;

/* Cycles by a clock may be off by so much of the time the CPU was run. */
#define PERCENT 5
/* The paravirtual event that counts the nanoseconds this CPU was ready and the host ran something else (docs/reference/vpmu.md). */
#define STEAL_NS 11

struct run {
    u64 rounds, count, tsc;
    u64 stolen; /* at most so many TSC ticks, those around the run included; 0 also where nobody tells */
    u64 around; /* TSC ticks from before the counter was started until it was stopped */
};

/* A counter to use: general counter 0, or a fixed one. */
struct counter {
    s64 fixed; /* -1: general */
    u64 select;
};

static void arm(const struct counter *c)
{
    if (c->fixed >= 0) {
        wrmsr(MSR_FIXED_CTR0 + c->fixed, 0);
        wrmsr(MSR_FIXED_CTR_CTRL, 3UL << 4 * c->fixed);
    } else {
        ctr_write(0, 0);
        sel_write(0, c->select | SEL_EN);
    }
}

static u64 disarm(const struct counter *c)
{
    if (c->fixed >= 0) {
        wrmsr(MSR_FIXED_CTR_CTRL, 0);
        return rdmsr(MSR_FIXED_CTR0 + c->fixed);
    }
    sel_write(0, 0);
    return ctr_read(0);
}

/* The last counter has the stolen time; the first two are for what is tested. */
static bool tells_steal(void) { return pmu.gp > 2 && !option("denied-steal-ns"); }

static struct run run_once(const struct counter *c, u32 cpl, u64 rounds)
{
    struct run r = { .rounds = rounds };
    u64 t0, start;

    if (tells_steal()) {
        ctr_write(pmu.gp - 1, 0);
        sel_write(pmu.gp - 1, (pmu.amd_cpu ? 0xf000000ffUL : 0xffUL) | STEAL_NS << 8 | SEL_USR | SEL_OS | SEL_EN);
    }
    start = rdtsc();
    arm(c);
    global_write(global_enabled());
    t0 = rdtsc();
    run_at(cpl, known_loop, rounds);
    r.tsc = rdtsc() - t0;
    global_write(0);
    r.count = disarm(c);
    r.around = rdtsc() - start;
    if (tells_steal()) {
        sel_write(pmu.gp - 1, 0);
        r.stolen = ctr_read(pmu.gp - 1) / 1000 * (tsc_hz / 1000) / 1000;
        if (r.stolen > r.tsc)
            r.stolen = r.tsc;
    }
    return r;
}

/*
 * Finds how many rounds take about RUN_MS with this counter running, and keeps the shortest of RUNS runs: the one
 * during which the host took the CPU away the least.
 */
static struct run measure(const struct counter *c, u32 cpl)
{
    u64 target = tsc_hz / 1000 * RUN_MS;
    struct run best = { .rounds = 16 };

    global_write(0);
    for (u32 tries = 0; tries < 20 && best.tsc < target / 2; tries++) {
        u64 factor = best.tsc ? target / best.tsc : 1, rounds = best.rounds * (factor > 16 ? 16 : factor);
        u32 runs = factor <= 16 && tries ? RUNS : 1; /* one run is enough to see that it must be longer */
        best = run_once(c, cpl, rounds);
        /* On a busy host it takes more of them to find one that was left alone. */
        for (u32 i = 1; i < runs || (runs > 1 && i < 4 * RUNS && best.count < best.tsc - best.tsc / 8); i++) {
            struct run r = run_once(c, cpl, rounds);
            if (r.tsc < best.tsc)
                best = r;
            if (best.tsc > 4 * target || best.count < best.tsc / 64)
                break; /* each instruction is stepped, or the event is not one of time */
        }
    }
    return best;
}

/* A row's name in the table; the machine-readable one has no blanks. */
struct name {
    const char *shown, *id;
};

static bool name_is(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

static void put_row(const char *name, u32 cpl)
{
    if (tables)
        kprintf("    %-20s CPL%u", name, cpl);
}

static void put_counts(u64 saw, u64 expected, bool ratio)
{
    if (!tables)
        return;
    kprintf("  %'15lu  %'15lu", saw, expected);
    if (ratio && expected) {
        u64 permille = (saw * 1000 + expected / 2) / expected;
        kprintf("  %3lu.%03lu", permille / 1000, permille % 1000);
    } else {
        kprintf("         ");
    }
}

static void not_measured(const char *name, const char *id, u32 cpl, enum verdict why)
{
    put_row(name, cpl);
    if (tables)
        kprintf("  %15s  %15s         ", "-", "-");
    verdict(id, cpl ? "cpl3" : "cpl0", 0, 0, why);
}

static void not_supported(const char *name, const char *id, u32 cpl)
{
    not_measured(name, id, cpl, V_UNSUPPORTED);
}

/* The host said that the event filter denies the event; it reads 0 then. */
static bool denied(const char *id)
{
    char word[40] = "denied-";
    u32 n = 7;

    for (; *id && n < sizeof(word) - 1; id++)
        word[n++] = *id;
    word[n] = 0;
    return option(word);
}

/* Prints the row of an event that nothing counts here or that the filter denies. Returns false if the event is to be measured. */
static bool not_counted(const char *name, const char *id, u32 cpl)
{
    if (denied(id))
        not_measured(name, id, cpl, V_DENIED);
    else if (option("no-cycles"))
        not_supported(name, id, cpl);
    else
        return false;
    return true;
}

/* The host said that it cannot count CPL3 (exact backing on a KVM that cannot step it). */
static bool not_counted_at(u32 cpl) { return cpl && option("no-user"); }

/*
 * What a count of time comes to. A clock's must be the TSC ticks that this CPU was run for, and so must ref-cycles on any host: where
 * hardware counts cycles, the ratio says how far the processor's clock is from the TSC's.
 */
static enum verdict time_verdict(const struct run *r, bool is_cycles, u64 *expected)
{
    u64 least = r->tsc - r->stolen;

    *expected = r->tsc;
    if (is_cycles && !option("clock"))
        return r->count >= r->tsc / 64 && r->count <= r->tsc * 4 ? V_OK : V_FAILED;
    if (near(r->count, r->tsc, r->tsc / 100 * PERCENT))
        return V_OK;
    /* More than all of the time is wrong on any host. What lies between the loop and the counter's start and end is counted too, and
     * where the host did something in it for this CPU it is long. */
    if (r->count > r->tsc)
        return r->count <= r->around + r->around / 100 * PERCENT ? V_BUSY : V_FAILED;
    *expected = least;
    if (near(r->count, least, least / 100 * PERCENT))
        return V_OK;
    /* Between the two: the CPU was taken away, and nobody knows how much of that fell into the run. */
    return r->count > least || !tells_steal() ? V_BUSY : V_FAILED;
}

/* Events that go with time: TSC ticks less what was stolen are the yardstick. */
static void time_row(struct name name, struct counter c, u32 cpl, bool is_cycles)
{
    struct run r;
    u64 instructions, expected;
    u32 tries;
    enum verdict v;
    bool stepped, told_nothing = false;

    if (not_counted(name.shown, name.id, cpl))
        return;
    if (not_counted_at(cpl)) {
        not_supported(name.shown, name.id, cpl);
        return;
    }
    /*
     * Under an emulator that is itself waiting nobody tells of all the time that the CPU was not run. What does not count is short each time.
     * A busy host may leave the next measurement alone.
     */
    for (tries = 1;; tries++) {
        r = measure(&c, cpl);
        instructions = KNOWN_INSTRUCTIONS(r.rounds);
        stepped = near(r.count, instructions, OVERHEAD) && r.tsc > 20 * instructions;
        if (stepped) {
            expected = instructions;
            v = V_OK;
        } else {
            v = time_verdict(&r, !name_is(name.id, "ref-cycles-fixed"), &expected);
        }
        told_nothing |= v == V_BUSY;
        if (v == V_OK || (v == V_FAILED && r.count >= expected) || tries == TRIES)
            break;
    }
    if (v == V_FAILED && r.count < expected && told_nothing)
        v = V_BUSY; /* it was not short each time */
    if (is_cycles && r.count * 1024 / r.tsc > cycles_per_1024_tsc)
        cycles_per_1024_tsc = r.count * 1024 / r.tsc;
    put_row(name.shown, cpl);
    put_counts(r.count, expected, true);
    if (tables && stepped)
        kprintf("  (counts instructions: exact backing)");
    if (tables && tries > 1)
        kprintf("  (measured %u times)", tries);
    verdict(name.id, cpl ? "cpl3" : "cpl0", r.count, expected, v);
}

/* Events of which the loop has a known number. */
static void number_row(enum pmu_event e, u32 cpl)
{
    struct counter c = { -1, event_select(e) | SEL_USR | SEL_OS };
    struct run r, twice;
    u64 saw, expected;

    if (event_exists(e) && denied(event_name(e))) {
        not_measured(event_name(e), event_name(e), cpl, V_DENIED);
        return;
    }
    if (!event_exists(e) || not_counted_at(cpl)) {
        not_supported(event_name(e), event_name(e), cpl);
        return;
    }
    r = measure(&c, cpl);
    /* AMD has no bit that says so, the host's words have. What somebody counts is not 0. */
    if (!r.count && pmu.amd_cpu && !option(e == EV_BRANCHES ? "has-branches" : "has-instructions")) {
        not_supported(event_name(e), event_name(e), cpl);
        return;
    }
    /* The difference of two runs lacks what counts around the loop, which is much where each instruction is stepped. */
    twice = run_once(&c, cpl, 2 * r.rounds);
    saw = twice.count > r.count ? twice.count - r.count : r.count;
    expected = e == EV_BRANCHES ? KNOWN_BRANCHES(twice.rounds) - KNOWN_BRANCHES(r.rounds)
                                : KNOWN_INSTRUCTIONS(twice.rounds) - KNOWN_INSTRUCTIONS(r.rounds);
    put_row(event_name(e), cpl);
    put_counts(saw, expected, true);
    verdict(event_name(e), cpl ? "cpl3" : "cpl0", saw, expected, near(saw, expected, OVERHEAD) ? V_OK : V_FAILED);
}

/* A counter that counts CPL3 only, while the loop runs at CPL0 or at CPL3; a second one counts both levels. */
static void split_row(u32 cpl)
{
    struct counter user = { -1, event_select(EV_CYCLES) | SEL_USR };
    struct counter both = { -1, user.select | SEL_OS };
    struct run r;
    u64 looks, rounds, all, factor, expected;
    bool stepped = false;

    if (denied("cycles") || option("no-cycles")) {
        not_measured("cycles, CPL3 only", "user-cycles", cpl, denied("cycles") ? V_DENIED : V_UNSUPPORTED);
        return;
    }
    if (not_counted_at(cpl)) {
        not_supported("cycles, CPL3 only", "user-cycles", cpl);
        return;
    }
    r = measure(&both, cpl);
    /* Where no hardware tells the levels apart, the host looks about a thousand times a second: give it some looks. */
    looks = tsc_hz / 1000 * LEVEL_MS;
    rounds = r.rounds;
    all = r.count;
    /* By what was counted: the time on the wall may have been stolen for the most part, in one run more than in another. */
    for (u32 i = 0; i < 2 * TRIES; i++) {
        factor = all && all < looks ? looks / all + 1 : 1;
        rounds *= factor > 16 ? 16 : factor;
        if (pmu.gp > 1) {
            ctr_write(1, 0);
            sel_write(1, both.select | SEL_EN);
        }
        r = run_once(&user, cpl, rounds);
        all = r.tsc - r.stolen;
        if (pmu.gp > 1) {
            sel_write(1, 0);
            all = ctr_read(1);
        }
        stepped = near(all, KNOWN_INSTRUCTIONS(rounds), OVERHEAD);
        if (all >= looks / 2 || stepped || r.tsc > tsc_hz)
            break;
    }
    expected = cpl ? all : 0;
    put_row("cycles, CPL3 only", cpl);
    put_counts(r.count, expected, true);
    verdict("user-cycles", cpl ? "cpl3" : "cpl0", r.count, expected,
            near(r.count, expected, all / 4)  ? V_OK
            : all < looks / 2 && !stepped ? V_BUSY /* too few looks */
                                          : V_FAILED);
}

void counting(void)
{
    static const u64 both = SEL_USR | SEL_OS;

    if (tables)
        kprintf("\n  Counting a loop (shortest of %u runs; cycles: the TSC less stolen time is expected)\n"
                "    event                where             saw         expected    ratio\n", RUNS);
    for (u32 cpl = 0; cpl <= 3; cpl += 3) {
        if (event_exists(EV_CYCLES))
            time_row((struct name){ "cycles", "cycles" }, (struct counter){ -1, event_select(EV_CYCLES) | both }, cpl,
                     true);
        else
            not_supported("cycles", "cycles", cpl);
        if ((pmu.fixed & BIT(1)) && event_exists(EV_CYCLES))
            time_row((struct name){ "cycles, fixed 1", "cycles-fixed" }, (struct counter){ 1, 0 }, cpl, false);
        if ((pmu.fixed & BIT(2)) && event_exists(EV_REF_CYCLES))
            time_row((struct name){ "ref-cycles, fixed 2", "ref-cycles-fixed" }, (struct counter){ 2, 0 }, cpl, false);
        number_row(EV_INSTRUCTIONS, cpl);
        number_row(EV_BRANCHES, cpl);
    }
    if (event_exists(EV_CYCLES)) {
        split_row(0);
        split_row(3);
    }
}
