/*
 * kexec KERNEL INITRD CMDLINE: the running kernel loads another one (kexec_file_load(2)) and jumps to it at once, without
 * stopping any program. Only returns with an error. With -p first it keeps the other one for the time when it panics,
 * and with -c alone it has the running one panic. Before a kernel ends, the console has sent what was written to it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kexec.h>
#include <linux/reboot.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

/* The console's driver sends from a buffer of its own, which ends with the kernel. */
static void drain_console(void)
{
	int console = open("/dev/console", O_WRONLY | O_NOCTTY | O_CLOEXEC);

	if (console < 0 || tcdrain(console))
		fprintf(stderr, "kexec: /dev/console: %s\n", strerror(errno));
}

static int panic_now(void)
{
	int trigger = open("/proc/sysrq-trigger", O_WRONLY | O_CLOEXEC);

	drain_console();
	if (trigger < 0 || write(trigger, "c", 1) < 0)
		fprintf(stderr, "kexec: /proc/sysrq-trigger: %s\n", strerror(errno));
	return 1;
}

int main(int argc, char **argv)
{
	unsigned long flags = 0;

	if (argc == 2 && !strcmp(argv[1], "-c"))
		return panic_now();
	if (argc == 5 && !strcmp(argv[1], "-p")) {
		flags = KEXEC_FILE_ON_CRASH;
		argc--;
		argv++;
	}
	if (argc != 4) {
		fprintf(stderr, "usage: kexec [-p] KERNEL INITRD CMDLINE, or kexec -c\n");
		return 2;
	}
	int kernel = open(argv[1], O_RDONLY | O_CLOEXEC), initrd = open(argv[2], O_RDONLY | O_CLOEXEC);
	if (kernel < 0 || initrd < 0) {
		fprintf(stderr, "kexec: %s: %s\n", kernel < 0 ? argv[1] : argv[2], strerror(errno));
		return 1;
	}
	/* The length counts the NUL. */
	if (syscall(SYS_kexec_file_load, kernel, initrd, strlen(argv[3]) + 1, argv[3], flags)) {
		fprintf(stderr, "kexec: kexec_file_load: %s\n", strerror(errno));
		return 1;
	}
	if (flags)
		return 0;
	drain_console();
	syscall(SYS_reboot, LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_KEXEC, NULL);
	fprintf(stderr, "kexec: reboot: %s\n", strerror(errno));
	return 1;
}
