"""The exact headers are one text for C, C++ and GPUs: NVRTC must take them, and must neither fuse nor flush."""

import platform
import re
import subprocess
from pathlib import Path

import pytest

from support.nvrtc import compile_cuda

EXACT = Path(__file__).parents[2] / "native/src/exact"
HEADERS = sorted(p.name for p in EXACT.glob("*.h"))
EVERYTHING = "".join(f'#include "{name}"\n' for name in HEADERS)
FUNCTION = re.compile(r"^BITS\w* (?:const )?(?:struct )?\w+ \*?(\w+)\(", re.MULTILINE)
FUNCTIONS = sorted(name for header in HEADERS for name in FUNCTION.findall((EXACT / header).read_text()))


def ptx_of(*options: str, source: str = EVERYTHING) -> str:
    """PTX of all functions of all headers: other files might call them, so that each is there."""
    log, ptx = compile_cuda(source, {name: (EXACT / name).read_text() for name in HEADERS}, list(options))
    assert not log.strip()
    return ptx


ALONE = ("-default-device", "--relocatable-device-code=true", "-DBITS_FN=__device__")


def test_a_gpu_computes_as_a_cpu_does() -> None:
    """The least GPU that there may be; tests/engines/test_cuda.py has the kernels for another."""
    ptx = ptx_of("-arch=compute_80", "-fmad=false", *ALONE)
    missing = [name for name in FUNCTIONS if f"_Z{len(name)}{name}" not in ptx]
    assert FUNCTIONS
    assert not missing
    assert not re.findall(r"\bfma\.|\bmad\.rn|\.ftz|\.approx|\bdiv\.full", ptx), "fused, flushed or approximated"


def test_why_that_option_is_needed() -> None:
    """Without it products and sums become one operation: were this to end, the option could go."""
    assert "fma.rn" in ptx_of("-arch=compute_90", *ALONE, source='#include "round.h"\n')


@pytest.mark.parametrize("compiler", [["g++", "-std=c++17"], ["gcc", "-std=c11"]])
def test_c_and_cpp_take_them_without_a_warning(compiler: list[str]) -> None:
    language = "c++" if compiler[0] == "g++" else "c"
    options = [
        "-x",
        language,
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        f"-I{EXACT}",
        "-",
    ]
    done = subprocess.run([*compiler, *options], check=False, input=EVERYTHING, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_stands_alone() -> None:
    """No header leans on one that happens to be included before it, nor on libc."""
    for name in HEADERS:
        options = ["-std=c11", "-fsyntax-only", "-ffreestanding", "-nostdinc", "-isystem", _freestanding()]
        text = f'#include "{EXACT / name}"\n'
        done = subprocess.run(["gcc", *options, "-xc", "-"], check=False, input=text, text=True, capture_output=True)
        assert (name, done.returncode, done.stderr) == (name, 0, "")


def _freestanding() -> str:
    """Where gcc keeps the headers that need no libc, stdint.h among them."""
    return subprocess.run(
        ["gcc", "-print-file-name=include"], text=True, capture_output=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ([], False),
        (["-ffast-math"], True),
        (["-m32", "-ffreestanding", "-march=i686"], True),
        (["-m32", "-ffreestanding", "-msse2", "-mfpmath=sse"], False),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are its compiler's options")
def test_builds_that_compute_otherwise_are_refused(options: list[str], refused: bool) -> None:
    """What may reorder floats, or has more bits than they do."""
    command = ["gcc", "-std=c11", "-fsyntax-only", *options, f"-I{EXACT}", "-xc", "-"]
    said = subprocess.run(command, input=EVERYTHING, capture_output=True, text=True, check=False)
    assert ("numbers would depend on the build" in said.stderr) == refused
    assert refused or not said.returncode, said.stderr
