"""Files of the command line: frames, and arrays in .npz, .npy and .safetensors files.

Only regular files are opened, because reading a pipe or a device may block or never end. Reads are bounded by what is
needed. Pickles are rejected.
"""

import importlib
import json
import math
import mmap
import os
import stat
import sys
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile, ZipFile

import numpy as np

from codec._c.library import ITEMSIZE, MANTISSA_BITS, lib
from codec.errors import ArgumentError, CodecError
from codec.inspection import Info, inspect, verify
from codec.tensors.view import Array, dtype_name

_HEADER: int = lib.CODEC_HEADER_NBYTES
_NUMPY = b"\x93NUMPY"  # first bytes of an array
_MAX_SIDE = 16 << 20  # bytes of a side section that inspect_file reads
MAX_JSON = 100_000_000  # maximum bytes of a .safetensors header, from its specification
_CHUNK = 1 << 20  # bytes read from standard input at once
_CANNOT_READ = (
    OSError, ValueError, TypeError, LookupError, EOFError, BadZipFile, zlib.error, MemoryError, RuntimeError
)  # fmt: skip

Read = Callable[[int], bytes]  # reads the next bytes, at most so many
Arrays = tuple[Sequence[str], Callable[[str], Array]]  # names of a file's arrays, and a function that reads one


def printable(path: str) -> str:
    """Return a path for a message: unchanged, or its repr if it has characters that are unsafe in a terminal."""
    return path if path.isprintable() and path else repr(path)


@contextmanager
def _opened(path: str) -> Generator[int]:
    """Open a regular file, and yield its descriptor.

    Raises
    ------
    ArgumentError
        The file cannot be opened or is not regular, or the ``with`` block cannot read it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ArgumentError(f"{printable(path)} cannot be read: it is not a regular file")
            yield fd
        finally:
            os.close(fd)
    except CodecError:
        raise
    except _CANNOT_READ as e:
        why = getattr(e, "strerror", None) or str(e) or type(e).__name__
        raise ArgumentError(f"{printable(path)} cannot be read: {why}") from None


def inspect_file(path: str) -> Info:
    """Return the header of a frame as :class:`codec.Info`, reading only the header and the side section.

    Parameters
    ----------
    path : str
        Path of a regular file that begins with a frame; "-" for standard input.

    Returns
    -------
    Info

    Raises
    ------
    ArgumentError
        The file cannot be read.
    FrameError
        The header or the side section is invalid, as in :func:`codec.inspect`.
    """
    if path == "-":
        return _inspect_by(sys.stdin.buffer.read)
    with _opened(path) as fd:
        return _inspect_by(lambda nbytes: os.read(fd, nbytes))


def _inspect_by(read: Read) -> Info:
    """Inspect a frame by a function that reads its next bytes."""
    head = read(_HEADER)
    begin, nbytes = inspect(head).sections["side"]
    if nbytes <= _MAX_SIDE:
        head += read(max(0, begin + nbytes - len(head)))
    return inspect(head)


def verify_file(path: str) -> None:
    """Verify a frame without decoding its values. A regular file is mapped, not copied to memory.

    Parameters
    ----------
    path : str
        Path of a regular file that is a frame; "-" for standard input, of which at most the frame and a byte are read.

    Raises
    ------
    ArgumentError
        The file cannot be read.
    FrameError
        The frame is invalid, as in :func:`codec.verify`.
    """
    if path == "-":
        verify(_frame_from(sys.stdin.buffer.read))
        return
    with _opened(path) as fd:
        size = os.fstat(fd).st_size
        # files of size 0 cannot be mapped; files in /proc report size 0 but have contents
        verify(mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else os.read(fd, _HEADER))


def _frame_from(read: Read) -> bytearray:
    """Return a frame, and the first byte after the frame if there is one."""
    frame = bytearray(read(_HEADER))
    most = inspect(frame).nbytes + 1
    while more := read(min(_CHUNK, most - len(frame))):
        frame += more
    return frame


def arrays_of(path: str, names: Sequence[str], dtype: str | None) -> dict[str, Array]:
    """Return arrays of a .npz, .npy or .safetensors file.

    Parameters
    ----------
    path : str
        Path of a regular file.
    names : sequence of str
        Names of the arrays to return. Empty: all arrays with at least one dimension whose dtype is float32, bfloat16 or
        float16, or that can hold the bits of `dtype`.
    dtype : str or None
        Dtype of the values whose bits are stored as unsigned integers or as a dtype that numpy lacks.

    Returns
    -------
    dict of str to array

    Raises
    ------
    ArgumentError
        The file cannot be read, has an unknown format, or has no such array.
    """
    with _opened(path) as fd:
        known, read = _arrays_in(fd, path)
        if missing := set(names) - set(known):
            raise ArgumentError(f"{printable(path)} has {', '.join(known)}, not {', '.join(sorted(missing))}")
        found = {name: read(name) for name in names or known}
    if names:
        return found
    fit = {name: x for name, x in found.items() if x.ndim and _may_hold(x.dtype, dtype)}
    if not fit:
        have = ", ".join(f"{name} ({x.dtype})" for name, x in found.items()) or "no arrays"
        wanted = dtype or ", ".join(MANTISSA_BITS)
        raise ArgumentError(
            f"{printable(path)} has no arrays of {wanted} with a dimension, but {have}: name those that are meant, "
            "with --dtype if they hold the bits of another dtype"
        )
    return fit


def _may_hold(own: Any, dtype: str | None) -> bool:
    """Return whether an array of dtype `own` holds values of `dtype` or their bits; None: any dtype of gradients."""
    if dtype is None:
        return own.name in MANTISSA_BITS
    name = dtype_name(dtype)
    return own.itemsize == ITEMSIZE[name] and (own.name == name or own.kind in "uV")


def _arrays_in(fd: int, path: str) -> Arrays:
    """Return a reader of the arrays in a file, whose format its first bytes identify."""
    head = os.pread(fd, 9, 0)
    if head.startswith(b"PK"):
        return _npz(fd, path)
    if head.startswith(_NUMPY):
        return [Path(path).stem], lambda _: np.load(path, mmap_mode="r")
    if head[8:] == b"{":
        return _safetensors(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    if head.startswith(b"\x80"):
        raise _pickled(path)
    raise ArgumentError(f"{printable(path)} cannot be read: it is no .npz, .npy or .safetensors file")


def _pickled(path: str) -> ArgumentError:
    """Return the error for a pickle."""
    return ArgumentError(
        f"{printable(path)} is a pickle, as torch.save writes it, which could run code when it is read. Load it where "
        "you trust it, and save its tensors by numpy.savez or safetensors.torch.save_file"
    )


def _npz(fd: int, path: str) -> Arrays:
    """Return a reader of a .npz file."""
    with os.fdopen(fd, "rb", closefd=False) as f, ZipFile(f) as archive:
        if any(name.endswith("data.pkl") for name in archive.namelist()):
            raise _pickled(path)
        members = [member for member in archive.namelist() if _begins_as_array(archive, member)]

    def read(name: str) -> Array:
        with np.load(path) as file:
            try:
                return cast(Array, file[name])
            except ValueError as e:
                if "allow_pickle" in str(e):
                    raise ArgumentError(f"{name!r} holds Python objects: save it as an array of numbers") from None
                raise

    return [member.removesuffix(".npy") for member in members], read


def _begins_as_array(archive: ZipFile, member: str) -> bool:
    """Return True if a member of a .npz file is an array; np.load returns others as bytes."""
    with archive.open(member) as f:
        return f.read(len(_NUMPY)) == _NUMPY


SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64",
}  # fmt: skip


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _safetensors(file: mmap.mmap) -> Arrays:
    """Return a reader of a .safetensors file: u64 length of a JSON header, the header, the bytes of all arrays."""
    nbytes = int.from_bytes(file[:8], "little")
    if nbytes > min(MAX_JSON, len(file) - 8):
        raise ValueError("its header is longer than the file, or than 100 MB")
    header: Any = json.loads(file[8 : 8 + nbytes])
    if not _is_table(header) or not all(_is_table(entry) for entry in header.values()):
        raise ValueError("its header does not describe arrays")
    # skip metadata, and arrays whose values take less than a byte
    entries = {str(name): entry for name, entry in header.items() if entry.get("dtype") in SAFETENSORS}

    def read(name: str) -> Array:
        entry = entries[name]
        kind = _numpy_dtype(SAFETENSORS[entry["dtype"]])
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        fits = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and end <= len(file) - 8 - nbytes
        if not fits or math.prod(shape) * kind.itemsize != end - begin:
            raise ValueError(f"{name!r} does not lie in the file as its header says")
        return np.frombuffer(file, kind, math.prod(shape), 8 + nbytes + begin).reshape(shape)

    return list(entries), read


def _numpy_dtype(name: str) -> np.dtype[Any]:
    """Return a dtype by name: of numpy, of ml_dtypes, or without ml_dtypes a dtype of raw bytes."""
    if hasattr(np, name):
        return np.dtype(name)
    try:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ImportError:
        return np.dtype(f"V{ITEMSIZE[name]}")
