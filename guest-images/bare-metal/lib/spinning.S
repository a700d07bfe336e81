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

    .section .note.GNU-stack, "", @progbits
