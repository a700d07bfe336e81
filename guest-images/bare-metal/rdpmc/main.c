/*
 * RDPMC in code that was not there when the guest was loaded: made at run time, executed by the kernel and by programs. There is
 * none in this kernel's own text.
 *
 * Command line: only=PREFIX.
 */
#include "tap.h"

#define CR4_PCE BIT(8)

typedef u64 (*routine)(u64 index);

/* MOV %edi,%ecx, RDPMC and what makes one thing of the state behind it the result. */
enum { VALUE, FLAGS, STACK, REGISTER, ROUTINES };
static const u8 behind[ROUTINES][8] = {
    [VALUE] = { 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0, 0xc3 }, /* shl $32,%rdx; or %rdx,%rax; ret */
    [FLAGS] = { 0x9c, 0x58, 0xc3 },                               /* pushfq; pop %rax; ret */
    [STACK] = { 0x48, 0x89, 0xe0, 0xc3 },                         /* mov %rsp,%rax; ret */
    [REGISTER] = { 0x4c, 0x89, 0xc0, 0xc3 },                      /* mov %r8,%rax; ret */
};
static u8 code[ROUTINES][32] __attribute__((aligned(16)));
static u8 *volatile fault_at[ROUTINES];

static routine make(u32 what)
{
    /* mov %edi,%ecx; mov %rdi,%r8; xor %eax,%eax; stc; not to be found by a search through the file */
    static const u8 before[] = { 0x89, 0xf9, 0x49, 0x89, 0xf8, 0x31, 0xc0, 0xf9 };
    static volatile u8 half = 0x0e;
    u8 *at = code[what];

    for (u32 i = 0; i < sizeof(before); i++)
        *at++ = before[i];
    fault_at[what] = at;
    *at++ = half + 1;
    *at++ = 0x33;
    for (u32 i = 0; i < sizeof(behind[0]); i++)
        *at++ = behind[what][i];
    return (routine)code[what];
}

static struct trap_frame seen;
static u32 faults;
static bool catch_fault(struct trap_frame *f)
{
    if (f->vector != VEC_GP)
        return false;
    seen = *f;
    faults++;
    f->rip += 2;
    return true;
}

/* Whether `index` raises #GP(0) at the RDPMC, and the handler sees all of it. */
static bool faults_at(u32 cpl, u64 index)
{
    routine read = make(VALUE);

    faults = 0;
    trap_hook = catch_fault;
    run_at(cpl, read, index);
    trap_hook = NULL;
    CHECK(faults == 1, "%u faults", faults);
    CHECK(seen.error == 0 && seen.rip == (u64)fault_at[VALUE], "error 0x%lx at 0x%lx", seen.error, seen.rip);
    CHECK((seen.cs & 3) == cpl && (seen.ss & 3) == cpl, "CS 0x%lx, SS 0x%lx", seen.cs, seen.ss);
    CHECK(seen.rcx == (u32)index && seen.vector == VEC_GP, "RCX 0x%lx, vector %lu", seen.rcx, seen.vector);
    return faults == 1;
}

static void reads(u32 cpl)
{
    for (u32 i = 0; i < pmu.gp; i++) {
        ctr_write(i, (0x112200000000UL + i) & width_mask());
        u64 expected = rdmsr(ctr_msr(i)), v = run_at(cpl, make(VALUE), i);
        CHECK(v == expected, "index %u: 0x%lx instead of 0x%lx", i, v, expected);
    }
}

TEST(kernel_reads, ON_ANY, "rdpmc: code that the kernel made reads the counters")
{
    reads(0);
}

TEST(user_reads, ON_ANY, "rdpmc: a program reads the counters while CR4.PCE is 1")
{
    write_cr4(read_cr4() | CR4_PCE);
    reads(3);
}

TEST(user_refused, ON_ANY, "rdpmc: a program gets #GP while CR4.PCE is 0")
{
    CHECK(faults_at(3, 0));
}

TEST(missing, ON_ANY, "rdpmc: a counter that does not exist raises #GP at both levels")
{
    write_cr4(read_cr4() | CR4_PCE);
    for (u32 cpl = 0; cpl <= 3; cpl += 3) {
        CHECK(faults_at(cpl, pmu.gp), "CPL%u", cpl);
        CHECK(faults_at(cpl, 0x20000000), "CPL%u", cpl);
    }
}

TEST(state_behind, ON_ANY, "rdpmc: flags, stack and other registers are as before")
{
    write_cr4(read_cr4() | CR4_PCE);
    for (u32 cpl = 0; cpl <= 3; cpl += 3) {
        u64 flags = run_at(cpl, make(FLAGS), 0), sp = run_at(cpl, make(STACK), 0);
        CHECK((flags & 1) == 1, "CPL%u: carry is lost, 0x%lx", cpl, flags);
        CHECK(!(flags & BIT(16)), "CPL%u: RF, 0x%lx", cpl, flags);
        CHECK(run_at(cpl, make(STACK), 0) == sp && sp % 16 == 8, "CPL%u: RSP 0x%lx", cpl, sp);
        CHECK(run_at(cpl, make(REGISTER), 0xabcdef00000000UL) == 0xabcdef00000000UL, "CPL%u: R8", cpl);
    }
}

extern u64 user_hlt(u64 unused);
extern u8 user_hlt_end[];
asm(".text\n.globl user_hlt, user_hlt_end\nuser_hlt:\n hlt\n nop\nuser_hlt_end: ret\n");

TEST(other_faults, ON_ANY, "#GP: other faults reach the handler, their error code with them")
{
    u64 v;

    faults = 0;
    trap_hook = catch_fault;
    run_user(user_hlt, 0);
    trap_hook = NULL;
    CHECK(faults == 1 && seen.rip == (u64)user_hlt && (seen.cs & 3) == 3, "%u faults, 0x%lx", faults, seen.rip);
    CHECK(rdmsr_safe(0x12345678, &v) && this_cpu()->fault_vector == VEC_GP);
    faults = 0;
    trap_hook = catch_fault;
    /* A selector beyond the table: an error code that names it. MOV to DS is two bytes long. */
    asm volatile("mov %0,%%ds" : : "r"(0xfff8) : "memory");
    trap_hook = NULL;
    CHECK(faults == 1 && seen.error == 0xfff8, "%u faults, error 0x%lx", faults, seen.error);
}

/* As Linux's begins where CLAC is not needed; it does what the common one does. */
extern u8 own_handler[];
asm(".text\n.p2align 4\n.globl own_handler\nown_handler:\n nopl (%rax)\n cld\n jmp trap_stubs + 16 * 13\n");

TEST(another_handler, ON_ANY, "rdpmc: is served at another handler too, found at one of 4,096 writes")
{
    write_cr4(read_cr4() | CR4_PCE);
    trap_entry(VEC_GP, own_handler);
    for (u32 i = 0; i < 4096; i++)
        ctr_write(0, 0x77);
    CHECK(run_user(make(VALUE), 0) == 0x77);
    CHECK(run_at(0, make(VALUE), 0) == 0x77);
    CHECK(faults_at(3, pmu.gp));
    trap_entry(VEC_GP, NULL);
    for (u32 i = 0; i < 4096; i++)
        ctr_write(0, 0x88);
    CHECK(run_user(make(VALUE), 0) == 0x88);
}

static volatile u64 on_other;
static void read_there(u64 read)
{
    pmu_reset();
    write_cr4(read_cr4() | CR4_PCE);
    ctr_write(0, 0x99);
    on_other = run_user((routine)read, 0);
}

TEST(second_cpu, ON_ANY, "rdpmc: a program on another CPU reads that CPU's counter")
{
    if (fw_cfg_cpus() < 2)
        SKIP("one CPU");
    CHECK(smp_start() > 1);
    ctr_write(0, 0x11);
    smp_run(1, read_there, (u64)make(VALUE));
    smp_wait(1);
    CHECK(on_other == 0x99, "0x%lx", on_other);
}

/* A program's own trap flag, behind the NOP that follows POPFQ. */
extern u64 user_step(u64 unused);
extern u8 user_stepped[];
asm(".text\n.globl user_step, user_stepped\nuser_step:\n pushfq\n orl $0x100,(%rsp)\n popfq\n nop\nuser_stepped: nop\n ret\n");

static u64 step_dr6;
static bool catch_step(struct trap_frame *f)
{
    if (f->vector != 1)
        return false;
    asm volatile("mov %%db6,%0" : "=r"(step_dr6));
    seen = *f;
    faults++;
    f->rflags &= ~BIT(8);
    return true;
}

TEST(own_step, ON_ANY, "#DB: a program's own trap flag reaches the handler, and DR6 says so")
{
    faults = 0;
    asm volatile("mov %0,%%db6" : : "r"(0xffff0ff0UL));
    trap_hook = catch_step;
    run_user(user_step, 0);
    trap_hook = NULL;
    CHECK(faults == 1 && seen.rip == (u64)user_stepped, "%u at 0x%lx", faults, seen.rip);
    CHECK((step_dr6 & 0xe00f) == BIT(14), "DR6 0x%lx", step_dr6);
    asm volatile("mov %0,%%db6" : : "r"(0xffff0ff0UL));
}

static void before(void)
{
    cli();
    pmu_reset();
    write_cr4(read_cr4() & ~CR4_PCE);
}

void kmain(void)
{
    pmu_detect();
    if (tap_run(before))
        debug_exit(1);
}
