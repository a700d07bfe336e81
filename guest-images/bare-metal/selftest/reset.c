/* The machine from inside: what it holds when it starts, how it is reset, and its power button. */
#include "selftest.h"

#define MARK ((volatile u64 *)(24 << 20)) /* memory that nobody uses */
#define MARK_VALUE 0x5245534554ULL
#define PM1_STATUS 0x600
#define PM1_ENABLE 0x602
#define PM1_PWRBTN BIT(8)

static u32 selector(void)
{
    return pmu.kind == PMU_INTEL ? MSR_EVNTSEL0 : pmu.kind == PMU_K7 ? MSR_K7_EVNTSEL0 : MSR_F15H_CTL0;
}

/* Says what is left of the time before, leaves something behind, and resets the machine in this way; with the word key
 * when a character comes. */
void reset_by(const char *way)
{
    struct { u16 limit; u64 base; } __attribute__((packed)) none = { 0, 0 };
    u32 cpus = smp_start();
    u64 left = 0;

    pmu_detect();
    if (pmu.kind != PMU_NONE) {
        left = rdmsr(selector());
        wrmsr(selector(), SEL_EN | SEL_OS | SEL_USR | 0xc0);
    }
    kprintf("boot cpus=%u memory=%lx selector=%lx pm=%x\n", cpus, *MARK, left, inb(PM1_ENABLE + 1));
    *MARK = MARK_VALUE;
    outb(PM1_ENABLE + 1, 1);
    run_user(known_loop, 1000000);
    while (option("key") && !getchar_ready())
        asm volatile("pause");
    switch (*way) {
    case 'k': outb(0x64, 0xfe); break;
    case 'c': outb(0xcf9, 6); break;
    case 'a': outb(0x92, 1); break;
    case 't': asm volatile("lidt %0; ud2" : : "m"(none)); break;
    }
    for (;;)
        asm volatile("pause");
}

/* Waits for the power button and powers off, which an operating system does in its handler; with the word deaf it never
 * looks. */
void wait_for_button(void)
{
    outb(PM1_ENABLE + 1, PM1_PWRBTN >> 8);
    kprintf("waiting for the button\n");
    while (option("deaf") || !(inb(PM1_STATUS + 1) & PM1_PWRBTN >> 8))
        asm volatile("pause");
    outb(PM1_STATUS + 1, PM1_PWRBTN >> 8);
    kprintf("the button was pressed; status %x\n", inb(PM1_STATUS + 1));
    power_off();
}
