# To be sourced: with_progress TEXT COMMAND [ARGUMENT...] runs COMMAND, and every ten seconds prints TEXT and how
# long it has taken so far.

# Waits without a process of its own, which would outlive its parent and keep standard error open.
wait_seconds() { read -rt "$1" <> <(:) || :; }

with_progress() {
	local text=$1 begun=$SECONDS ticker status=0
	shift
	{ while wait_seconds 10; do echo "$text ($((SECONDS - begun)) s so far)" >&2; done; } &
	ticker=$!
	"$@" || status=$?
	kill "$ticker" 2>/dev/null || :
	wait "$ticker" 2>/dev/null || :
	return "$status"
}
