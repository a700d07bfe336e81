/*
 * Running a function at CPL3. It returns to a UD2, whose fault the trap handler takes for the way back: an instruction
 * that faults is not counted, and INT n and SYSCALL do not work from CPL3 under every KVM.
 */
#include "lib.h"

static u8 user_stacks[MAX_CPUS][4096] __attribute__((aligned(4096)));
extern u64 user_enter(u64 (*entry)(u64), u64 argument, u64 stack);
extern void user_return(void);

asm(".text\n.globl user_return\nuser_return:\n ud2\n");

u64 run_user(u64 (*entry)(u64), u64 argument)
{
    /* The function's RET leads to user_return; RSP is as after a CALL. */
    u64 *sp = (u64 *)user_stacks[this_cpu()->index + 1] - 1;
    *sp = (u64)user_return;
    return user_enter(entry, argument, (u64)sp);
}

u64 run_at(u32 cpl, u64 (*fn)(u64), u64 argument) { return cpl ? run_user(fn, argument) : fn(argument); }
