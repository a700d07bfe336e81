/*
 * The guest of `perfvisor validate`. It measures what it is asked to over the serial console and answers in JSON, one
 * object in a line; between the steps it halts, so that the host can read its own view of the same counters.
 *
 *   host:   measure work=busy n=1000 cpl=3 c=0x300c0 c=0x3003c f=0x30 period=0 cpus=1
 *   guest:  ready          and after an empty line
 *   guest:  done           the counters are off and keep their values; after an empty line
 *   guest:  {"at":"result","cpus":[{"tsc":1,"c":[..],"f":[..],"pmis":0,"late":0,"spurious":0,"struck":[..]}]}
 *   host:   end
 */
#include "validate.h"

#define LINE 256
#define PATIENCE_SECONDS 120
#define IOAPIC 0xfec00000UL
#define UART_LINE 4
#define UART_ENABLE 0x3f9

static char line[LINE];
static struct job job;
static struct result results[MAX_CPUS];
static volatile u32 go[MAX_CPUS]; /* a CPU's turn: measure, and clear it */
static u32 started = 1;

/* The UART's interrupt, line 4, goes to this CPU through the I/O APIC: who waits for input has nothing to do until then. */
static void console_interrupts(void)
{
    volatile u32 *select = (volatile u32 *)IOAPIC, *window = (volatile u32 *)(IOAPIC + 0x10);

    *select = 0x10 + 2 * UART_LINE + 1;
    *window = this_cpu()->apic_id << 24;
    *select = 0x10 + 2 * UART_LINE;
    *window = VEC_IPI; /* edge, fixed delivery, not masked */
    outb(UART_ENABLE, 1); /* received data */
}

/* One line of the console. In between this halts: waiting must not be counted as running. */
static void read_line(void)
{
    u64 deadline = rdtsc() + PATIENCE_SECONDS * tsc_hz;
    u32 n = 0;

    for (;;) {
        while (!getchar_ready()) {
            /* The timer is for the case that the interrupt came before the halt. */
            apic_write(APIC_TIMER_DIV, 0xb);
            apic_write(APIC_LVT_TIMER, VEC_TIMER);
            apic_write(APIC_TIMER_INIT, 50000000);
            sti_hlt();
            cli();
            apic_write(APIC_LVT_TIMER, LVT_MASKED);
            if ((s64)(deadline - rdtsc()) < 0) {
                kprintf("{\"at\":\"gave up\"}\n");
                power_off(); /* whoever asked has gone */
            }
        }
        char c = getchar_raw();
        if (c == '\n')
            break;
        if (c != '\r' && n < LINE - 1)
            line[n++] = c;
    }
    line[n] = 0;
}

/* Where the value of the word `name=` begins, from `s` on; NULL if there is none. */
static const char *value_of(const char *s, const char *name)
{
    while (*s) {
        const char *n = name;
        while (*s == ' ')
            s++;
        while (*n && *s == *n)
            s++, n++;
        if (!*n && *s == '=')
            return s + 1;
        while (*s && *s != ' ')
            s++;
    }
    return NULL;
}

static u64 number_of(const char *name, u64 otherwise)
{
    const char *s = value_of(line, name);
    return s ? parse_number(&s) : otherwise;
}

/* The other CPUs' life: halted until it is their turn. */
static void serve_cpu(u64 index)
{
    for (;;) {
        while (!go[index]) {
            sti_hlt(); /* until the interrupt that comes with its turn */
            cli();
        }
        measure(&job, &results[index]);
        go[index] = 0;
        apic_command(cpu_at(0)->apic_id, 0x4000 | VEC_IPI);
    }
}

static bool parse_job(u32 *cpus)
{
    const char *s = value_of(line, "work");

    job = (struct job){ 0 };
    job.work = s ? work_named(s) : NULL;
    job.n = number_of("n", 1);
    job.cpl = number_of("cpl", 0);
    job.fixed_control = number_of("f", 0);
    job.period = number_of("period", 0);
    for (s = line; job.selectors < MAX_SELECTORS && (s = value_of(s, "c"));)
        job.select[job.selectors++] = parse_number(&s);
    *cpus = number_of("cpus", 1);
    return job.work && job.n && job.selectors <= pmu.gp && *cpus >= 1 && *cpus <= started &&
           (!job.fixed_control || pmu.fixed) && (!job.period || (job.work->any_cpl && job.selectors));
}

static void put_list(const char *name, const u64 *values, u32 n)
{
    kprintf(",\"%s\":[", name);
    for (u32 i = 0; i < n; i++)
        kprintf(i ? ",%lu" : "%lu", values[i]);
    kprintf("]");
}

static void put_results(u32 cpus)
{
    kprintf("{\"at\":\"result\",\"cpus\":[");
    for (u32 i = 0; i < cpus; i++) {
        const struct result *r = &results[i];
        kprintf("%s{\"tsc\":%lu", i ? "," : "", r->tsc);
        put_list("c", r->general, job.selectors);
        put_list("f", r->fixed, job.fixed_control ? 4 : 0);
        if (job.period) {
            kprintf(",\"pmis\":%lu,\"late\":%lu,\"spurious\":%lu", r->pmis, r->late, r->spurious);
            put_list("struck", r->struck, 4);
        }
        kprintf("}");
    }
    kprintf("]}\n");
}

static void serve(void)
{
    u32 cpus;

    if (!parse_job(&cpus)) {
        kprintf("{\"at\":\"refused\"}\n");
        return;
    }
    kprintf("ready\n");
    read_line();
    for (u32 i = 1; i < cpus; i++) {
        go[i] = 1;
        apic_command(cpu_at(i)->apic_id, 0x4000 | VEC_IPI);
    }
    measure(&job, &results[0]);
    for (u32 i = 1; i < cpus; i++)
        while (go[i]) {
            sti_hlt(); /* until the interrupt of the last to finish; looking now and then would use time that counts */
            cli();
        }
    kprintf("done\n"); /* short: an exit or two for each character, in the time that is measured */
    read_line();
    put_results(cpus);
}

void kmain(void)
{
    pmu_detect();
    if (pmu.kind != PMU_NONE)
        pmu_reset();
    work_setup();
    console_interrupts();
    if (fw_cfg_cpus() > 1) {
        started = smp_start();
        for (u32 i = 1; i < started; i++)
            smp_run(i, serve_cpu, i);
    }
    kprintf("{\"at\":\"hello\",\"tsc_hz\":%lu,\"cpus\":%u,\"pmu\":\"%s\",\"amd\":%s,\"gp\":%u,\"fixed\":%u,\"width\":%u,"
            "\"version\":%u,\"global\":%s,\"unavailable\":%u}\n",
            tsc_hz, started, pmu_name(), pmu.amd_cpu ? "true" : "false", pmu.gp, pmu.fixed, pmu.width, pmu.version,
            pmu.global ? "true" : "false", pmu.unavailable);
    if (pmu.kind == PMU_NONE)
        return;
    for (;;) {
        read_line();
        if (line[0] == 'e')
            return;
        serve();
    }
}
