#!/bin/sh
# abi.sh check BUILD: compare the ABI of libcodec and libcodec_cuda in BUILD with the recorded one. abi.sh write BUILD:
# record it. `make abi` and `make abi-baseline` call these. The libraries need debug information. The record of a library
# is a folder:
#   types.abi      functions, and the types of their arguments
#   symbols.txt    exported symbols
#   constants.txt  constants of the public headers
#   imports.txt    symbols that the library may import, listed by hand: no malloc, no abort, no stdio in libcodec
# Additions are recorded under the next CODEC_ABI_VERSION, or CODEC_CUDA_ABI_VERSION. Before version 0.1.0 is released,
# names, functions and types may change with the ABI version unchanged: record a change in the commit that makes it.
set -eu
here=$(dirname "$0")
native=$here/..
build=$2

select_library() { # NAME
	record=$here/$1
	archive=
	case $1 in
	codec)
		library=$build/libcodec.so archive=$build/libcodec.a
		folder=$native/include headers="codec.h codec_engine.h"
		;;
	codec_cuda)
		library=$build/cuda_api/libcodec_cuda.so
		folder=$native/cuda_api/include headers=codec_cuda.h
		;;
	esac
}

describe() { # FOLDER
	abidw --exported-interfaces-only --headers-dir "$folder" --drop-private-types --no-show-locs \
		--no-comp-dir-path --no-corpus-path --no-elf-needed --no-architecture "$library" |
		sed "s,path='.*/native/,path='native/," >"$1/types.abi" # on every machine the same
	nm -D --defined-only "$library" | awk '{ print $3 }' | sort >"$1/symbols.txt"
	for header in $headers; do
		sed -nE 's/^(#define |\t)(CODEC_[A-Z0-9_]+) (= )?([0-9]+)u?\>.*/\2 \4/p' "$folder/codec/$header"
	done >"$1/constants.txt"
}

bad() {
	echo "ABI: $1" >&2
	failed=1
}

check_record() {
	now=$(mktemp -d)
	describe "$now"
	advice='. If programs built before still work, or version 0.1.0 is not released: make abi-baseline, and commit the record'
	abidiff --no-added-syms "$record/types.abi" "$now/types.abi" || bad "functions or types are not those of $record$advice"
	for file in symbols.txt constants.txt; do
		diff -u "$record/$file" "$now/$file" || bad "not what $record/$file says$advice"
	done
	[ -z "$archive" ] ||
		nm -g --defined-only "$archive" | awk 'NF == 3 { print $3 }' | sort | diff -u "$now/symbols.txt" - ||
		bad 'the static library exports other names than the shared one'
	rm -r "$now"
}

check_imports() {
	for imports in "nm -D -u $library" ${archive:+"nm -u $archive"}; do
		$imports | awk 'NF > 1 { sub("@.*", "", $NF); print $NF }' | grep -vxFf "$record/imports.txt" &&
			bad "$imports: not in $record/imports.txt"
	done
	return 0
}

check_headers() { # each alone, in every language that may include it
	for compiler in 'gcc -std=c99' 'gcc -std=c11' 'g++ -std=c++17' 'clang -std=c99' 'clang -std=c11' 'clang++ -std=c++17'; do
		case $compiler in *++*) language=c++ ;; *) language=c ;; esac
		for header in $headers; do
			$compiler -x $language -fsyntax-only -Wall -Wextra -Wpedantic -Werror -I "$native/include" -I "$folder" \
				-include "codec/$header" /dev/null || bad "$compiler does not take $header alone"
		done
	done
}

failed=0
for name in codec codec_cuda; do
	select_library $name
	if [ "$1" = write ]; then
		describe "$record"
		continue
	fi
	check_record
	check_imports
	check_headers
done
exit $failed
