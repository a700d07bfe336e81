/* RDPMC: which operands name a counter. */
#include "check.h"

static bool rdpmc_gp(u32 index)
{
    u64 v;
    return rdpmc_safe(index, &v) && this_cpu()->fault_vector == VEC_GP;
}

TEST(rdpmc_general, ON_ANY, "rdpmc: an index reads that counter")
{
    if (option_is("rdpmc", "off"))
        SKIP("RDPMC is off");
    for (u32 i = 0; i < pmu.gp; i++)
        ctr_write(i, (0x112200000000UL + i) & width_mask());
    for (u32 i = 0; i < pmu.gp; i++) {
        u64 v = 0, expected = rdmsr(ctr_msr(i));
        CHECK(!rdpmc_safe(i, &v), "index %u faults", i);
        CHECK(v == expected, "index %u: 0x%lx instead of 0x%lx", i, v, expected);
    }
}

TEST(rdpmc_fixed, ON_INTEL, "rdpmc: bit 30 selects the fixed counters")
{
    if (option_is("rdpmc", "off"))
        SKIP("RDPMC is off");
    for (u32 i = 0; i < 5; i++) {
        u64 v = 0;
        if (!(pmu.fixed & BIT(i))) {
            CHECK(rdpmc_gp(BIT(30) | i), "fixed index %u does not exist", i);
            continue;
        }
        wrmsr(MSR_FIXED_CTR0 + i, 0x334400000000UL & width_mask());
        CHECK(!rdpmc_safe(BIT(30) | i, &v), "fixed index %u faults", i);
        CHECK(v == rdmsr(MSR_FIXED_CTR0 + i), "fixed index %u: 0x%lx", i, v);
    }
}

TEST(rdpmc_missing, ON_ANY, "rdpmc: any other operand raises #GP")
{
    static const u32 bad[] = { 0x10, 0x20, 0xff, 0x100, 0x40000010, 0x20000000, 0x80000000, 0x80000001, 0xc0000000,
                               0x7fffffff, 0xffffffff };

    if (option_is("rdpmc", "off"))
        SKIP("RDPMC is off");
    CHECK(rdpmc_gp(pmu.gp), "index %u", pmu.gp);
    for (u32 k = 0; k < ARRAY_LEN(bad); k++)
        CHECK(rdpmc_gp(bad[k]), "index 0x%x", bad[k]);
}

/* Executed at CPL3; the fault is caught below. */
extern u64 user_rdpmc(u64 index);
extern u8 user_rdpmc_fault[];
asm(".text\n.globl user_rdpmc, user_rdpmc_fault\nuser_rdpmc:\n mov %edi,%ecx\n xor %eax,%eax\nuser_rdpmc_fault: rdpmc\n ret\n");

static bool user_faulted;
static bool catch_user_fault(struct trap_frame *f)
{
    if (f->vector != VEC_GP || f->rip != (u64)user_rdpmc_fault)
        return false;
    user_faulted = true;
    f->rip += 2;
    return true;
}

TEST(rdpmc_user, ON_ANY, "rdpmc: raises #GP at CPL3 while CR4.PCE is 0")
{
    user_faulted = false;
    trap_hook = catch_user_fault;
    run_user(user_rdpmc, 0);
    trap_hook = NULL;
    CHECK(user_faulted);
}
