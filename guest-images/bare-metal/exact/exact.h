/* What a block of blocks.S counts, and how it is measured. */
#ifndef EXACT_H
#define EXACT_H

#include "tap.h"

#define AROUND 5          /* instructions of measure() around a block */
#define AROUND_BRANCHES 1 /* its CALL */

typedef void block(void);
void measure(u32 msr, u64 on, block *b, u64 argument);
block block_empty, block_1000, block_loop, block_branches, block_rep, block_rep_zero, block_memory, block_sti,
    block_mov_ss, block_hlt, block_nmi, block_ud, block_gp, block_pf, block_pf_retried, block_iret, block_fences,
    block_swapgs;
extern u8 block_sti_taken[], block_hlt_taken[];
extern u8 handler_irq[], handler_nmi[], handler_ud[], handler_gp[], handler_pf_fix[], handler_syscall[];
#define HANDLER_IRQ 14
#define HANDLER_NMI 2
#define HANDLER_UD 3
#define HANDLER_GP 4
#define HANDLER_PF_FIX 6
u64 user_1000(u64), user_syscall(u64);
extern volatile u64 interrupts, interrupted_rip, syscall_cs;

/* --- main.c --- */
extern u64 instructions;                    /* selector of the instructions event, without USR, OS and EN */
u64 count(u64 select, block *b, u64 argument);
/* Counts `b` five times and expects the same number, AROUND included. */
void expect(u64 select, block *b, u64 argument, void (*before)(void), u64 expected);

#endif
