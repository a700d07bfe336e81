/* Each CPU has a PMU of its own. Runs with two CPUs or more. */
#include "check.h"

static u32 cpus;
static struct reset_state state;
static volatile u64 seen[4];

static bool started(void)
{
    if (!cpus)
        cpus = smp_start();
    return cpus > 1;
}
static void on_cpu1(void (*fn)(u64), u64 argument)
{
    smp_run(1, fn, argument);
    smp_wait(1);
}

static void reset_values(u64 unused)
{
    (void)unused;
    reset_state_read(&state);
}

/* Before anything else is run on the second CPU. */
TEST(smp_reset, ON_ANY, "smp: all CPUs of fw_cfg start, and the second one's registers are at reset")
{
    if (fw_cfg_cpus() < 2)
        SKIP("one CPU");
    CHECK(started());
    CHECK(cpus == fw_cfg_cpus(), "%u of %u", cpus, fw_cfg_cpus());
    if (cpus < 2)
        return;
    /* Something to be mistaken for: CPU 0 is not at reset. */
    ctr_write(0, 0x1111);
    sel_write(0, 0x2222);
    on_cpu1(reset_values, 0);
    for (u32 i = 0; i < pmu.gp; i++)
        CHECK(state.selectors[i] == 0 && state.counters[i] == 0, "counter %u", i);
    CHECK(state.global_ctrl == (pmu.global ? BIT(pmu.gp) - 1 : 0), "0x%lx", state.global_ctrl);
    CHECK(state.status == 0 && state.fixed_ctrl == 0);
}

static void write_registers(u64 unused)
{
    (void)unused;
    pmu_reset();
    ctr_write(0, 0x3333);
    sel_write(0, 0x4444);
    global_write(2);
}
static void read_registers(u64 unused)
{
    (void)unused;
    seen[0] = ctr_read(0);
    seen[1] = rdmsr(sel_msr(0));
}

TEST(smp_own_registers, ON_ANY, "smp: a CPU's registers are its own")
{
    if (!started())
        SKIP("one CPU");
    ctr_write(0, 0x1111);
    sel_write(0, 0x2222);
    on_cpu1(write_registers, 0);
    CHECK(ctr_read(0) == 0x1111 && rdmsr(sel_msr(0)) == 0x2222, "CPU 0: 0x%lx", ctr_read(0));
    ctr_write(0, 0x5555);
    sel_write(0, 0);
    on_cpu1(read_registers, 0);
    CHECK(seen[0] == 0x3333 && seen[1] == 0x4444, "CPU 1: 0x%lx 0x%lx", seen[0], seen[1]);
}

static void count_here(u64 ms)
{
    pmu_reset();
    sel_write(0, counting_event | SEL_USR | SEL_OS | SEL_EN);
    global_write(1);
    busy(0, ms);
    global_write(0);
    sel_write(0, counting_event);
    seen[0] = ctr_read(0);
}

TEST(smp_own_counts, ON_ANY, "smp: a counter counts its own CPU only")
{
    if (!started())
        SKIP("one CPU");
    NEED_COUNTING();
    ctr_write(0, 0x1111);
    sel_write(0, counting_event | SEL_USR | SEL_OS); /* programmed but off */
    global_write(1);
    on_cpu1(count_here, 5);
    CHECK(seen[0] > 0, "CPU 1 counted nothing");
    CHECK(ctr_read(0) == 0x1111, "CPU 0 counted: 0x%lx", ctr_read(0));
}

static void overflow_here(u64 lvt)
{
    struct percpu *p = this_cpu();
    u64 end = rdtsc() + tsc_hz;

    pmu_reset();
    p->pmi_nmi = p->pmi_fixed = 0;
    apic_write(APIC_LVTPC, lvt);
    ctr_write(0, -period_of_ms(1));
    sel_write(0, counting_event | SEL_USR | SEL_OS | SEL_INT | SEL_EN);
    sti();
    global_write(1);
    while (!(p->pmi_nmi + p->pmi_fixed) && (s64)(end - rdtsc()) > 0)
        delay_us(100);
    cli();
    seen[0] = p->pmi_nmi;
    seen[1] = p->pmi_fixed;
    pmu_reset();
}

TEST(smp_own_pmi, ON_ANY, "smp: a PMI goes to the CPU whose counter overflowed")
{
    if (!started())
        SKIP("one CPU");
    NEED_COUNTING();
    apic_write(APIC_LVTPC, LVT_NMI);
    sti();
    on_cpu1(overflow_here, LVT_NMI);
    CHECK(seen[0] == 1 && seen[1] == 0, "NMI mode: %lu NMIs, %lu of the vector", seen[0], seen[1]);
    on_cpu1(overflow_here, VEC_PMI);
    CHECK(seen[0] == 0 && seen[1] == 1, "fixed mode: %lu NMIs, %lu of the vector", seen[0], seen[1]);
    cli();
    CHECK(this_cpu()->pmi_nmi + this_cpu()->pmi_fixed == 0, "CPU 0 got %lu", this_cpu()->pmi_nmi);
}

static void count_in_parallel(u64 end)
{
    pmu_reset();
    sel_write(0, counting_event | SEL_USR | SEL_OS | SEL_EN);
    global_write(1);
    while ((s64)(end - rdtsc()) > 0)
        pause();
    global_write(0);
    sel_write(0, counting_event);
    seen[this_cpu()->index & 3] = ctr_read(0);
}

TEST(smp_parallel, ON_ANY, "smp: all CPUs count at the same time")
{
    u64 end = rdtsc() + tsc_hz / 50;

    if (!started())
        SKIP("one CPU");
    NEED_COUNTING();
    for (u32 i = 1; i < cpus && i < 4; i++)
        smp_run(i, count_in_parallel, end);
    count_in_parallel(end);
    for (u32 i = 1; i < cpus && i < 4; i++)
        smp_wait(i);
    for (u32 i = 0; i < cpus && i < 4; i++)
        CHECK(seen[i] > 0, "CPU %u counted nothing", i);
}
