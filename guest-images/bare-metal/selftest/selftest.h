/* The built-in guest: what its files share. */
#ifndef SELFTEST_H
#define SELFTEST_H

#include "pmu.h"

/* --- selftest.c --- */
enum verdict { V_OK, V_FAILED, V_UNSUPPORTED, V_BUSY /* the host was too busy to tell */, V_DENIED /* the event filter denies it */ };
/* Prints the end of a table row and the machine-readable line, and keeps the score. */
void verdict(const char *name, const char *where, u64 saw, u64 expected, enum verdict v);
extern bool tables, lines;
static inline bool near(u64 saw, u64 expected, u64 slack) { return saw + slack >= expected && saw <= expected + slack; }

/* --- counting.c --- */
void counting(void);
extern u64 cycles_per_1024_tsc; /* what the cycles event counted at CPL3 in 1024 TSC ticks; 0 if it does not count */

/* --- overflow.c --- */
void overflows(void);
void slow_handler(u64 us); /* PMIs of a handler that takes `us` microseconds */

/* --- spin.c --- */
void spin(u64 seconds); /* 0: for ever */
void __attribute__((noreturn)) branches(void);
void __attribute__((noreturn)) show_gaps(void);

/* --- reset.c --- */
void __attribute__((noreturn)) reset_by(const char *way); /* keyboard, cf9, a20 (port 0x92) or triple */
void __attribute__((noreturn)) wait_for_button(void);

/* --- hostile.c --- */
void __attribute__((noreturn)) hostile(u64 seed);
void __attribute__((noreturn)) unemulated(void);

#endif
