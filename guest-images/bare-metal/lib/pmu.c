/* Detection and the operations common to all kinds of PMU. */
#include "pmu.h"

struct pmu pmu;

static const struct {
    const char *name;
    u64 intel, amd; /* selector: event in [7:0] and, on AMD, [35:32], unit mask in [15:8]; 0 for none */
} events[EV_COUNT] = {
    [EV_CYCLES] = { "cycles", 0x003c, 0x0076 },
    [EV_INSTRUCTIONS] = { "instructions", 0x00c0, 0x00c0 },
    [EV_REF_CYCLES] = { "ref-cycles", 0x013c, 0x100000120 },
    [EV_LLC_REFS] = { "cache-references", 0x4f2e, 0 },
    [EV_LLC_MISSES] = { "cache-misses", 0x412e, 0 },
    [EV_BRANCHES] = { "branches", 0x00c4, 0x00c2 },
    [EV_BRANCH_MISSES] = { "branch-misses", 0x00c5, 0x00c3 },
};

/* A K7 PMU has no CPUID bit: it is there if its counter keeps what is written. */
static bool k7_answers(void)
{
    u64 v;
    if (wrmsr_safe(MSR_K7_PERFCTR0, 0x1234) || rdmsr_safe(MSR_K7_PERFCTR0, &v) || v != 0x1234)
        return false;
    wrmsr(MSR_K7_PERFCTR0, 0);
    return true;
}

static void detect_amd(void)
{
    u32 max = cpuid(0x80000000, 0).eax;

    pmu.width = 48;
    if (max >= 0x80000022 && (cpuid(0x80000022, 0).eax & 1)) {
        pmu.kind = PMU_V2;
        pmu.version = 2;
        pmu.gp = cpuid(0x80000022, 0).ebx & 0xf;
        if (cpuid(0x80000022, 0).eax & BIT(1))
            pmu.branch_records = cpuid(0x80000022, 0).ebx >> 4 & 0x3f;
        pmu.global = true;
    } else if (max >= 0x80000001 && (cpuid(0x80000001, 0).ecx & BIT(23))) {
        pmu.kind = PMU_CORE;
        pmu.gp = 6;
    } else if (k7_answers()) {
        pmu.kind = PMU_K7;
        pmu.gp = 4;
    }
}

static void detect_intel(void)
{
    struct cpuid c = cpuid(0xa, 0);
    u64 caps;

    if (!(c.eax & 0xff))
        return;
    pmu.kind = PMU_INTEL;
    pmu.version = c.eax & 0xff;
    pmu.gp = c.eax >> 8 & 0xff;
    pmu.width = c.eax >> 16 & 0xff;
    /* A bit beyond the mask length speaks of an event the processor does not know: unavailable too. */
    pmu.unavailable = c.ebx | ~(u32)(BIT(c.eax >> 24) - 1);
    if (pmu.version >= 2) {
        pmu.fixed = BIT(c.edx & 0x1f) - 1;
        pmu.global = true;
    }
    if (pmu.version >= 5)
        pmu.fixed |= c.ecx;
    pmu.pdcm = cpuid(1, 0).ecx >> 15 & 1;
    /* Some KVMs show leaf 7 of the host, so the format of architectural LBRs says whether there are any. */
    if (pmu.pdcm && !rdmsr_safe(MSR_PERF_CAPABILITIES, &caps)) {
        pmu.full_width = caps & BIT(13);
        pmu.branch_records = (caps & 0x3f) == 0x3f ? 32 : 0;
    }
}

void pmu_detect(void)
{
    struct cpuid c = cpuid(0, 0);

    pmu.amd_cpu = c.ebx == 0x68747541; /* "Auth" */
    if (pmu.amd_cpu)
        detect_amd();
    else if (c.eax >= 0xa)
        detect_intel();
}

const char *pmu_name(void)
{
    switch (pmu.kind) {
    case PMU_INTEL:
        return "Intel architectural";
    case PMU_K7:
        return "AMD K7";
    case PMU_CORE:
        return "AMD core";
    case PMU_V2:
        return "AMD PerfMonV2";
    default:
        return "none";
    }
}

u32 sel_msr(u32 i)
{
    return pmu.kind == PMU_INTEL ? MSR_EVNTSEL0 + i : pmu.kind == PMU_K7 ? MSR_K7_EVNTSEL0 + i : MSR_F15H_CTL0 + 2 * i;
}

u32 ctr_msr(u32 i)
{
    return pmu.kind == PMU_INTEL ? MSR_PMC0 + i : pmu.kind == PMU_K7 ? MSR_K7_PERFCTR0 + i : MSR_F15H_CTR0 + 2 * i;
}

u64 width_mask(void) { return pmu.width >= 64 ? ~0UL : BIT(pmu.width) - 1; }

bool event_exists(enum pmu_event e)
{
    return pmu.kind == PMU_INTEL ? !(pmu.unavailable & BIT(e)) : pmu.kind != PMU_NONE && events[e].amd;
}

u64 event_select(enum pmu_event e) { return pmu.kind == PMU_INTEL ? events[e].intel : events[e].amd; }
const char *event_name(enum pmu_event e) { return events[e].name; }

void sel_write(u32 i, u64 v) { wrmsr(sel_msr(i), v); }

void ctr_write(u32 i, u64 v)
{
    wrmsr(pmu.kind == PMU_INTEL && pmu.full_width ? MSR_A_PMC0 + i : ctr_msr(i), v & width_mask());
}

u64 ctr_read(u32 i) { return rdmsr(ctr_msr(i)); }

u64 global_enabled(void) { return (BIT(pmu.gp) - 1) | (u64)pmu.fixed << 32; }

void global_write(u64 v)
{
    if (pmu.global)
        wrmsr(pmu.kind == PMU_INTEL ? MSR_GLOBAL_CTRL : MSR_V2_CTL, v);
}

u64 status_read(void)
{
    return pmu.global ? rdmsr(pmu.kind == PMU_INTEL ? MSR_GLOBAL_STATUS : MSR_V2_STATUS) : 0;
}

void status_clear(u64 bits)
{
    if (pmu.global)
        wrmsr(pmu.kind == PMU_INTEL ? MSR_GLOBAL_OVF_CTRL : MSR_V2_STATUS_CLR, bits);
}

void pmu_reset(void)
{
    apic_write(APIC_LVTPC, LVT_MASKED);
    global_write(0);
    for (u32 i = 0; i < pmu.gp; i++) {
        sel_write(i, 0);
        ctr_write(i, 0);
    }
    if (pmu.fixed) {
        wrmsr(MSR_FIXED_CTR_CTRL, 0);
        for (u32 i = 0; i < 32; i++)
            if (pmu.fixed & BIT(i))
                wrmsr(MSR_FIXED_CTR0 + i, 0);
    }
    status_clear(status_read());
}

bool counter_wrapped(u32 i) { return !(ctr_read(i) >> (pmu.width - 1)); }
