"""Reading of arrays in .npz, .npy and .safetensors files. Pickles are rejected."""

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
from codec.files.opening import NUMPY, FileBytes, FileKind, kind_of, opened, printable
from codec.tensors.view import Array, dtype_name

Arrays = tuple[Sequence[str], Callable[[str], Array]]  # names of a file's arrays, and a function that reads one


def arrays_of(path: str, names: Sequence[str], dtype: str | None) -> dict[str, Array]:
    """Read arrays of a .npz, .npy or .safetensors file.

    Parameters
    ----------
    path : str
        Path of a regular file.
    names : sequence of str
        Names of the arrays to return. Empty: all arrays of at least one dimension whose dtype is float32, bfloat16 or
        float16; or, if `dtype` is given, all arrays whose items are values of `dtype` or can hold their bits.
    dtype : str or None
        Dtype of values whose bits are stored as unsigned integers, or in a dtype that numpy lacks.

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
            raise ArgumentError(
                f"{printable(path)} has no array {', '.join(sorted(missing))}: its arrays are {', '.join(known)}"
            )
        found = {name: read(name) for name in names or known}
    if names:
        return found
    fit = {name: x for name, x in found.items() if x.ndim and _may_hold(x.dtype, dtype)}
    if not fit:
        have = ", ".join(f"{name} ({x.dtype})" for name, x in found.items()) or "none"
        wanted = dtype or ", ".join(MANTISSA_BITS)
        raise ArgumentError(
            f"{printable(path)} has no array of {wanted} with at least one dimension (its arrays: {have}): name the "
            "arrays to read, and pass --dtype if they hold the bits of another dtype"
        )
    return fit


def _may_hold(own: Any, dtype: str | None) -> bool:
    """Return True if an array of dtype `own` can hold values of `dtype`, or their bits; None: any gradient dtype."""
    if dtype is None:
        return own.name in MANTISSA_BITS
    name = dtype_name(dtype)
    return own.itemsize == ITEMSIZE[name] and (own.name == name or own.kind in "uV")


def _arrays_in(fd: int, path: str) -> Arrays:
    """Return the names of the arrays in a file, and a function that reads one. The first bytes determine the format."""
    kind = kind_of(fd)
    if kind in (FileKind.NPZ, FileKind.NPY, FileKind.ZIP):
        return numpy_arrays(fd, path)
    if kind is FileKind.SAFETENSORS:
        return _safetensors(fd)
    if kind in (FileKind.TORCH, FileKind.PICKLE):
        raise ArgumentError(
            f"{printable(path)} is {kind.value}, a pickle, which could run code when it is read. Load it where you "
            "trust it, and save its tensors by numpy.savez or safetensors.torch.save_file"
        )
    raise ArgumentError(f"{printable(path)} cannot be read: it is {kind.value}, not a .npz, .npy or .safetensors file")


def numpy_arrays(fd: int, path: str) -> Arrays:
    """Return the array names of a .npz or .npy file, and a function that reads one; warn of members of other kinds.

    Raises
    ------
    ArgumentError
        Two members of a .npz file are arrays of the same name, such as ``a`` and ``a.npy``.
    """
    if kind_of(fd) is FileKind.NPY:
        return [Path(path).stem], lambda _: np.load(path, mmap_mode="r", allow_pickle=False)
    with os.fdopen(fd, "rb", closefd=False) as f, ZipFile(f) as archive:
        members = [member for member in archive.namelist() if _begins_as_array(archive, member)]
        others = [member for member in archive.namelist() if member not in members]
    if others and members:
        warnings.warn(
            f"{printable(path)}: left out, because they are not arrays: {printable(', '.join(others))}", stacklevel=2
        )
    by_name: dict[str, str] = {}
    for member in members:
        name = member.removesuffix(".npy")
        if name in by_name:
            raise ArgumentError(
                f"{printable(path)} has two arrays named {name!r}, in the members {by_name[name]!r} and {member!r}: "
                "save the arrays again, under different names"
            )
        by_name[name] = member

    def read(name: str) -> Array:
        with np.load(path, allow_pickle=False) as file:
            try:
                return cast(
                    Array, file[by_name[name]]
                )  # a member's name, since `x.npy` may be the name of an array, too
            except ValueError as e:
                if "allow_pickle" in str(e):
                    raise ArgumentError(f"{name!r} holds Python objects: save it as an array of numbers") from None
                raise

    return list(by_name), read


def _begins_as_array(archive: ZipFile, member: str) -> bool:
    """Return True if a member of a .npz file is an array; np.load returns other members as bytes."""
    with archive.open(member) as f:
        return f.read(len(NUMPY)) == NUMPY


def _safetensors(fd: int) -> Arrays:
    """Map a .safetensors file to memory; return the names of its arrays, and a function that reads one."""
    header, file = read_header(FileBytes(fd)), mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    # leave out tensors whose values are smaller than a byte
    tensors = {t.name: t for t in header.tensors if t.dtype in SAFETENSORS}

    def read(name: str) -> Array:
        t = tensors[name]
        values = np.frombuffer(file, np.uint8, t.nbytes, len(header.prefix) + t.begin)
        return values.view(numpy_dtype(SAFETENSORS[t.dtype])).reshape(t.shape)

    return [name for name in header.names if name in tensors], read


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name from numpy or ml_dtypes; without ml_dtypes, a dtype of raw bytes (V1, V2...)."""
    if hasattr(np, name):
        return np.dtype(name)
    try:
        return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ImportError:
        return np.dtype(f"V{ITEMSIZE[name]}")
