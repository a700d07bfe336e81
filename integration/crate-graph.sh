#!/bin/sh
# Prints the dependencies between the crates of the product as a Mermaid graph, without those that
# follow from others. `make graph` runs it; docs/architecture.md has the result.
set -e
cd "$(dirname "$0")/.."
echo "graph TD"
"${CARGO:-cargo}" tree --workspace --offline --edges normal --depth 1 --no-dedupe \
    --prefix depth --format ' {p}' | awk '
    # Lines are DEPTH NAME VERSION, and (PATH) for the crates of this workspace.
    $2 ~ /^(comparisons|integration|lab-agent|test-support)$/ { product = 0; next }
    $1 == 0 { product = 1; from = $2; crates[from]; next }
    product && $4 ~ /^\(\// { direct[from, $2]; reaches[from, $2] }
    END {
        for (via in crates) for (a in crates) for (b in crates)
            if ((a, via) in reaches && (via, b) in reaches) reaches[a, b]
        for (edge in direct) {
            split(edge, end, SUBSEP)
            implied = 0
            for (via in crates)
                if ((end[1], via) in reaches && (via, end[2]) in reaches) implied = 1
            if (!implied) print "    " end[1] " --> " end[2]
        }
    }' | LC_ALL=C sort
