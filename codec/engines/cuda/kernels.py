"""Kernels of ``native/cuda``: machine code for a GPU architecture, and launch parameters.

Machine code comes from libcodec_cuda if it is installed. Otherwise NVRTC compiles it, and it is cached on disk. NVRTC
is called directly, because CuPy compiles with options that flush subnormals to zero.
"""

import hashlib
import importlib
import json
import os
from typing import Any, NamedTuple

from codec._c import pool
from codec._c.library import lib
from codec._c.spec_structs import NUMBERS
from codec.engines.cuda import library, sources
from codec.engines.cuda.cache import load_cached, store_cached
from codec.engines.cuda.library import Code
from codec.errors import EngineError
from codec.specs import Delta, Lossless, TopK, Truncate

_SIZES = 1, 2, 4, 8  # possible sizes of a value in bytes
_ROWS = tuple(n for kind, n in NUMBERS.items() if kind not in (Lossless, Delta, Truncate, TopK))  # row codecs
_AFFINE = lib.CODEC_QUANTIZE + 16  # Quantize with zero points: QUANTIZE_AFFINE of native/cuda/rows/rows.cuh


class File(NamedTuple):
    """Kernels of one ``.cu`` file."""

    threads: int  # threads per thread block
    kernels: dict[str, int]  # by kernel: number of thread blocks whose registers fit on a multiprocessor at once

    def compiled_with(self, kernel: str) -> tuple[str, ...]:
        """Return the kernels to compile with ``kernel``: a template's instance alone, otherwise all of its file."""
        return (kernel,) if kernel.endswith(">") else tuple(self.kernels)


def _each(template: str, arguments: tuple[int, ...], resident: int) -> dict[str, int]:
    """Return the instances of a kernel template, each with ``resident`` thread blocks per multiprocessor."""
    return {f"{template}<{n}>": resident for n in arguments}


FILES = {
    "frame/gather": File(256, {"gather": 4}),
    "frame/check_finite": File(256, {"check_finite": 4}),
    "frame/preprocess": File(256, {"preprocess": 4}),
    "lossless/choose": File(256, {"choose_lossless": 2}),
    "rows/choose": File(256, {"choose_rows": 2, "scale_rows": 2}),
    "truncate/choose": File(256, {"choose_truncate": 2}),
    "lossless/encode_fast": File(128, {"encode_lossless_fast<2>": 6, "encode_lossless_fast<4>": 5}),
    "lossless/encode": File(128, _each("encode_lossless", _SIZES, 4)),
    "rows/encode": File(128, _each("encode_rows", (*_ROWS, _AFFINE), 4)),
    "truncate/encode": File(128, {"encode_truncate": 4}),
    "frame/close": File(256, {"close_frame": 4}),
    "lossless/decode": File(128, _each("decode_lossless", _SIZES[:3], 4) | _each("decode_lossless", _SIZES[3:], 3)),
    "lossless/decode_fast2": File(512, {"decode_lossless_fast<2>": 2}),
    "lossless/decode_fast4": File(384, {"decode_lossless_fast<4>": 2}),
    "rows/decode": File(128, _each("decode_rows", _ROWS, 6)),
    "rows/reduce": File(128, _each("reduce_rows", (*_ROWS, _AFFINE), 4)),
    "truncate/decode": File(128, {"decode_truncate": 4}),
    "delta/encode": File(128, _each("encode_delta", _SIZES, 4)),
    "delta/decode": File(128, _each("decode_delta", _SIZES, 4)),
    "topk/encode": File(256, {"choose_topk": 4, "encode_topk": 4}),
    "topk/decode": File(128, {"decode_topk": 6}),
    "frame/decode_stored": File(128, {"decode_stored": 4}),
}
FILE_OF = {kernel: name for name, file in FILES.items() for kernel in file.kernels}

# Limits of launches. tests/support/kernel_table.py writes them and FILES to native/cuda_api/src/kernels.h.
WARPS = 4  # warps per thread block of most kernels; each warp encodes or decodes one block of values at a time
ELEMENTWISE_VALUES = 4096  # values per thread block of elementwise kernels
ELEMENTWISE_BLOCKS = 8  # maximum thread blocks per multiprocessor of elementwise kernels
OTHER_BLOCKS = 2  # maximum thread blocks per multiprocessor of kernels that choose parameters or write headers
MAX_GRID_Y = 65_535  # CUDA's limit of a grid's second dimension
MAX_IDLE = 4096  # maximum number of thread blocks in a launch that have no work
MAX_SCRATCH = 300_000_000  # maximum bytes of scratch memory of a call; if all warps need more, fewer run at once


def rows_kernel(template: str, v: Any) -> str:
    """Return the name of the instance of a row codecs' kernel template for a frame. `v`: the frame's ``codec_view``."""
    affine = v.codec == lib.CODEC_QUANTIZE and v.variant == lib.CODEC_LEVELS_AFFINE
    return f"{template}<{_AFFINE if affine else v.codec}>"


def blocks_for(kernel: str, processors: int, nblocks: int) -> int:
    """Return the number of thread blocks to launch for ``nblocks`` blocks of values.

    A warp processes a block of values; in ``reduce_rows`` and ``encode_topk``, all warps of a thread block share one.
    For small tensors, a thread block is launched for every 4 blocks of values, even if it has more than 4 warps, so
    that the work is spread over the whole GPU.
    """
    each = 1 if kernel.startswith(("reduce_rows", "encode_topk")) else WARPS
    return max(1, min(-(-nblocks // each), resident_blocks(kernel, processors)))


def warps_of(kernel: str) -> int:
    """Return the number of warps per thread block that a kernel receives as an argument; 4 for ``encode_topk``."""
    return WARPS if kernel == "encode_topk" else FILES[FILE_OF[kernel]].threads // 32


def resident_blocks(kernel: str, processors: int) -> int:
    """Return the number of thread blocks of a kernel that the GPU runs at once."""
    return processors * FILES[FILE_OF[kernel]].kernels[kernel]


def load(wanted: list[str], arch: str) -> list[Code]:
    """Return machine code that includes the wanted kernels, for an architecture such as ``"sm_90"``.

    If the environment variable ``CODEC_NVRTC_OPTIONS`` is set, libcodec_cuda is not used: its code is already compiled,
    so these compiler options would have no effect.

    Raises
    ------
    EngineError
        See :func:`compiled` and :func:`codec.engines.cuda.library.code_for`.
    """
    if not _more_options() and (code := library.code_for(arch)) and code.names.keys() >= set(wanted):
        return [code]

    def task(i: int, _: int) -> Code:
        file = FILE_OF[wanted[i]]
        return compiled(file, FILES[file].compiled_with(wanted[i]), arch)

    return pool.run(task, len(wanted), len(wanted))


def _more_options() -> list[str]:
    return os.environ.get("CODEC_NVRTC_OPTIONS", "").split()


def compiled(file: str, kernels: tuple[str, ...], arch: str, more: tuple[str, ...] = ()) -> Code:
    """Return kernels of a file for an architecture such as ``"sm_90"``, from the cache on disk if possible.

    ``more`` are compiler options that do not change the kernels' results. The options in the environment variable
    ``CODEC_NVRTC_OPTIONS`` are added, for example ``-lineinfo`` for a profiler or for compute-sanitizer.

    Raises
    ------
    EngineError
        NVRTC cannot be used, or does not know the architecture.
    """
    cupy: Any = importlib.import_module("cupy")
    nvrtc = cupy.cuda.nvrtc
    try:
        version = nvrtc.getVersion()
    except Exception as e:  # CuPy loads NVRTC on its first call, which raises errors of many types
        raise EngineError(f"NVRTC, which compiles kernels for the GPU, is unavailable: {e}") from e
    options = (*sources.OPTIONS, f"-arch={arch}", *more, *_more_options())
    request = json.dumps([file, kernels, options, version, cupy.__version__])
    key = hashlib.sha256(f"{request} {sources.digest()}".encode()).hexdigest()
    cached = load_cached(key)
    code = None if cached is None else _deserialize(cached, kernels)
    if code is None:
        code = _compile(nvrtc, file, kernels, arch, options)
        store_cached(key, _serialize(code))
    return code


def _compile(nvrtc: Any, file: str, kernels: tuple[str, ...], arch: str, options: tuple[str, ...]) -> Code:
    """Compile kernels of a file with NVRTC."""
    texts, names = ([text.encode() for text in column] for column in (sources.HEADERS.values(), sources.HEADERS))
    program = nvrtc.createProgram(f'#include "{file}.cu"\n', "codec.cu", texts, names)
    try:
        for kernel in kernels:
            nvrtc.addNameExpression(program, kernel)
        try:
            nvrtc.compileProgram(program, [*options, *(f"-I{folder}" for folder in sources.folders())])
        except nvrtc.NVRTCError as e:
            log = nvrtc.getProgramLog(program).strip()
            version = ".".join(map(str, nvrtc.getVersion()))
            raise EngineError(f"NVRTC {version} cannot compile {file}.cu for {arch}: {log or e}") from e
        image = nvrtc.getCUBIN(program) + b"\0"  # CuPy removes the last byte, as a string's terminator
        return Code(image, {kernel: nvrtc.getLoweredName(program, kernel) for kernel in kernels})
    finally:
        nvrtc.destroyProgram(program)


def _serialize(code: Code) -> bytes:
    """Return code as bytes: the names as JSON, a line feed, and the machine code."""
    return json.dumps(code.names).encode() + b"\n" + code.image


def _deserialize(data: bytes, kernels: tuple[str, ...]) -> Code | None:
    """Return the code of these kernels from the bytes of :func:`_serialize`; None if the bytes are anything else."""
    try:
        names, image = data.split(b"\n", 1)
        found: Any = json.loads(names)
        return Code(image, {kernel: str(found[kernel]) for kernel in kernels})
    except (ValueError, LookupError, TypeError):
        return None
