/* Interrupts, NMIs and faults in a counted block. An instruction that faults does not retire; its handler's do. */
#include "exact.h"

static u64 taken_before;

/* An interrupt that waits for STI. Sent to itself, so that it does not depend on time. */
static void pending(void)
{
    trap_entry(VEC_IPI, handler_irq);
    wrmsr(X2APIC_SELF_IPI, VEC_IPI);
    taken_before = interrupts;
}

TEST(sti_shadow, ON_ANY, "exact: an interrupt after STI's shadow, and its handler")
{
    if (!x2apic)
        SKIP("needs x2APIC");
    expect(instructions | SEL_OS, block_sti, 0, pending, AROUND + 4 + HANDLER_IRQ);
    CHECK(interrupts == taken_before + 1, "%lu interrupts", interrupts - taken_before);
    CHECK(interrupted_rip == (u64)block_sti_taken, "taken at 0x%lx", interrupted_rip);
}

TEST(mov_ss_shadow, ON_ANY, "exact: an interrupt held off by MOV SS, and its handler")
{
    if (!x2apic)
        SKIP("needs x2APIC");
    expect(instructions | SEL_OS, block_mov_ss, 0, pending, AROUND + 6 + HANDLER_IRQ);
    CHECK(interrupts == taken_before + 1, "%lu interrupts", interrupts - taken_before);
}

TEST(hlt, ON_ANY, "exact: HLT is one instruction, woken by an interrupt")
{
    if (!x2apic)
        SKIP("needs x2APIC");
    expect(instructions | SEL_OS, block_hlt, 0, pending, AROUND + 4 + HANDLER_IRQ);
    CHECK(interrupted_rip == (u64)block_hlt_taken, "taken at 0x%lx", interrupted_rip);
}

TEST(nmi, ON_ANY, "exact: an NMI and its handler")
{
    if (!x2apic)
        SKIP("needs x2APIC");
    trap_entry(VEC_NMI, handler_nmi);
    /* Delivery mode NMI, asserted, to APIC identifier 0. */
    expect(instructions | SEL_OS, block_nmi, 0x4400, NULL, AROUND + 5 + HANDLER_NMI);
    CHECK(interrupts == 5, "%lu NMIs", interrupts);
}

TEST(undefined, ON_ANY, "exact: UD2 does not count, its handler does")
{
    trap_entry(VEC_UD, handler_ud);
    expect(instructions | SEL_OS, block_ud, 0, NULL, AROUND + 2 + HANDLER_UD);
    CHECK(interrupts == 5, "%lu faults", interrupts);
}

TEST(protection, ON_ANY, "exact: an RDMSR that raises #GP does not count, its handler does")
{
    trap_entry(VEC_GP, handler_gp);
    expect(instructions | SEL_OS, block_gp, 0, NULL, AROUND + 2 + HANDLER_GP);
    CHECK(interrupts == 5, "%lu faults", interrupts);
}

TEST(page_fault, ON_ANY, "exact: a load that raises #PF does not count, its handler does")
{
    trap_entry(VEC_PF, handler_gp);
    expect(instructions | SEL_OS, block_pf, 0, NULL, AROUND + 2 + HANDLER_GP);
    CHECK(interrupts == 5, "%lu faults", interrupts);
}

TEST(page_fault_retried, ON_ANY, "exact: a load that succeeds after its page fault counts once")
{
    trap_entry(VEC_PF, handler_pf_fix);
    expect(instructions | SEL_OS, block_pf_retried, 0, NULL, AROUND + 3 + HANDLER_PF_FIX);
    CHECK(interrupts == 5, "%lu faults", interrupts);
}

TEST(overflow_exactly, ON_ANY, "exact: a counter overflows after exactly its distance, and the NMI comes once")
{
    u64 n;

    trap_entry(VEC_NMI, handler_nmi);
    apic_write(APIC_LVTPC, LVT_NMI);
    /* Set apart from count(): the counter must not begin at 0. */
    ctr_write(0, -500UL);
    if (pmu.global) {
        sel_write(0, instructions | SEL_OS | SEL_INT | SEL_EN);
        measure(pmu.kind == PMU_INTEL ? MSR_GLOBAL_CTRL : MSR_V2_CTL, 1, block_1000, 0);
    } else {
        measure(sel_msr(0), instructions | SEL_OS | SEL_INT | SEL_EN, block_1000, 0);
    }
    n = ctr_read(0);
    CHECK(interrupts == 1, "%lu NMIs", interrupts);
    CHECK(n == AROUND + 1000 + HANDLER_NMI - 500, "counter at %lu", n);
    if (pmu.global)
        CHECK(status_read() == 1, "status 0x%lx", status_read());
}

TEST(no_overflow_yet, ON_ANY, "exact: a counter one short of its overflow does not overflow")
{
    trap_entry(VEC_NMI, handler_nmi);
    apic_write(APIC_LVTPC, LVT_NMI);
    ctr_write(0, -(AROUND + 1000UL + 1));
    if (pmu.global) {
        sel_write(0, instructions | SEL_OS | SEL_INT | SEL_EN);
        measure(pmu.kind == PMU_INTEL ? MSR_GLOBAL_CTRL : MSR_V2_CTL, 1, block_1000, 0);
    } else {
        measure(sel_msr(0), instructions | SEL_OS | SEL_INT | SEL_EN, block_1000, 0);
    }
    CHECK(interrupts == 0, "%lu NMIs", interrupts);
    CHECK(ctr_read(0) == width_mask(), "0x%lx", ctr_read(0));
}
