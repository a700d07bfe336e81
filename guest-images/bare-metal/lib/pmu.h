/*
 * The PMU found by CPUID, and the same operations on all kinds: Intel architectural perfmon 1 to 5, AMD K7, AMD core
 * extension, AMD PerfMonV2. Registers: Intel SDM volume 4; AMD APM volume 2 section 13.2 and appendix A.
 */
#ifndef PMU_H
#define PMU_H

#include "lib.h"

#define MSR_PMC0 0xc1
#define MSR_EVNTSEL0 0x186
#define MSR_DEBUGCTL 0x1d9
#define MSR_FIXED_CTR0 0x309
#define MSR_PERF_CAPABILITIES 0x345
#define MSR_FIXED_CTR_CTRL 0x38d
#define MSR_GLOBAL_STATUS 0x38e
#define MSR_GLOBAL_CTRL 0x38f
#define MSR_GLOBAL_OVF_CTRL 0x390 /* from version 4 on GLOBAL_STATUS_RESET */
#define MSR_GLOBAL_STATUS_SET 0x391
#define MSR_GLOBAL_INUSE 0x392
#define MSR_A_PMC0 0x4c1 /* full-width alias of MSR_PMC0 */
#define MSR_K7_EVNTSEL0 0xc0010000
#define MSR_K7_PERFCTR0 0xc0010004
#define MSR_F15H_CTL0 0xc0010200
#define MSR_F15H_CTR0 0xc0010201
#define MSR_V2_STATUS 0xc0000300
#define MSR_V2_CTL 0xc0000301
#define MSR_V2_STATUS_CLR 0xc0000302
#define MSR_V2_STATUS_SET 0xc0000303

#define SEL_USR BIT(16)
#define SEL_OS BIT(17)
#define SEL_EDGE BIT(18)
#define SEL_PC BIT(19)
#define SEL_INT BIT(20)
#define SEL_ANY BIT(21)
#define SEL_EN BIT(22)
#define SEL_INV BIT(23)
#define SEL_CMASK(n) ((u64)(n) << 24)
#define DEBUGCTL_FREEZE_PMI BIT(12)

enum pmu_kind { PMU_NONE, PMU_INTEL, PMU_K7, PMU_CORE, PMU_V2 };

/* Architectural events in the order of CPUID 0AH EBX; the selectors differ by vendor. */
enum pmu_event { EV_CYCLES, EV_INSTRUCTIONS, EV_REF_CYCLES, EV_LLC_REFS, EV_LLC_MISSES, EV_BRANCHES, EV_BRANCH_MISSES, EV_COUNT };

struct pmu {
    enum pmu_kind kind;
    bool amd_cpu;
    u32 version;    /* Intel: CPUID 0AH EAX[7:0]; AMD: 2 for PerfMonV2, else 0 */
    u32 gp;         /* general counters */
    u32 fixed;      /* bitmap of the fixed counters */
    u32 width;
    bool full_width; /* PERF_CAPABILITIES bit 13 */
    bool pdcm;
    u32 unavailable; /* CPUID 0AH EBX, cut to its mask length */
    bool global;     /* has global control and status */
    u32 branch_records; /* number of branch records (LBR) */
};
extern struct pmu pmu;

void pmu_detect(void);
const char *pmu_name(void);
u32 sel_msr(u32 i);
u32 ctr_msr(u32 i);
u64 width_mask(void);
bool event_exists(enum pmu_event e);  /* has a selector on this vendor and no "unavailable" bit */
u64 event_select(enum pmu_event e);
const char *event_name(enum pmu_event e);

void sel_write(u32 i, u64 v);
/* Any value up to the width, on every kind: without full-width writes Intel's bits above 31 copy bit 31. */
void ctr_write(u32 i, u64 v);
u64 ctr_read(u32 i);
u64 global_enabled(void);           /* what global control must hold for all counters */
void global_write(u64 v);           /* no-op without global control */
u64 status_read(void);              /* 0 where there is no status register */
void status_clear(u64 bits);
void pmu_reset(void);               /* all off, all zero, LVTPC masked */
bool counter_wrapped(u32 i);        /* armed with a negative value, and no longer negative */

#endif
