"""Arrays in .npz, .npy and .safetensors files. Pickles are rejected."""

import importlib
import mmap
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile

import numpy as np

from codec._c.library import ITEMSIZE, MANTISSA_BITS
from codec.errors import ArgumentError
from codec.files.header import SAFETENSORS, read_header
from codec.files.opening import NUMPY, FileBytes, Kind, kind_of, opened, printable
from codec.tensors.view import Array, dtype_name

Arrays = tuple[Sequence[str], Callable[[str], Array]]  # names of a file's arrays, and a function that reads one


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
    with opened(path) as fd:
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
            f"{printable(path)} has no arrays of {wanted} with a dimension, but {have}: name the arrays to read, "
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
    kind = kind_of(fd)
    if kind in (Kind.NPZ, Kind.NPY, Kind.ZIP):
        return numpy_arrays(fd, path)
    if kind is Kind.SAFETENSORS:
        return _safetensors(fd)
    if kind in (Kind.TORCH, Kind.PICKLE):
        raise ArgumentError(
            f"{printable(path)} is {kind.value}, a pickle, which could run code when it is read. Load it where you "
            "trust it, and save its tensors by numpy.savez or safetensors.torch.save_file"
        )
    raise ArgumentError(f"{printable(path)} cannot be read: it is {kind.value}, no .npz, .npy or .safetensors file")


def numpy_arrays(fd: int, path: str) -> Arrays:
    """Return a reader of an open .npz or .npy file. It warns of members of .npz files that are no arrays."""
    if kind_of(fd) is Kind.NPY:
        return [Path(path).stem], lambda _: np.load(path, mmap_mode="r")
    with os.fdopen(fd, "rb", closefd=False) as f, ZipFile(f) as archive:
        members = [member for member in archive.namelist() if _begins_as_array(archive, member)]
        others = [member for member in archive.namelist() if member not in members]
    if others and members:
        warnings.warn(f"{printable(path)}: left out, no arrays: {printable(', '.join(others))}", stacklevel=2)

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
        return f.read(len(NUMPY)) == NUMPY


def _safetensors(fd: int) -> Arrays:
    """Return a reader of a .safetensors file, which is mapped to memory."""
    header, file = read_header(FileBytes(fd)), mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    # values of less than a byte are skipped
    tensors = {t.name: t for t in header.tensors if t.dtype in SAFETENSORS}

    def read(name: str) -> Array:
        t = tensors[name]
        values = np.frombuffer(file, np.uint8, t.nbytes, len(header.prefix) + t.begin)
        return values.view(numpy_dtype(SAFETENSORS[t.dtype])).reshape(t.shape)

    return [name for name in header.names if name in tensors], read


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return a dtype by name: of numpy, of ml_dtypes, or without ml_dtypes a dtype of raw bytes."""
    if hasattr(np, name):
        return np.dtype(name)
    try:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ImportError:
        return np.dtype(f"V{ITEMSIZE[name]}")
