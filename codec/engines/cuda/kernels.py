"""Kernels of ``native/cuda``: machine code for a GPU architecture, and launch parameters.

Machine code comes from libcodec_cuda if it is installed. Otherwise NVRTC compiles it, and it is cached on disk. NVRTC
is called directly, because CuPy compiles with options that flush subnormals to zero.
"""

import hashlib
import importlib
import itertools
import json
import os
from typing import Any, NamedTuple

from codec._c import pool
from codec._c.library import ffi, lib
from codec.engines.cuda import library, sources
from codec.engines.cuda.cache import load_cached, store_cached
from codec.engines.cuda.library import Code
from codec.errors import EngineError


class Kernel(NamedTuple):
    """Kernel of a ``.cu`` file, as libcodec describes it (codec_kernel of ``codec_engine.h``)."""

    name: str
    file: str  # path in native/cuda, without ".cu"
    sizes: str  # name of the file's constant array with sizes of scratch memory; "": none
    threads: int  # threads per thread block
    resident: int  # number of thread blocks whose registers fit on a multiprocessor at once
    blocks: int  # blocks of values for which a thread block is launched
    warps: int  # warps per thread block, as the kernel's arguments count them

    def compiled_with(self) -> tuple[str, ...]:
        """Return the kernels to compile with this one: a template's instance alone, otherwise all of its file."""
        return (self.name,) if self.name.endswith(">") else tuple(FILES[self.file])

    def resident_on(self, processors: int) -> int:
        """Return the number of thread blocks that a GPU runs at once."""
        return processors * self.resident

    def grid(self, processors: int, nblocks: int) -> int:
        """Return the number of thread blocks to launch for ``nblocks`` blocks of values.

        For small tensors, a thread block is launched for every 4 blocks of values, even if it has more than 4 warps, so
        that the work is spread over the whole GPU.
        """
        return max(1, min(-(-nblocks // self.blocks), self.resident_on(processors)))


def _text(pointer: Any) -> str:
    return ffi.string(pointer).decode()


def _kernel(k: Any) -> Kernel:
    return Kernel(_text(k.name), _text(k.file), _text(k.sizes), k.threads, k.resident, k.blocks, k.warps)


# kernels by their numbers in libcodec, which count from 1; those without a file are libcodec_cuda's own
_all: Any = iter(map(lib.codec_kernel_at, itertools.count(1)).__next__, ffi.NULL)
BY_NUMBER = {number: kernel for number, kernel in enumerate(map(_kernel, _all), 1) if kernel.file}
KERNELS = {kernel.name: kernel for kernel in BY_NUMBER.values()}
FILES = {kernel.file: [k.name for k in KERNELS.values() if k.file == kernel.file] for kernel in KERNELS.values()}


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
        kernel = KERNELS[wanted[i]]
        return compiled(kernel.file, kernel.compiled_with(), arch)

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
