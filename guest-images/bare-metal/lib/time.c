/* TSC frequency against the PIT, and delays. */
#include "lib.h"

#define PIT_HZ 1193182
#define PIT_CH0 0x40
#define PIT_MODE 0x43

u64 tsc_hz;

static u32 pit_read(void)
{
    outb(PIT_MODE, 0); /* latch channel 0 */
    u32 lo = inb(PIT_CH0);
    return inb(PIT_CH0) << 8 | lo;
}

/* Channel 0 counts down from 65536 in mode 2; its interrupt is masked at the PIC. */
void time_setup(void)
{
    u32 start, now, spin = 0;
    u64 t0, t1;

    outb(PIT_MODE, 0x34);
    outb(PIT_CH0, 0);
    outb(PIT_CH0, 0);
    start = pit_read();
    t0 = rdtsc();
    do {
        now = pit_read();
        t1 = rdtsc();
        spin++;
    } while (((start - now) & 0xffff) < PIT_HZ / 50 && spin < 1000000);
    if (((start - now) & 0xffff) >= PIT_HZ / 50)
        tsc_hz = (t1 - t0) * PIT_HZ / ((start - now) & 0xffff);
    if (tsc_hz < 1000000)
        tsc_hz = 2000000000; /* no PIT: assume 2 GHz; only the length of the loops depends on it */
}

void delay_us(u64 us)
{
    u64 end = rdtsc() + us * (tsc_hz / 1000000);
    while ((s64)(end - rdtsc()) > 0)
        pause();
}
