#!/bin/bash
# Installs what building, the lab and the tests need beyond a Rust toolchain, from Debian's packages; does nothing where all is there.
# Debian's perf and strace are not needed: tests that use them say that they were skipped. They are installed where that can be done.
# "make setup" calls it.
set -euo pipefail

. "$(dirname "$0")/progress.sh"

packages=(gcc libc6-dev binutils xz-utils qemu-system-x86 qemu-utils)
options=(-y --no-install-recommends -o Acquire::Retries=3)

missing=()
for tool in gcc ld xz qemu-system-x86_64 qemu-img; do
	command -v "$tool" >/dev/null || missing+=("$tool")
done
[ -e /usr/lib/x86_64-linux-gnu/libc.a ] || missing+=(libc.a)
command -v "${CARGO:-cargo}" >/dev/null || {
	echo "setup: no cargo: install Rust (https://rustup.rs), rust-version is in Cargo.toml"
	exit 1
}

# What some tests compare with or look through: install_if_possible COMMAND PACKAGE REMEDY. Nothing fails for want of it.
install_if_possible() {
	local command=$1 package=$2 remedy=$3
	if command -v "$command" >/dev/null; then return; fi
	if [ "$(id -u)" = 0 ] && [ -n "$(apt-cache madison "$package" 2>/dev/null)" ]; then
		echo "setup: no $command here; installing $package"
		DEBIAN_FRONTEND=noninteractive with_progress "setup: installing $package" \
			apt-get install "${options[@]}" "$package" </dev/null >/dev/null && return
		remedy="apt-get update, then apt-get install $package"
	fi
	echo "setup: no $command here: tests that use it are skipped ($remedy)"
}

tools_if_possible() {
	install_if_possible perf linux-perf "apt-get install linux-perf (Debian), linux-tools-generic (Ubuntu)"
	install_if_possible strace strace "apt-get install strace"
}

if [ ${#missing[@]} = 0 ]; then
	tools_if_possible
	exit 0
fi
if [ "$(id -u)" != 0 ]; then
	echo "setup: missing: ${missing[*]}. Type: sudo apt-get update && sudo apt-get install ${options[*]} ${packages[*]}"
	exit 1
fi

echo "setup: missing: ${missing[*]}; installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
with_progress "setup: apt-get update" apt-get update -qq -o Acquire::Retries=3
if apt-get install "${options[@]}" "${packages[@]}" </dev/null; then
	tools_if_possible
	exit 0
fi

# QEMU's packages are of one version or none. Where qemu-utils came from another suite (backports) than apt would take the others from,
# they come from there too if apt still knows it; otherwise qemu-utils changes to theirs.
installed=$(dpkg-query -W -f '${Version}' qemu-utils 2>/dev/null || true)
candidate=$(apt-cache policy qemu-system-x86 | awk '/Candidate:/ { print $2 }')
if [ -z "$installed" ] || [ "$installed" = "$candidate" ]; then
	exit 1
fi
if apt-cache madison qemu-system-x86 | awk '{ print $3 }' | grep -qxF "$installed"; then
	version=$installed
else
	version=$candidate
fi
echo "setup: qemu-utils is $installed and qemu-system-x86 would be $candidate: installing both as $version"
pinned=()
for package in qemu-system-x86 qemu-system-common qemu-system-data qemu-utils; do
	if apt-cache madison "$package" | awk '{ print $3 }' | grep -qxF "$version"; then
		pinned+=("$package=$version")
	fi
done
apt-get install "${options[@]}" --allow-downgrades gcc libc6-dev binutils xz-utils "${pinned[@]}" </dev/null
tools_if_possible
