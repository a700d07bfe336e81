/* Numbers shared by assembly and C: selectors, vectors, sizes. */
#ifndef LAYOUT_H
#define LAYOUT_H

#define SEL_KERNEL_CS 0x08
#define SEL_KERNEL_DS 0x10
/* SYSRET loads CS from STAR[63:48]+16 and SS from STAR[63:48]+8, so user data comes before user code. */
#define SEL_USER_DS 0x1b
#define SEL_USER_CS 0x23
#define SEL_TSS0 0x28 /* one 16-byte TSS descriptor per CPU follows */

#define MAX_CPUS 64
#define KSTACK_SHIFT 14
#define KSTACK_SIZE (1 << KSTACK_SHIFT) /* the CPU's struct percpu sits at the bottom */

#define VEC_NMI 2
#define VEC_UD 6
#define VEC_GP 13
#define VEC_PF 14
#define VEC_PMI 0x40     /* LVTPC in fixed mode */
#define VEC_PMI2 0x51    /* a second one, to see that the vector is obeyed */
#define VEC_IPI 0x52
#define VEC_TIMER 0x60   /* local APIC timer */
#define VEC_SPURIOUS 0xff

/* Offsets into struct percpu, checked by static assertions in cpu.c. */
#define PERCPU_TSS_RSP0 4
#define PERCPU_SAVED_RSP 104

#define AP_TRAMPOLINE 0x8000 /* real-mode start of the other CPUs, below 1 MiB and page-aligned */

#endif
