/* Running the tests and printing TAP version 13. */
#include "tap.h"

#define FAILURES_SHOWN 8 /* per test */

extern const struct test tests_start[], tests_end[];
static u32 failures;
static const char *skipped;

void tap_skip(const char *reason) { skipped = reason; }

void tap_fail(const char *file, u32 line, const char *condition, const char *fmt, ...)
{
    const char *name = file;

    for (; *file; file++)
        if (*file == '/')
            name = file + 1;
    if (failures++ >= FAILURES_SHOWN)
        return;
    kprintf("# %s:%u: not true: %s", name, line, condition);
    if (*fmt) {
        __builtin_va_list ap;
        kprintf(" (");
        __builtin_va_start(ap, fmt);
        kvprintf(fmt, ap);
        __builtin_va_end(ap);
        kprintf(")");
    }
    kprintf("\n");
}

static u64 machine(void)
{
    switch (pmu.kind) {
    case PMU_INTEL:
        return ON_INTEL;
    case PMU_K7:
        return ON_K7;
    case PMU_CORE:
        return ON_CORE;
    case PMU_V2:
        return ON_V2;
    default:
        return pmu.amd_cpu ? ON_AMD_WITHOUT : ON_INTEL_WITHOUT;
    }
}

static bool wanted(const struct test *t)
{
    const char *only = option_value("only"), *d = t->description;

    if (!(t->on & machine()))
        return false;
    /* The command line has no quotes: a dash stands for the blank. */
    for (; only && *only && *only != ' '; only++, d++)
        if (*d != *only && !(*d == ' ' && *only == '-'))
            return false;
    return true;
}

u32 tap_run(void (*before)(void))
{
    u32 n = 0, failed = 0;

    for (const struct test *t = tests_start; t < tests_end; t++)
        n += wanted(t);
    kprintf("TAP version 13\n1..%u\n", n);
    n = 0;
    for (const struct test *t = tests_start; t < tests_end; t++) {
        if (!wanted(t))
            continue;
        failures = 0;
        skipped = NULL;
        before();
        t->fn();
        n++;
        failed += failures != 0;
        kprintf("%sok %u - %s", failures ? "not " : "", n, t->description);
        if (skipped && !failures)
            kprintf(" # SKIP %s", skipped);
        kprintf("\n");
    }
    if (failed)
        kprintf("# %u of %u failed\n", failed, n);
    return failed;
}
