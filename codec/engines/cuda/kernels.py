"""The kernels of ``native/cuda``, and their machine code: compiled once for an architecture, then kept on disk.

NVRTC is called as it is: CuPy's own way to compile sources would flush subnormals.
"""

import functools
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from codec._c import PACKAGE
from codec.engines.cuda.cache import load_cached, store_cached
from codec.errors import EngineError

_SIZES, _ROWS = (1, 2, 4, 8), (2, 3, 4, 5, 6)  # bytes of a value; codecs of rows


class File(NamedTuple):
    """Kernels of one ``.cu`` file."""

    threads: int  # of a block
    kernels: dict[str, int]  # and how many blocks a multiprocessor is given: as many as its registers let it have

    def alone(self, kernel: str) -> tuple[str, ...]:
        """What is compiled when one of them is wanted: of a template nothing else."""
        return (kernel,) if kernel.endswith(">") else tuple(self.kernels)


def _each(template: str, arguments: tuple[int, ...], resident: int) -> dict[str, int]:
    return {f"{template}<{n}>": resident for n in arguments}


FILES = {
    "frame/gather": File(256, {"gather": 4}),
    "frame/check_finite": File(256, {"check_finite": 4}),
    "frame/preprocess": File(256, {"preprocess": 4}),
    "lossless/choose": File(256, {"choose_lossless": 2}),
    "rows/choose": File(256, {"choose_rows": 2, "scale_rows": 2}),
    "truncate/choose": File(256, {"choose_truncate": 2}),
    "lossless/encode": File(128, _each("encode_lossless", _SIZES, 4)),
    "rows/encode": File(128, _each("encode_rows", _ROWS, 4)),
    "truncate/encode": File(128, {"encode_truncate": 4}),
    "frame/close": File(256, {"close_frame": 4}),
    "lossless/decode": File(128, _each("decode_lossless", _SIZES[:3], 4) | _each("decode_lossless", _SIZES[3:], 3)),
    "rows/decode": File(128, _each("decode_rows", _ROWS, 6)),
    "rows/reduce": File(128, _each("reduce_rows", _ROWS, 4)),
    "truncate/decode": File(128, {"decode_truncate": 4}),
    "frame/decode_stored": File(128, {"decode_stored": 4}),
}
FILE_OF = {kernel: name for name, file in FILES.items() for kernel in file.kernels}


def blocks_for(kernel: str, processors: int, nblocks: int) -> int:
    """Blocks of threads for so many blocks of values, of which each of their warps does one after the other."""
    file = FILES[FILE_OF[kernel]]
    return max(1, min(-(-nblocks // (file.threads // 32)), file.kernels[kernel] * processors))


# a product and a sum are two roundings, as on a CPU
_OPTIONS = ("-std=c++17", "-fmad=false", "-default-device")
_STANDARD = {"stdint.h": '#pragma once\n#include "exact/bits.h"\n', "stddef.h": "#pragma once\n"}  # NVRTC has no libc


class Code(NamedTuple):
    """Machine code, and what kernels are called in it."""

    image: bytes
    names: dict[str, str]


@functools.cache
def folders() -> tuple[Path, ...]:
    """Where sources and headers lie: in the repository, if this is one, or in the package."""
    native = Path(__file__).parents[3] / "native"
    if (native / "cuda").is_dir():
        return native / "cuda", native / "src", native / "include"
    return PACKAGE / "kernels/cuda", PACKAGE / "kernels", PACKAGE / "include"


@functools.cache
def _sources() -> bytes:
    """A digest of all that can be included."""
    digest = hashlib.sha256()
    for folder in folders():
        for path in sorted((*folder.glob("*/*.cu*"), *folder.glob("exact/*.h"), *folder.glob("codec/*.h"))):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.digest()


def compiled(file: str, kernels: tuple[str, ...], arch: str, more: tuple[str, ...] = ()) -> Code:
    """Return kernels of a file for an architecture such as ``"sm_90"``, from disk if they were compiled before.

    `more`: compiler options that do not change what kernels compute.

    Raises
    ------
    EngineError
        NVRTC cannot be used, or does not know the architecture.
    """
    cupy: Any = importlib.import_module("cupy")
    nvrtc = cupy.cuda.nvrtc
    try:
        version = nvrtc.getVersion()
    except Exception as e:  # of many kinds: CuPy finds it on its first call
        raise EngineError(f"NVRTC, which compiles kernels for the GPU, cannot be used: {e}") from e
    options = (*_OPTIONS, f"-arch={arch}", *more)
    asked = json.dumps([file, kernels, options, version, cupy.__version__])
    key = hashlib.sha256(asked.encode() + _sources()).hexdigest()
    cached = load_cached(key)
    code = None if cached is None else _unpacked(cached, kernels)
    if code is None:
        code = _compile(nvrtc, file, kernels, arch, options)
        store_cached(key, _packed(code))
    return code


def _compile(nvrtc: Any, file: str, kernels: tuple[str, ...], arch: str, options: tuple[str, ...]) -> Code:
    names, texts = _STANDARD, _STANDARD.values()
    program = nvrtc.createProgram(
        f'#include "{file}.cu"\n', "codec.cu", [text.encode() for text in texts], [name.encode() for name in names]
    )
    try:
        for kernel in kernels:
            nvrtc.addNameExpression(program, kernel)
        try:
            nvrtc.compileProgram(program, [*options, *(f"-I{folder}" for folder in folders())])
        except nvrtc.NVRTCError as e:
            said = nvrtc.getProgramLog(program).strip()
            version = ".".join(map(str, nvrtc.getVersion()))
            raise EngineError(f"NVRTC {version} cannot compile {file}.cu for {arch}: {said or e}") from e
        image = nvrtc.getCUBIN(program) + b"\0"  # CuPy takes the last byte for the end of a string
        return Code(image, {kernel: nvrtc.getLoweredName(program, kernel) for kernel in kernels})
    finally:
        nvrtc.destroyProgram(program)


def _packed(code: Code) -> bytes:
    """Return code as bytes: names as JSON, a line feed, and the image."""
    return json.dumps(code.names).encode() + b"\n" + code.image


def _unpacked(data: bytes, kernels: tuple[str, ...]) -> Code | None:
    """Return the code of these kernels that bytes hold; None if they hold something else."""
    try:
        names, image = data.split(b"\n", 1)
        found: Any = json.loads(names)
        return Code(image, {kernel: str(found[kernel]) for kernel in kernels})
    except (ValueError, LookupError, TypeError):
        return None
