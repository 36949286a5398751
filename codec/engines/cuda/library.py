"""Access to libcodec_cuda, which contains the kernels as machine code, so that NVRTC is not needed."""

import ctypes
import functools
import os
from pathlib import Path
from typing import NamedTuple

from codec._c import PACKAGE
from codec.engines.cuda import sources
from codec.errors import EngineError

_NO_KERNELS = 72  # the status CODEC_CUDA_NO_KERNELS of codec_cuda.h


class Code(NamedTuple):
    """Machine code of kernels, and the mangled names of the kernels."""

    image: bytes
    names: dict[str, str]


class _Struct(ctypes.Structure):
    """The C struct codec_cuda_code."""

    _fields_ = [
        ("struct_nbytes", ctypes.c_uint32),
        ("nkernels", ctypes.c_uint32),
        ("image", ctypes.c_void_p),
        ("image_nbytes", ctypes.c_uint64),
        ("expressions", ctypes.POINTER(ctypes.c_char_p)),
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("sources", ctypes.c_char_p),
    ]


@functools.cache
def code_for(arch: str) -> Code | None:
    """Return machine code of all kernels for an architecture such as ``"sm_90"``; None if there is none.

    The code is read from the library that the environment variable ``CODEC_CUDA_LIBRARY`` names, or from the one in the
    package, if the package was built with it.

    Raises
    ------
    EngineError
        The library that ``CODEC_CUDA_LIBRARY`` names cannot be loaded, or its kernels differ from this package's.
    """
    named = os.environ.get("CODEC_CUDA_LIBRARY")
    path = Path(named) if named else PACKAGE / "lib/libcodec_cuda.so"
    if not named and not path.exists():
        return None
    try:
        call = ctypes.CDLL(str(path)).codec_cuda_code_for
    except (OSError, AttributeError) as e:
        raise EngineError(f"{path} cannot be used as libcodec_cuda: {e}") from e
    found = _Struct(struct_nbytes=ctypes.sizeof(_Struct))
    status = call(ctypes.c_int(int(arch.removeprefix("sm_"))), ctypes.byref(found))
    if status == _NO_KERNELS:
        return None
    if status or found.sources.decode() != sources.digest():
        if not named:
            return None  # the kernels of this checkout have changed since the library was built
        raise EngineError(f"{path} has other kernels than this package: build both from the same sources")
    names = {found.expressions[i].decode(): found.names[i].decode() for i in range(found.nkernels)}
    return Code(ctypes.string_at(found.image, found.image_nbytes), names)
