#!/bin/bash
# without-gcc.sh ARCHIVE DIRECTORY: builds the program from the source archive where there is no compiler but Rust's, no assembler and no
# linker but Rust's own, and says so. Rust calls `cc` to link; here that is a script that links with rust-lld and refuses all else. What it
# links with is the C library's (libc6-dev) and libgcc_s.so.1, which every program of Rust for Linux with glibc needs. The tools are hidden
# in a mount namespace of this process only. Needs root. DIRECTORY keeps what is built.
set -euo pipefail
archive=$(realpath "$1") directory=$(realpath -m "$2")
here=$(realpath "$0")
if [ "${3:-}" != inside ]; then
	if [ "$(id -u)" != 0 ] || ! unshare -m true 2>/dev/null; then
		echo "without-gcc: SKIPPED, nothing was tried: it needs root and unshare(1)"
		exit 0
	fi
	exec unshare -m "$here" "$archive" "$directory" inside
fi

sysroot=$(rustc --print sysroot)
rust_lld=$sysroot/lib/rustlib/x86_64-unknown-linux-gnu/bin/gcc-ld/ld.lld
[ -x "$rust_lld" ] || { echo "without-gcc: SKIPPED, nothing was tried: no rust-lld in $sysroot"; exit 0; }
libraries=$(dirname "$(find /usr/lib/x86_64-linux-gnu /usr/lib64 -maxdepth 1 -name crt1.o 2>/dev/null | head -n 1)")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin" "$work/lib"
ln -s "$(ldconfig -p | sed -n 's/^\tlibgcc_s.so.1 .*x86-64.* => //p' | head -n 1)" "$work/lib/libgcc_s.so"
cat >"$work/bin/cc" <<CC
#!/bin/bash
# What rustc gives to \`cc\` to link, for rust-lld. All else is refused.
begin=$libraries/Scrt1.o loader="-dynamic-linker /lib64/ld-linux-x86-64.so.2"
arguments=()
while [ \$# -gt 0 ]; do
	case "\$1" in
	-c | -S | -E | -M* | *.c | *.s | *.S | *.cc | *.cpp) echo "cc: refused: \$*" | tee -a "$work/refused" >&2; exit 1 ;;
	-m64 | -nodefaultlibs | -nostartfiles | -fuse-ld=* | -B* | -pie) ;;
	-shared) begin="" loader=""; arguments+=(-shared) ;;
	-no-pie) begin=$libraries/crt1.o ;;
	-Wl,*) IFS=, read -ra given <<<"\${1#-Wl,}"; arguments+=("\${given[@]}") ;;
	*) arguments+=("\$1") ;;
	esac
	shift
done
echo >>"$work/links"
exec "$rust_lld" -m elf_x86_64 --eh-frame-hdr \$([ -z "\$begin" ] || echo -pie) \$loader \$begin "$libraries/crti.o" -L"$work/lib" -L"$libraries" \\
	"\${arguments[@]}" "$libraries/crtn.o"
CC
chmod +x "$work/bin/cc"

# Hidden: all that compiles, assembles or links.
hidden=0
for tool in /usr/bin/*gcc* /usr/bin/*g++* /usr/bin/*clang* /usr/bin/{cc,c++,cpp,c89,c99,as,ld,tcc} /usr/bin/ld.{bfd,gold,lld*} /usr/bin/*linux-gnu-{as,ld,cpp}* \
	/usr/bin/{cmake,nasm,yasm,pkg-config}; do
	tool=$(realpath -e "$tool" 2>/dev/null) || continue
	[ ! -f "$tool" ] || { mount --bind /dev/null "$tool"; hidden=$((hidden + 1)); }
done
[ ! -d /usr/lib/gcc ] || mount -t tmpfs none /usr/lib/gcc
for tool in gcc cc as ld; do
	! "$tool" --version >/dev/null 2>&1 || { echo "without-gcc: $tool still runs"; exit 1; }
done

tar -C "$work" -xf "$archive"
cd "$work"/perfvisor-*
source=$PWD
# Empty flags replace those of .cargo/config.toml: the linker here makes dynamic programs.
env -u GUEST_CC -u GUEST_LD -u GUEST_ELF_DIR RUSTFLAGS= PATH="$work/bin:$PATH" CARGO_TARGET_DIR="$directory" \
	cargo build --locked -p perfvisor --config profile.dev.debug=false
[ ! -e "$work/refused" ] || { echo "without-gcc: more than a link was asked of cc: $(cat "$work/refused")"; exit 1; }
program=$directory/x86_64-unknown-linux-gnu/debug/perfvisor
"$program" --version
for guest in "$source"/guest-images/prebuilt/*.elf; do
	built=$(ls -t "$directory"/x86_64-unknown-linux-gnu/debug/build/guest-images-*/out/"$(basename "$guest")" | head -n 1)
	cmp "$guest" "$built"
done
echo "without-gcc: built with $hidden tools hidden: $(wc -l <"$work/links") links by rust-lld, and nothing compiled but by rustc"
