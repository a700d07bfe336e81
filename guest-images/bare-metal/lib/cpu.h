/*
 * Instructions as functions. The *_safe forms return true if the instruction faulted: the trap handler finds the
 * faulting address in .extable and continues behind it, so that a fault is something a test can assert.
 */
#ifndef CPU_H
#define CPU_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
typedef signed long s64;
typedef _Bool bool;
#define true 1
#define false 0
#define NULL ((void *)0)

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define BIT(n) (1UL << (n))
#define EXTABLE(insn, next) ".pushsection .extable,\"a\"\n.quad " insn ", " next "\n.popsection\n"

static inline u32 bit_count(u64 v)
{
    u32 n = 0;
    for (; v; v &= v - 1)
        n++;
    return n;
}

static inline void outb(u16 port, u8 v) { asm volatile("outb %0,%1" : : "a"(v), "Nd"(port)); }
static inline void outw(u16 port, u16 v) { asm volatile("outw %0,%1" : : "a"(v), "Nd"(port)); }
static inline void outl(u16 port, u32 v) { asm volatile("outl %0,%1" : : "a"(v), "Nd"(port)); }
static inline u8 inb(u16 port)
{
    u8 v;
    asm volatile("inb %1,%0" : "=a"(v) : "Nd"(port));
    return v;
}

static inline u64 rdtsc(void)
{
    u32 lo, hi;
    asm volatile("rdtsc" : "=a"(lo), "=d"(hi));
    return (u64)hi << 32 | lo;
}

struct cpuid {
    u32 eax, ebx, ecx, edx;
};
static inline struct cpuid cpuid(u32 leaf, u32 sub)
{
    struct cpuid c;
    asm volatile("cpuid" : "=a"(c.eax), "=b"(c.ebx), "=c"(c.ecx), "=d"(c.edx) : "a"(leaf), "c"(sub));
    return c;
}

static inline u64 rdmsr(u32 msr)
{
    u32 lo, hi;
    asm volatile("rdmsr" : "=a"(lo), "=d"(hi) : "c"(msr) : "memory");
    return (u64)hi << 32 | lo;
}
static inline void wrmsr(u32 msr, u64 v)
{
    asm volatile("wrmsr" : : "c"(msr), "a"((u32)v), "d"((u32)(v >> 32)) : "memory");
}
static inline bool rdmsr_safe(u32 msr, u64 *v)
{
    u32 lo = 0, hi = 0, fault = 1;
    asm volatile("1: rdmsr\nxorl %0,%0\n2:\n" EXTABLE("1b", "2b")
                 : "+r"(fault), "+a"(lo), "+d"(hi) : "c"(msr) : "memory", "cc");
    *v = (u64)hi << 32 | lo;
    return fault;
}
static inline bool wrmsr_safe(u32 msr, u64 v)
{
    u32 fault = 1;
    asm volatile("1: wrmsr\nxorl %0,%0\n2:\n" EXTABLE("1b", "2b")
                 : "+r"(fault) : "c"(msr), "a"((u32)v), "d"((u32)(v >> 32)) : "memory", "cc");
    return fault;
}
static inline bool rdpmc_safe(u32 index, u64 *v)
{
    u32 lo = 0, hi = 0, fault = 1;
    asm volatile("1: rdpmc\nxorl %0,%0\n2:\n" EXTABLE("1b", "2b")
                 : "+r"(fault), "+a"(lo), "+d"(hi) : "c"(index) : "memory", "cc");
    *v = (u64)hi << 32 | lo;
    return fault;
}

static inline u64 read_cr4(void)
{
    u64 v;
    asm volatile("mov %%cr4,%0" : "=r"(v));
    return v;
}
static inline void write_cr4(u64 v) { asm volatile("mov %0,%%cr4" : : "r"(v) : "memory"); }
static inline void cli(void) { asm volatile("cli" : : : "memory"); }
static inline void sti(void) { asm volatile("sti" : : : "memory"); }
static inline void pause(void) { asm volatile("pause" : : : "memory"); }
/* STI's shadow covers HLT: an interrupt cannot be taken between the two and then be slept through. */
static inline void sti_hlt(void) { asm volatile("sti\nhlt" : : : "memory"); }

#endif
