#!/bin/bash
# source.sh VERSION OUTPUT: the source archive, compressed as OUTPUT's name says: what is committed, with the bare-metal guests compiled, so
# that building it needs no C compiler. The same commit and compiler give the same bytes.
set -euo pipefail
version=$1 output=$(realpath -m "$2")
root=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
name=perfvisor-$version
umask 022
if ! commit=$(git -C "$root" rev-parse --verify -q HEAD); then
	echo "source: $root is no checkout: the archive is made of what git has committed"
	exit 1
fi
[ -z "$(git -C "$root" status --porcelain --untracked-files=no)" ] || echo "source: without changes that are not committed"
git -C "$root" archive --prefix="$name/" "$commit" | tar -C "$work" -x

# This part of the build script is what compiles them in any build, and it is a program of its own.
mkdir "$work/out"
rustc --edition 2024 -o "$work/build-guests" "$work/$name/guest-images/build/guests.rs"
CARGO_MANIFEST_DIR=$work/$name/guest-images OUT_DIR=$work/out PROFILE=release "$work/build-guests" >"$work/said" || { cat "$work/said"; exit 1; }
install -d "$work/$name/guest-images/prebuilt"
install -m 0644 "$work"/out/*.elf "$work/out/sources.fnv1a" "$work/$name/guest-images/prebuilt/"
{ "${GUEST_CC:-gcc}" --version | head -n 1; "${GUEST_LD:-ld}" --version | head -n 1; } >"$work/$name/guest-images/prebuilt/compiled-by"

mkdir -p "$(dirname "$output")"
# One thread: several would put blocks into the archive.
XZ_OPT="-T1 -6" tar -C "$work" --format=gnu --owner=0 --group=0 --numeric-owner --sort=name \
	--mtime="@$(git -C "$root" show -s --format=%ct "$commit")" -caf "$output" "$name"
