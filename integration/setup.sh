#!/bin/bash
# Installs what building, the lab and the tests need beyond a Rust toolchain, from Debian. Does nothing when all is there.
# usage: integration/setup.sh DIRECTORY    (for files of its own; CARGO names the cargo to look for)
set -euo pipefail
files=$1
packages=(gcc libc6-dev binutils qemu-system-x86)
# Older ones may execute code that another processor has just changed (seen with 7.2; from 8.1 on QEMU holds a page's lock
# while it translates it). Linux patches itself whenever perf starts or stops, and then hangs or dies now and then.
least_qemu=8.1
# Debian 12 has 7.2, and a newer one among its backports.
backported=(qemu-system-x86 qemu-system-common qemu-system-data seabios)

say() {
	echo "setup: $*"
}

install() {
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends -o Acquire::Retries=3 "$@" </dev/null
}

qemu_version() {
	qemu-system-x86_64 --version | sed -n '1s/.*version \([0-9.]*\).*/\1/p'
}

qemu_is_new() {
	[ "$(printf '%s\n' "$least_qemu" "$(qemu_version)" | sort -V | head -n 1)" = "$least_qemu" ]
}

# Looks at the release's backports with a list of sources of its own: the system's stays as it is.
qemu_from_backports() {
	local codename mirror apt
	codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
	mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' 'Component: main' | head -n 1)
	[ -n "$codename" ] && [ -n "$mirror" ] || return 1
	mkdir -p "$files/lists/partial"
	printf 'deb %s %s main\n' "$mirror" "$codename" "$mirror" "$codename-backports" >"$files/sources.list"
	apt=(-o "Dir::Etc::sourcelist=$files/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$files/lists")
	apt-get update -qq "${apt[@]}" -o Acquire::Retries=3 &&
		install "${apt[@]}" -t "$codename-backports" "${backported[@]}"
}

missing=
for tool in gcc ld qemu-system-x86_64; do
	command -v $tool >/dev/null || missing="$missing $tool"
done
[ -e /usr/lib/x86_64-linux-gnu/libc.a ] || missing="$missing libc.a"
command -v "${CARGO:-cargo}" >/dev/null || {
	say "no cargo: install Rust (https://rustup.rs), rust-version is in Cargo.toml"
	exit 1
}
if [ -n "$missing" ]; then
	if [ "$(id -u)" != 0 ]; then
		say "missing:$missing. Type: sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages[*]}"
		exit 1
	fi
	say "missing:$missing; installing ${packages[*]}"
	apt-get update -qq -o Acquire::Retries=3
	install "${packages[@]}"
fi
# Tried once: without it the lab works most of the time.
if ! qemu_is_new && [ ! -e "$files/tried" ]; then
	mkdir -p "$files"
	touch "$files/tried"
	if [ "$(id -u)" = 0 ] && say "QEMU $(qemu_version) is older than $least_qemu: looking for one in the backports" &&
		qemu_from_backports; then
		say "QEMU $(qemu_version)"
	else
		say "QEMU $(qemu_version) is older than $least_qemu: the lab may hang or die now and then (docs/lab.md)"
	fi
fi
