/* Per-CPU state, descriptor tables and the trap handler. */
#include "lib.h"

_Static_assert(__builtin_offsetof(struct percpu, tss) + __builtin_offsetof(__typeof__(((struct percpu *)0)->tss), rsp0) ==
                   PERCPU_TSS_RSP0, "trap.S knows this offset");
_Static_assert(__builtin_offsetof(struct percpu, saved_rsp) == PERCPU_SAVED_RSP, "trap.S knows this offset");
_Static_assert(sizeof(((struct percpu *)0)->tss) == 104, "a 64-bit TSS");

u8 kstacks[MAX_CPUS][KSTACK_SIZE] __attribute__((aligned(KSTACK_SIZE), section(".stacks,\"aw\",@nobits#")));
extern u64 gdt[];
extern u8 trap_stubs[];
extern const u64 extable_start[], extable_end[];
bool (*trap_hook)(struct trap_frame *f);

static struct {
    u16 offset0, selector;
    u8 ist, type;
    u16 offset1;
    u32 offset2, reserved;
} idt[256];

struct descriptor_pointer {
    u16 limit;
    u64 base;
} __attribute__((packed));

struct percpu *cpu_at(u32 index) { return (struct percpu *)kstacks[index]; }

void trap_entry(u32 vector, void *entry)
{
    u64 address = entry ? (u64)entry : (u64)trap_stubs + 16 * vector;

    idt[vector].offset0 = address;
    idt[vector].selector = SEL_KERNEL_CS;
    idt[vector].type = 0x8e; /* interrupt gate */
    idt[vector].offset1 = address >> 16;
    idt[vector].offset2 = address >> 32;
}

void traps_setup(void)
{
    for (u32 v = 0; v < 256; v++)
        trap_entry(v, NULL);
}

void cpu_setup(u32 index)
{
    struct percpu *p = cpu_at(index);
    u64 base = (u64)&p->tss;
    u64 *desc = gdt + SEL_TSS0 / 8 + 2 * index;
    struct descriptor_pointer gdtr = { SEL_TSS0 + 16 * MAX_CPUS - 1, (u64)gdt };
    struct descriptor_pointer idtr = { sizeof(idt) - 1, (u64)idt };

    p->index = index;
    p->tss.rsp0 = (u64)p + KSTACK_SIZE;
    desc[0] = 0x0000890000000067UL | (base & 0xffffff) << 16 | (base >> 24 & 0xff) << 56;
    desc[1] = base >> 32;
    asm volatile("lgdt %0" : : "m"(gdtr));
    asm volatile("mov %0,%%ds\nmov %0,%%es\nmov %0,%%ss" : : "r"(SEL_KERNEL_DS));
    asm volatile("lidt %0" : : "m"(idtr));
    asm volatile("ltr %w0" : : "r"(SEL_TSS0 + 16 * index));
}

/* A fault of an instruction listed in .extable is what a test waits for: go on behind it. */
static bool fixup(struct trap_frame *f)
{
    for (const u64 *e = extable_start; e < extable_end; e += 2) {
        if (e[0] == f->rip) {
            this_cpu()->fault_vector = f->vector;
            this_cpu()->fault_count++;
            f->rip = e[1];
            return true;
        }
    }
    return false;
}

extern void __attribute__((noreturn)) user_leave(u64 value);
extern u8 user_return[];

static void pmi(struct percpu *p, struct trap_frame *f)
{
    if (f->vector == VEC_NMI) {
        p->pmi_nmi++;
    } else {
        p->pmi_fixed++;
        p->pmi_vector = f->vector;
    }
    if (p->pmi_hook)
        p->pmi_hook(f);
    if (f->vector != VEC_NMI)
        apic_write(APIC_EOI, 0);
}

void trap(struct trap_frame *f);
void trap(struct trap_frame *f)
{
    struct percpu *p = this_cpu();

    if (trap_hook && trap_hook(f))
        return;
    switch (f->vector) {
    case VEC_NMI:
    case VEC_PMI:
    case VEC_PMI2:
        pmi(p, f);
        return;
    case VEC_TIMER:
        p->timer++;
        apic_write(APIC_EOI, 0);
        return;
    case VEC_IPI:
        apic_write(APIC_EOI, 0);
        return;
    case VEC_SPURIOUS:
        p->spurious++;
        return;
    case VEC_UD:
        if ((f->cs & 3) && f->rip == (u64)user_return)
            user_leave(f->rax);
        break;
    }
    if (f->vector < 32 && fixup(f))
        return;
    panic("unexpected trap %lu (error 0x%lx) on CPU %u at 0x%lx, CPL%lu, RSP 0x%lx", f->vector, f->error, p->index,
          f->rip, f->cs & 3, f->rsp);
}
