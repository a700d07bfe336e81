/* Code of the validating guest whose instructions are counted by hand; the numbers are in validate.h. */
    .text
    .code64

    .globl counted
    .type counted, @function
counted:
    push %rbx
    push %rbp
    push %r12
    push %r13
    push %r14
    mov %edi, %r12d
    mov %edx, %r13d         /* off, low half */
    shr $32, %rdx
    mov %edx, %r14d         /* off, high half */
    mov %rcx, %rbx
    mov %r8, %rdi
    mov %r12d, %ecx
    mov %esi, %eax
    mov %rsi, %rdx
    shr $32, %rdx
    wrmsr                   /* 1 */
    call *%rbx              /* 2 */
    mov %r12d, %ecx         /* 3 */
    mov %r13d, %eax         /* 4 */
    mov %r14d, %edx         /* 5 */
    wrmsr                   /* counting is off when it retires */
    pop %r14
    pop %r13
    pop %r12
    pop %rbp
    pop %rbx
    ret
    .size counted, . - counted

    .globl chase
    .type chase, @function
    .p2align 6
chase:
    push %rbp
    mov %rsp, %rbp
    mov chase_start(%rip), %rax
1:  mov (%rax), %rax
    dec %rdi
    jnz 1b
    pop %rbp
    ret
    .size chase, . - chase

    .section .note.GNU-stack, "", @progbits
