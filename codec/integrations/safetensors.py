"""Read and write packed model files with the functions and signatures of the package safetensors.

Provisional: may change in any version.

:func:`save_file` and :func:`save` write the format of ``codec pack``. :func:`safe_open`, :func:`load_file` and
:func:`load` read packed and plain .safetensors files; the first two also read the index of a sharded model. So a
program can use them for any model. The package safetensors need not be installed.
"""

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from codec.errors import ArgumentError, LimitError
from codec.files.header import FileTensor, read_header
from codec.files.index import is_container
from codec.files.opening import FileBytes, MemoryBytes, opened, readable
from codec.files.packing import pack
from codec.files.reading import ModelFile, open_bytes, open_model
from codec.files.replacing import replaced
from codec.files.restoring import new_array, new_tensor, read_all
from codec.files.shards import shard_names
from codec.files.sources import MemorySource

__all__ = ["is_packed", "load", "load_file", "safe_open", "save", "save_file"]

_INDEX = ".index.json"
_FRAMEWORKS = {"pt": new_tensor, "torch": new_tensor, "np": new_array, "numpy": new_array}


def save_file(
    tensors: Mapping[str, Any], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a packed file. Tensors with identical bytes, such as tied weights, are stored once.

    Parameters
    ----------
    tensors : mapping of str to torch.FileTensor or array
        Tensors by name. Tensors on a device are copied to host memory.
    filename : path
        File to write. It is created or replaced atomically, once it is complete.
    metadata : mapping of str to str, optional
        Metadata to store in the file.

    Raises
    ------
    ArgumentError
        A tensor has a dtype that the .safetensors format does not support, or the file cannot be written.

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
        "pt": torch tensors; "numpy": numpy arrays. Without the package ml_dtypes, numpy returns bfloat16 and float8
        tensors as arrays of bytes.
    threads : int, optional
        Number of threads. Default: the number of CPUs.
    max_nbytes : int, optional
        Maximum size of all tensors of a file together, in bytes. Set it for files from untrusted sources, since a small
        file can contain large tensors of repeated values. Default: no limit.

    Returns
    -------
    dict of str to tensor

    Raises
    ------
    ArgumentError
        The file cannot be read, or the framework does not support a dtype in it.
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
    """Return all tensors of a packed file or a .safetensors file, given as bytes; see :func:`load_file`."""
    model = open_bytes(data)
    _check_limit(model, max_nbytes)
    return read_all(model, _new(framework))


def is_packed(file: str | os.PathLike[str] | bytes) -> bool:
    """Return True if a file, given by its name or its bytes, is packed; False also for files that cannot be read."""
    try:
        if isinstance(file, bytes):
            with readable("the file in memory"):
                return is_container(read_header(MemoryBytes(file)))
        with opened(os.fspath(file)) as fd:
            return is_container(read_header(FileBytes(fd)))
    except ArgumentError:
        return False


class safe_open:
    """Open a file; each tensor is decoded when it is requested.

    Parameters
    ----------
    filename : path
        Packed file, .safetensors file, or ``model.safetensors.index.json``.
    framework : str
        "pt": torch tensors; "numpy": numpy arrays.
    device : str, int or torch.device
        Device of the tensors.

    Raises
    ------
    ArgumentError
        The file cannot be read.
    FrameError
        The header of the file is damaged. Damage in a tensor raises FrameError only when that tensor is decoded.

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
        """Return the names of all tensors, in the order of their data in the file."""
        return list(self._places)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file; for a sharded model, the merged metadata of all files. None if empty."""
        found: dict[str, str] = {}
        for model in self._models:
            found |= model.header.metadata
        return found or None

    def get_tensor(self, name: str) -> Any:
        """Decode and return a whole tensor."""
        return self.get_slice(name)[...]

    def get_tensors(self, names: Sequence[str]) -> dict[str, Any]:
        """Decode the tensors with these names, and return them by name."""
        return {name: self.get_tensor(name) for name in names}

    def get_slice(self, name: str) -> "Slice":
        """Return a lazy view of a tensor; indexing the view decodes the selected rows."""
        if not self._models:
            raise ArgumentError("the file is closed: open it again by safe_open()")
        if name not in self._places:
            raise ArgumentError(f"the file has no tensor {name!r}: keys() returns the names of its tensors")
        return Slice(*self._places[name], self._new, self._device)


class Slice:
    """Lazy view of a tensor in an open file. Indexing decodes only the rows that the first index selects."""

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
        """Decode and return the values that an index selects; `index` follows the rules of the framework."""
        key = cast(tuple[Any, ...], index) if isinstance(index, tuple) else (index,)
        shape, first = self._tensor.stored_shape, key[0] if key else Ellipsis
        part = self._tensor._replace(begin=0, end=self._tensor.nbytes)
        if shape and type(first) is int and -shape[0] <= first < shape[0]:
            part, key = self._tensor.rows(first % shape[0], first % shape[0] + 1), (0, *key[1:])
        elif shape and isinstance(first, slice):
            begin, end, step = first.indices(shape[0])
            if step > 0:
                part, key = self._tensor.rows(begin, max(begin, end)), (slice(None, None, step), *key[1:])
        return _moved(self._decoded(part)[key], self._device)

    def _decoded(self, part: FileTensor) -> Any:
        """Decode the rows of the tensor that `part` describes."""
        tensor, memory = self._new(part)
        self._model.read(self._k, part.begin, memory)
        return tensor


def _check_limit(model: ModelFile, most: int | None) -> None:
    if most is not None and model.header.data_nbytes > most:
        raise LimitError(f"the tensors have {model.header.data_nbytes} bytes, more than max_nbytes, {most}")


def _new(framework: str) -> Any:
    if framework not in _FRAMEWORKS:
        raise ArgumentError(f"framework must be one of {', '.join(_FRAMEWORKS)}, got {framework!r}")
    return _FRAMEWORKS[framework]


def _moved(tensor: Any, device: Any) -> Any:
    """Move a tensor to `device`; numpy arrays stay on the CPU."""
    return tensor if device == "cpu" else tensor.to(device)


def _paths(filename: str | os.PathLike[str]) -> list[str]:
    """Return `filename`, or the paths of all files that it lists if it is the index of a sharded model."""
    path = os.fspath(filename)
    if not path.endswith(_INDEX):
        return [path]
    return [str(Path(path).parent / name) for name in shard_names(path)]
