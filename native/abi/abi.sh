#!/bin/sh
# abi.sh check BUILD: compare the ABI of the library in BUILD, which needs debug information, with the recorded one.
# abi.sh write BUILD: record it. `make abi` and `make abi-baseline` call these. Files of the record:
#   codec.abi      functions, and the types of their arguments
#   symbols.txt    exported symbols, of the static library too
#   constants.txt  constants of the public headers
#   imports.txt    symbols that the library may import, listed by hand: no malloc, no abort, no stdio
# Additions are recorded under the next CODEC_ABI_VERSION. Before version 0.1.0 is released, names of fields, parameters
# and constants may change: record a rename in the commit that makes it, with CODEC_ABI_VERSION unchanged, if numbers,
# types, sizes and offsets are as before. From version 0.1.0 on names are fixed, too.
set -eu
here=$(dirname "$0")
include=$here/../include
library=$2/libcodec

describe() {
	abidw --exported-interfaces-only --headers-dir "$include" --drop-private-types --no-show-locs \
		--no-comp-dir-path --no-corpus-path --no-elf-needed --no-architecture "$library.so" |
		sed "s,path='.*/native/,path='native/," >"$1/codec.abi" # on every machine the same
	nm -D --defined-only "$library.so" | awk '{ print $3 }' | sort >"$1/symbols.txt"
	sed -nE 's/^(#define |\t)(CODEC_[A-Z0-9_]+) (= )?([0-9]+)u?\>.*/\2 \4/p' "$include"/codec/*.h >"$1/constants.txt"
}

bad() {
	echo "ABI: $1" >&2
	failed=1
}

kept() {
	advice='. If programs built before still work, or this is a rename before 0.1.0: make abi-baseline, and commit the record'
	abidiff --no-added-syms "$here/codec.abi" "$1/codec.abi" || bad "functions or types are not those of codec.abi$advice"
	for file in symbols.txt constants.txt; do
		diff -u "$here/$file" "$1/$file" || bad "not what $file says$advice"
	done
	nm -g --defined-only "$library.a" | awk 'NF == 3 { print $3 }' | sort | diff -u "$1/symbols.txt" - ||
		bad 'the static library exports other names than the shared one'
}

alone() { # what the library imports is on the list
	for imports in "nm -D -u $library.so" "nm -u $library.a"; do
		$imports | awk 'NF > 1 { sub("@.*", "", $NF); print $NF }' | grep -vxFf "$here/imports.txt" &&
			bad "$imports: not in imports.txt"
	done
	return 0
}

headers() { # each alone, in every language that may include it
	for compiler in 'gcc -std=c99' 'gcc -std=c11' 'g++ -std=c++17' 'clang -std=c99' 'clang -std=c11' 'clang++ -std=c++17'; do
		case $compiler in *++*) language=c++ ;; *) language=c ;; esac
		for header in codec.h codec_engine.h; do
			$compiler -x $language -fsyntax-only -Wall -Wextra -Wpedantic -Werror -I "$include" \
				-include "codec/$header" /dev/null || bad "$compiler does not take $header alone"
		done
	done
}

case $1 in
write) describe "$here" ;;
check)
	failed=0
	now=$(mktemp -d)
	trap 'rm -r "$now"' EXIT
	describe "$now"
	kept "$now"
	alone
	headers
	exit $failed
	;;
esac
