/* The local APIC, in x2APIC mode where there is one. */
#include "lib.h"

#define MSR_X2APIC 0x800
#define CPUID1_ECX_X2APIC BIT(21)
#define XAPIC 0xfee00000UL
#define ICR_PENDING BIT(12)

bool x2apic;

u32 apic_read(u32 reg) { return x2apic ? rdmsr(MSR_X2APIC + reg / 16) : *(volatile u32 *)(XAPIC + reg); }

void apic_write(u32 reg, u32 v)
{
    if (x2apic)
        wrmsr(MSR_X2APIC + reg / 16, v);
    else
        *(volatile u32 *)(XAPIC + reg) = v;
}

void apic_command(u32 apic_id, u32 command)
{
    if (x2apic) {
        wrmsr(MSR_X2APIC + APIC_ICR / 16, (u64)apic_id << 32 | command);
        return;
    }
    apic_write(APIC_ICR2, apic_id << 24);
    apic_write(APIC_ICR, command);
    for (u32 i = 0; i < 10000 && (apic_read(APIC_ICR) & ICR_PENDING); i++)
        pause();
}

void apic_setup(void)
{
    outb(0x21, 0xff); /* both PICs masked: all interrupts here come from the local APIC */
    outb(0xa1, 0xff);
    if ((cpuid(1, 0).ecx & CPUID1_ECX_X2APIC) && !option("xapic")) {
        wrmsr(MSR_APIC_BASE, rdmsr(MSR_APIC_BASE) | APIC_BASE_EXTD);
        x2apic = true;
    }
    apic_write(APIC_LVT_TIMER, LVT_MASKED);
    apic_write(APIC_LVTPC, LVT_MASKED);
    apic_write(APIC_SVR, 0x100 | VEC_SPURIOUS);
    this_cpu()->apic_id = x2apic ? apic_read(APIC_ID) : apic_read(APIC_ID) >> 24;
}
