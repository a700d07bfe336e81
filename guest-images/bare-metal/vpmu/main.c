/*
 * Test kernel for the virtual PMU: asserts from inside what the manuals say. It finds the model by CPUID.
 *
 * Command line: model=NAME gp=N fixed=N width=N (what the VMM was told; checked against CPUID), backing=NAME,
 * deny=SELECT[:UMASK],… deny-fixed=MASK (the event filter in force), rdpmc=off, paravirtual, only=PREFIX.
 */
#include "check.h"

struct reset_state boot_state;

void reset_state_read(struct reset_state *s)
{
    for (u32 i = 0; i < pmu.gp && i < 16; i++) {
        s->selectors[i] = rdmsr(sel_msr(i));
        s->counters[i] = rdmsr(ctr_msr(i));
    }
    for (u32 i = 0; i < 32; i++)
        if (pmu.fixed & BIT(i))
            s->fixed[i] = rdmsr(MSR_FIXED_CTR0 + i);
    if (pmu.kind == PMU_INTEL && pmu.version >= 2) {
        s->fixed_ctrl = rdmsr(MSR_FIXED_CTR_CTRL);
        s->debugctl = rdmsr(MSR_DEBUGCTL);
    }
    if (pmu.global)
        s->global_ctrl = rdmsr(pmu.kind == PMU_INTEL ? MSR_GLOBAL_CTRL : MSR_V2_CTL);
    s->status = status_read();
}

bool denied(u64 select)
{
    const char *s = option_value("deny");
    while (s && *s && *s != ' ') {
        u64 event = parse_number(&s), umask = 0;
        if (*s == ':') {
            s++;
            umask = parse_number(&s);
        }
        if (((event & 0xff) | (event & 0xf00) << 24 | umask << 8) == (select & 0xf0000ffffUL))
            return true;
        if (*s != ',')
            break;
        s++;
    }
    return false;
}

bool fixed_denied(u32 n) { return option_number("deny-fixed", 0) >> n & 1; }
bool backing_is(const char *name) { return option_is("backing", name); }

static void before(void)
{
    struct percpu *p = this_cpu();

    cli();
    p->pmi_hook = NULL;
    if (pmu.kind != PMU_NONE)
        pmu_reset();
    p->pmi_nmi = p->pmi_fixed = 0;
}

void kmain(void)
{
    u32 failed;

    pmu_detect();
    if (pmu.kind != PMU_NONE) {
        reset_state_read(&boot_state);
        pmu_reset();
        work_setup();
    }
    failed = tap_run(before);
    if (failed)
        debug_exit(1);
}
