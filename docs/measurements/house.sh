#!/bin/sh
# For each crate: lines of source without tests, its longest file and its longest function, and how many
# errors are a String. Run at the root of a tree; house.md has what it says.
count() {
	find "$1/src" -name '*.rs' ! -name tests.rs ! -path '*/tests/*' ! -path '*/testing/*' | sort | xargs awk -v crate="$1" '
		FNR == 1 { tests = 0; name = "" }
		/^#\[cfg\((all\()?test/ { tests = 1 }
		{ if (FNR > file) { file = FNR; file_name = FILENAME } }
		tests { if ($0 == "}") tests = 0; next }
		{ lines++ }
		/Result<[^;{]*, *String>/ { strings++ }
		# A function ends with the brace in the column where it begins.
		match($0, /^ *(pub(\([a-z]+\))? )?((const|unsafe|async) )*fn [a-z_0-9]+/) && !/[;}]$/ {
			begin = FNR; name = substr($0, 1, RLENGTH); sub(/.*fn /, "", name)
			indent = $0; sub(/[^ ].*/, "", indent)
		}
		name != "" && $0 == indent "}" {
			if (FNR - begin + 1 > long) { long = FNR - begin + 1; long_name = name " in " FILENAME }
			name = ""
		}
		END {
			sub(crate "/src/", "", file_name); sub(crate "/src/", "", long_name)
			printf "%s: %d lines; %d in %s; %d of %s; %d\n", crate, lines, file, file_name, long, long_name, strings
		}'
}
for manifest in $(find . -name Cargo.toml ! -path './target/*' ! -path '*/fuzz/*' ! -path './guest-images/*/*' | sort); do
	crate=$(dirname "$manifest" | sed 's|^\./||')
	[ -d "$crate/src" ] && count "$crate"
done
