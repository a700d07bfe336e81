/*
 * kexec KERNEL INITRD CMDLINE: the running kernel loads another one (kexec_file_load(2)) and jumps to it at once, without
 * stopping any program. Only returns with an error. With -p first it keeps the other one for the time when it panics.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kexec.h>
#include <linux/reboot.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	unsigned long flags = 0;

	if (argc == 5 && !strcmp(argv[1], "-p")) {
		flags = KEXEC_FILE_ON_CRASH;
		argc--;
		argv++;
	}
	if (argc != 4) {
		fprintf(stderr, "usage: kexec [-p] KERNEL INITRD CMDLINE\n");
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
	syscall(SYS_reboot, LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_KEXEC, NULL);
	fprintf(stderr, "kexec: reboot: %s\n", strerror(errno));
	return 1;
}
