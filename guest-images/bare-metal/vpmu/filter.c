/* The event filter: the command line says what the VMM denies. */
#include "check.h"

TEST(filter_denied_events, ON_ANY, "filter: a denied event keeps its value, without a fault or an overflow")
{
    const char *s = option_value("deny");

    if (!s)
        SKIP("deny= is not on the command line");
    while (*s && *s != ' ') {
        u64 event = parse_number(&s), umask = 0, select;
        if (*s == ':') {
            s++;
            umask = parse_number(&s);
        }
        select = (event & 0xff) | (event & 0xf00) << 24 | umask << 8;
        for (u32 i = 0; i < pmu.gp; i++) {
            ctr_write(i, -1000);
            CHECK(!wrmsr_safe(sel_msr(i), select | SEL_USR | SEL_OS | SEL_EN | SEL_INT), "event 0x%lx", event);
        }
        apic_write(APIC_LVTPC, LVT_NMI);
        global_write(global_enabled());
        busy(0, 2);
        busy(3, 2);
        for (u32 i = 0; i < pmu.gp; i++)
            CHECK(ctr_read(i) == (-1000UL & width_mask()), "event 0x%lx on counter %u: 0x%lx", event, i, ctr_read(i));
        CHECK(status_read() == 0, "status 0x%lx", status_read());
        pmu_reset();
        if (*s != ',')
            break;
        s++;
    }
    CHECK(this_cpu()->pmi_nmi == 0, "%lu NMIs", this_cpu()->pmi_nmi);
}

TEST(filter_changes_selector, ON_ANY, "filter: a counter follows its selector from a denied to an allowed event and back")
{
    const char *s = option_value("deny");
    u64 event, v;

    if (!s)
        SKIP("deny= is not on the command line");
    NEED_COUNTING();
    event = parse_number(&s);
    event = (event & 0xff) | (event & 0xf00) << 24;
    if (*s == ':') {
        s++;
        event |= parse_number(&s) << 8;
    }
    global_write(1);
    sel_write(0, event | SEL_USR | SEL_OS | SEL_EN);
    busy(0, 1);
    CHECK(ctr_read(0) == 0, "%lu", ctr_read(0));
    sel_write(0, counting_event | SEL_USR | SEL_OS | SEL_EN);
    busy(0, 1);
    CHECK(ctr_read(0) > 0);
    sel_write(0, event | SEL_USR | SEL_OS | SEL_EN);
    v = ctr_read(0);
    busy(0, 1);
    CHECK(ctr_read(0) == v, "from %lu to %lu", v, ctr_read(0));
}

TEST(filter_fixed, ON_INTEL, "filter: the bitmap alone decides about fixed counters")
{
    u64 mask = option_number("deny-fixed", 0);

    if (!mask)
        SKIP("deny-fixed= is not on the command line");
    for (u32 i = 0; i < 16; i++) {
        if (!(pmu.fixed & mask & BIT(i)))
            continue;
        wrmsr(MSR_FIXED_CTR0 + i, 0x777);
        wrmsr(MSR_FIXED_CTR_CTRL, 3UL << 4 * i);
        global_write(BIT(32 + i));
        busy(0, 2);
        CHECK(rdmsr(MSR_FIXED_CTR0 + i) == 0x777, "fixed %u: 0x%lx", i, rdmsr(MSR_FIXED_CTR0 + i));
    }
}
