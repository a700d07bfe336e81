#!/bin/sh
# stage.sh BINARY AGENT DIRECTORY: lays out under DIRECTORY/usr and DIRECTORY/etc what an installed Perfvisor has. Manual pages and
# completions are what the binary itself prints, so that they fit it.
set -eu
binary=$1 agent=$2 root=$3
here=$(dirname "$0")
share=$root/usr/share
for program in "$binary" "$agent"; do
	if readelf -lW "$program" | grep -q INTERP; then
		echo "stage: $program needs libraries, which a package of it does not name; make build builds one that needs none"
		exit 1
	fi
done
install -D -m 0755 "$binary" "$root/usr/bin/perfvisor"
install -d "$root/etc/perfvisor" "$share/man/man1" "$share/bash-completion/completions" "$share/zsh/vendor-completions" \
	"$share/fish/vendor_completions.d"
"$binary" generate --man "$share/man/man1"
"$binary" generate --completions bash >"$share/bash-completion/completions/perfvisor"
"$binary" generate --completions zsh >"$share/zsh/vendor-completions/_perfvisor"
"$binary" generate --completions fish >"$share/fish/vendor_completions.d/perfvisor.fish"
gzip -9n "$share"/man/man1/*.1
# What perfvisor exec and cp need in a guest.
install -D -m 0755 "$agent" "$root/usr/lib/perfvisor/perfvisor-agent"
install -D -m 0644 "$here/../vmm/guest-agent/perfvisor-agent.service" "$root/usr/lib/perfvisor/perfvisor-agent.service"
for unit in perfvisor@.service perfvisor-exporter.service; do
	install -D -m 0644 "$here/$unit" "$root/usr/lib/systemd/system/$unit"
done
install -D -m 0644 "$here/sysusers.conf" "$root/usr/lib/sysusers.d/perfvisor.conf"
install -D -m 0644 "$here/tmpfiles.conf" "$root/usr/lib/tmpfiles.d/perfvisor.conf"
doc=$share/doc/perfvisor
install -D -m 0644 "$here/example.toml" "$doc/examples/demo.toml"
for page in README.md CHANGELOG.md CONTRIBUTING.md MAINTAINERS.md SECURITY.md; do
	install -m 0644 "$here/../$page" "$doc/$page"
done
# The pages, event files and dashboard that README, pages and messages name.
(cd "$here/.." && find docs -type f) | while read -r page; do
	install -D -m 0644 "$here/../$page" "$doc/$page"
done
install -m 0644 "$here/copyright" "$doc/copyright"
gzip -9nc "$here/../CHANGELOG.md" >"$doc/changelog.gz"
chmod 0644 "$doc/changelog.gz"
