#!/bin/bash
# try.sh BINARY PACKAGE ARCHIVE: installs the Debian package, and then the archive, in a copy of this machine, and tries what a user has of
# them: the program, which must be BINARY and need no file of the host's, its manual pages and completions, and that nothing stays behind a
# removed package. The copy is an overlay that goes with this process: nothing is changed here. Needs root.
set -euo pipefail
binary=$(realpath "$1") package=$(realpath "$2") archive=$(realpath "$3")
here=$(realpath "$0")

if [ "${4:-}" != inside ]; then
	if [ "$(id -u)" != 0 ] || ! command -v dpkg >/dev/null || ! unshare -m true 2>/dev/null; then
		echo "try: SKIPPED, nothing was tried: it needs root, dpkg and unshare(1)"
		exit 0
	fi
	exec unshare -m "$here" "$binary" "$package" "$archive" inside
fi

# fresh: another copy, in $root.
copies=0
if ! mount -t tmpfs -o mode=0755 try /mnt || ! mkdir /mnt/{a,b,c} || ! mount -t overlay -o lowerdir=/,upperdir=/mnt/a,workdir=/mnt/b try /mnt/c; then
	echo "try: SKIPPED, nothing was tried: no overlay can be mounted here"
	exit 0
fi
umount /mnt/c
fresh() {
	copies=$((copies + 1))
	root=/mnt/$copies/root
	mkdir -p /mnt/$copies/{changed,work,root}
	mount -t overlay -o "lowerdir=/,upperdir=/mnt/$copies/changed,workdir=/mnt/$copies/work" try "$root"
	mount --rbind /dev "$root/dev"
	mount --rbind /proc "$root/proc"
	# Images of containers tell dpkg to leave manual pages out.
	rm -rf "$root"/etc/dpkg/dpkg.cfg.d "$root/usr/bin/perfvisor" "$root"/usr/share/man/man1/perfvisor*
}

failed() {
	echo "try: $what: $*"
	exit 1
}

in_copy() {
	chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 MANWIDTH=100 MANROFFSEQ= PAGER=cat "$@"
}

# What is installed in $root.
tried() {
	cmp "$binary" "$root/usr/bin/perfvisor" || failed "it has not the binary that it was made of"
	# Nothing but the binary: it needs no library, no loader, no /proc.
	mkdir -p /mnt/empty
	cp "$root/usr/bin/perfvisor" /mnt/empty/
	chroot /mnt/empty /perfvisor --version || failed "it does not run where there is nothing else"
	in_copy perfvisor check >/mnt/said || failed "check: status $?"
	grep -q '^ *Linux guests' /mnt/said || failed "check says $(cat /mnt/said)"

	local pages=0 commands man=man
	# Without man, that there is something to unpack.
	in_copy sh -c 'command -v man' >/dev/null || man=""
	page() {
		if [ -n "$man" ]; then in_copy man --warnings=all "$1"; else gzip -dc "$root/usr/share/man/man1/$1.1.gz" | sed 's/^\.SH //; s/\\-/-/g'; fi
	}
	commands=$(in_copy perfvisor --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
	[ -n "$commands" ] || failed "no commands in --help"
	for command in "" $commands; do
		page "perfvisor${command:+-$command}" >/mnt/page 2>/mnt/said || failed "man $command: $(cat /mnt/said)"
		[ ! -s /mnt/said ] || failed "man $command: $(cat /mnt/said)"
		grep -q "^SYNOPSIS" /mnt/page || failed "the page of $command has no synopsis"
		pages=$((pages + 1))
	done
	page perfvisor-record >/mnt/page
	grep -q -e '--call-graph' /mnt/page || failed "record's page has no --call-graph"

	# As bash does it at the tabulator.
	completed() {
		in_copy bash -c '. /usr/share/bash-completion/completions/perfvisor
			COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
			_perfvisor perfvisor "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
			echo "${COMPREPLY[@]}"' bash "$@"
	}
	[ "$(completed perfvisor rec)" = record ] || failed "rec<Tab>: $(completed perfvisor rec)"
	[ "$(completed perfvisor record --call)" = --call-graph ] || failed "--call<Tab>: $(completed perfvisor record --call)"
	grep -q 'perfvisor ps --names' "$root/usr/share/bash-completion/completions/perfvisor" || failed "no names of VMs are completed"
	for file in zsh/vendor-completions/_perfvisor fish/vendor_completions.d/perfvisor.fish; do
		grep -q call-graph "$root/usr/share/$file" || failed "$file has no --call-graph"
	done
	local doc=$root/usr/share/doc/perfvisor link
	for link in $(grep -o '](\([^)#]*\)' "$doc/README.md" | sed 's/](//' | grep -v http | sort -u); do
		[ -e "$doc/$link" ] || failed "README.md names $link, which is not installed"
	done
	for unit in perfvisor@.service perfvisor-exporter.service; do
		[ -f "$root/usr/lib/systemd/system/$unit" ] || failed "no $unit"
	done
	for file in perfvisor-agent perfvisor-agent.service; do
		[ -f "$root/usr/lib/perfvisor/$file" ] || failed "no $file for guests"
	done
	echo "try: $what: the program, check, $pages manual pages$([ -n "$man" ] || echo ' (not shown: no man here)') and completions are right"
}

what=$(basename "$package")
fresh
cp "$package" "$root/tmp/try.deb"
in_copy dpkg -i /tmp/try.deb || failed "dpkg -i: status $?"
[ -z "$(in_copy dpkg -V perfvisor)" ] || failed "dpkg -V: $(in_copy dpkg -V perfvisor)"
tried
files=$(in_copy dpkg -L perfvisor)
in_copy dpkg -P perfvisor || failed "dpkg -P: status $?"
for file in $files; do
	[ ! -f "$root$file" ] || failed "$file stays behind"
done

what=$(basename "$archive")
fresh
tar -C "$root" -xf "$archive"
tried
