"""Compile the kernels of libcodec_cuda by NVRTC, and write them as a C file: ``images.py OUT --archs 80 90 ptx80``.

NVRTC needs neither a GPU nor a driver. The C file embeds the machine code of each architecture, and PTX, which the
driver compiles for later architectures.
"""

import argparse
import concurrent.futures
import ctypes
import os
import re
import runpy
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parent
SOURCES = runpy.run_path(str(NATIVE.parent / "codec/engines/cuda/sources.py"))  # not imported: codec is not built yet
OPTIONS, STANDARD, DIGEST = [*SOURCES["OPTIONS"], "-diag-suppress=128"], SOURCES["HEADERS"], SOURCES["digest"]
INCLUDED = [HERE, HERE / "src", HERE / "include", NATIVE / "cuda", NATIVE / "src", NATIVE / "include"]
PACKAGES = "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"  # PyPI packages that contain NVRTC


class Image(NamedTuple):
    """Kernels compiled for an architecture, and their mangled names in the image."""

    arch: str
    data: bytes
    names: list[str]


def expressions() -> list[str]:
    """Return the name expressions of all kernels, in the order of the table in job/launch.h."""
    table = (NATIVE / "src/job/launch.h").read_text()
    return re.findall(r'^\tX\(\w+, "([^"]+)"', table, re.MULTILINE)


def find_nvrtc(given: str | None) -> ctypes.CDLL:
    """Load NVRTC: the given library, else one from a Python package, else one on the loader's path."""
    if given:
        return ctypes.CDLL(given)
    for package in PACKAGES:
        try:
            found = [f.locate() for f in files(package) or [] if re.fullmatch(r"libnvrtc\.so\.\d+", f.name)]
        except PackageNotFoundError:
            continue
        if found:
            return ctypes.CDLL(str(found[0]))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    sys.exit(f"images.py: NVRTC is not installed: pip install {PACKAGES[0]}, or pass --nvrtc=PATH/libnvrtc.so.12")


def _array(texts: list[str]) -> "ctypes.Array[ctypes.c_char_p]":
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def _output(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Return an output of a program: its log ("ProgramLog"), machine code ("CUBIN") or "PTX"."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data.raw


def compile_image(arch: str, nvrtc_path: str | None) -> Image:
    """Compile all kernels for an architecture: "90" compiles machine code, "ptx80" compiles PTX."""
    nvrtc, program, kernels = find_nvrtc(nvrtc_path), ctypes.c_void_p(), expressions()
    is_ptx, number = arch.startswith("ptx"), arch.removeprefix("ptx")
    options = [*OPTIONS, f"-arch={'compute' if is_ptx else 'sm'}_{number}", *(f"-I{folder}" for folder in INCLUDED)]
    headers = len(STANDARD), _array(list(STANDARD.values())), _array(list(STANDARD))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), b'#include "kernels/all.cu"\n', b"codec_cuda.cu", *headers)
    for kernel in kernels:
        nvrtc.nvrtcAddNameExpression(program, kernel.encode())
    if nvrtc.nvrtcCompileProgram(program, len(options), _array(options)):
        sys.exit(f"images.py: NVRTC cannot compile for {arch}:\n{_output(nvrtc, program, 'ProgramLog').decode()}")
    names = []
    for kernel in kernels:
        name = ctypes.c_char_p()
        if nvrtc.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(name)) or not name.value:
            sys.exit(f"images.py: no kernel {kernel}")
        names.append(name.value.decode())
    image = Image(arch, _output(nvrtc, program, "PTX" if is_ptx else "CUBIN"), names)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image


EMBED = """__asm__(".pushsection .rodata\\n.balign 16\\n.globl {symbol}\\n.hidden {symbol}\\n"
	"{symbol}:\\n.incbin \\"{path}\\"\\n.byte 0\\n.popsection");
extern const unsigned char {symbol}[];
"""


def write_images(out: Path, images: list[Image]) -> None:
    """Write images.c, and the image files that it embeds, into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    text, table = '/* images.c - written by images.py. */\n#include "images.h"\n\n', []
    for image in images:
        path, symbol = out / f"{image.arch}.image", f"codec_cuda_image_{image.arch}"
        path.write_bytes(image.data)
        text += EMBED.format(symbol=symbol, path=path.resolve())
        is_ptx = image.arch.startswith("ptx")
        table.append(f"\t{{{image.arch.removeprefix('ptx')}, {int(is_ptx)}, {symbol}, {len(image.data)}}},\n")
    names = "".join(f'\t"{name}",\n' for name in images[0].names)
    text += f"\nconst struct image codec_cuda_images[] = {{\n{''.join(table)}\t{{0, 0, NULL, 0}},\n}};\n"
    text += f"const char *const codec_cuda_names[] = {{\n{names}}};\n"
    (out / "images.c").write_text(f'{text}const char codec_cuda_sources[] = "{DIGEST()}";\n')


def main() -> None:
    """Compile the kernels for all architectures in parallel, and write images.c."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of images.c and the files that it embeds")
    parser.add_argument("--archs", nargs="+", default=["90"], help="numbers such as 90, and ptx80 for PTX")
    parser.add_argument("--nvrtc", help="path of NVRTC's library")
    given = parser.parse_args()
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        images = list(pool.map(compile_image, given.archs, [given.nvrtc] * len(given.archs)))
    write_images(given.out, images)
    for image in images:
        print(f"{image.arch}: {len(image.data) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
