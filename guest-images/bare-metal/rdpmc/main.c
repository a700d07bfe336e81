/*
 * RDPMC in code that was not there when the guest was loaded: made at run time, executed by the kernel and by programs. And what is
 * replaced in this kernel's own text, and port writes to the port that stands for it, which are none.
 *
 * Command line: only=PREFIX; auto: the VMM serves what is in the file only.
 */
#include "tap.h"

#define CR4_PCE BIT(8)
#define VEC_DB 1

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
static u32 faults, fault_length = 2;
static bool catch_fault(struct trap_frame *f)
{
    if (f->vector != VEC_GP)
        return false;
    seen = *f;
    faults++;
    f->rip += fault_length;
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

TEST(another_handler, ON_ANY, "rdpmc: is served at another handler too, found within 4,096 writes")
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

TEST(asked_for, ON_ANY, "rdpmc: made at run time, it is served if the VMM was asked to, and raises #GP if not")
{
    write_cr4(read_cr4() | CR4_PCE);
    ctr_write(0, 0x2468);
    for (u32 cpl = 0; cpl <= 3; cpl += 3) {
        if (option("auto"))
            CHECK(faults_at(cpl, 0), "CPL%u", cpl);
        else
            CHECK(run_at(cpl, make(VALUE), 0) == 0x2468, "CPL%u", cpl);
    }
}

static u32 all_cpus(void)
{
    static u32 started;

    if (!started)
        started = smp_start();
    return started;
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
    CHECK(all_cpus() > 1);
    ctr_write(0, 0x11);
    smp_run(1, read_there, (u64)make(VALUE));
    smp_wait(1);
    CHECK(on_other == 0x99, "0x%lx", on_other);
}

/* A table that is not where the others' is, as early in the start of a CPU, and in a kernel that another one has loaded. */
static u8 own_table[256 * 16] __attribute__((aligned(16)));
extern u8 handler_of_own_table[];
asm(".text\n.p2align 4\n.globl handler_of_own_table\nhandler_of_own_table:\n nopl (%rax)\n jmp trap_stubs + 16 * 13\n");

static void read_by_own_table(u64 read)
{
    struct {
        u16 limit;
        u64 base;
    } __attribute__((packed)) old, own = { sizeof(own_table) - 1, (u64)own_table };
    u64 handler = (u64)handler_of_own_table;
    u8 *gate = own_table + 16 * VEC_GP;

    pmu_reset();
    write_cr4(read_cr4() | CR4_PCE);
    asm volatile("sidt %0" : "=m"(old));
    __builtin_memcpy(own_table, (void *)old.base, sizeof(own_table));
    *(u16 *)gate = handler;
    *(u16 *)(gate + 6) = handler >> 16;
    *(u32 *)(gate + 8) = handler >> 32;
    asm volatile("lidt %0" : : "m"(own));
    delay_us(2000); /* a table that has moved is looked at no more often than once in a millisecond */
    ctr_write(0, 0xaa);
    on_other = run_user((routine)read, 0);
    asm volatile("lidt %0" : : "m"(old));
    ctr_write(0, 0);
}

TEST(own_interrupt_table, ON_ANY, "rdpmc: a CPU with a table of its own is served after one write, and then the others after one")
{
    if (fw_cfg_cpus() < 2)
        SKIP("one CPU");
    CHECK(all_cpus() > 1);
    write_cr4(read_cr4() | CR4_PCE);
    ctr_write(0, 0x11);
    CHECK(run_user(make(VALUE), 0) == 0x11);
    smp_run(1, read_by_own_table, (u64)make(VALUE));
    smp_wait(1);
    CHECK(on_other == 0xaa, "0x%lx", on_other);
    ctr_write(0, 0x22);
    CHECK(run_user(make(VALUE), 0) == 0x22);
}

/* A program's own trap flag, behind the NOP that follows POPFQ. */
extern u64 user_step(u64 unused);
extern u8 user_stepped[];
asm(".text\n.globl user_step, user_stepped\nuser_step:\n pushfq\n orl $0x100,(%rsp)\n popfq\n nop\nuser_stepped: nop\n ret\n");

static u64 step_dr6;
static bool catch_own_step(struct trap_frame *f)
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
    trap_hook = catch_own_step;
    run_user(user_step, 0);
    trap_hook = NULL;
    CHECK(faults == 1 && seen.rip == (u64)user_stepped, "%u at 0x%lx", faults, seen.rip);
    CHECK((step_dr6 & 0xe00f) == BIT(14), "DR6 0x%lx", step_dr6);
    asm volatile("mov %0,%%db6" : : "r"(0xffff0ff0UL));
}

/* As Linux's begins; not where the handler was before. */
extern u8 third_handler[];
asm(".text\n.p2align 4\n.globl third_handler\nthird_handler:\n push $0x77\n lea 8(%rsp),%rsp\n jmp trap_stubs + 16 * 13\n");

TEST(changed_gate, ON_ANY, "rdpmc: is served at another handler at the next write")
{
    write_cr4(read_cr4() | CR4_PCE);
    ctr_write(0, 0x11);
    trap_entry(VEC_GP, third_handler);
    ctr_write(0, 0x66);
    CHECK(run_user(make(VALUE), 0) == 0x66);
    trap_entry(VEC_GP, NULL);
    ctr_write(0, 0x55);
    CHECK(run_user(make(VALUE), 0) == 0x55);
}

TEST(prefixes, ON_ANY, "rdpmc: prefixes change nothing")
{
    static const u8 prefixes[][4] = { { 0x66 }, { 0x67 }, { 0xf2 }, { 0xf3 }, { 0x48 }, { 0x65 }, { 0x66, 0xf3, 0x4f } };
    static u8 prefixed[32];

    write_cr4(read_cr4() | CR4_PCE);
    for (u32 i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++) {
        u8 *from = (u8 *)make(VALUE), *to = prefixed, *pair = fault_at[VALUE];

        while (from < pair)
            *to++ = *from++;
        for (u32 j = 0; j < 4 && prefixes[i][j]; j++)
            *to++ = prefixes[i][j];
        while (from < code[VALUE] + 20)
            *to++ = *from++;
        ctr_write(0, 0x5500 + i);
        for (u32 cpl = 0; cpl <= 3; cpl += 3) {
            u64 v = run_at(cpl, (routine)prefixed, 0);
            CHECK(v == 0x5500 + i, "prefix 0x%x, CPL%u: 0x%lx", prefixes[i][0], cpl, v);
        }
    }
}

static u64 first_step, step_status;
static u32 steps;
static bool catch_step(struct trap_frame *f)
{
    if (f->vector != VEC_DB)
        return false;
    if (!steps++) {
        first_step = f->rip;
        asm volatile("mov %%dr6,%0" : "=r"(step_status));
    }
    if (steps == 2)
        f->rflags &= ~BIT(8);
    return true;
}

TEST(single_step, ON_ANY, "rdpmc: #DB comes right behind it while the trap flag is set")
{
    /* pushfq; orl $0x100,(%rsp); mov %edi,%ecx; popfq; RDPMC; nop; nop; nop; ret */
    static const u8 head[] = { 0x9c, 0x81, 0x0c, 0x24, 0, 1, 0, 0, 0x89, 0xf9, 0x9d };
    static u8 stepped[24];
    static volatile u8 half = 0x0e;
    u8 *at = stepped;

    for (u32 i = 0; i < sizeof(head); i++)
        *at++ = head[i];
    *at++ = half + 1;
    *at++ = 0x33;
    u8 *behind_it = at;
    for (u32 i = 0; i < 3; i++)
        *at++ = 0x90;
    *at = 0xc3;
    ctr_write(0, 0x4321);
    steps = 0;
    asm volatile("mov %0,%%dr6" : : "r"(0xffff0ff0UL));
    trap_hook = catch_step;
    u64 v = (u32)((routine)stepped)(0);
    trap_hook = NULL;
    CHECK(v == 0x4321, "0x%lx", v);
    CHECK(steps == 2 && first_step == (u64)behind_it, "%u steps, the first %ld bytes behind it", steps,
          first_step - (u64)behind_it);
    CHECK(step_status & BIT(14), "DR6 0x%lx", step_status);
}

/* Found when the file is loaded: no symbol but the functions' is to be an anchor for the search. Each RDPMC is behind a MOV of two bytes. */
extern u64 of_the_file(u64 index), of_the_file_prefixed(u64 index);
#define OF_THE_FILE(function) ((u8 *)(function) + 2)
asm(".text\n.globl of_the_file, of_the_file_prefixed\n"
    ".type of_the_file, @function\n.type of_the_file_prefixed, @function\n"
    "of_the_file:\n mov %edi,%ecx\n rdpmc\n shl $32,%rdx\n or %rdx,%rax\n ret\n"
    "of_the_file_prefixed:\n mov %edi,%ecx\n .byte 0x66,0x48,0x0f,0x33\n shl $32,%rdx\n or %rdx,%rax\n ret\n");

TEST(file, ON_ANY, "rdpmc: in the file, with prefixes or without, and a fault is at its first byte")
{
    ctr_write(0, 0x7654);
    CHECK(of_the_file(0) == 0x7654 && of_the_file_prefixed(0) == 0x7654);
    for (u32 i = 0; i < 2; i++) {
        u8 *at = OF_THE_FILE(i ? of_the_file_prefixed : of_the_file);

        faults = 0;
        fault_length = i ? 4 : 2;
        trap_hook = catch_fault;
        i ? of_the_file_prefixed(pmu.gp) : of_the_file(pmu.gp);
        trap_hook = NULL;
        fault_length = 2;
        CHECK(faults == 1 && seen.rip == (u64)at && seen.error == 0, "%u: %u faults, 0x%lx", i, faults, seen.rip);
    }
}

/* RAX, RDX and how often an instruction behind it was executed; a step back or a wrong length would change all. */
#define OUT(instruction, a, d, n) asm volatile(instruction "\n incl %2\n incl %2" : "+a"(a), "+d"(d), "+r"(n) : "c"(0) : "memory")

TEST(other_port_writes, ON_ANY, "port 0x33: a write elsewhere is no RDPMC")
{
    static const u8 bytes[4] = { 1, 2, 3, 4 };
    const u8 *string = bytes;
    u64 a = 0x1111222233334444UL, d = 0x55556666777700e1UL, count = 4;
    u32 n = 0;

    ctr_write(0, 0x123456789aUL);
    OUT("out %%al,$0x33", a, d, n);
    OUT("out %%eax,$0x33", a, d, n);
    OUT("out %%al,%%dx", a, d, n);
    OUT("out %%ax,%%dx", a, d, n);
    OUT("out %%eax,%%dx", a, d, n);
    asm volatile("rep outsb" : "+S"(string), "+c"(count) : "d"(0x33) : "memory");
    CHECK(a == 0x1111222233334444UL && d == 0x55556666777700e1UL && n == 10, "0x%lx 0x%lx %u", a, d, n);
    CHECK(count == 0 && string == bytes + 4);
}

/* Beside one that is replaced: OUT, RDPMC, OUT. */
extern u64 crowded(u64 index);
asm(".text\n.globl crowded\n.type crowded, @function\ncrowded:\n mov %edi,%ecx\n mov $0x33,%edx\n mov $5,%eax\n out %al,%dx\n"
    " cmp $5,%eax\n jne 1f\n mov $0x33,%edx\n out %al,%dx\n rdpmc\n out %al,$0x33\n shl $32,%rdx\n or %rdx,%rax\n ret\n1: ud2\n");

TEST(beside_a_write, ON_ANY, "port 0x33: a write right beside an RDPMC is none")
{
    for (u64 i = 0; i < 3; i++) {
        ctr_write(0, 0x19000000UL + i); /* no model truncates it */
        u64 v = crowded(0);
        CHECK(v == 0x19000000UL + i, "0x%lx", v);
    }
}

TEST(level_of_the_file, ON_ANY, "rdpmc: in the file, at CPL 3: CR4.PCE decides")
{
    for (u32 iopl = 0; iopl <= 3; iopl += 3) {
        asm volatile("pushfq\n andl $~0x3000,(%%rsp)\n orl %0,(%%rsp)\n popfq" : : "r"(iopl << 12) : "memory", "cc");
        write_cr4(read_cr4() | CR4_PCE);
        ctr_write(0, 0x3131);
        u64 v = run_user(of_the_file, 0);
        CHECK(v == 0x3131, "IOPL %u: 0x%lx", iopl, v);
        write_cr4(read_cr4() & ~CR4_PCE);
        faults = 0;
        trap_hook = catch_fault;
        run_user(of_the_file, 0);
        trap_hook = NULL;
        CHECK(faults == 1 && seen.rip == (u64)OF_THE_FILE(of_the_file), "IOPL %u: %u faults", iopl, faults);
    }
    asm volatile("pushfq\n andl $~0x3000,(%%rsp)\n popfq" : : : "memory", "cc");
}

/*
 * PMIs while counters are read all the time. Where overflows are found by exits, and an RDPMC is one, a PMI would come right behind it as
 * a rule, with the value read and not yet used; on a processor it hardly ever does. See docs/architecture.md.
 */
#define PMIS 20
#define MOST_READS 500000

static u64 next_behind, pmi_period;
static volatile u32 pmis_behind, pmis_seen;

/* 0.2 ms, and so long that the handler, some ten exits, is a small part of it where exits are dear: else there would be nothing but PMIs. */
static u64 period_for_this_host(void)
{
    u64 least = 0;

    for (u32 i = 0; i < 5; i++) {
        u64 t0 = rdtsc();

        ctr_read(0);
        t0 = rdtsc() - t0;
        least = i && t0 > least ? least : t0;
    }
    return least * 100 > tsc_hz / 5000 ? least * 100 : tsc_hz / 5000;
}

static void arm(void)
{
    /* Before the counter is written: an overflow behind that, should this take long, is not the one that is served here. */
    status_clear(1);
    ctr_write(0, -pmi_period);
    apic_write(APIC_LVTPC, LVT_NMI); /* on Intel models the delivery has masked it */
}

static void note_place(struct trap_frame *f)
{
    pmis_behind += f->rip == next_behind;
    pmis_seen++;
    arm();
}

static void never_behind(u32 cpl, routine read, u8 *behind_it)
{
    u32 reads = 0;

    next_behind = (u64)behind_it;
    pmis_behind = pmis_seen = 0;
    pmi_period = period_for_this_host();
    this_cpu()->pmi_hook = note_place;
    arm();
    sel_write(0, event_select(EV_CYCLES) | SEL_USR | SEL_OS | SEL_INT | SEL_EN);
    global_write(1);
    for (; pmis_seen < PMIS && reads < MOST_READS; reads++)
        run_at(cpl, read, 0);
    pmu_reset();
    this_cpu()->pmi_hook = NULL;
    CHECK(pmis_seen >= PMIS, "CPL%u: %u PMIs in %u reads", cpl, pmis_seen, reads);
    CHECK(pmis_behind == 0, "CPL%u: %u of %u PMIs", cpl, pmis_behind, pmis_seen);
}

TEST(pmi_in_the_file, ON_ANY, "rdpmc: in the file, a PMI comes before it and not right behind it")
{
    write_cr4(read_cr4() | CR4_PCE);
    for (u32 cpl = 0; cpl <= 3; cpl += 3) {
        never_behind(cpl, of_the_file, OF_THE_FILE(of_the_file) + 2);
        never_behind(cpl, of_the_file_prefixed, OF_THE_FILE(of_the_file_prefixed) + 4);
    }
}

TEST(pmi_at_run_time, ON_ANY, "rdpmc: made at run time, a PMI comes before it and not right behind it")
{
    routine read = make(VALUE);
    write_cr4(read_cr4() | CR4_PCE);
    for (u32 cpl = 0; cpl <= 3; cpl += 3)
        never_behind(cpl, read, fault_at[VALUE] + 2);
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
