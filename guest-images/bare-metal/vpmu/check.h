/* What the test files share beside TAP. */
#ifndef CHECK_H
#define CHECK_H

#include "tap.h"

/* --- main.c --- */
struct reset_state { /* of one CPU, read before anything was written */
    u64 selectors[16], counters[16], fixed[32];
    u64 fixed_ctrl, global_ctrl, status, debugctl;
};
extern struct reset_state boot_state;
void reset_state_read(struct reset_state *s);
bool denied(u64 select);            /* by the event filter, as the command line says */
bool fixed_denied(u32 n);
bool backing_is(const char *name);  /* backing=… on the command line */

/* --- work.c --- */
extern u64 counting_event;          /* selector of an event that counts here, 0 if there is none */
extern u64 counts_per_ms;           /* of that event in a millisecond of CPL0 time */
void work_setup(void);
void busy(u32 cpl, u32 ms);
u64 period_of_ms(u32 ms);
bool wait_wrapped(u32 i);           /* busy at CPL0 until counter i has wrapped; false after a second */
#define NEED_COUNTING()                                                                                                  \
    do {                                                                                                                 \
        if (!counting_event)                                                                                             \
            SKIP("no event counts on this machine");                                                                     \
    } while (0)

static inline bool rdmsr_gp(u32 msr)
{
    u64 v;
    return rdmsr_safe(msr, &v) && this_cpu()->fault_vector == VEC_GP;
}
static inline bool wrmsr_gp(u32 msr, u64 v) { return wrmsr_safe(msr, v) && this_cpu()->fault_vector == VEC_GP; }

#endif
