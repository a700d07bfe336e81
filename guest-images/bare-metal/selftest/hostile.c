/* A guest that means no good to whoever runs it: it storms, guesses and loops, on every CPU, and never ends. */
#include "selftest.h"

#define PHASE_MS 50
#define NOBODY_S 0xfed40000UL /* no memory and no device */

/* Registers of the PMU. Others would break this machine and not its host's VMM. */
static const struct {
    u32 first, count;
} ranges[] = {
    { MSR_PMC0, 8 }, { MSR_EVNTSEL0, 8 }, { MSR_FIXED_CTR0, 6 }, { MSR_PERF_CAPABILITIES, 1 }, { MSR_FIXED_CTR_CTRL, 8 },
    { MSR_A_PMC0, 8 }, { MSR_K7_EVNTSEL0, 8 }, { MSR_F15H_CTL0, 12 }, { MSR_V2_STATUS, 4 }, { 0x3f0, 8 }, { 0x1c0, 16 },
};

struct chaos {
    u64 random, deadline, faults;
    bool storming;
};
static struct chaos chaos[MAX_CPUS];

static struct chaos *mine(void) { return &chaos[this_cpu()->index]; }

static u64 next(void)
{
    u64 *r = &mine()->random;

    *r ^= *r << 13;
    *r ^= *r >> 7;
    return *r ^= *r << 17;
}

static bool over(void) { return (s64)(mine()->deadline - rdtsc()) <= 0; }

static void arm_all(void)
{
    for (u32 i = 0; i < pmu.gp; i++)
        ctr_write(i, -1UL);
    for (u32 i = 0; i < 32; i++)
        if (pmu.fixed & BIT(i))
            wrmsr_safe(MSR_FIXED_CTR0 + i, width_mask());
}

static void disarm(void)
{
    mine()->storming = false;
    pmu_reset();
}

/* Each counter again one event before its overflow, and no word of thanks. */
static void on_pmi(struct trap_frame *f)
{
    (void)f;
    if (!mine()->storming || over()) {
        disarm();
        return;
    }
    status_clear(status_read());
    arm_all();
    apic_write(APIC_LVTPC, next() & 1 ? LVT_NMI : VEC_PMI);
}

/* What happens often, here or on the host (docs/reference/vpmu.md, paravirtual events): its host opens events for these. */
static u64 something(void)
{
    static const u8 paravirtual[] = { 1, 5, 6, 7 };

    switch (next() % 4) {
    case 0: return event_select(EV_INSTRUCTIONS);
    case 1: return (pmu.amd_cpu ? 0xf000000ffUL : 0xffUL) | (u64)paravirtual[next() % ARRAY_LEN(paravirtual)] << 8;
    default: return event_select(EV_CYCLES);
    }
}

/* Every counter interrupts at every event. */
static void storm(void)
{
    pmu_reset();
    this_cpu()->pmi_hook = on_pmi;
    mine()->storming = true;
    apic_write(APIC_LVTPC, LVT_NMI);
    arm_all();
    for (u32 i = 0; i < pmu.gp; i++)
        sel_write(i, something() | SEL_EN | SEL_INT | SEL_OS | SEL_USR);
    if (pmu.fixed)
        wrmsr_safe(MSR_FIXED_CTR_CTRL, 0xbbb);
    global_write(global_enabled());
    while (!over()) {
        sti();
        run_user(known_loop, 1000);
    }
    cli();
    disarm();
}

/* Reads and writes of anything the PMU may have. */
static void guess(void)
{
    u64 v;

    this_cpu()->pmi_hook = on_pmi;
    apic_write(APIC_LVTPC, next() & 1 ? LVT_NMI : LVT_MASKED);
    while (!over()) {
        u32 at = next() % ARRAY_LEN(ranges);
        u32 msr = ranges[at].first + next() % ranges[at].count;

        v = next() >> next() % 64;
        mine()->faults += next() & 1 ? wrmsr_safe(msr, v) : rdmsr_safe(msr, &v);
    }
    disarm();
}

static u64 tables_of[MAX_CPUS][512] __attribute__((aligned(4096)));

/* Page tables that lead back to themselves, and a frame that is its own caller: whoever walks them walks for ever. */
static void loop_tables(void)
{
    u64 *top = tables_of[this_cpu()->index], old, frame[2], sum = 0;

    asm volatile("mov %%cr3,%0" : "=r"(old));
    __builtin_memcpy(top, (void *)(old & ~0xfffUL), 4096);
    for (u32 i = 1; i < 512; i++)
        top[i] = (u64)top | 7;
    frame[0] = (u64)frame;
    frame[1] = (u64)loop_tables;
    asm volatile("mov %0,%%cr3" : : "r"(top) : "memory");
    while (!over()) {
        /* An address of the upper half is an entry of the one table, whichever way it goes through it. */
        u64 at = 0xffffUL << 48 | (256 + next() % 256) << 39 | next() % 512 * 8;
        for (u32 level = 12; level < 39; level += 9)
            at |= (1 + next() % 511) << level;
        sum += *(volatile u64 *)at;
        asm volatile("push %%rbp\nmov %0,%%rbp\nmov $2000,%%ecx\n1: dec %%ecx\njnz 1b\npop %%rbp" : : "r"(frame) : "rcx", "cc", "memory");
    }
    asm volatile("mov %0,%%cr3" : : "r"(old), "r"(sum) : "memory");
}

/* Nothing but a jump, deaf to interrupts. */
static void tight(void)
{
    while (!over())
        asm volatile("mov $20000,%%ecx\n1: dec %%ecx\njnz 1b" : : : "rcx", "cc");
}

/* Ports and memory that are nobody's, and those that are somebody's. */
static void poke(void)
{
    static const u16 ports[] = { 0x20, 0x40, 0x60, 0x64, 0x70, 0x71, 0x80, 0x2f8, 0x3f9, 0x3fd, 0x511, 0x608, 0xcf8, 0xcfc };

    while (!over()) {
        inb(ports[next() % ARRAY_LEN(ports)]);
        (void)*(volatile u32 *)(NOBODY_S + (next() & 0xffc));
    }
}

static void misbehave(u64 seed)
{
    static void (*const phases[])(void) = { storm, guess, loop_tables, tight, poke };
    u32 first = 0, count = pmu.kind == PMU_NONE ? 3 : ARRAY_LEN(phases);

    if (pmu.kind == PMU_NONE)
        first = 2;
    mine()->random = (seed + this_cpu()->index + 1) * 0x9e3779b97f4a7c15UL;
    for (u64 round = 0;; round++) {
        u32 phase = first + next() % count;

        /* The same at once on all CPUs at first, so that each has been seen after a short time. */
        if (round < count)
            phase = first + round;
        mine()->deadline = rdtsc() + tsc_hz / 1000 * PHASE_MS;
        phases[phase]();
        if (this_cpu()->index == 0 && round % 20 == count - 1)
            kprintf("hostile: round %lu\n", round);
    }
}

void hostile(u64 seed)
{
    u32 cpus = smp_start();

    pmu_detect();
    kprintf("hostile on %u CPUs, %s\n", cpus, pmu_name());
    for (u32 i = 1; i < cpus; i++)
        smp_run(i, misbehave, seed);
    misbehave(seed);
    __builtin_unreachable();
}

/* An instruction that KVM executes itself, where there is no memory, and cannot. */
void unemulated(void)
{
    kprintf("cmpxchg16b where nobody is\n");
    asm volatile("xor %%eax,%%eax\nxor %%edx,%%edx\nxor %%ebx,%%ebx\nxor %%ecx,%%ecx\ncmpxchg16b (%0)"
                 : : "r"(NOBODY_S) : "rax", "rbx", "rcx", "rdx", "cc", "memory");
    panic("it was executed");
}
