/* The interrupt of an overflow: delivery mode, vector, masking, blocking, and none that is lost or invented. */
#include "check.h"

#define BOTH (SEL_USR | SEL_OS)
#define INTERRUPTING (BOTH | SEL_INT | SEL_EN)

static u64 pmis(void) { return this_cpu()->pmi_nmi + this_cpu()->pmi_fixed; }

static void arm(u32 i, u32 ms)
{
    ctr_write(i, -period_of_ms(ms));
    sel_write(i, counting_event | INTERRUPTING);
}

/* Time for interrupts that must not come, with interrupts on. */
static void settle(void)
{
    sti();
    delay_us(1000);
    cli();
}

/* Waits until `n` PMIs in all have come, for a second at most, and then for one too many. */
static void await(u64 n)
{
    u64 end = rdtsc() + tsc_hz;
    while (pmis() < n && (s64)(end - rdtsc()) > 0)
        settle();
    settle();
}

/* One overflow of counter i with interrupts on or off. */
static void overflow(u32 i, bool interrupts)
{
    arm(i, 1);
    if (interrupts)
        sti();
    global_write(BIT(i));
    CHECK(wait_wrapped(i), "counter %u did not overflow", i);
    cli();
    global_write(0);
    sel_write(i, counting_event | BOTH);
}

TEST(pmi_nmi, ON_ANY, "pmi: LVTPC in NMI mode gives one NMI for each overflow, with interrupts off")
{
    NEED_COUNTING();
    for (u32 i = 0; i < pmu.gp; i++) {
        u64 before = this_cpu()->pmi_nmi;
        apic_write(APIC_LVTPC, LVT_NMI);
        overflow(i, false);
        await(before + 1);
        CHECK(this_cpu()->pmi_nmi == before + 1, "counter %u: %lu", i, this_cpu()->pmi_nmi - before);
    }
    CHECK(this_cpu()->pmi_fixed == 0);
}

TEST(pmi_vector, ON_ANY, "pmi: LVTPC in fixed mode gives its vector, once for each overflow")
{
    static const u32 vectors[] = { VEC_PMI, VEC_PMI2 };

    NEED_COUNTING();
    for (u32 k = 0; k < 2; k++) {
        for (u32 i = 0; i < pmu.gp; i++) {
            u64 before = this_cpu()->pmi_fixed;
            apic_write(APIC_LVTPC, vectors[k]);
            overflow(i, true);
            await(before + 1);
            CHECK(this_cpu()->pmi_fixed == before + 1, "counter %u: %lu", i, this_cpu()->pmi_fixed - before);
            CHECK(this_cpu()->pmi_vector == vectors[k], "vector 0x%lx", this_cpu()->pmi_vector);
        }
    }
    CHECK(this_cpu()->pmi_nmi == 0);
}

static bool from_user;
static void note_privilege(struct trap_frame *f) { from_user = f->cs & 3; }

TEST(pmi_user, ON_ANY, "pmi: an overflow at CPL3 interrupts CPL3")
{
    NEED_COUNTING();
    this_cpu()->pmi_hook = note_privilege;
    for (u32 k = 0; k < 2; k++) {
        u64 end = rdtsc() + tsc_hz;
        from_user = false;
        apic_write(APIC_LVTPC, k ? VEC_PMI : LVT_NMI);
        arm(0, 20);
        global_write(1);
        do {
            sti();
            busy(3, 40);
            cli();
        } while (pmis() == k && (s64)(end - rdtsc()) > 0);
        settle();
        global_write(0);
        sel_write(0, 0);
        CHECK(pmis() == k + 1, "%lu", pmis());
        CHECK(from_user, "it came at CPL0");
    }
}

TEST(pmi_interrupts_off, ON_ANY, "pmi: in fixed mode it waits for STI")
{
    NEED_COUNTING();
    apic_write(APIC_LVTPC, VEC_PMI);
    overflow(0, false);
    delay_us(1000);
    CHECK(pmis() == 0, "%lu while interrupts are off", pmis());
    await(1);
    CHECK(pmis() == 1, "%lu after STI", pmis());
}

TEST(pmi_despite_clearing, ON_ANY, "pmi: one that LVTPC lets through comes even if the guest has cleared the status meanwhile")
{
    NEED_COUNTING();
    apic_write(APIC_LVTPC, VEC_PMI);
    overflow(0, false);
    status_clear(1);
    ctr_write(0, 0);
    sel_write(0, 0);
    await(1);
    CHECK(pmis() == 1, "%lu", pmis());
}

/* SDM volume 3, local vector table: the performance counter entry's mask bit is set when its interrupt is handled. */
TEST(pmi_masks_lvtpc, ON_INTEL, "pmi: a delivery sets the mask bit of LVTPC")
{
    NEED_COUNTING();
    if (!x2apic)
        SKIP("only to be seen in x2APIC mode");
    apic_write(APIC_LVTPC, LVT_NMI);
    overflow(0, false);
    await(1);
    CHECK(apic_read(APIC_LVTPC) == (LVT_NMI | LVT_MASKED), "0x%x", apic_read(APIC_LVTPC));
    apic_write(APIC_LVTPC, VEC_PMI);
    overflow(0, true);
    await(2);
    CHECK(apic_read(APIC_LVTPC) == (VEC_PMI | LVT_MASKED), "0x%x", apic_read(APIC_LVTPC));
}

TEST(pmi_leaves_lvtpc, ON_AMD, "pmi: a delivery leaves LVTPC as it is, and a second one follows")
{
    NEED_COUNTING();
    apic_write(APIC_LVTPC, LVT_NMI);
    overflow(0, false);
    await(1);
    CHECK(apic_read(APIC_LVTPC) == LVT_NMI, "0x%x", apic_read(APIC_LVTPC));
    overflow(0, false);
    await(2);
    CHECK(pmis() == 2, "%lu", pmis());
}

/*
 * Behind the mask the local APIC latches nothing. Perfvisor notices some overflows later than a processor does, so it keeps
 * the interrupt for as long as the status asks for it, and no longer.
 */
TEST(pmi_while_masked, ON_ANY, "pmi: it waits while LVTPC is masked, and comes once when it is not any more and the status bit is left")
{
    NEED_COUNTING();
    for (u32 k = 0; k < 2; k++) {
        u32 lvt = k ? VEC_PMI : LVT_NMI;
        u64 before = pmis();
        apic_write(APIC_LVTPC, lvt | LVT_MASKED);
        overflow(0, true);
        settle();
        CHECK(pmis() == before, "%lu while masked", pmis() - before);
        apic_write(APIC_LVTPC, lvt);
        await(before + 1);
        CHECK(pmis() == before + 1, "%lu after unmasking", pmis() - before);
        status_clear(1);
    }
}

/* What a handler does with counter i: without a global status it looks at the counter, and writes it. */
static void serve(u32 i)
{
    if (pmu.global)
        status_clear(BIT(i));
    else
        ctr_write(i, 0);
}

/* SDM volume 3, local vector table, and Linux's handler from Haswell on, which unmasks LVTPC when all has been served. */
TEST(pmi_served_while_masked, ON_ANY, "pmi: none after unmasking LVTPC for an overflow that was served behind the mask")
{
    NEED_COUNTING();
    for (u32 k = 0; k < 2; k++) {
        u32 lvt = k ? VEC_PMI : LVT_NMI;
        apic_write(APIC_LVTPC, lvt | LVT_MASKED);
        overflow(0, true);
        settle();
        serve(0);
        apic_write(APIC_LVTPC, lvt);
        for (u32 i = 0; i < 5; i++)
            settle();
        CHECK(pmis() == 0, "%lu", pmis());
    }
}

static bool serves_both, in_service;
static void serve_late(struct trap_frame *f)
{
    if (pmis() == 1) {
        in_service = apic_read(APIC_ISR + f->vector / 32 * 16) >> f->vector % 32 & 1;
        arm(1, 1);
        global_write(2);
        CHECK(wait_wrapped(1), "counter 1 did not overflow in the handler");
        delay_us(3000);
    }
    global_write(0);
    serve(0);
    if (serves_both || pmis() > 1)
        serve(1);
    apic_write(APIC_LVTPC, f->vector == VEC_NMI ? LVT_NMI : f->vector);
}

TEST(pmi_late_ack, ON_INTEL, "pmi: a handler that serves a second overflow and then unmasks LVTPC is not called again; one that leaves it is")
{
    NEED_COUNTING();
    if (pmu.gp < 2)
        SKIP("needs two counters");
    this_cpu()->pmi_hook = serve_late;
    for (u32 k = 0; k < 4; k++) {
        u64 expected = k < 2 ? 1 : 2;
        serves_both = k < 2;
        this_cpu()->pmi_nmi = this_cpu()->pmi_fixed = 0;
        apic_write(APIC_LVTPC, k & 1 ? VEC_PMI : LVT_NMI);
        arm(0, 1);
        sti();
        global_write(1);
        CHECK(wait_wrapped(0));
        await(expected);
        for (u32 i = 0; i < 5; i++)
            settle();
        if ((k & 1) && !x2apic && !in_service)
            /* In xAPIC mode the handler of a vector is known by it. One software-only KVM shows no vector in service. */
            kprintf("# this local APIC shows no interrupt in service: %lu PMIs by vector\n", pmis());
        else
            CHECK(pmis() == expected, "%s: %lu, expected %lu", k & 1 ? "vector" : "NMI", pmis(), expected);
        global_write(0);
        sel_write(0, 0);
        sel_write(1, 0);
        status_clear(status_read());
    }
}

TEST(pmi_apic_off, ON_ANY, "pmi: none while the local APIC is globally disabled")
{
    u64 base = rdmsr(MSR_APIC_BASE);

    NEED_COUNTING();
    apic_write(APIC_LVTPC, LVT_NMI);
    wrmsr(MSR_APIC_BASE, base & ~(APIC_BASE_EN | APIC_BASE_EXTD));
    overflow(0, false);
    delay_us(3000);
    CHECK(pmis() == 0, "%lu", pmis());
    serve(0);
    wrmsr(MSR_APIC_BASE, (base | APIC_BASE_EN) & ~APIC_BASE_EXTD);
    apic_setup();
    settle();
    CHECK(pmis() == 0, "%lu after it was enabled", pmis());
}

TEST(pmi_renamed_apic, ON_ANY, "pmi: in fixed mode it comes to a processor that has changed its APIC id")
{
    u32 id = apic_read(APIC_ID);

    NEED_COUNTING();
    if (x2apic)
        SKIP("an x2APIC id cannot be changed");
    apic_write(APIC_ID, 77 << 24);
    if (apic_read(APIC_ID) >> 24 != 77)
        SKIP("this local APIC's id cannot be changed");
    apic_write(APIC_LVTPC, VEC_PMI);
    overflow(0, true);
    await(1);
    apic_write(APIC_ID, id);
    CHECK(pmis() == 1, "%lu", pmis());
}

/* Starts counter 0 far from its overflow and runs it a little; false if the host was so slow that it overflowed. */
static bool run_without_overflow(void)
{
    for (u32 tries = 0; tries < 5; tries++) {
        apic_write(APIC_LVTPC, LVT_NMI);
        arm(0, 20);
        global_write(1);
        busy(0, 1);
        global_write(0);
        sel_write(0, counting_event | BOTH | SEL_INT);
        if (!counter_wrapped(0))
            return true;
        delay_us(1000);
        status_clear(1);
        this_cpu()->pmi_nmi = 0;
    }
    tap_skip("the host is too slow");
    return false;
}

TEST(no_pmi_when_off, ON_ANY, "pmi: none for a counter that was stopped before its overflow")
{
    NEED_COUNTING();
    if (!run_without_overflow())
        return;
    global_write(1);
    busy(0, 25);
    CHECK(pmis() == 0, "%lu", pmis());
}

TEST(no_pmi_when_rewritten, ON_ANY, "pmi: none for a counter that was rewritten before its overflow")
{
    NEED_COUNTING();
    if (!run_without_overflow())
        return;
    ctr_write(0, 0);
    sel_write(0, counting_event | INTERRUPTING);
    global_write(1);
    busy(0, 25);
    CHECK(pmis() == 0, "%lu", pmis());
}

TEST(rewritten_nearer, ON_ANY, "pmi: a running counter that is rewritten overflows after the new distance")
{
    u64 end = rdtsc() + tsc_hz;

    NEED_COUNTING();
    apic_write(APIC_LVTPC, LVT_NMI);
    ctr_write(0, 0);
    sel_write(0, counting_event | INTERRUPTING);
    global_write(1);
    busy(0, 1);
    ctr_write(0, -period_of_ms(1));
    while (!pmis() && (s64)(end - rdtsc()) > 0)
        delay_us(100);
    CHECK(pmis() == 1, "%lu", pmis());
}

TEST(int_set_later, ON_ANY, "pmi: none for an overflow that happened before INT was set")
{
    NEED_COUNTING();
    apic_write(APIC_LVTPC, LVT_NMI);
    ctr_write(0, -period_of_ms(1));
    sel_write(0, counting_event | BOTH | SEL_EN);
    global_write(1);
    CHECK(wait_wrapped(0));
    sel_write(0, counting_event | INTERRUPTING);
    busy(0, 2);
    CHECK(pmis() == 0, "%lu", pmis());
}

static u32 nested_seen;
static void overflow_in_handler(struct trap_frame *f)
{
    (void)f;
    if (this_cpu()->pmi_nmi != 1)
        return;
    apic_write(APIC_LVTPC, LVT_NMI);
    arm(1, 1);
    global_write(2);
    CHECK(wait_wrapped(1), "counter 1 did not overflow in the handler");
    delay_us(1000);
    nested_seen = this_cpu()->pmi_nmi;
}

TEST(pmi_in_nmi_handler, ON_ANY, "pmi: an overflow in the NMI handler gives an NMI after its IRET, not before")
{
    NEED_COUNTING();
    if (pmu.gp < 2)
        SKIP("needs two counters");
    nested_seen = 0;
    this_cpu()->pmi_hook = overflow_in_handler;
    apic_write(APIC_LVTPC, LVT_NMI);
    arm(0, 1);
    global_write(1);
    CHECK(wait_wrapped(0));
    await(2);
    CHECK(nested_seen == 1, "%u NMIs when the handler ended", nested_seen);
    CHECK(this_cpu()->pmi_nmi == 2, "%lu NMIs in all", this_cpu()->pmi_nmi);
}

static void unmask(struct trap_frame *f)
{
    apic_write(APIC_LVTPC, f->vector == VEC_NMI ? LVT_NMI : f->vector);
}

TEST(pmi_all_at_once, ON_ANY, "pmi: all counters overflowing together give at least one, and no more than one each")
{
    NEED_COUNTING();
    this_cpu()->pmi_hook = unmask;
    for (u32 k = 0; k < 2; k++) {
        u64 before = pmis();
        apic_write(APIC_LVTPC, k ? VEC_PMI : LVT_NMI);
        for (u32 i = 0; i < pmu.gp; i++)
            arm(i, 3);
        sti();
        global_write(BIT(pmu.gp) - 1);
        for (u32 i = 0; i < pmu.gp; i++)
            CHECK(wait_wrapped(i), "counter %u", i);
        await(before + 1);
        global_write(0);
        for (u32 i = 0; i < pmu.gp; i++)
            sel_write(i, 0);
        CHECK(pmis() > before && pmis() - before <= pmu.gp, "%lu for %u counters", pmis() - before, pmu.gp);
        if (pmu.global)
            CHECK(status_read() == BIT(pmu.gp) - 1, "status 0x%lx", status_read());
        status_clear(status_read());
    }
}

TEST(fixed_pmi, ON_INTEL, "pmi: a fixed counter interrupts if bit 3 of its field is set, and only then")
{
    u32 i = counting_event == event_select(EV_REF_CYCLES) ? 2 : counting_event == event_select(EV_CYCLES) ? 1 : 0;

    if (!(pmu.fixed & BIT(i)) || fixed_denied(i))
        SKIP("no such fixed counter");
    NEED_COUNTING();
    for (u32 k = 0; k < 2; k++) {
        u64 end = rdtsc() + tsc_hz;
        apic_write(APIC_LVTPC, LVT_NMI);
        wrmsr(MSR_FIXED_CTR0 + i, -period_of_ms(1) & width_mask());
        wrmsr(MSR_FIXED_CTR_CTRL, (k ? 0xbUL : 3UL) << 4 * i);
        global_write(BIT(32 + i));
        while (!status_read() && (s64)(end - rdtsc()) > 0)
            delay_us(100);
        await(k);
        CHECK(pmis() == k, "field %s: %lu", k ? "0xb" : "3", pmis());
        global_write(0);
        status_clear(status_read());
    }
}

static u64 period, late;
static void rearm(struct trap_frame *f)
{
    u64 v;
    global_write(0);
    if (!pmu.global)
        sel_write(0, counting_event | BOTH);
    v = ctr_read(0);
    status_clear(1);
    late += v / period;
    ctr_write(0, v % period - period);
    unmask(f);
    if (!pmu.global)
        sel_write(0, counting_event | INTERRUPTING);
    global_write(3);
}

TEST(pmi_rate, ON_ANY, "pmi: as many as the count divided by the period")
{
    u64 end = rdtsc() + tsc_hz / 20, expected, got;

    NEED_COUNTING();
    if (pmu.gp < 2)
        SKIP("needs two counters");
    period = period_of_ms(1);
    late = 0;
    this_cpu()->pmi_hook = rearm;
    apic_write(APIC_LVTPC, LVT_NMI);
    ctr_write(0, -period);
    sel_write(1, counting_event | BOTH | SEL_EN);
    sel_write(0, counting_event | INTERRUPTING);
    global_write(3);
    while ((s64)(end - rdtsc()) > 0)
        busy(0, 1);
    global_write(0);
    sel_write(0, 0);
    sel_write(1, 0);
    delay_us(1000);
    /* Without global control the second counter runs on in the handler, so there the count is a little more. */
    expected = ctr_read(1) / period;
    got = pmis() + late;
    CHECK(pmis() > 0 && got <= expected + 2 && got + expected / (pmu.global ? 10 : 2) + 2 >= expected,
          "%lu and %lu late, expected %lu", pmis(), late, expected);
}
