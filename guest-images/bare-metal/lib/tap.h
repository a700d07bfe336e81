/*
 * Tests that print TAP. A test is a function with a description and the machines it is for:
 *
 *     TEST(amd_counter_is_48_bits, ON_AMD, "a counter keeps the low 48 bits of what is written") { CHECK(...); }
 *
 * Tests for other machines are not run and not in the plan. A test that finds that it cannot say anything calls SKIP.
 */
#ifndef TAP_H
#define TAP_H

#include "pmu.h"

#define ON_INTEL BIT(0)
#define ON_K7 BIT(1)
#define ON_CORE BIT(2)
#define ON_V2 BIT(3)
#define ON_INTEL_WITHOUT BIT(4) /* an Intel processor without a PMU */
#define ON_AMD_WITHOUT BIT(5)
#define ON_AMD (ON_K7 | ON_CORE | ON_V2)
#define ON_ANY (ON_INTEL | ON_AMD)

struct test {
    void (*fn)(void);
    const char *description;
    u64 on;
};

#define TEST(id, where, text)                                                                                            \
    static void id(void);                                                                                              \
    static const struct test id##_entry __attribute__((section(".tests"), used, aligned(8))) = { id, text, where };      \
    static void id(void)

/* Marks the running test as failed and prints why; the test goes on. */
#define CHECK(condition, ...)                                                                                            \
    do {                                                                                                                 \
        if (!(condition))                                                                                                \
            tap_fail(__FILE__, __LINE__, #condition, "" __VA_ARGS__);                                                    \
    } while (0)
#define SKIP(reason)                                                                                                     \
    do {                                                                                                                 \
        tap_skip(reason);                                                                                                \
        return;                                                                                                          \
    } while (0)

void tap_fail(const char *file, u32 line, const char *condition, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void tap_skip(const char *reason);
/* Runs every test for this machine, each after `before`; `only=PREFIX` restricts them by description. Returns the failures. */
u32 tap_run(void (*before)(void));

#endif
