#!/bin/sh
# Decode and encode the golden frames with the library, the header and the pkg-config file that a wheel holds.
#
# usage: check_wheel.sh WHEEL FOLDER [MACHINE]
#
# FOLDER is replaced by the files of the wheel. MACHINE (aarch64) names the compiler and emulator of another machine.
set -eu
wheel=$1
folder=$2
machine=${3:-}
vectors=$(dirname "$0")/../vectors
program=$(dirname "$0")/../../native/tests/test_vectors.c

rm -rf "$folder"
mkdir -p "$folder"
folder=$(realpath "$folder")
python3 -m zipfile -e "$wheel" "$folder"
export PKG_CONFIG_PATH="$folder/codec/lib/pkgconfig"
# shellcheck disable=SC2046 # several arguments
${machine:+$machine-linux-gnu-}gcc "$program" $(pkg-config --cflags --libs codec) -lm -o "$folder/test_vectors"
${machine:+qemu-$machine -L /usr/$machine-linux-gnu} "$folder/test_vectors" "$vectors"
