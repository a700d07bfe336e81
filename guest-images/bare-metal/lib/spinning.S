/*
 * Code to profile. Everything here runs at either privilege level.
 * Each function keeps a frame, so that a call chain taken from outside is complete.
 */
    .text
    .code64

/* Three loops of different weight; the profile of spin_chunk is 60 : 30 : 10. */
    .macro SPIN name, weight
    .globl \name
    .type \name, @function
    .p2align 6
\name:
    push %rbp
    mov %rsp, %rbp
    imul $\weight, %rdi, %rdi
1:  dec %rdi
    jnz 1b
    pop %rbp
    ret
    .size \name, . - \name
    .endm

    SPIN spin_hot, 6
    SPIN spin_warm, 3
    SPIN spin_cool, 1
    .globl spin_end
spin_end:

/* spin_chunk(n): hot → its own level, warm and cool one level deeper, 10n loop rounds in all. */
    .globl spin_chunk
    .type spin_chunk, @function
    .p2align 6
spin_chunk:
    push %rbp
    mov %rsp, %rbp
    push %rbx
    mov %rdi, %rbx
    call spin_hot
    mov %rbx, %rdi
    call spin_rest
    xor %eax, %eax
    pop %rbx
    pop %rbp
    ret
    .size spin_chunk, . - spin_chunk

    .globl spin_rest
    .type spin_rest, @function
spin_rest:
    push %rbp
    mov %rsp, %rbp
    push %rbx
    mov %rdi, %rbx
    call spin_warm
    mov %rbx, %rdi
    call spin_cool
    pop %rbx
    pop %rbp
    ret
    .size spin_rest, . - spin_rest

/*
 * spin_gaps(struct gaps *): reads the TSC again and again for `length` ticks, and adds up the time between two readings where it
 * is more than `least`. A frame deeper than spin_rest.
 */
    .globl spin_gaps
    .type spin_gaps, @function
    .p2align 6
spin_gaps:
    push %rbp
    mov %rsp, %rbp
    call spin_gaps_below
    xor %eax, %eax
    pop %rbp
    ret
    .size spin_gaps, . - spin_gaps

    .type spin_gaps_below, @function
spin_gaps_below:
    push %rbp
    mov %rsp, %rbp
    call spin_gaps_loop
    pop %rbp
    ret
    .size spin_gaps_below, . - spin_gaps_below

    .type spin_gaps_loop, @function
    .p2align 6
spin_gaps_loop:
    push %rbp
    mov %rsp, %rbp
    xor %esi, %esi              /* in gaps */
    xor %r8d, %r8d              /* rounds */
    rdtsc
    shl $32, %rdx
    or %rdx, %rax
    mov %rax, %r9               /* the first reading */
    mov %rax, %r10              /* the last one */
1:  rdtsc
    shl $32, %rdx
    or %rdx, %rax
    mov %rax, %rcx
    sub %r10, %rcx
    mov %rax, %r10
    inc %r8
    cmp 8(%rdi), %rcx
    jbe 2f
    add %rcx, %rsi
2:  sub %r9, %rax
    cmp 0(%rdi), %rax
    jb 1b
    mov %rax, 16(%rdi)
    mov %rsi, 24(%rdi)
    mov %r8, 32(%rdi)
    pop %rbp
    ret
    .size spin_gaps_loop, . - spin_gaps_loop

    .section .note.GNU-stack, "", @progbits
