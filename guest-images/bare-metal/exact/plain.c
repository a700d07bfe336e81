/* Instructions, branches, loads and stores without any interrupt. */
#include "exact.h"

TEST(around, ON_ANY, "exact: an empty block counts the enabling WRMSR, not the disabling one")
{
    expect(instructions | SEL_OS, block_empty, 0, NULL, AROUND + 1);
}

TEST(thousand, ON_ANY, "exact: a block of 1000 instructions at CPL0")
{
    expect(instructions | SEL_OS, block_1000, 0, NULL, AROUND + 1000);
    expect(instructions | SEL_OS | SEL_USR, block_1000, 0, NULL, AROUND + 1000);
}

TEST(not_user, ON_ANY, "exact: CPL0 counts nothing for USR alone")
{
    expect(instructions | SEL_USR, block_1000, 0, NULL, 0);
}

TEST(loop, ON_ANY, "exact: a loop")
{
    expect(instructions | SEL_OS, block_loop, 0, NULL, AROUND + 202);
}

TEST(rep, ON_ANY, "exact: a repeated string instruction is one instruction, whatever its count")
{
    expect(instructions | SEL_OS, block_rep, 0, NULL, AROUND + 5);
    expect(instructions | SEL_OS, block_rep_zero, 0, NULL, AROUND + 3);
}

TEST(iret, ON_ANY, "exact: IRET is one instruction")
{
    expect(instructions | SEL_OS, block_iret, 0, NULL, AROUND + 8);
}

TEST(fences, ON_ANY, "exact: LFENCE, MFENCE and SFENCE and what follows them")
{
    expect(instructions | SEL_OS, block_fences, 0, NULL, AROUND + 9);
}

TEST(swapgs, ON_ANY, "exact: a pair of SWAPGS")
{
    expect(instructions | SEL_OS, block_swapgs, 0, NULL, AROUND + 5);
}

TEST(every_counter, ON_ANY, "exact: each general counter counts the same")
{
    for (u32 i = 0; i < pmu.gp; i++) {
        ctr_write(i, 0);
        if (pmu.global) {
            sel_write(i, instructions | SEL_OS | SEL_EN);
            measure(pmu.kind == PMU_INTEL ? MSR_GLOBAL_CTRL : MSR_V2_CTL, BIT(i), block_1000, 0);
        } else {
            measure(sel_msr(i), instructions | SEL_OS | SEL_EN, block_1000, 0);
        }
        CHECK(ctr_read(i) == AROUND + 1000, "counter %u: %lu", i, ctr_read(i));
    }
}

TEST(fixed, ON_INTEL, "exact: fixed counter 0 counts the same")
{
    if (!(pmu.fixed & 1))
        SKIP("no fixed counter 0");
    wrmsr(MSR_FIXED_CTR0, 0);
    wrmsr(MSR_FIXED_CTR_CTRL, 1);
    measure(MSR_GLOBAL_CTRL, BIT(32), block_1000, 0);
    CHECK(rdmsr(MSR_FIXED_CTR0) == AROUND + 1000, "%lu", rdmsr(MSR_FIXED_CTR0));
}

TEST(together, ON_INTEL | ON_V2, "exact: counters enabled by one write count the same")
{
    if (!pmu.global)
        SKIP("no global control");
    for (u32 i = 0; i < pmu.gp; i++)
        sel_write(i, instructions | SEL_OS | SEL_EN);
    measure(pmu.kind == PMU_INTEL ? MSR_GLOBAL_CTRL : MSR_V2_CTL, BIT(pmu.gp) - 1, block_1000, 0);
    for (u32 i = 0; i < pmu.gp; i++)
        CHECK(ctr_read(i) == AROUND + 1000, "counter %u: %lu", i, ctr_read(i));
}

TEST(hundred_runs, ON_ANY, "exact: the same block gives the same count a hundred times")
{
    u64 first = count(instructions | SEL_OS, block_loop, 0);
    for (u32 i = 1; i < 100; i++) {
        u64 n = count(instructions | SEL_OS, block_loop, 0);
        CHECK(n == first, "run %u: %lu, first %lu", i, n, first);
    }
}

TEST(branches, ON_ANY, "exact: branches, taken or not, with CALL and RET")
{
    u64 select = event_select(EV_BRANCHES) | SEL_OS;

    if (!event_exists(EV_BRANCHES) || !count(select, block_loop, 0))
        SKIP("branches are not counted here");
    expect(select, block_empty, 0, NULL, AROUND_BRANCHES + 1);
    expect(select, block_loop, 0, NULL, AROUND_BRANCHES + 101);
    expect(select, block_branches, 0, NULL, AROUND_BRANCHES + 6);
    expect(select, block_1000, 0, NULL, AROUND_BRANCHES + 1);
    expect(select, block_rep, 0, NULL, AROUND_BRANCHES + 1);
}

/* Intel: BR_INST_RETIRED.NEAR_TAKEN; AMD: PMCx0C4. Not architectural: tested where they count. */
TEST(taken, ON_ANY, "exact: taken branches")
{
    u64 select = (pmu.amd_cpu ? 0xc4 : 0x20c4) | SEL_OS;

    if (!count(select, block_loop, 0))
        SKIP("taken branches are not counted here");
    expect(select, block_empty, 0, NULL, AROUND_BRANCHES + 1);
    expect(select, block_loop, 0, NULL, AROUND_BRANCHES + 100);
    expect(select, block_branches, 0, NULL, AROUND_BRANCHES + 5);
}

/* Intel: MEM_INST_RETIRED.ALL_LOADS and .ALL_STORES; AMD: PMCx029. */
TEST(loads, ON_ANY, "exact: instructions that load")
{
    u64 select = (pmu.amd_cpu ? 0x129 : 0x81d0) | SEL_OS, around = count(select, block_empty, 0);

    if (!around)
        SKIP("loads are not counted here");
    expect(select, block_memory, 0, NULL, around + 5);
    expect(select, block_1000, 0, NULL, around);
}

TEST(stores, ON_ANY, "exact: instructions that store")
{
    u64 select = (pmu.amd_cpu ? 0x229 : 0x82d0) | SEL_OS, around = count(select, block_empty, 0);

    if (!around)
        SKIP("stores are not counted here");
    expect(select, block_memory, 0, NULL, around + 4);
    expect(select, block_1000, 0, NULL, around);
}
