/* The kinds of work. Each does exactly n of something, so that its counts are known. */
#include "validate.h"

#define UART_SCRATCH 0x3ff
#define UNBACKED 0xd0000000UL /* in the hole below 4 GiB: no memory, no device */
#define FRESH_MEMORY 0x2000000UL /* 32 MiB: nothing of this guest is there */
#define FRESH_END 0x6000000UL    /* 96 MiB: the machine has at least 128 */
#define LINES 4096
#define LINE 64

u64 chase_start;
static u8 ring[LINES * LINE] __attribute__((aligned(4096)));
static u64 fresh = FRESH_MEMORY;

void halt_us(u64 us)
{
    volatile u64 *rung = &this_cpu()->timer;
    u64 before = *rung;

    apic_write(APIC_TIMER_DIV, 0xb); /* by 1; KVM's timer counts nanoseconds */
    apic_write(APIC_LVT_TIMER, VEC_TIMER);
    apic_write(APIC_TIMER_INIT, us * 1000);
    while (*rung == before) {
        sti_hlt();
        cli();
    }
    apic_write(APIC_LVT_TIMER, LVT_MASKED);
}

static u64 nothing(u64 n) { return n; }

/* n halts of 20 ms each. */
static u64 sleep(u64 n)
{
    while (n--)
        halt_us(20000);
    return 0;
}

/* From CPL0 to CPL3 and back by a fault. SYSCALL does not work under every KVM. */
static u64 to_user(u64 n)
{
    while (n--)
        run_user(known_loop, 1);
    return 0;
}

/* Faults that the guest handles itself. */
static u64 faults(u64 n)
{
    u64 v;
    while (n--) {
        u32 fault = 1;
        /* An address that is not mapped: #PF, which stays within KVM. #GP is an exit to the VMM, which looks for RDPMC. */
        asm volatile("1: mov (%2),%1\nxorl %0,%0\n2:\n" EXTABLE("1b", "2b")
                     : "+r"(fault), "=r"(v) : "r"(1UL << 40) : "memory", "cc");
    }
    return 0;
}

static u64 ports(u64 n)
{
    while (n--)
        outb(UART_SCRATCH, n);
    return 0;
}

static u64 mmio(u64 n)
{
    while (n--)
        (void)*(volatile u32 *)UNBACKED;
    return 0;
}

static u64 msrs(u64 n)
{
    while (n--)
        rdmsr(ctr_msr(pmu.gp - 1));
    return 0;
}

static u64 irqs(u64 n)
{
    volatile u64 *taken = &this_cpu()->timer; /* the handler of that vector counts */
    while (n--) {
        u64 before = *taken;
        apic_command(this_cpu()->apic_id, 0x4000 | VEC_TIMER);
        sti();
        /* It may not come at once: an emulated CPU looks for it now and then. */
        for (u32 i = 0; *taken == before && i < 100000; i++)
            pause();
        cli();
    }
    return 0;
}

static u64 nmis(u64 n)
{
    volatile u64 *taken = &this_cpu()->pmi_nmi;
    while (n--) {
        u64 before = *taken;
        apic_command(this_cpu()->apic_id, 0x4400); /* an NMI to this CPU */
        for (u32 i = 0; *taken == before && i < 100000; i++)
            pause();
    }
    return 0;
}

static u64 touch(u64 n)
{
    for (; n-- && fresh < FRESH_END; fresh += 4096)
        *(volatile u8 *)fresh = 1;
    return 0;
}

static const struct work kinds[] = {
    { "nothing", nothing, false }, { "busy", known_loop, true }, { "chase", chase, true },
    { "spin", spin_chunk, true },  { "sleep", sleep, false }, { "to-user", to_user, false },
    { "faults", faults, false },   { "ports", ports, false },    { "mmio", mmio, false },
    { "msrs", msrs, false },       { "irqs", irqs, false },      { "nmis", nmis, false },
    { "touch", touch, false },
};

const struct work *work_named(const char *name)
{
    for (u32 i = 0; i < ARRAY_LEN(kinds); i++) {
        const char *a = kinds[i].name, *b = name;
        while (*a && *a == *b)
            a++, b++;
        if (!*a && (*b == ' ' || !*b))
            return &kinds[i];
    }
    return NULL;
}

void work_setup(void)
{
    /* An odd stride visits every line before it comes back. */
    for (u32 i = 0, at = 0; i < LINES; i++) {
        u32 next = (at + 1657) % LINES;
        *(u64 *)(ring + at * LINE) = (u64)(ring + next * LINE);
        at = next;
    }
    chase_start = (u64)ring;
}
