#!/bin/sh
# abi.sh check|write BUILD - what programs built against libcodec rely on, of the library in BUILD, which has debug
# information. Beside this file stand
#   codec.abi      functions, and the types that they lead to
#   symbols.txt    what is exported, by the static library too
#   constants.txt  numbers in the public headers
#   imports.txt    all that the library may ask of others, written by hand: no malloc, no abort, no stdio
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
	advice='. If all programs built before work with it as they did: make abi-baseline, and commit what that writes'
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
