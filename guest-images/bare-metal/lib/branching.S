/*
 * Branches of known probability, for branch stacks. Runs at either privilege level. Each label before a branch
 * instruction names it; the decisions are bits of a xorshift generator and independent of each other.
 */
    .text
    .code64

/* branch_rounds(): rounds without end. */
    .globl branch_rounds
    .type branch_rounds, @function
branch_rounds:
    mov $0x9e3779b97f4a7c15, %rbx
1:
    .globl branch_round
branch_round:                   /* one call per round */
    call branch_decide
    jmp 1b
    .size branch_rounds, . - branch_rounds

    .globl branch_decide
    .type branch_decide, @function
branch_decide:
    push %rbp
    mov %rsp, %rbp
    mov %rbx, %rax
    shl $13, %rax
    xor %rax, %rbx
    mov %rbx, %rax
    shr $7, %rax
    xor %rax, %rbx
    mov %rbx, %rax
    shl $17, %rax
    xor %rax, %rbx
    test $0x3, %bl
    .globl branch_quarter
branch_quarter:                 /* taken in 1 of 4 rounds */
    jz 2f
    nop
2:  test $0xff00, %ebx
    .globl branch_rare
branch_rare:                    /* taken in 1 of 256 rounds */
    jz 3f
    nop
3:  mov %rbx, %rax
    shr $16, %rax
    .globl branch_enter
branch_enter:
    call branch_recurse
    mov %rbx, %rax
    shr $50, %rax
    and $3, %eax
    .globl branch_indirect
branch_indirect:                /* each target in 1 of 4 rounds */
    call *branch_targets(,%rax,8)
    pop %rbp
    ret
    .size branch_decide, . - branch_decide

/* branch_recurse: calls itself with probability 1/2, by the bits of %rax, at most 32 deep. */
    .globl branch_recurse
    .type branch_recurse, @function
branch_recurse:
    push %rbp
    mov %rsp, %rbp
    mov %eax, %ecx
    shr $1, %eax
    test $1, %cl
    .globl branch_leaf
branch_leaf:                    /* taken with probability 1/2 */
    jz 4f
    .globl branch_again
branch_again:
    call branch_recurse
4:  pop %rbp
    ret
    .size branch_recurse, . - branch_recurse

    .macro TARGET name
    .globl \name
    .type \name, @function
\name:
    nop
    ret
    .size \name, . - \name
    .endm

    TARGET branch_target0
    TARGET branch_target1
    TARGET branch_target2
    TARGET branch_target3

    .section .rodata
    .balign 8
branch_targets:
    .quad branch_target0, branch_target1, branch_target2, branch_target3
