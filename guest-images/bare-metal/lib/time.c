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

/*
 * What the PIT shows and the TSC at that moment: of some readings the one with the least time around it. Where the host takes the CPU
 * away between the two, they belong to different moments.
 */
static u64 pit_and_tsc(u32 *pit)
{
    u64 least = ~0UL, at = 0;

    for (u32 i = 0; i < 8; i++) {
        u64 before = rdtsc();
        u32 now = pit_read();
        u64 after = rdtsc();

        if (after - before < least) {
            least = after - before;
            at = before + least / 2;
            *pit = now;
        }
    }
    return at;
}

/*
 * Channel 0 counts down from 65536 in mode 2; its interrupt is masked at the PIC. If the CPU is taken away for longer than the 55 ms
 * of a round, the PIT seems to have counted too little and the TSC too fast: the slowest of some measurements is right.
 */
void time_setup(void)
{
    outb(PIT_MODE, 0x34);
    outb(PIT_CH0, 0);
    outb(PIT_CH0, 0);
    for (u32 measured = 0; measured < 3; measured++) {
        u32 start = 0, now = 0, spin = 0;
        u64 t0 = pit_and_tsc(&start), t1, hz;

        do
            spin++;
        while (((start - pit_read()) & 0xffff) < PIT_HZ / 50 && spin < 1000000);
        if (spin == 1000000)
            break; /* no PIT */
        t1 = pit_and_tsc(&now);
        if (((start - now) & 0xffff) < PIT_HZ / 50)
            continue; /* it began anew meanwhile */
        hz = (t1 - t0) * PIT_HZ / ((start - now) & 0xffff);
        if (!tsc_hz || hz < tsc_hz)
            tsc_hz = hz;
    }
    if (tsc_hz < 1000000)
        tsc_hz = 2000000000; /* no PIT: assume 2 GHz; only the length of the loops depends on it */
}

void delay_us(u64 us)
{
    u64 end = rdtsc() + us * (tsc_hz / 1000000);
    while ((s64)(end - rdtsc()) > 0)
        pause();
}
