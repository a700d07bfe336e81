/*
 * Small workloads with known behaviour, for guests. One static binary, several names:
 *
 *   spin SECONDS|ITERATIONSx   busy loop; with an "x" a fixed number of iterations
 *   three SECONDS              60 / 30 / 10 % of the time in heavy(), middle() and light()
 *   syscalls COUNT             COUNT calls of getppid(2): time in the kernel
 *   faults PAGES               touches PAGES fresh pages: one minor fault each
 *   chase SECONDS              pointer chase through 8 MiB: cache misses
 *   threads N SECONDS|ITERATIONSx  N threads that spin; with an "x" a fixed number of iterations each
 *   idle SECONDS               sleeps
 *   branches SECONDS           conditional branches, recursion and indirect calls of known probability
 *   selfread COUNT             reads its own cycle counter by RDPMC COUNT times, each between two read(2) of it
 *   gate PROGRAM ARGUMENTS     one of the above, held at both ends until a line comes on the console; switches a perf
 *                              that waits at the pipes /tmp/ctl and /tmp/ack on before and off after it
 *
 * Each prints one line "NAME: key=value ..." that says what it did. Built with frame pointers,
 * without inlining of the functions that profiles are expected to show.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NOINLINE __attribute__((noinline, noclone))

static double now(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/*
 * The loop whose length everything here is measured in: two instructions and one taken branch
 * per iteration ("sub $1,%rax; jne").
 */
#define LOOP(iterations)                                                     \
	do {                                                                 \
		uint64_t left = (iterations);                                \
		__asm__ volatile("1: sub $1, %0\n\tjne 1b" : "+r"(left) :: "cc"); \
	} while (0)

NOINLINE void busy_loop(uint64_t iterations)
{
	LOOP(iterations);
	__asm__ volatile(""); /* no tail call: the frame stays on the stack */
}

NOINLINE void heavy(uint64_t unit) { LOOP(6 * unit); __asm__ volatile(""); }
NOINLINE void middle(uint64_t unit) { LOOP(3 * unit); __asm__ volatile(""); }
NOINLINE void light(uint64_t unit) { LOOP(1 * unit); __asm__ volatile(""); }

NOINLINE uint64_t work(double seconds)
{
	uint64_t rounds = 0;
	double end = now(CLOCK_MONOTONIC) + seconds;
	do {
		heavy(200000);
		middle(200000);
		light(200000);
		rounds++;
	} while (now(CLOCK_MONOTONIC) < end);
	return rounds;
}

static int spin(const char *amount)
{
	uint64_t iterations = 0;
	double start = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
	size_t length = strlen(amount);
	if (length && amount[length - 1] == 'x') {
		iterations = strtoull(amount, NULL, 10);
		if (iterations)
			busy_loop(iterations);
	} else {
		double end = start + atof(amount);
		do {
			busy_loop(1000000);
			iterations += 1000000;
		} while (now(CLOCK_MONOTONIC) < end);
	}
	printf("spin: iterations=%llu seconds=%.6f cpu_seconds=%.6f\n",
	       (unsigned long long)iterations, now(CLOCK_MONOTONIC) - start,
	       now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
	return 0;
}

static int three(const char *seconds)
{
	double cpu = now(CLOCK_PROCESS_CPUTIME_ID);
	uint64_t rounds = work(atof(seconds));
	printf("three: rounds=%llu cpu_seconds=%.6f\n", (unsigned long long)rounds,
	       now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
	return 0;
}

/*
 * Branches that depend on random bits: a conditional branch with probability 1/4, and calls of one of four functions
 * through a pointer, one of which calls itself with probability 1/2.
 */
static uint64_t bits = 88172645463325252ull;
static volatile uint64_t quarters;

static inline __attribute__((always_inline)) uint64_t next_bits(void)
{
	bits ^= bits << 13;
	bits ^= bits >> 7;
	bits ^= bits << 17;
	return bits >> 20;
}

NOINLINE void target_a(void) { __asm__ volatile("nop"); }
NOINLINE void target_b(void) { __asm__ volatile("nop; nop"); }
NOINLINE void target_c(void) { __asm__ volatile("nop; nop; nop"); }
NOINLINE void target_d(void)
{
	if (next_bits() & 1)
		target_d();
	__asm__ volatile("");
}

static void (*const volatile targets[4])(void) = { target_a, target_b, target_c, target_d };

NOINLINE void branch_round(void)
{
	if ((next_bits() & 3) == 0)
		quarters++;
	targets[next_bits() & 3]();
	__asm__ volatile("");
}

static int branches(const char *seconds)
{
	uint64_t rounds = 0;
	double end = now(CLOCK_MONOTONIC) + atof(seconds);
	do {
		for (int i = 0; i < 1000000; i++)
			branch_round();
		rounds += 1000000;
	} while (now(CLOCK_MONOTONIC) < end);
	printf("branches: rounds=%llu\n", (unsigned long long)rounds);
	return 0;
}

static int syscalls(const char *count)
{
	uint64_t left = strtoull(count, NULL, 10);
	double cpu = now(CLOCK_PROCESS_CPUTIME_ID);
	for (uint64_t i = 0; i < left; i++)
		syscall(SYS_getppid);
	printf("syscalls: count=%llu cpu_seconds=%.6f\n", (unsigned long long)left,
	       now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
	return 0;
}

static int faults(const char *pages)
{
	size_t count = strtoull(pages, NULL, 10);
	char *area = mmap(NULL, count * 4096, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED) {
		perror("faults: mmap");
		return 1;
	}
	madvise(area, count * 4096, MADV_NOHUGEPAGE);
	for (size_t i = 0; i < count; i++)
		*(volatile char *)(area + i * 4096) = 1;
	printf("faults: pages=%zu\n", count);
	return 0;
}

static int chase(const char *seconds)
{
	enum { LINES = (8 << 20) / 64, STRIDE = 40503 }; /* odd stride: one full cycle */
	struct line { struct line *next; char pad[56]; } *lines;
	if (posix_memalign((void **)&lines, 64, sizeof(*lines) * LINES)) {
		fputs("chase: out of memory\n", stderr);
		return 1;
	}
	for (uint32_t i = 0; i < LINES; i++)
		lines[i].next = &lines[(i + STRIDE) % LINES];
	uint64_t hops = 0;
	struct line *at = lines;
	double end = now(CLOCK_MONOTONIC) + atof(seconds);
	do {
		for (int i = 0; i < 100000; i++)
			at = *(struct line *volatile *)&at->next;
		hops += 100000;
	} while (now(CLOCK_MONOTONIC) < end);
	printf("chase: hops=%llu last=%p\n", (unsigned long long)hops, (void *)at);
	return 0;
}

/* How long a thread spins: so many iterations if there are any, or else so many seconds. */
struct amount { uint64_t iterations; double seconds; };

static void *spinner(void *argument)
{
	const struct amount *amount = argument;
	double end = now(CLOCK_MONOTONIC) + amount->seconds;
	if (amount->iterations) {
		busy_loop(amount->iterations);
		return NULL;
	}
	do
		busy_loop(1000000);
	while (now(CLOCK_MONOTONIC) < end);
	return NULL;
}

static int threads(const char *count, const char *length)
{
	int n = atoi(count);
	size_t letters = strlen(length);
	int fixed = letters && length[letters - 1] == 'x';
	struct amount amount = { fixed ? strtoull(length, NULL, 10) : 0, fixed ? 0 : atof(length) };
	pthread_t ids[64];
	if (n < 1 || n > 64) {
		fputs("threads: 1 to 64\n", stderr);
		return 2;
	}
	for (int i = 0; i < n; i++)
		if (pthread_create(&ids[i], NULL, spinner, &amount)) {
			fputs("threads: pthread_create failed\n", stderr);
			return 1;
		}
	for (int i = 0; i < n; i++)
		pthread_join(ids[i], NULL);
	printf("threads: count=%d length=%s cpu_seconds=%.6f\n", n, length,
	       now(CLOCK_PROCESS_CPUTIME_ID));
	return 0;
}

static int idle(const char *seconds)
{
	double length = atof(seconds);
	struct timespec t = { (time_t)length, (long)((length - (time_t)length) * 1e9) };
	nanosleep(&t, NULL);
	printf("idle: seconds=%.3f\n", length);
	return 0;
}

/* The count of an event of our own without the kernel, as perf_event_open(2) describes it; false if it is not on. */
static int read_by_rdpmc(volatile struct perf_event_mmap_page *page, uint64_t *value)
{
	uint32_t lock, index, low, high;
	do {
		lock = page->lock;
		__sync_synchronize();
		index = page->index;
		*value = page->offset;
		if (!page->cap_user_rdpmc || !index)
			return 0;
		__asm__ volatile("rdpmc" : "=a"(low), "=d"(high) : "c"(index - 1));
		int unused = 64 - page->pmc_width;
		*value += (uint64_t)((int64_t)(((uint64_t)high << 32 | low) << unused) >> unused);
		__sync_synchronize();
	} while (page->lock != lock);
	return 1;
}

static int selfread(const char *count)
{
	struct perf_event_attr attr = { .type = PERF_TYPE_HARDWARE, .size = sizeof(attr), .config = PERF_COUNT_HW_CPU_CYCLES };
	uint64_t times = strtoull(count, NULL, 10), reads = 0, in_order = 0, before, value = 0, after = 0;
	int fd = (int)syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0);
	volatile struct perf_event_mmap_page *page;

	if (fd < 0) {
		printf("selfread: perf_event_open: %s\n", strerror(errno));
		return 1;
	}
	page = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED) {
		printf("selfread: mmap: %s\n", strerror(errno));
		return 1;
	}
	for (uint64_t i = 0; i < times; i++) {
		busy_loop(1000);
		if (read(fd, &before, sizeof(before)) != sizeof(before))
			break;
		if (!read_by_rdpmc(page, &value))
			continue;
		if (read(fd, &after, sizeof(after)) != sizeof(after))
			break;
		reads++;
		in_order += before < value && value < after;
	}
	printf("selfread: reads=%llu in_order=%llu width=%u last=%llu then=%llu\n", (unsigned long long)reads,
	       (unsigned long long)in_order, (unsigned)page->pmc_width, (unsigned long long)value, (unsigned long long)after);
	return 0;
}

static int run(int argc, char **argv);

/* Says something on the console and waits for a line there. */
static int wait_for_line(int console, const char *text)
{
	char c = 0;
	printf("@@pv gate %s\n", text);
	fflush(stdout);
	while (c != '\n')
		if (read(console, &c, 1) != 1)
			return -1;
	return 0;
}

/* Tells a perf that was started with --control and --delay=-1 to count or to stop, and waits until it has. */
static void control(int ctl, int ack, const char *word)
{
	char answer[64];
	if (ctl < 0 || ack < 0)
		return;
	if (write(ctl, word, strlen(word)) < 0 || read(ack, answer, sizeof(answer)) <= 0)
		perror("gate: perf");
}

static int gate(int argc, char **argv)
{
	char text[96];
	int console = open("/dev/console", O_RDONLY), status;
	/* Opened both ways, so that it does not wait for a perf that is not there; without one, reading would wait for ever. */
	int perf = getenv("GATE_PERF") != NULL;
	int ctl = perf ? open("/tmp/ctl", O_RDWR) : -1, ack = perf ? open("/tmp/ack", O_RDWR) : -1;
	double cpu;

	if (console < 0 || wait_for_line(console, "begin"))
		return 3;
	control(ctl, ack, "enable\n");
	cpu = now(CLOCK_PROCESS_CPUTIME_ID);
	status = run(argc, argv);
	cpu = now(CLOCK_PROCESS_CPUTIME_ID) - cpu;
	control(ctl, ack, "disable\n");
	snprintf(text, sizeof(text), "end cpu_ns=%.0f", cpu * 1e9);
	return wait_for_line(console, text) ? 3 : status;
}

int main(int argc, char **argv)
{
	const char *name = strrchr(argv[0], '/');
	if (!strcmp(name ? name + 1 : argv[0], "gate") && argc > 1)
		return gate(argc - 1, argv + 1);
	return run(argc, argv);
}

static int run(int argc, char **argv)
{
	const char *name = strrchr(argv[0], '/');
	name = name ? name + 1 : argv[0];
	if (!strcmp(name, "spin") && argc == 2)
		return spin(argv[1]);
	if (!strcmp(name, "three") && argc == 2)
		return three(argv[1]);
	if (!strcmp(name, "branches") && argc == 2)
		return branches(argv[1]);
	if (!strcmp(name, "syscalls") && argc == 2)
		return syscalls(argv[1]);
	if (!strcmp(name, "faults") && argc == 2)
		return faults(argv[1]);
	if (!strcmp(name, "chase") && argc == 2)
		return chase(argv[1]);
	if (!strcmp(name, "threads") && argc == 3)
		return threads(argv[1], argv[2]);
	if (!strcmp(name, "idle") && argc == 2)
		return idle(argv[1]);
	if (!strcmp(name, "selfread") && argc == 2)
		return selfread(argv[1]);
	fputs("usage: spin SECONDS|Nx, three SECONDS, branches SECONDS, syscalls N, faults PAGES, chase SECONDS, threads N SECONDS|Nx, idle SECONDS, "
	      "selfread N, gate ...\n",
	      stderr);
	return 2;
}
