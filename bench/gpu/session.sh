#!/bin/bash
# Tests and figures of the CUDA engine on a machine with a GPU, where nothing can be installed from a network.
#
#     make gpu-bundle                                  # on any machine: the wheels, in build/gpu-bundle
#     OUT=results bash bench/gpu/session.sh tests table    # on the machine with the GPU, in a copy of this folder
#
# The machine needs a Python (GPU_PYTHON, python3) with CuPy, pytest, hypothesis, ml_dtypes and PyTorch. Parts:
#   tests      the tests on the GPU, in 8 processes       stress     thousands of blocks, graphs, streams, torch
#   table      bench/gpu/throughput.py, with its peers    profile    five kernels under ncu
#   sanitizer  a selection of tests under compute-sanitizer
# Each part ends within 8 minutes, and writes its output to $OUT (build/gpu-session) as it goes.
set -u
PYTHON=${GPU_PYTHON:-python3}
OUT=${OUT:-build/gpu-session}
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
mkdir -p "$OUT"
$PYTHON -m pip install -q --no-index --no-deps --no-compile --target "$SITE" build/gpu-bundle/*.whl || exit 1
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
PYTEST="$PYTHON -P -m pytest -m gpu -W default -p no:cacheprovider --timeout 120 --timeout-method thread"

part() { # NAME SECONDS COMMAND...: run a command or function for a limited time, with its output in a file
	local name=$1 limit=$2 begin=$SECONDS
	shift 2
	timeout -k 10 "${LIMIT:-$limit}" bash -c '"$@"' "$name" "$@" 2>&1 | tee "$OUT/$name.log" | tail -n "${LINES_SHOWN:-60}"
	echo "== $name: status ${PIPESTATUS[0]}, $((SECONDS - begin)) s"
}

about() {
	nvidia-smi
	$PYTHON -c 'import sys, numpy, cupy, codec
print(sys.version, "numpy", numpy.__version__, "cupy", cupy.__version__, codec.engines())'
}

# The kernels of one encode and decode of each case
profile() {
	local case i=0
	for case in "Lossless bfloat16, offsets" "Lossless float32, offsets" "Float8" "Sign" "Truncate, AdamW"; do
		i=$((i + 1))
		timeout -k 5 60 ncu --clock-control none --section SpeedOfLight --section WarpStateStats \
			--section MemoryWorkloadAnalysis --section LaunchStats --section Occupancy --section SchedulerStats \
			--kernel-name 'regex:choose|scale|encode|close|decode' -c 8 --kill yes \
			"$PYTHON" -P bench/gpu/throughput.py --only "$case" --values "${VALUES:-26}"
	done
}

sanitizer() {
	local tool
	for tool in memcheck racecheck synccheck; do
		CODEC_NVRTC_OPTIONS=-lineinfo compute-sanitizer --tool "$tool" --launch-timeout 300 --print-limit 20 \
			--error-exitcode 1 $PYTEST tests/engines/test_cuda_codecs.py tests/engines/test_cuda_frames.py --timeout 400 \
			-k "few or by_hand"
	done
}
export -f about profile sanitizer
export OUT PYTHON PYTEST

for name in "$@"; do
	case $name in
	about | profile) part $name 300 $name ;;
	warmup) part warmup 180 "$PYTHON" -P -c 'import codec; codec.warmup(options=codec.options(engine="cuda"))' ;;
	tests) part tests 480 $PYTEST -n "${PROCESSES:-8}" --maxfail 40 \
		tests/engines/test_cuda{,_c,_c_errors,_c_frames,_calls,_codecs,_frames,_memory}.py ;;
	stress) part stress 300 $PYTEST -n 4 --maxfail 40 --durations 8 tests/engines/test_cuda_gpu.py ;;
	table) part table 480 "$PYTHON" -P bench/gpu/throughput.py ;;
	sanitizer) part sanitizer 480 sanitizer ;;
	*) echo "unknown part: $name" >&2 && exit 2 ;;
	esac
done
