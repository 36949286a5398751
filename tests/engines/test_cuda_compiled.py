"""CUDA kernels run under sanitizers, NVRTC compiles them within limits, and the emulation detects injected faults."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import codec
from codec.engines.cuda import kernels
from codec.engines.cuda.kernels import FILES, KERNELS
from codec.engines.cuda.workspace import pointer
from support.device import ROOT, LaunchError, build, compile_kernels, launch
from support.tiers import NIGHTLY

TESTS = ROOT / "tests/engines"

ALL_REGISTERS, ALL_SHARED = 65_536, 164 << 10  # registers and bytes of shared memory per multiprocessor, A100 or later
MORE_SHARED = {"lossless/encode_fast": 228 << 10}  # bytes on an H100; an A100 holds one thread block less
STACK = 300  # maximum stack per thread in bytes; the driver reserves it for all threads
SPILLS = 80  # maximum bytes of spilled registers per thread, mostly around calls made once per block
MORE_SPILLS = {
    "lossless/encode_fast": 180,
    "lossless/decode_fast2": 500,
    "lossless/decode_fast4": 360,
}  # maximum bytes of spills by file; these spills are outside of loops
CODE = {  # minimum machine code in kB per kernel of a file; less means that the compiler dropped code as unreachable
    "lossless/choose": 120,
    "rows/choose": 45,
    "truncate/choose": 110,
    "lossless/encode_fast": 180,
    "lossless/encode": 75,
    "rows/encode": 80,
    "truncate/encode": 95,
    "frame/close": 25,
    "lossless/decode": 70,
    "lossless/decode_fast2": 100,
    "lossless/decode_fast4": 100,
    "rows/decode": 65,
    "rows/reduce": 45,
    "truncate/decode": 70,
    "delta/encode": 65,
    "delta/decode": 80,
    "frame/decode_stored": 20,
}
# Minimum number of PTX instructions by file. If a file has fewer, the compiler has not unrolled the loops over whole
# rows by a factor of 8. The factors are the number of loops, of rows, and of loads, stores or roundings per row. Three
# loops encode, three decode, and one more decodes without storing. For Quantize and Ternary, roundings of 8 values are
# counted, too; for small groups of Float8, stores of codes and conversions of pairs of codes, in the loops for float32
# and for 16-bit dtypes.
LOOPS = {
    "rows/encode": {"add.rz.f32": 8 * 3 * (4 + 2 * 2), "fma.rz.f32": 8 * 2, "st.global.v2.u32": 4 * (2 + 1)},
    "rows/decode": {
        "ld.shared.f32": 7 * 8 * 4,
        "st.global.v4.f32": 7 * 8,
        "cvt.rn.f16x2.e4m3x2": 2 * 8 * 2 * 2 + 8 * 2,
    },
    "lossless/encode_fast": {
        "ld.global.cs.v2.u32": 3 * (4 + 8),
        "ld.global.cs.v4.u32": 3 * (2 + 8),
        "st.global.cs.u32": 3 * 8 * (1 + 3),
        "st.shared.u32": 3 * 8 * 2,
        "st.shared.u8": 4 * (2 + 4),  # stores in put_raw, for each plane of the kernels
    },
    "lossless/encode": {"st.shared.u8": 4 * (1 + 2 + 4 + 8)},
    "lossless/decode_fast2": {"ld.global.cs.u32": 4 * 8, "st.global.cs.v2.u32": 3 * 8, "ld.shared.u32": 4 * 8 * 2},
    "lossless/decode_fast4": {"ld.global.cs.u32": 12 * 8, "st.global.cs.v4.u32": 3 * 8, "ld.shared.u32": 4 * 8 * 2},
}
FUSED = ("rows/encode", "rows/decode", "rows/reduce")  # files whose kernels use fused multiply-adds explicitly


def test_undefined_behaviour_of_a_launch_is_reported(tmp_path):
    """Undefined behaviour in a launch is an error that names the thread and the source line."""
    source = tmp_path / "wrong.cc"
    source.write_text(
        '#include "cuda_on_cpu.h"\n'
        "void diverges(uint32_t *x) { if (threadIdx.x % 2) x[0] = __ballot_sync(~0u, 1); }\n"
        "void outside(uint32_t *x) { if (threadIdx.x < 16) x[0] = __shfl_sync(0xffffu, 1u, 20); }\n"
        "void alien(uint32_t *x) { x[0] = __ballot_sync(1u, 1); }\n"
        "void barrier(uint32_t *x) { if (threadIdx.x) __syncthreads(); x[0] = 1; }\n"
        "void fine(uint32_t *x) { x[threadIdx.x] = __shfl_xor_sync(~0u, threadIdx.x, 1); __syncthreads(); }\n"
        + "".join(
            f"CUDA_ON_CPU_EXPORT({name}, {name})\n" for name in ("diverges", "outside", "alien", "barrier", "fine")
        )
    )
    wrong, x = build(source), np.zeros(64, np.uint32)
    for kernel, said in (
        ("diverges", "waiting for ever: thread 1 vote in line 2"),
        ("outside", "shuffle from outside of the mask in line 3"),
        ("alien", "thread 1 is not in its own mask in line 4"),
        ("barrier", "waiting for ever: thread 1 __syncthreads in line 5"),
    ):
        with pytest.raises(LaunchError, match=said):
            launch(wrong, kernel, (1, 1), 64, pointer(x.ctypes.data))
    launch(wrong, "fine", (1, 1), 64, pointer(x.ctypes.data))
    assert (x == np.arange(64) ^ 1).all()


@pytest.mark.nightly
def test_no_access_is_out_of_range(tmp_path):
    """Address and undefined-behaviour sanitizers find no error when kernels decode damaged and hand-made frames."""
    asan, ubsan = (
        subprocess.run(["gcc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True).stdout
        for name in ("asan", "ubsan")
    )
    env = {
        **os.environ,
        "CUDA_ON_CPU_FLAGS": "-fsanitize=address,undefined -fno-sanitize-recover=all",
        "LD_PRELOAD": f"{asan.strip()} {ubsan.strip()}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    some = "batches_of_different or hostile or by_hand or golden or few_values or rows_whose_scales"
    files = [str(TESTS / f"test_cuda_{part}.py") for part in ("codecs", "frames", "memory")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files, "-k", some]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout


FEWER = [  # outside nightly tests: files that compile in at most 3 s, one of them with unrolled loops
    "frame/gather",
    "lossless/decode_fast4",
    "topk/decode",
    "frame/decode_stored",
]


@pytest.mark.parametrize("file", FILES if NIGHTLY else FEWER)
def test_nvrtc_compiles_every_kernel(file):
    """NVRTC compiles each kernel completely, within limits of stack, spills, registers and shared memory.

    No instruction rounds differently from a CPU's.
    """
    log, ptx, code_nbytes = compile_kernels(file, "sm_90")
    threads, resident = KERNELS[FILES[file][0]].threads, {name: KERNELS[name].resident for name in FILES[file]}
    pattern = (
        r"entry function '([\w<>]+)'",
        r"(\d+) bytes spill stores",
        r"Used (\d+) registers(?:.* (\d+) bytes smem)?",
    )
    found = re.findall("(?s:.*?)".join(pattern), log)
    assert {name for name, *_ in found} == set(resident)
    for name, spilled, registers, shared in found:
        assert int(spilled) <= MORE_SPILLS.get(file, SPILLS), name
        assert code_nbytes[name] >= 1000 * CODE.get(file, 0), name
        assert int(registers) * threads * resident[name] <= ALL_REGISTERS, name
        assert (int(shared or 0) + 1024) * resident[name] <= MORE_SHARED.get(file, ALL_SHARED), (
            name
        )  # CUDA reserves 1 KiB of shared memory per block
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", log))) <= MORE_SPILLS.get(file, SPILLS), "functions"
    assert max(map(int, re.findall(r"(\d+) bytes stack frame", log))) <= STACK
    assert all(ptx.count(f"{instruction} ") >= n for instruction, n in LOOPS.get(file, {}).items())
    if file in FUSED:
        ptx = re.sub(r"fma\.r[nz]\.f32", "", ptx)
    assert not re.findall(r"\bfma\.|\bmad\.rn|\.ftz|\.approx|\bdiv\.full", ptx), "fused, flushed or approximated"


ARCHS = ("sm_80", "sm_100", "sm_120")
SOME = [
    ("frame/close", "sm_80"),
    ("frame/gather", "sm_100"),
    ("frame/check_finite", "sm_120"),
]  # the kernels that compile fastest, outside nightly tests
ALL = [(file, arch) for file in FILES for arch in ARCHS]


@pytest.mark.parametrize(("file", "arch"), ALL if NIGHTLY else SOME)
def test_cached_machine_code(file, arch, tmp_path, monkeypatch):
    """The engine compiles each kernel once, and again if the cached file is damaged."""
    monkeypatch.setenv("CODEC_CACHE_DIR", str(tmp_path / "made"))
    wanted = KERNELS[FILES[file][-1]].compiled_with()
    code = kernels.compiled(file, wanted, arch)
    assert code.image.startswith(b"\x7fELF")
    assert code.names.keys() == set(wanted)
    assert all(name.encode() in code.image for name in code.names.values())
    with monkeypatch.context() as m:
        m.setattr(kernels, "_compile", lambda *_: pytest.fail("compiled again"))
        assert kernels.compiled(file, wanted, arch) == code
    if file == "frame/close":
        [path] = (tmp_path / "made").iterdir()
        for damaged in (path.read_bytes()[:-1], b"", b"\n\n\n"):
            path.write_bytes(damaged)
            assert kernels.compiled(file, wanted, arch) == code
        monkeypatch.setenv("CODEC_CACHE_DIR", "/dev/null/nowhere")
        assert kernels.compiled(file, wanted, arch) == code


def test_compile_errors_are_engine_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("CODEC_CACHE_DIR", str(tmp_path))
    with pytest.raises(codec.EngineError, match=r"cannot compile frame/close.cu for sm_19: nvrtc: error"):
        kernels.compiled("frame/close", ("close_frame",), "sm_19")
    assert not list(tmp_path.iterdir())


def test_every_kernel_is_listed():
    sources = ROOT / "native/cuda"
    assert {str(path.relative_to(sources).with_suffix("")) for path in sources.rglob("*.cu")} == FILES.keys()
