/*
 * Code whose instructions are counted by hand. The number is in the comment and, as the expectation of a test, in
 * exact.h. RET belongs to a block, the CALL that leads to it does not.
 */
#include "layout.h"

    .text
    .code64

/*
 * measure(msr, on, block, argument): enables counting with WRMSR, calls the block, disables counting with WRMSR.
 * Around the block five instructions count: the enabling WRMSR, CALL, and three after the return. The disabling WRMSR
 * does not: when it retires, counting is off.
 */
    .globl measure
measure:
    push %rbx
    push %rbp
    push %r12
    mov %rdx, %rbx
    mov %edi, %r12d
    mov %rcx, %rdi
    mov %r12d, %ecx
    mov %esi, %eax
    mov %rsi, %rdx
    shr $32, %rdx
    wrmsr                   /* 1 */
    call *%rbx              /* 2 */
    mov %r12d, %ecx         /* 3 */
    xor %eax, %eax          /* 4 */
    xor %edx, %edx          /* 5 */
    wrmsr
    pop %r12
    pop %rbp
    pop %rbx
    ret

    .globl block_empty      /* 1 */
block_empty:
    ret

    .globl block_1000       /* 333 * 3 + 1 = 1000 */
block_1000:
    .rept 333
    add $3, %rax
    lea 5(%rax), %rdx
    xor %rcx, %rcx
    .endr
    ret

    .globl block_loop       /* 1 + 100 * 2 + 1 = 202; branches: 100 + 1, of which 99 + 1 are taken */
block_loop:
    mov $100, %ecx
1:  dec %ecx
    jnz 1b
    ret

    .globl block_branches   /* 8; branches: 6, of which 5 are taken (all but the first) */
block_branches:
    xor %eax, %eax          /* sets ZF */
    jnz 2f                  /* not taken */
    jz 1f                   /* taken */
    nop
1:  call 3f                 /* taken */
    jmp 2f                  /* taken */
2:  ret                     /* taken */
3:  test %eax, %eax
    ret                     /* taken */

    .globl block_rep        /* 5: a repeated string instruction is one */
block_rep:
    lea scratch(%rip), %rsi
    lea scratch+256(%rip), %rdi
    mov $100, %ecx
    rep movsb
    ret

    .globl block_rep_zero   /* 3: also when it repeats zero times */
block_rep_zero:
    xor %ecx, %ecx
    rep stosb
    ret

    .globl block_memory     /* 12; without the RET: loads 3 MOV, 1 POP, 1 ADD = 5; stores 2 MOV, 1 PUSH, 1 ADD = 4 */
block_memory:
    lea scratch(%rip), %rdx
    mov (%rdx), %rax
    mov 8(%rdx), %rax
    mov 16(%rdx), %eax
    mov %rax, 24(%rdx)
    mov %eax, 32(%rdx)
    push %rax
    pop %rax
    add %eax, 40(%rdx)
    lea (%rdx,%rax), %rcx   /* computes an address, touches no memory */
    nop
    ret

/* An interrupt that is pending when the block begins is taken after the instruction that follows STI. */
    .globl block_sti, block_sti_taken   /* 4, and the handler */
block_sti:
    sti
    nop
block_sti_taken:
    cli
    ret

    .globl block_mov_ss     /* 6, and the handler: taken after the NOP or before it, that does not change the count */
block_mov_ss:
    mov %ss, %eax
    sti
    mov %eax, %ss
    nop
    cli
    ret

    .globl block_fences     /* 9: what may hide a stop where it is emulated, alone and in a row */
block_fences:
    lfence
    nop
    mfence
    nop
    sfence
    nop
    lfence
    mfence
    ret

    .globl block_swapgs     /* 5 */
block_swapgs:
    swapgs
    nop
    swapgs
    nop
    ret

    .globl block_hlt, block_hlt_taken   /* 4, and the handler */
block_hlt:
    sti
    hlt
block_hlt_taken:
    cli
    ret

    .globl block_nmi        /* 5, and the handler: sends an NMI to CPU 0; RDI = command */
block_nmi:
    mov $0x830, %ecx
    mov %edi, %eax
    xor %edx, %edx
    wrmsr
    ret

/* An instruction that faults does not retire. Handlers step over it. */
    .globl block_ud         /* 2, and the handler */
block_ud:
    nop
    ud2
    ret

    .globl block_gp         /* 2, and the handler */
block_gp:
    mov $0x12345678, %ecx   /* no such MSR */
    rdmsr
    ret

    .globl block_pf         /* 2, and the handler */
block_pf:
    movabs $0x500000000000, %rax
    mov (%rax), %edx
    ret

    .globl block_pf_retried /* 3, and the handler: the second attempt succeeds and counts */
block_pf_retried:
    movabs $0x500000000000, %rax
    mov (%rax), %edx
    ret

    .globl block_iret       /* 8 */
block_iret:
    mov %rsp, %rax
    push $SEL_KERNEL_DS
    push %rax
    pushfq
    push $SEL_KERNEL_CS
    push $1f
    iretq
1:  ret

/* --- handlers, entered through their own gates --- */

    .globl handler_irq      /* 14 */
handler_irq:
    push %rax
    push %rcx
    push %rdx
    mov 24(%rsp), %rax
    mov %rax, interrupted_rip   /* 5 */
    mov $0x80b, %ecx        /* x2APIC end of interrupt */
    xor %eax, %eax
    xor %edx, %edx
    wrmsr                   /* 9 */
    pop %rdx
    pop %rcx
    pop %rax                /* 12 */
    incq interrupts
    iretq                   /* 14 */

    .globl handler_nmi      /* 2 */
handler_nmi:
    incq interrupts
    iretq

    .globl handler_ud       /* 3 */
handler_ud:
    incq interrupts
    addq $2, (%rsp)
    iretq

    .globl handler_gp       /* 4: RDMSR and MOV (%rax),%edx are two bytes long */
handler_gp:
    incq interrupts
    add $8, %rsp            /* error code */
    addq $2, (%rsp)
    iretq

    .globl handler_pf_fix   /* 6: has RAX point to memory and tries again */
handler_pf_fix:
    incq interrupts
    add $8, %rsp
    lea scratch(%rip), %rax
    nop
    nop
    iretq

/* --- CPL3 --- */

    .globl user_1000        /* 1000 at CPL3; the UD2 it returns to faults and does not count */
user_1000:
    .rept 999
    lea 1(%rax), %rax
    .endr
    ret

    .globl user_syscall     /* at CPL3: 5 MOV/SYSCALL/ADD/MOV/RET; at CPL0: 3 in the handler */
user_syscall:
    mov $41, %eax
    syscall
    add $1, %eax
    mov %eax, %edx
    ret

    .globl handler_syscall  /* 3 at CPL0 */
handler_syscall:
    mov %cs, syscall_cs
    nop
    sysretq

    .bss
    .p2align 6
    .globl scratch, interrupts, interrupted_rip, syscall_cs
scratch:         .skip 512
interrupts:      .skip 8
interrupted_rip: .skip 8
syscall_cs:      .skip 8

    .section .note.GNU-stack, "", @progbits
