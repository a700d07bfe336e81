/* Entry from interrupts and exceptions, and the way to CPL3 and back. */
#include "layout.h"

    .text
    .code64

/* 256 stubs of 16 bytes each; vectors for which the processor pushes an error code do not push a zero. */
    .p2align 4
    .globl trap_stubs
trap_stubs:
    .set vector, 0
    .rept 256
    .p2align 4
    .if !((vector == 8) || (vector >= 10 && vector <= 14) || (vector == 17) || (vector == 21) || (vector == 29) || (vector == 30))
    push $0
    .endif
    push $vector
    jmp trap_common
    .set vector, vector + 1
    .endr
    .p2align 4

trap_common:
    push %rax
    push %rcx
    push %rdx
    push %rbx
    push %rbp
    push %rsi
    push %rdi
    push %r8
    push %r9
    push %r10
    push %r11
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, %rdi
    cld
    call trap
    .globl trap_return
trap_return:
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %r11
    pop %r10
    pop %r9
    pop %r8
    pop %rdi
    pop %rsi
    pop %rbp
    pop %rbx
    pop %rdx
    pop %rcx
    pop %rax
    add $16, %rsp
    iretq

/*
 * u64 user_enter(entry, argument, stack): runs entry(argument) at CPL3 until it returns, and returns what
 * was then in its RAX. Interrupts are on or off in user mode as they were here; they are off on return.
 */
    .globl user_enter
user_enter:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, %rax
    and $-KSTACK_SIZE, %rax
    mov %rsp, PERCPU_SAVED_RSP(%rax)
    mov %rsp, PERCPU_TSS_RSP0(%rax)
    pushfq
    pop %rcx
    push $SEL_USER_DS
    push %rdx
    push %rcx
    push $SEL_USER_CS
    push %rdi
    mov %rsi, %rdi
    xor %ebp, %ebp
    iretq

/* Abandons the trap in progress and returns from user_enter with the value in RDI. */
    .globl user_leave
user_leave:
    mov %rdi, %rax
    mov %rsp, %rcx
    and $-KSTACK_SIZE, %rcx
    mov PERCPU_SAVED_RSP(%rcx), %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret

    .section .note.GNU-stack, "", @progbits
