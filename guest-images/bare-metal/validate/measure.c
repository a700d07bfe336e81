/* One measurement on the CPU that runs it: counters on, work, counters off. */
#include "validate.h"

struct sampler {
    const struct job *job;
    u64 period, on, off, pmis, late, spurious, struck[4];
    u32 msr, others; /* counters beside 0 that are switched one by one: without global control */
};
static struct sampler samplers[MAX_CPUS];
static struct {
    u64 (*fn)(u64);
} user_work[MAX_CPUS];

static u64 at_user(u64 n) { return run_user(user_work[this_cpu()->index].fn, n); }

/*
 * Work to be profiled is done in pieces: the host's processor does not keep its pace for long. They are of different lengths, or the
 * samples would fall on each at the same place.
 */
static u64 pieces(u64 n)
{
    u64 (*fn)(u64) = user_work[this_cpu()->index].fn;
    u64 piece = n / 64 + 1;
    u32 random = 1;

    sti();
    while (n) {
        u64 now;
        random = random * 1103515245 + 12345;
        now = piece / 2 + piece * (random >> 24) / 256 + 1;
        now = now < n ? now : n;
        run_user(fn, now);
        n -= now;
    }
    cli();
    return 0;
}

/* As a driver does it: counters off, acknowledge, re-arm so that the distance between overflows stays, unmask, on. */
static void on_pmi(struct trap_frame *f)
{
    struct sampler *s = &samplers[this_cpu()->index];
    u64 v;

    wrmsr(s->msr, s->off);
    for (u32 i = 1; i < s->others; i++)
        sel_write(i, s->job->select[i]);
    v = ctr_read(0);
    status_clear(BIT(0));
    if (counter_wrapped(0)) {
        s->pmis++;
        s->late += v / s->period; /* periods that went by before this handler ran */
        ctr_write(0, v % s->period - s->period);
        s->struck[f->rip < (u64)spin_hot || f->rip >= (u64)spin_end ? 3
                  : f->rip >= (u64)spin_cool                        ? 2
                  : f->rip >= (u64)spin_warm                        ? 1
                                                                    : 0]++;
    } else {
        s->spurious++;
    }
    apic_write(APIC_LVTPC, LVT_NMI); /* Intel has masked it */
    /* In the same order as off, so that all run equally long. */
    wrmsr(s->msr, s->on);
    for (u32 i = 1; i < s->others; i++)
        sel_write(i, s->job->select[i] | SEL_EN);
}

void measure(const struct job *job, struct result *r)
{
    u32 self = this_cpu()->index, fixed = 0;
    struct sampler *s = &samplers[self];
    u64 interrupt = job->period ? SEL_INT : 0, t0;
    u64 (*fn)(u64) = job->work->fn;

    *r = (struct result){ 0 };
    pmu_reset();
    *s = (struct sampler){ .job = job, .period = job->period, .others = pmu.global ? 0 : job->selectors };
    for (u32 i = 0; i < 4; i++)
        if (job->fixed_control >> 4 * i & 3)
            fixed |= BIT(i);
    if (job->period)
        ctr_write(0, -job->period);
    /*
     * The last register written starts counter 0. Without global control the others start one after the other before it,
     * and stop after it.
     */
    for (u32 i = job->selectors; i-- > 0;)
        if (pmu.global || i > 0)
            sel_write(i, job->select[i] | SEL_EN | (i ? 0 : interrupt));
    if (pmu.global) {
        if (job->fixed_control)
            wrmsr(MSR_FIXED_CTR_CTRL, job->fixed_control);
        s->msr = pmu.kind == PMU_INTEL ? MSR_GLOBAL_CTRL : MSR_V2_CTL;
        s->on = (BIT(job->selectors) - 1) | (u64)fixed << 32;
        s->off = 0;
    } else {
        s->msr = sel_msr(0);
        s->on = job->select[0] | SEL_EN | interrupt;
        s->off = job->select[0] | interrupt;
    }
    if (job->work->any_cpl && (job->cpl || job->period)) {
        user_work[self].fn = fn;
        fn = job->period || fn == spin_chunk ? pieces : at_user;
    }
    if (job->period) {
        this_cpu()->pmi_hook = on_pmi;
        apic_write(APIC_LVTPC, LVT_NMI);
    }
    t0 = rdtsc();
    if (job->selectors || fixed)
        counted(s->msr, s->on, s->off, fn, job->n);
    else
        fn(job->n);
    r->tsc = rdtsc() - t0;
    if (!pmu.global)
        for (u32 i = 1; i < job->selectors; i++)
            sel_write(i, job->select[i]);
    if (job->period) {
        /* A PMI that is on its way would find the counters on again. */
        apic_write(APIC_LVTPC, LVT_MASKED);
        delay_us(200);
        wrmsr(s->msr, s->off);
        for (u32 i = 1; i < s->others; i++)
            sel_write(i, job->select[i]);
        this_cpu()->pmi_hook = NULL;
    }
    for (u32 i = 0; i < job->selectors; i++)
        r->general[i] = ctr_read(i);
    for (u32 i = 0; i < 4; i++)
        if (fixed & BIT(i))
            r->fixed[i] = rdmsr(MSR_FIXED_CTR0 + i);
    r->pmis = s->pmis;
    r->late = s->late;
    r->spurious = s->spurious;
    for (u32 i = 0; i < 4; i++)
        r->struck[i] = s->struck[i];
}
