"""Source files of the CUDA kernels, and the options with which NVRTC compiles them.

This module must not import ``codec``: ``native/cuda_api/images.py`` runs it as a file while the package is built.
"""

import functools
import hashlib
from pathlib import Path

_PACKAGE, _NATIVE = Path(__file__).parents[2], Path(__file__).parents[3] / "native"
# Patterns of files that kernels can include: kernels and their headers, headers of the C library, public C headers.
_INCLUDED = "*/*.cu*", "exact/*.h", "codec/codec.h", "codec/codec_engine.h"

# -fmad=false: round products and sums separately, without fused multiply-add, so that results equal those of CPUs
OPTIONS = "-std=c++17", "-fmad=false", "-default-device"
# Contents, by name, of standard headers that NVRTC lacks.
HEADERS = {"stdint.h": '#pragma once\n#include "exact/bits.h"\n', "stddef.h": "#pragma once\n"}


@functools.cache
def folders() -> tuple[Path, ...]:
    """Return the folders of sources and headers: the repository's if this is a checkout, otherwise the package's."""
    if (_NATIVE / "cuda").is_dir():
        return _NATIVE / "cuda", _NATIVE / "src", _NATIVE / "include"
    return _PACKAGE / "kernels/cuda", _PACKAGE / "kernels", _PACKAGE / "include"


@functools.cache
def digest() -> str:
    """Return the SHA-256 of all files that kernels can include, and of the options, in hexadecimal digits."""
    found = hashlib.sha256(repr((OPTIONS, HEADERS)).encode())
    for folder in folders():
        for path in sorted(path for pattern in _INCLUDED for path in folder.glob(pattern)):
            name = path.relative_to(folder).as_posix()
            found.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()
