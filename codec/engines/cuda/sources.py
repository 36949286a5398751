"""Sources of the CUDA kernels, and how NVRTC compiles them.

``native/cuda_api/images.py`` runs this file by its path while the package is built, so it imports nothing of ``codec``.
"""

import functools
import hashlib
from pathlib import Path

_PACKAGE, _NATIVE = Path(__file__).parents[2], Path(__file__).parents[3] / "native"
# In a folder: kernels and their headers, what they share with the C library, and the headers of the C interface.
_INCLUDED = "*/*.cu*", "exact/*.h", "codec/codec.h", "codec/codec_engine.h"

# -fmad=false: a product and a sum are rounded separately, as on a CPU
OPTIONS = "-std=c++17", "-fmad=false", "-default-device"
# Headers that NVRTC does not have, by name.
HEADERS = {"stdint.h": '#pragma once\n#include "exact/bits.h"\n', "stddef.h": "#pragma once\n"}


@functools.cache
def folders() -> tuple[Path, ...]:
    """Return the folders of sources and headers: in the repository if this is a checkout, or in the package."""
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
