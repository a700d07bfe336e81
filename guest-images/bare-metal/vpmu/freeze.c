/* IA32_DEBUGCTL bit 12: counters stop at a PMI. SDM volume 3, "Freezing LBR and Performance Counters on PMI". */
#include "check.h"

#define CTR_FRZ BIT(59)

/* Lets counter 0 overflow with an interrupt while the highest counter runs along. */
static void overflow(void)
{
    u64 end = rdtsc() + tsc_hz;

    apic_write(APIC_LVTPC, LVT_NMI);
    ctr_write(0, -period_of_ms(1));
    sel_write(pmu.gp - 1, counting_event | SEL_USR | SEL_OS | SEL_EN);
    sel_write(0, counting_event | SEL_USR | SEL_OS | SEL_INT | SEL_EN);
    global_write(BIT(pmu.gp) - 1);
    while (!this_cpu()->pmi_nmi && (s64)(end - rdtsc()) > 0)
        delay_us(100);
    CHECK(this_cpu()->pmi_nmi == 1, "%lu NMIs", this_cpu()->pmi_nmi);
}

TEST(freeze_off, ON_INTEL, "freeze: without DEBUGCTL bit 12 counters go on after a PMI")
{
    u64 v;

    if (pmu.version < 2)
        SKIP("version 1 cannot freeze");
    NEED_COUNTING();
    overflow();
    v = ctr_read(0);
    busy(0, 1);
    CHECK(ctr_read(0) > v);
    CHECK(rdmsr(MSR_GLOBAL_CTRL) == BIT(pmu.gp) - 1, "0x%lx", rdmsr(MSR_GLOBAL_CTRL));
    CHECK(!(status_read() & CTR_FRZ));
}

TEST(freeze_on_pmi, ON_INTEL, "freeze: with DEBUGCTL bit 12 a PMI stops the counters until software starts them again")
{
    u64 first, last;

    if (pmu.version < 2)
        SKIP("version 1 cannot freeze");
    NEED_COUNTING();
    CHECK(!wrmsr_safe(MSR_DEBUGCTL, DEBUGCTL_FREEZE_PMI));
    CHECK(rdmsr(MSR_DEBUGCTL) & DEBUGCTL_FREEZE_PMI, "0x%lx", rdmsr(MSR_DEBUGCTL));
    overflow();
    first = ctr_read(0), last = ctr_read(pmu.gp - 1);
    busy(0, 2);
    CHECK(ctr_read(0) == first && ctr_read(pmu.gp - 1) == last, "counters moved after the PMI");
    if (pmu.version < 4) {
        CHECK(rdmsr(MSR_GLOBAL_CTRL) == 0, "global control 0x%lx", rdmsr(MSR_GLOBAL_CTRL));
        global_write(BIT(pmu.gp) - 1);
    } else {
        CHECK(status_read() == (CTR_FRZ | 1), "status 0x%lx", status_read());
        CHECK(rdmsr(MSR_GLOBAL_CTRL) == BIT(pmu.gp) - 1, "global control 0x%lx", rdmsr(MSR_GLOBAL_CTRL));
        status_clear(1);
        busy(0, 1);
        CHECK(ctr_read(pmu.gp - 1) == last, "clearing the overflow alone does not start them");
        status_clear(CTR_FRZ);
        CHECK(status_read() == 0, "status 0x%lx", status_read());
    }
    busy(0, 1);
    CHECK(ctr_read(0) > first && ctr_read(pmu.gp - 1) >= last, "counters did not start again");
    wrmsr(MSR_DEBUGCTL, 0);
}

TEST(freeze_by_software, ON_INTEL, "freeze: from version 4 on software can set and clear CTR_FRZ itself")
{
    u64 v;

    if (pmu.version < 4)
        SKIP("before version 4");
    NEED_COUNTING();
    sel_write(0, counting_event | SEL_USR | SEL_OS | SEL_EN);
    global_write(1);
    wrmsr(MSR_GLOBAL_STATUS_SET, CTR_FRZ);
    v = ctr_read(0);
    busy(0, 1);
    CHECK(ctr_read(0) == v, "frozen counter moved");
    wrmsr(MSR_GLOBAL_OVF_CTRL, CTR_FRZ);
    busy(0, 1);
    CHECK(ctr_read(0) > v, "counter did not start again");
}
