#!/bin/sh
# deb.sh BINARY AGENT VERSION OUTPUT: a Debian package of BINARY and the guest's AGENT, which must be static, as the package depends on no
# library.
set -eu
binary=$1 agent=$2 version=$3 output=$4
here=$(dirname "$0")
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 0755 "$root"
"$here/stage.sh" "$binary" "$agent" "$root"
mkdir "$root/DEBIAN"
cat >"$root/DEBIAN/control" <<CONTROL
Package: perfvisor
Version: $version
Architecture: amd64
Maintainer: The Perfvisor Authors
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Section: admin
Priority: optional
Suggests: linux-perf, virtiofsd
Description: VMM with a virtual performance monitoring unit
 Perfvisor runs virtual machines whose perf works, also on hosts that have no
 PMU, and counts, samples and profiles them from outside without an agent.
CONTROL
install -m 0755 "$here/postinst" "$root/DEBIAN/postinst"
dpkg-deb --root-owner-group -Zxz --build "$root" "$output" >/dev/null
