/* The local APIC in xAPIC mode. */
#include "lib.h"

void apic_setup(void)
{
    outb(0x21, 0xff); /* both PICs masked: all interrupts here come from the local APIC */
    outb(0xa1, 0xff);
    apic_write(APIC_LVT_TIMER, LVT_MASKED);
    apic_write(APIC_LVTPC, LVT_MASKED);
    apic_write(APIC_SVR, 0x100 | VEC_SPURIOUS);
    this_cpu()->apic_id = apic_read(APIC_ID) >> 24;
}
