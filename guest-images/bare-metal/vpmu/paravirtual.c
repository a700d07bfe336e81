/* The events that tell a guest what its host did: select 0xFF (Intel) or 0xFFF (AMD), unit mask = number. */
#include "check.h"

enum { PV_VM_EXITS = 1, PV_IO_EXITS = 2, PV_HALTS = 4, PV_MSR_EXITS = 10 };

static u64 paravirtual(u32 n) { return (pmu.amd_cpu ? 0xf000000ffUL : 0xffUL) | n << 8 | SEL_USR | SEL_OS | SEL_EN; }

/* Counts what `fn` causes. */
static u64 counted(u32 event, void (*fn)(void))
{
    ctr_write(0, 0);
    sel_write(0, paravirtual(event));
    global_write(1);
    fn();
    global_write(0);
    sel_write(0, 0);
    return ctr_read(0);
}

static void nothing(void) {}
static void ten_ports(void)
{
    for (u32 i = 0; i < 10; i++)
        outb(0x3f8 + 7, i); /* the UART's scratch register */
}
static void ten_msrs(void)
{
    for (u32 i = 0; i < 10; i++)
        rdmsr(ctr_msr(0));
}

/* `least` more than without; some exits around the block may count as well, or the host's own. */
static void check(const char *name, u32 event, void (*fn)(void), u64 least, u64 most)
{
    u64 around = counted(event, nothing), with = counted(event, fn);
    CHECK(with >= around + least && with <= around + most, "%s: %lu, without %lu", name, with, around);
}

TEST(pv_io, ON_ANY, "paravirtual: port writes count as I/O exits and as exits")
{
    if (!option("paravirtual"))
        SKIP("paravirtual is not on the command line");
    check("io-exits", PV_IO_EXITS, ten_ports, 10, 12);
    check("vm-exits", PV_VM_EXITS, ten_ports, 10, 10000);
    check("msr-exits", PV_MSR_EXITS, ten_ports, 0, 2);
}

TEST(pv_msr, ON_ANY, "paravirtual: register reads count as MSR exits")
{
    if (!option("paravirtual"))
        SKIP("paravirtual is not on the command line");
    check("msr-exits", PV_MSR_EXITS, ten_msrs, 10, 12);
    check("io-exits", PV_IO_EXITS, ten_msrs, 0, 2);
}

TEST(pv_unknown, ON_ANY, "paravirtual: a number nobody defined counts nothing")
{
    CHECK(counted(0, ten_ports) == 0);
    CHECK(counted(200, ten_ports) == 0);
}
