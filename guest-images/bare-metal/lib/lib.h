/* What every kernel here has: console, traps, CPL3, local APIC, other CPUs, command line, time. */
#ifndef LIB_H
#define LIB_H

#include "cpu.h"
#include "layout.h"

/* --- cpu.c: per-CPU state, descriptor tables, traps --- */
struct trap_frame {
    u64 r15, r14, r13, r12, r11, r10, r9, r8, rdi, rsi, rbp, rbx, rdx, rcx, rax;
    u64 vector, error, rip, cs, rflags, rsp, ss;
};
struct percpu { /* the first two members' places are known to assembly */
    struct { u32 reserved0; u64 rsp0; u8 rest[92]; } __attribute__((packed)) tss;
    u64 saved_rsp;         /* kernel stack to return to from CPL3 */
    u32 index;             /* 0 is the CPU that booted */
    u32 apic_id;
    u32 fault_vector;      /* of the last fault that *_safe caught */
    u32 fault_count;
    volatile u64 pmi_nmi;  /* PMIs taken, by delivery mode */
    volatile u64 pmi_fixed;
    volatile u64 pmi_vector;
    volatile u64 timer;
    volatile u64 spurious;
    void (*pmi_hook)(struct trap_frame *f); /* called for each PMI after it was counted */
};
static inline struct percpu *this_cpu(void)
{
    u64 sp;
    asm volatile("mov %%rsp,%0" : "=r"(sp));
    return (struct percpu *)(sp & -(u64)KSTACK_SIZE);
}
struct percpu *cpu_at(u32 index);
void cpu_setup(u32 index);
void traps_setup(void);
/* Points a vector at code of a kernel's own, or (NULL) back at the common handler. */
void trap_entry(u32 vector, void *entry);
/* Lets a kernel take a vector itself; the hook returns true if it handled the trap. */
extern bool (*trap_hook)(struct trap_frame *f);

/* --- user.c: run a function at CPL3 --- */
u64 run_user(u64 (*entry)(u64), u64 argument);

u64 run_at(u32 cpl, u64 (*fn)(u64), u64 argument);

/* --- work.S --- */
u64 known_loop(u64 rounds);
#define KNOWN_INSTRUCTIONS(rounds) (2 * (rounds) + 5)
#define KNOWN_BRANCHES(rounds) ((rounds) + 1)

/* --- spinning.S --- */
u64 spin_chunk(u64 rounds);
extern u8 spin_hot[], spin_warm[], spin_cool[], spin_end[];
/* In TSC ticks. For the first two spin_gaps finds the others: how long it ran, how much of that it was not run, readings of the TSC. */
struct gaps {
    u64 length, least, total, lost, rounds;
};
u64 spin_gaps(u64 gaps);

/* --- console.c --- */
void console_setup(void);
void putchar_raw(char c);
bool getchar_ready(void);
char getchar_raw(void);                                 /* what was received; garbage unless it is ready */
/* %c %s %d %u %x %p, with l; flags - 0 and ' (digits grouped by thousands), width, * for width. */
void kprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void kvprintf(const char *fmt, __builtin_va_list ap);
void __attribute__((noreturn)) power_off(void);         /* VMM exit status 0 */
void __attribute__((noreturn)) debug_exit(u8 code);     /* VMM exit status (code << 1) | 1 */
void __attribute__((noreturn, format(printf, 1, 2))) panic(const char *fmt, ...);

/* --- cmdline.c --- */
void cmdline_setup(u32 multiboot_info);
const char *cmdline(void);
bool option(const char *name);                          /* a word of the command line */
const char *option_value(const char *name);             /* name=value: value up to the next blank, else NULL */
bool option_is(const char *name, const char *value);
u64 option_number(const char *name, u64 otherwise);     /* decimal or 0x… */
u64 parse_number(const char **s);
bool str_eq(const char *a, const char *b);
u32 fw_cfg_cpus(void);                                  /* fw_cfg key 5; 1 if there is no fw_cfg */

/* --- apic.c --- */
#define APIC_ID 0x20
#define APIC_EOI 0xb0
#define APIC_SVR 0xf0
#define APIC_ISR 0x100
#define APIC_ICR 0x300
#define APIC_ICR2 0x310
#define APIC_LVT_TIMER 0x320
#define APIC_LVTPC 0x340
#define APIC_TIMER_INIT 0x380
#define APIC_TIMER_DIV 0x3e0
#define MSR_APIC_BASE 0x1b
#define APIC_BASE_EXTD BIT(10)
#define APIC_BASE_EN BIT(11)
#define LVT_MASKED BIT(16)
#define LVT_NMI 0x400
#define X2APIC_SELF_IPI 0x83f
#define APIC_TIMER_NOW 0x390
extern bool x2apic;
u32 apic_read(u32 reg);
void apic_write(u32 reg, u32 v);
void apic_command(u32 apic_id, u32 command); /* the interrupt command register */
/* x2APIC mode where CPUID has it, unless the command line says xapic. */
void apic_setup(void);

/* --- time.c --- */
extern u64 tsc_hz; /* measured against the PIT by time_setup */
void time_setup(void);
void delay_us(u64 us);

/* --- smp.c --- */
/* Starts the other CPUs; returns how many run, this one included. Each then waits for smp_run. */
u32 smp_start(void);
void smp_run(u32 index, void (*fn)(u64), u64 argument);
void smp_wait(u32 index);

void kmain(void); /* each kernel's own; returning means success */

#endif
