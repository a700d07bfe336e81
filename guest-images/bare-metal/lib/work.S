/* Work whose counts are known. It runs at either privilege level and keeps a frame for call chains. */
    .text
    .code64

/* known_loop(n): 2n + 5 instructions, of which n + 1 are branches (n of DEC/JNZ, one RET). */
    .globl known_loop
    .type known_loop, @function
    .p2align 6
known_loop:
    push %rbp
    mov %rsp, %rbp
1:  dec %rdi
    jnz 1b
    xor %eax, %eax
    pop %rbp
    ret
    .size known_loop, . - known_loop

    .section .note.GNU-stack, "", @progbits
