/*
 * Branch records: architectural LBRs (SDM volume 3, "Last Branch Records") and LBR version 2 (AMD APM volume 2,
 * "Last Branch Stack Registers"). The VMM fills them before a PMI, by single steps.
 */
#include "check.h"

#define MSR_LBR_CTL 0x14ce
#define MSR_LBR_DEPTH 0x14cf
#define MSR_LBR_INFO 0x1200
#define MSR_LBR_FROM 0x1500
#define MSR_LBR_TO 0x1600
#define MSR_LBR_SELECT 0xc000010e
#define MSR_DBG_EXTN_CFG 0xc000010f
#define MSR_SAMP_BR_FROM 0xc0010300
#define LBR_EN BIT(0)
#define LBR_OS BIT(1)
#define LBR_JCC BIT(16)
#define LBR_ALL (0x7fUL << 16)
#define LBR_V2_EN BIT(6)
#define LBR_V2_NO_JCC BIT(2)
#define LBR_V2_VALID BIT(63)
#define DEBUGCTL_FREEZE_LBRS BIT(11)
#define LBR_FRZ BIT(58)

#define NEED_RECORDS()                                                                                                   \
    do {                                                                                                                 \
        if (!pmu.branch_records)                                                                                         \
            SKIP("there are no branch records");                                                                         \
    } while (0)

static bool is_intel(void) { return pmu.kind == PMU_INTEL; }
static u32 from_msr(u32 n) { return is_intel() ? MSR_LBR_FROM + n : MSR_SAMP_BR_FROM + 2 * n; }
static u32 to_msr(u32 n) { return is_intel() ? MSR_LBR_TO + n : MSR_SAMP_BR_FROM + 2 * n + 1; }

/*
 * Runs until *pmis is not 0, at most `turns` times: a jump to records_target, and a conditional jump from records_back
 * to records_top. The branch to the end is taken once.
 */
void records_loop(volatile u64 *pmis, u64 turns);
extern char records_top[], records_target[], records_back[];
asm(".text\n"
    ".global records_loop, records_top, records_target, records_back\n"
    "records_loop:\n"
    "records_top: jmp records_target\n"
    "nop\n"
    "records_target: cmpq $0,(%rdi)\n"
    "jnz 1f\n"
    "decq %rsi\n"
    "records_back: jnz records_top\n"
    "1: ret\n");

static void records_enable(u64 intel, u64 amd)
{
    if (is_intel()) {
        wrmsr(MSR_LBR_CTL, intel);
    } else {
        wrmsr(MSR_LBR_SELECT, amd);
        wrmsr(MSR_DBG_EXTN_CFG, LBR_V2_EN);
    }
}

static void records_disable(void)
{
    wrmsr(is_intel() ? MSR_LBR_CTL : MSR_DBG_EXTN_CFG, 0);
    wrmsr(MSR_DEBUGCTL, 0);
    status_clear(~0UL & (BIT(pmu.gp) - 1));
    if (!is_intel() || pmu.version >= 4)
        status_clear(LBR_FRZ);
}

/* Loops until counter 0 has overflowed and its PMI has come, or for a second. */
static void overflow_in_loop(void)
{
    u64 end = rdtsc() + tsc_hz;

    apic_write(APIC_LVTPC, LVT_NMI);
    this_cpu()->pmi_nmi = 0;
    ctr_write(0, -period_of_ms(1));
    sel_write(0, counting_event | SEL_USR | SEL_OS | SEL_INT | SEL_EN);
    global_write(1);
    while (!this_cpu()->pmi_nmi && (s64)(end - rdtsc()) > 0)
        records_loop(&this_cpu()->pmi_nmi, 100000);
    global_write(0);
    sel_write(0, 0);
    CHECK(this_cpu()->pmi_nmi == 1, "%lu PMIs", this_cpu()->pmi_nmi);
}

/* Returns the source and target of record n, without the other bits of AMD's format. */
static void record_read(u32 n, u64 *from, u64 *to)
{
    *from = rdmsr(from_msr(n));
    *to = rdmsr(to_msr(n));
    if (!is_intel()) {
        CHECK((*to & LBR_V2_VALID) != 0, "record %u is not valid: 0x%lx", n, *to);
        *to &= ~LBR_V2_VALID;
    }
}

/* Returns the number of records that are not empty. On a slow host the time limit of the steps leaves some empty. */
static u32 recorded(void)
{
    u32 n = 0;

    while (n < pmu.branch_records && rdmsr(to_msr(n)))
        n++;
    CHECK(n >= 2, "%u records", n);
    for (u32 k = n; k < pmu.branch_records; k++)
        CHECK(rdmsr(from_msr(k)) == 0 && rdmsr(to_msr(k)) == 0, "record %u after %u", k, n);
    return n;
}

static bool is_jump(u64 from, u64 to) { return from == (u64)records_top && to == (u64)records_target; }
static bool is_back(u64 from, u64 to) { return from == (u64)records_back && to == (u64)records_top; }

TEST(records_exist, ON_ANY, "branch-records: CPUID and the registers agree")
{
    u64 v;
    bool exist = pmu.branch_records != 0;

    CHECK(rdmsr_safe(from_msr(0), &v) == !exist);
    CHECK(rdmsr_safe(is_intel() ? MSR_LBR_CTL : MSR_DBG_EXTN_CFG, &v) == !exist);
    if (is_intel()) {
        struct cpuid c = cpuid(0x1c, 0);
        /* A KVM that shows the host's leaf 7 shows its leaf 1CH, too. */
        if (cpuid(0, 0).eax >= 0x1c && (cpuid(7, 0).edx & BIT(19)))
            CHECK(exist && c.eax == 0xb && c.ebx == 3 && c.ecx == 4, "CPUID 1CH 0x%x 0x%x 0x%x", c.eax, c.ebx, c.ecx);
    } else if (pmu.kind == PMU_V2) {
        CHECK((cpuid(0x80000022, 0).eax >> 1 & 3) == (exist ? 3 : 0));
    }
}

TEST(records_reserved, ON_INTEL, "branch-records: reserved bits and depths raise #GP")
{
    NEED_RECORDS();
    for (u32 bit = 0; bit < 64; bit++) {
        bool takes = bit < 3 || (bit >= 16 && bit < 23);
        CHECK(wrmsr_safe(MSR_LBR_CTL, BIT(bit)) == !takes, "LBR_CTL bit %u", bit);
        takes = bit >= 3 && bit <= 5;
        CHECK(wrmsr_safe(MSR_LBR_DEPTH, BIT(bit)) == !takes, "LBR_DEPTH bit %u", bit);
        CHECK(wrmsr_safe(MSR_LBR_FROM, BIT(bit)) == (bit >= 56), "LBR_0_FROM_IP bit %u", bit);
    }
    wrmsr(MSR_LBR_CTL, 0);
    wrmsr(MSR_LBR_DEPTH, 8);
    CHECK(rdmsr(MSR_LBR_FROM) == 0, "a write to the depth clears the records");
    CHECK(rdmsr_gp(MSR_LBR_FROM + 8) && rdmsr_gp(MSR_LBR_TO + 8) && rdmsr_gp(MSR_LBR_INFO + 8), "beyond the depth");
    wrmsr(MSR_LBR_DEPTH, 32);
    CHECK(rdmsr(MSR_LBR_FROM + 31) == 0);
}

TEST(records_written, ON_ANY, "branch-records: each keeps what is written")
{
    NEED_RECORDS();
    for (u32 n = 0; n < pmu.branch_records; n++) {
        wrmsr(from_msr(n), 0x1000 + n);
        wrmsr(to_msr(n), 0x2000 + n);
    }
    for (u32 n = 0; n < pmu.branch_records; n++) {
        CHECK(rdmsr(from_msr(n)) == 0x1000 + n && rdmsr(to_msr(n)) == 0x2000 + n, "record %u", n);
        wrmsr(from_msr(n), 0);
        wrmsr(to_msr(n), 0);
    }
}

TEST(records_of_pmi, ON_ANY, "branch-records: a PMI finds consecutive branches of the code that it interrupted, newest first")
{
    u64 from, to, newer;
    u32 count;

    NEED_RECORDS();
    NEED_COUNTING();
    records_enable(LBR_EN | LBR_OS | LBR_ALL, 0);
    overflow_in_loop();
    count = recorded();
    record_read(0, &newer, &to);
    CHECK(is_jump(newer, to) || is_back(newer, to), "0x%lx -> 0x%lx", newer, to);
    for (u32 n = 1; n < count; n++) {
        record_read(n, &from, &to);
        CHECK(is_jump(from, to) || is_back(from, to), "record %u: 0x%lx -> 0x%lx", n, from, to);
        CHECK(from != newer, "record %u repeats the branch from 0x%lx", n, from);
        newer = from;
    }
    records_disable();
}

TEST(records_filtered, ON_ANY, "branch-records: the filter keeps one kind of branch")
{
    u64 from, to;
    u32 count;

    NEED_RECORDS();
    NEED_COUNTING();
    /* Intel's bits select, AMD's suppress. */
    records_enable(LBR_EN | LBR_OS | LBR_JCC, LBR_V2_NO_JCC);
    overflow_in_loop();
    count = recorded();
    for (u32 n = 0; n < count; n++) {
        record_read(n, &from, &to);
        CHECK(is_intel() ? is_back(from, to) : is_jump(from, to), "record %u: 0x%lx -> 0x%lx", n, from, to);
        if (is_intel())
            CHECK(rdmsr(MSR_LBR_INFO + n) >> 56 == 0, "kind 0x%lx", rdmsr(MSR_LBR_INFO + n));
    }
    records_disable();
}

TEST(records_frozen, ON_ANY, "branch-records: with DEBUGCTL bit 11 a PMI freezes them until software enables them again")
{
    u64 from, to, v;

    NEED_RECORDS();
    NEED_COUNTING();
    CHECK(!wrmsr_safe(MSR_DEBUGCTL, DEBUGCTL_FREEZE_LBRS));
    CHECK(rdmsr(MSR_DEBUGCTL) == DEBUGCTL_FREEZE_LBRS, "0x%lx", rdmsr(MSR_DEBUGCTL));
    records_enable(LBR_EN | LBR_OS | LBR_ALL, 0);
    overflow_in_loop();
    if (is_intel() && pmu.version < 4)
        CHECK(rdmsr(MSR_LBR_CTL) == (LBR_OS | LBR_ALL), "LBR_CTL 0x%lx", rdmsr(MSR_LBR_CTL));
    else
        CHECK(status_read() == (LBR_FRZ | 1), "status 0x%lx", status_read());
    record_read(0, &from, &to);
    /* A mark that the next PMI leaves. */
    wrmsr(from_msr(0), 0x1234);
    status_clear(1);
    overflow_in_loop();
    v = rdmsr(from_msr(0));
    CHECK(v == 0x1234, "frozen record 0x%lx", v);
    if (is_intel() && pmu.version < 4)
        records_enable(LBR_EN | LBR_OS | LBR_ALL, 0);
    else
        status_clear(LBR_FRZ);
    status_clear(1);
    overflow_in_loop();
    record_read(0, &from, &to);
    CHECK(is_jump(from, to) || is_back(from, to), "0x%lx -> 0x%lx", from, to);
    records_disable();
}

TEST(records_of_other_level, ON_ANY, "branch-records: without the interrupted level a PMI finds none")
{
    NEED_RECORDS();
    NEED_COUNTING();
    wrmsr(from_msr(0), 0x1234);
    /* User code only. */
    records_enable(LBR_EN | BIT(2) | LBR_ALL, BIT(0));
    overflow_in_loop();
    CHECK(rdmsr(from_msr(0)) == 0 && rdmsr(to_msr(0)) == 0, "0x%lx", rdmsr(from_msr(0)));
    records_disable();
}
