"""Headers of native/src/exact compile as C, C++ and CUDA, without fused multiply-adds or flushed subnormals."""

import platform
import re
import subprocess
from pathlib import Path

import pytest

from support.nvrtc import compile_cuda

EXACT = Path(__file__).parents[2] / "native/src/exact"
INCLUDE = EXACT.parents[1] / "include"
HEADERS = sorted(p.name for p in EXACT.glob("*.h"))
EVERYTHING = "".join(f'#include "{name}"\n' for name in HEADERS)
FUNCTION = re.compile(r"^BITS\w* (?:const )?(?:struct )?\w+ \*?(\w+)\(", re.MULTILINE)
FUNCTIONS = sorted(name for header in HEADERS for name in FUNCTION.findall((EXACT / header).read_text()))


def ptx_of(*options: str, source: str = EVERYTHING) -> str:
    """Compile a source, by default all functions of all headers, with NVRTC, and return the PTX."""
    headers = {name: (EXACT / name).read_text() for name in HEADERS}
    headers |= {"codec/codec.h": (INCLUDE / "codec/codec.h").read_text()}
    headers |= {"stdint.h": '#include "bits.h"\n', "stddef.h": "#pragma once\n"}  # NVRTC has neither
    log, ptx, _ = compile_cuda(source, headers, list(options))
    assert not log.strip()
    return ptx


ALONE = ("-default-device", "--relocatable-device-code=true", "-DBITS_FN=__device__")


@pytest.mark.nightly
def test_ptx_has_no_fused_or_approximate_instructions() -> None:
    """PTX for the oldest supported GPU has no fused multiply-add and no approximate instruction."""
    ptx = ptx_of("-arch=compute_80", "-fmad=false", *ALONE)
    missing = [name for name in FUNCTIONS if f"_Z{len(name)}{name}" not in ptx]
    assert FUNCTIONS
    assert not missing
    assert not re.findall(r"\bfma\.|\bmad\.rn|\.ftz|\.approx|\bdiv\.full", ptx), "fused, flushed or approximated"


def test_nvrtc_fuses_without_fmad_false() -> None:
    """Without -fmad=false, NVRTC fuses multiply-adds. If this test fails, the option is no longer needed."""
    assert "fma.rn" in ptx_of("-arch=compute_90", *ALONE, source='#include "round.h"\n')


@pytest.mark.parametrize("compiler", [["g++", "-std=c++17"], ["gcc", "-std=c11"]])
def test_c_and_cpp_compile_without_a_warning(compiler: list[str]) -> None:
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
        f"-I{INCLUDE}",
        "-",
    ]
    done = subprocess.run([*compiler, *options], check=False, input=EVERYTHING, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_header_compiles_alone() -> None:
    """Each header compiles without other headers and without libc."""
    for name in HEADERS:
        options = [
            "-std=c11",
            "-fsyntax-only",
            "-ffreestanding",
            "-nostdinc",
            "-isystem",
            _freestanding(),
            f"-I{INCLUDE}",
        ]
        text = f'#include "{EXACT / name}"\n'
        done = subprocess.run(["gcc", *options, "-xc", "-"], check=False, input=text, text=True, capture_output=True)
        assert (name, done.returncode, done.stderr) == (name, 0, "")


def _freestanding() -> str:
    """Return the folder of gcc's freestanding headers, such as stdint.h."""
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
def test_builds_with_other_float_semantics_are_rejected(options: list[str], refused: bool) -> None:
    """Compiler options that reorder float operations or use excess precision cause a compile error."""
    command = ["gcc", "-std=c11", "-fsyntax-only", *options, f"-I{EXACT}", f"-I{INCLUDE}", "-xc", "-"]
    said = subprocess.run(command, input=EVERYTHING, capture_output=True, text=True, check=False)
    assert ("numbers would depend on the build" in said.stderr) == refused
    assert refused or not said.returncode, said.stderr
