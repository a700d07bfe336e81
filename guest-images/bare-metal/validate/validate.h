/* The guest of `perfvisor validate`: what its files share. */
#ifndef VALIDATE_H
#define VALIDATE_H

#include "pmu.h"

#define MAX_SELECTORS 8 /* general counters that one measurement can use */

/* What is to be measured: the words of the line that asked for it. */
struct job {
    u64 select[MAX_SELECTORS]; /* event selectors, without EN */
    u32 selectors;
    u64 fixed_control; /* FIXED_CTR_CTRL; its counters run too */
    const struct work *work;
    u64 n;      /* how much work */
    u32 cpl;    /* 0 or 3; not for all kinds of work */
    u64 period; /* counter 0 interrupts that often; 0: it does not */
};

/* What came out. */
struct result {
    u64 tsc;
    u64 general[MAX_SELECTORS], fixed[4];
    u64 pmis, late, spurious;
    u64 struck[4]; /* spin_hot, spin_warm, spin_cool, anywhere else */
};

/* A kind of work. */
struct work {
    const char *name;
    u64 (*fn)(u64 n);
    bool any_cpl; /* the function itself runs at the asked level; all others run at CPL0 */
};
const struct work *work_named(const char *name); /* up to a blank; NULL if there is none */
void work_setup(void);

/* --- blocks.S: their instructions are counted by hand --- */
/*
 * Enables counting with WRMSR(msr, on), calls fn(n), and disables it with WRMSR(msr, off). Around fn count five instructions, one
 * of them a branch (the CALL, which is the only store): the enabling WRMSR, CALL, and three after the return.
 */
void counted(u32 msr, u64 on, u64 off, u64 (*fn)(u64), u64 n);
/* n hops along a list: 3n + 5 instructions, n + 1 branches of which n are taken, n + 3 loads, 1 store. */
u64 chase(u64 n);
extern u64 chase_start;

/* --- measure.c --- */
void measure(const struct job *job, struct result *r);

/* --- work.c --- */
/* Halts until the timer rings; interrupts are off before and after. */
void halt_us(u64 us);

#endif
