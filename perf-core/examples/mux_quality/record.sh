#!/bin/sh
# Records a trace for `mux_quality` from a real process: where it was, ten thousand times per second of CPU time.
#
#   record.sh NAME COMMAND [ARGS...]      writes data/NAME.csv
#
# Each row is one millisecond of the process's CPU time (ten samples of cpu-clock). Column 1 counts samples in the
# kernel. Columns 2 to 8 count samples in user space, by address: bits 14 and up, modulo 7. That makes eight events of
# one real program, with its real phases. Needs perf and awk.
#
# The recorded traces:
#   record.sh cc1    cc1 -quiet -fpreprocessed -O2 zstd_compress.i -o /dev/null     (GCC 12, zstd 1.5.7 preprocessed)
#   record.sh python python3 phases.py
set -e
name=$1
shift
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
perf record -q -e cpu-clock -F 10000 -o "$work/perf.data" -- "$@" >/dev/null
perf script -i "$work/perf.data" -F ip | awk '
function hex(s,   i, v) {
    v = 0
    for (i = 1; i <= length(s); i++) v = (v * 16 + index("0123456789abcdef", substr(s, i, 1)) - 1) % 7
    return v
}
{
    if (substr($1, 1, 8) == "ffffffff" && length($1) == 16) {
        n[0]++
    } else {
        # Address / 2^14: drop the low three hex digits and two more bits by looking at a quarter of the fourth.
        head = substr($1, 1, length($1) - 4)
        digit = index("0123456789abcdef", substr($1, length($1) - 3, 1)) - 1
        n[1 + (hex(head) * 4 + int(digit / 4)) % 7]++
    }
    if (++samples == 10) {
        print n[0] + 0 "," n[1] + 0 "," n[2] + 0 "," n[3] + 0 "," n[4] + 0 "," n[5] + 0 "," n[6] + 0 "," n[7] + 0
        split("", n)
        samples = 0
    }
}' > "$here/data/$name.csv"
wc -l "$here/data/$name.csv"
