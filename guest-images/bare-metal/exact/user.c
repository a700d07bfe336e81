/* Counting at CPL3, and the ways between CPL3 and CPL0. */
#include "exact.h"

#define MSR_STAR 0xc0000081
#define MSR_LSTAR 0xc0000082
#define MSR_FMASK 0xc0000084

/* As a block: the way to CPL3 and back is CPL0 code, which USR alone does not count. */
static u64 (*user_function)(u64);
static void at_cpl3(void) { run_user(user_function, 1); /* known_loop counts down from it */ }

TEST(user_thousand, ON_ANY, "exact: a block of 1000 instructions at CPL3")
{
    if (option("no-user"))
        SKIP("CPL3 is not counted here");
    user_function = user_1000;
    expect(instructions | SEL_USR, at_cpl3, 0, NULL, 1000);
}

TEST(user_not_kernel, ON_ANY, "exact: OS alone does not count what runs at CPL3")
{
    u64 short_way, long_way;

    user_function = known_loop;
    short_way = count(instructions | SEL_OS, at_cpl3, 0);
    user_function = user_1000;
    long_way = count(instructions | SEL_OS, at_cpl3, 0);
    CHECK(short_way == long_way, "%lu and %lu", short_way, long_way);
}

TEST(user_syscall_count, ON_ANY, "exact: SYSCALL counts at CPL3 and SYSRET at CPL0")
{
    u64 kernel, with_syscall;

    if (option("no-user") || option("no-syscall"))
        SKIP("SYSCALL from CPL3 is not right here");
    wrmsr(MSR_STAR, (u64)SEL_KERNEL_CS << 32 | (u64)(SEL_KERNEL_DS | 3) << 48);
    wrmsr(MSR_LSTAR, (u64)handler_syscall);
    wrmsr(MSR_FMASK, 0x300); /* TF, IF */
    syscall_cs = 0;
    user_function = user_syscall;
    expect(instructions | SEL_USR, at_cpl3, 0, NULL, 5);
    CHECK(syscall_cs == SEL_KERNEL_CS, "CS 0x%lx", syscall_cs);
    with_syscall = count(instructions | SEL_OS, at_cpl3, 0);
    user_function = user_1000;
    kernel = count(instructions | SEL_OS, at_cpl3, 0);
    CHECK(with_syscall == kernel + 3, "%lu instead of %lu", with_syscall, kernel + 3);
}
