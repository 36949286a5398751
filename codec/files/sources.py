"""Sources of tensors to pack: .safetensors, .npz, .npy and .pt files, and tensors in memory."""

import importlib
import os
import re
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from codec.errors import ArgumentError, EngineError
from codec.files.arrays import numpy_arrays
from codec.files.header import Header, compose, described, itemsize_of, read_header
from codec.files.opening import FileBytes, FileKind, kind_of, open_regular, printable, readable

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_CACHED = 1 << 27  # maximum bytes of a .npz file's arrays in the cache, unless a single array is larger


class TensorSource(Protocol):
    """Collection of tensors, numbered in the order of the header's data section."""

    header: Header

    def read(self, k: int, begin: int, end: int, out: Bytes) -> Bytes:
        """Return bytes [begin, end) of tensor `k`: in `out`, or in memory that is valid until the source is closed."""
        ...


class SafetensorsSource:
    """Tensors of an open .safetensors file."""

    def __init__(self, fd: int) -> None:
        self._file = FileBytes(fd)
        self.header = read_header(self._file)

    def read(self, k: int, begin: int, end: int, out: Bytes) -> Bytes:
        """Return bytes of a tensor, see :meth:`TensorSource.read`."""
        at = len(self.header.prefix) + self.header.tensors[k].begin + begin
        self._file.read_into(out[: end - begin], at)
        return out[: end - begin]


class MemorySource:
    """Tensors in memory.

    Parameters
    ----------
    tensors : sequence of (str, str, tuple of int, array of uint8)
        Name, dtype as named in .safetensors files, shape and bytes of each tensor.
    metadata : mapping of str to str, optional
        Contents of the header's entry ``__metadata__``.
    """

    def __init__(
        self, tensors: Sequence[tuple[str, str, tuple[int, ...], Bytes]], metadata: Mapping[str, str] | None = None
    ) -> None:
        found = sorted(tensors, key=lambda each: -itemsize_of(each[1]))  # largest items first, to align values
        self._values = [values for *_, values in found]
        self.header = compose([(name, code, shape, len(x)) for name, code, shape, x in found], metadata or {})

    @classmethod
    def of(cls, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> "MemorySource":
        """Return a source of named arrays and torch tensors; tensors on a device are copied to host memory."""
        return cls([(name, *_described(name, x), _bytes_of(x)) for name, x in tensors.items()], metadata)

    def read(self, k: int, begin: int, end: int, out: Bytes) -> Bytes:
        """Return bytes of a tensor, see :meth:`TensorSource.read`."""
        return self._values[k][begin:end]


class ArraySource:
    """Arrays of an open .npz or .npy file, read one by one."""

    def __init__(self, names: Sequence[str], read: Any) -> None:
        self._read, self._lock, self._loaded = read, threading.Lock(), dict[int, Bytes]()
        found: list[tuple[str, str, tuple[int, ...], int]] = []
        for name in names:
            x = read(name)  # .npz files have no table of dtypes, so each array must be read
            found.append((name, *_described(name, x), x.nbytes))
        found.sort(key=lambda each: -itemsize_of(each[1]))
        self.header = compose(found, {})

    def read(self, k: int, begin: int, end: int, out: Bytes) -> Bytes:
        """Return bytes of a tensor, see :meth:`TensorSource.read`."""
        with self._lock:
            if k not in self._loaded:
                x = _bytes_of(self._read(self.header.tensors[k].name))
                while self._loaded and sum(map(len, self._loaded.values())) + len(x) > _CACHED:
                    del self._loaded[next(iter(self._loaded))]
                self._loaded[k] = x
            return self._loaded[k][begin:end]


@contextmanager
def source_of(path: str, key: str | None = None) -> Generator[TensorSource]:
    """Open a file of tensors; its contents, not its name, determine the format.

    Parameters
    ----------
    path : str
        Path of a .safetensors, .npz, .npy or .pt file.
    key : str, optional
        Key of the dict of tensors in a .pt file, such as "model". Default: the file itself is a dict of tensors.

    Raises
    ------
    ArgumentError
        The file cannot be read, or contains no tensors.
    EngineError
        A .pt file needs torch, which is not installed.
    """
    fd = open_regular(path)
    try:
        with readable(path):
            source = _source(fd, path, key)
        yield source
    finally:
        os.close(fd)


def _source(fd: int, path: str, key: str | None) -> TensorSource:
    kind = kind_of(fd)
    if kind is FileKind.SAFETENSORS:
        return SafetensorsSource(fd)
    if kind in (FileKind.TORCH, FileKind.PICKLE):
        return MemorySource.of(_torch_tensors(path, key))
    if kind in (FileKind.NPZ, FileKind.NPY):
        return ArraySource(*numpy_arrays(fd, path))
    raise ArgumentError(
        f"{printable(path)} is {kind.value}: tensors are read from .safetensors, .npz, .npy and .pt files"
    )


def _torch_tensors(path: str, key: str | None) -> dict[str, Any]:
    """Read the tensors of a file of torch.save, with the loader that runs no code from the file."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise EngineError(
            f"{printable(path)} was written by torch.save, and reading it needs torch, which is not installed: pip "
            "install torch"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own deprecated classes, which are refused below
            try:
                given = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of torch before 1.6 cannot be mapped to memory
                given = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # torch's own unpickler raises errors of many kinds
        refused = re.search(r"GLOBAL ([\w.]+)", str(e))  # name of a class that weights_only=True refuses
        why = (
            f"it holds objects of {refused[1]}; save tensors alone, such as model.state_dict()"
            if refused
            else printable(str(e).partition("\n")[0])
        )
        name = printable(path)
        raise ArgumentError(f"{name} cannot be read by torch.load(weights_only=True): {why[:200]}") from None
    if key is not None:
        if not isinstance(given, dict) or key not in given:
            raise ArgumentError(f"{printable(path)} has no key {key!r}, but {_keys(given)}")
        given = cast(dict[str, Any], given)[key]
    if torch.is_tensor(given):
        given = {Path(path).stem: given}
    if isinstance(given, dict) and all(torch.is_tensor(x) for x in cast(dict[Any, Any], given).values()):
        found = {str(name): x for name, x in cast(dict[Any, Any], given).items()}
        if len(found) != len(cast(dict[Any, Any], given)):
            raise ArgumentError(
                f"two keys of the dict in {printable(path)} are equal as strings, such as 1 and '1': rename one of them"
            )
        return found
    raise ArgumentError(
        f"{printable(path)} must hold a dict of tensors, but holds {_keys(given)}: choose the key of such a dict by "
        "--key"
    )


def _keys(given: Any) -> str:
    if not isinstance(given, dict):
        return f"a {type(given).__name__}"
    entries = cast(dict[Any, Any], given)
    shown = [f"{k} ({type(v).__name__})" for k, v in list(entries.items())[:8]]
    return ", ".join(shown) + (", ..." if len(entries) > 8 else "")


def _described(name: str, x: Any) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's dtype, as named in .safetensors files, and its shape."""
    dtype = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
    if dtype.startswith((">", "<")):
        dtype = np.dtype(dtype).name
    return described(name, dtype, tuple(int(n) for n in x.shape))


def _bytes_of(x: Any) -> Bytes:
    """Return the bytes of a tensor or array, without a copy if it is contiguous and in host memory."""
    if hasattr(x, "detach"):
        flat = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return flat.view(importlib.import_module("torch").uint8).numpy()
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat.astype(flat.dtype.newbyteorder("="), copy=False).view(np.uint8)
