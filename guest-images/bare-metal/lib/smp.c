/* Starting the other CPUs with INIT and SIPI, one after the other, and giving them work. */
#include "lib.h"

#define ICR_INIT 0x4500
#define ICR_STARTUP 0x4600

static volatile u32 started;
static struct {
    void (*volatile fn)(u64);
    volatile u64 argument;
} work[MAX_CPUS];

extern u8 ap_trampoline[], ap_trampoline_end[], kstacks[][KSTACK_SIZE];
extern u64 ap_stack_top;
void ap_main(void);

u32 smp_start(void)
{
    u32 cpus = fw_cfg_cpus();

    __builtin_memcpy((void *)AP_TRAMPOLINE, ap_trampoline, ap_trampoline_end - ap_trampoline);
    started = 1;
    for (u32 i = 1; i < cpus; i++) {
        u32 id = i; /* APIC identifiers are the CPU indexes on every machine these kernels run on */
        ap_stack_top = (u64)kstacks[i] + KSTACK_SIZE;
        apic_command(id, ICR_INIT);
        delay_us(200);
        apic_command(id, ICR_STARTUP | AP_TRAMPOLINE >> 12);
        /* The second SIPI is for processors that lost the first. */
        for (u32 tries = 0; started != i + 1 && tries < 1000; tries++) {
            delay_us(1000);
            if (tries == 200)
                apic_command(id, ICR_STARTUP | AP_TRAMPOLINE >> 12);
        }
        if (started != i + 1)
            return started;
    }
    return started;
}

void ap_main(void)
{
    u32 index = started;

    cpu_setup(index);
    apic_setup();
    started = index + 1;
    for (;;) {
        void (*fn)(u64) = work[index].fn;
        if (fn) {
            fn(work[index].argument);
            work[index].fn = NULL;
        }
        pause();
    }
}

void smp_run(u32 index, void (*fn)(u64), u64 argument)
{
    work[index].argument = argument;
    work[index].fn = fn;
}

void smp_wait(u32 index)
{
    while (work[index].fn)
        pause();
}
