"""Sources of the CUDA kernels: their folders, and a digest of them.

``native/cuda_api/images.py`` runs this file by its path while the package is built, so it imports nothing of ``codec``.
"""

import functools
import hashlib
from pathlib import Path

_PACKAGE, _NATIVE = Path(__file__).parents[2], Path(__file__).parents[3] / "native"
# In a folder: kernels and their headers, what they share with the C library, and the headers of the C interface.
_INCLUDED = "*/*.cu*", "exact/*.h", "codec/codec.h", "codec/codec_engine.h"


@functools.cache
def folders() -> tuple[Path, ...]:
    """Return the folders of sources and headers: in the repository if this is a checkout, or in the package."""
    if (_NATIVE / "cuda").is_dir():
        return _NATIVE / "cuda", _NATIVE / "src", _NATIVE / "include"
    return _PACKAGE / "kernels/cuda", _PACKAGE / "kernels", _PACKAGE / "include"


@functools.cache
def digest() -> str:
    """Return the SHA-256 of all files that kernels can include, in hexadecimal digits."""
    found = hashlib.sha256()
    for folder in folders():
        for path in sorted(path for pattern in _INCLUDED for path in folder.glob(pattern)):
            name = path.relative_to(folder).as_posix()
            found.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()
