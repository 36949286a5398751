#!/bin/sh
# Build native/tests/test_vectors.c with the library, header and pkg-config file of a wheel, and run it: it decodes
# and encodes the golden frames.
#
# usage: check_wheel.sh WHEEL FOLDER [MACHINE]
#
# The script deletes FOLDER and unpacks the wheel there. MACHINE, such as aarch64, selects a cross compiler and an
# emulator.
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
# shellcheck disable=SC2046 # must be split into several arguments
${machine:+$machine-linux-gnu-}gcc "$program" $(pkg-config --cflags --libs codec) -lm -o "$folder/test_vectors"
${machine:+qemu-$machine -L /usr/$machine-linux-gnu} "$folder/test_vectors" "$vectors"
