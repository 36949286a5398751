"""Packed model files in place of .safetensors files: the functions of the package safetensors, with its signatures.

:func:`safe_open`, :func:`load_file` and :func:`load` also read .safetensors files that are not packed; the first two
read the index of a sharded model, too. So a program can use them for any model. Files are those of ``codec pack``. The
package safetensors is not needed.
"""

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from codec.errors import ArgumentError, LimitError
from codec.files.header import Tensor
from codec.files.packing import pack
from codec.files.reading import ModelFile, open_bytes, open_model
from codec.files.replacing import replaced
from codec.files.restoring import new_array, new_tensor, read_all
from codec.files.shards import shard_names
from codec.files.sources import MemorySource

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]

_INDEX = ".index.json"
_FRAMEWORKS = {"pt": new_tensor, "torch": new_tensor, "np": new_array, "numpy": new_array}


def save_file(
    tensors: Mapping[str, Any], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a packed file. Tensors with equal bytes, such as tied weights, are stored once.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor or array
        Tensors by name. Those on a device are copied to host memory.
    filename : path
        File to write. It appears, or is replaced, when it is complete.
    metadata : mapping of str to str, optional
        Texts to keep in the file.

    Raises
    ------
    ArgumentError
        A tensor has a dtype that .safetensors files cannot hold, or the file cannot be written.

    Examples
    --------
    >>> from codec.integrations.safetensors import load_file, save_file
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_file({"weight": torch.ones(512, 512)}, f"{folder.name}/model.codec.safetensors")
    >>> load_file(f"{folder.name}/model.codec.safetensors")["weight"].sum()
    tensor(262144.)
    >>> folder.cleanup()
    """
    source = MemorySource.of(tensors, metadata)
    with replaced(Path(filename)) as file:
        pack(source, file)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a packed file; see :func:`save_file`."""
    file = BytesIO()
    pack(MemorySource.of(tensors, metadata), file)
    return file.getvalue()


def load_file(
    filename: str | os.PathLike[str],
    device: Any = "cpu",
    *,
    framework: str = "pt",
    threads: int | None = None,
    max_nbytes: int | None = None,
) -> dict[str, Any]:
    """Return all tensors of a file, or of all files of a sharded model.

    Parameters
    ----------
    filename : path
        Packed file, .safetensors file, or ``model.safetensors.index.json``.
    device : str, int or torch.device
        Device of the tensors.
    framework : str
        "pt": tensors of torch; "numpy": arrays. bfloat16 and float8 arrays need ml_dtypes; without it they hold bytes.
    threads : int, optional
        Default: as many as CPUs.
    max_nbytes : int, optional
        Maximum bytes of all tensors of a file, for files from untrusted sources: a small file may hold large tensors
        with repeated values. Default: no limit.

    Returns
    -------
    dict of str to tensor

    Raises
    ------
    ArgumentError
        The file cannot be read, or the framework has no such dtype.
    LimitError
        The tensors are larger than `max_nbytes`.
    FrameError
        The file is damaged. No tensor is returned.
    """
    new = _new(framework)
    found: dict[str, Any] = {}
    for path in _paths(filename):
        model = open_model(path)
        try:
            _check_limit(model, max_nbytes)
            found |= {name: _moved(x, device) for name, x in read_all(model, new, threads).items()}
        finally:
            model.close()
    return found


def load(data: bytes, *, framework: str = "pt", max_nbytes: int | None = None) -> dict[str, Any]:
    """Return all tensors of a packed file, or of a .safetensors file, in memory; see :func:`load_file`."""
    model = open_bytes(data)
    _check_limit(model, max_nbytes)
    return read_all(model, _new(framework))


class safe_open:
    """Open a file whose tensors are decoded when they are asked for.

    Parameters
    ----------
    filename : path
        Packed file, .safetensors file, or ``model.safetensors.index.json``.
    framework : str
        "pt": tensors of torch; "numpy": arrays.
    device : str, int or torch.device
        Device of the tensors.

    Raises
    ------
    ArgumentError
        The file cannot be read.
    FrameError
        The file is damaged. Its tensors are checked when they are decoded.

    Examples
    --------
    >>> from codec.integrations.safetensors import safe_open, save_file
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_file({"weight": torch.arange(6.0).reshape(3, 2)}, f"{folder.name}/model.codec.safetensors")
    >>> with safe_open(f"{folder.name}/model.codec.safetensors", framework="pt") as f:
    ...     f.keys(), f.get_tensor("weight").shape, f.get_slice("weight")[1:, 0]
    (['weight'], torch.Size([3, 2]), tensor([2., 4.]))
    >>> folder.cleanup()
    """

    def __init__(self, filename: str | os.PathLike[str], framework: str, device: Any = "cpu") -> None:
        self._new, self._device = _new(framework), device
        self._models = list[ModelFile]()
        self._places: dict[str, tuple[ModelFile, int]] = {}
        try:
            for path in _paths(filename):
                model = open_model(path)
                self._models.append(model)
                self._places |= {t.name: (model, k) for k, t in enumerate(model.header.tensors)}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "safe_open":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        while self._models:
            self._models.pop().close()

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._places)

    def offset_keys(self) -> list[str]:
        """Return the names of all tensors, in the order of the data."""
        return list(self._places)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file before it was packed; of a sharded model those of all files."""
        found: dict[str, str] = {}
        for model in self._models:
            found |= model.header.metadata
        return found or None

    def get_tensor(self, name: str) -> Any:
        """Return a tensor."""
        return self.get_slice(name)[...]

    def get_tensors(self, names: Sequence[str]) -> dict[str, Any]:
        """Return several tensors by name."""
        return {name: self.get_tensor(name) for name in names}

    def get_slice(self, name: str) -> "Slice":
        """Return an object that decodes the part of a tensor by which it is indexed."""
        if not self._models:
            raise ArgumentError("the file is closed")
        if name not in self._places:
            raise ArgumentError(f"the file has no tensor {name!r}: keys() lists all")
        return Slice(*self._places[name], self._new, self._device)


class Slice:
    """Tensor of an open file. Indexing decodes the rows of the first dimension that the first index selects."""

    def __init__(self, model: ModelFile, k: int, new: Any, device: Any) -> None:
        self._model, self._k, self._new, self._device = model, k, new, device
        self._tensor = model.header.tensors[k]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype by its name in .safetensors files, such as ``"BF16"``."""
        return self._tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        """Return the values that an index of the framework selects."""
        key = cast(tuple[Any, ...], index) if isinstance(index, tuple) else (index,)
        t = self._tensor
        rows, first = slice(0, t.shape[0] if t.shape else 1), key[0] if key else Ellipsis
        if t.shape and type(first) is int and -t.shape[0] <= first < t.shape[0]:
            rows, key = slice(first % t.shape[0], first % t.shape[0] + 1), (0, *key[1:])
        elif t.shape and isinstance(first, slice):
            begin, end, step = first.indices(t.shape[0])
            if step > 0:
                rows, key = slice(begin, max(begin, end)), (slice(None, None, step), *key[1:])
        return _moved(self._rows(rows)[key], self._device)

    def _rows(self, rows: slice) -> Any:
        """Return consecutive rows."""
        t = self._tensor
        row = t.nbytes // max(1, t.shape[0]) if t.shape else t.nbytes
        shape = (rows.stop - rows.start, *t.shape[1:]) if t.shape else ()
        part = Tensor(t.name, t.dtype, shape, 0, row * (rows.stop - rows.start))
        tensor, memory = self._new(part)
        self._model.read(self._k, row * rows.start, memory)
        return tensor


def _check_limit(model: ModelFile, most: int | None) -> None:
    if most is not None and model.header.data_nbytes > most:
        raise LimitError(f"the tensors have {model.header.data_nbytes} bytes, max_nbytes is {most}")


def _new(framework: str) -> Any:
    if framework not in _FRAMEWORKS:
        raise ArgumentError(f"framework must be one of {', '.join(_FRAMEWORKS)}, got {framework!r}")
    return _FRAMEWORKS[framework]


def _moved(tensor: Any, device: Any) -> Any:
    """Return a tensor of torch on a device."""
    return tensor if device == "cpu" else tensor.to(device)


def _paths(filename: str | os.PathLike[str]) -> list[str]:
    """Return the path of a file, or those of all files that the index of a sharded model lists."""
    path = os.fspath(filename)
    if not path.endswith(_INDEX):
        return [path]
    return [str(Path(path).parent / name) for name in shard_names(path)]
