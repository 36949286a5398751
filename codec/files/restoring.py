"""Conversion of model files to .npz and .pt files, and to arrays and tensors in memory."""

import importlib
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile

import numpy as np

from codec.errors import ArgumentError, EngineError
from codec.files.arrays import numpy_dtype
from codec.files.header import SAFETENSORS, TORCH, FileTensor, itemsize_of
from codec.files.index import FilePart
from codec.files.packing import Progress
from codec.files.parts import Bytes
from codec.files.reading import ModelFile, PackedFile, each_part

_MAX_MEMBER = 65535 - len(".npy")  # bytes of a name in a .npz file


def new_array(t: FileTensor) -> tuple[Any, Bytes]:
    """Allocate a numpy array for a tensor; return it, and a view of its bytes.

    Raises
    ------
    ArgumentError
        numpy has no such dtype.
    """
    if t.dtype not in SAFETENSORS:
        raise ArgumentError(f"tensor {t.name!r} has dtype {t.dtype}, which numpy lacks: read torch tensors instead")
    memory = np.empty(t.nbytes, np.uint8)
    return memory.view(numpy_dtype(SAFETENSORS[t.dtype])).reshape(t.shape), memory


def new_tensor(t: FileTensor) -> tuple[Any, Bytes]:
    """Allocate a torch tensor in host memory for a tensor; return it, and a view of its bytes.

    Raises
    ------
    ArgumentError, EngineError
        torch has no such dtype, or is not installed.
    """
    torch = torch_module()
    dtype = getattr(torch, TORCH.get(t.dtype, ""), None)
    if dtype is None:
        raise ArgumentError(f"tensor {t.name!r} has dtype {t.dtype}, which torch {torch.__version__} lacks")
    if math.prod(t.stored_shape) * itemsize_of(t.dtype) != t.nbytes:
        raise ArgumentError(
            f"tensor {t.name!r} has dtype {t.dtype} and shape {t.shape}: the last dimension must be even, because "
            "torch stores two values in a byte"
        )
    memory = torch.empty(t.nbytes, dtype=torch.uint8)
    return memory.view(dtype).reshape(t.stored_shape), memory.numpy()


def torch_module() -> Any:
    """Return the module torch; raise EngineError if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise EngineError("tensors of PyTorch need torch, which is not installed: pip install torch") from None


def read_all(
    model: ModelFile,
    new: Callable[[FileTensor], tuple[Any, Bytes]],
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read all tensors of a file with several threads; return them by name, in the order of the header."""
    made = [new(t) for t in model.header.tensors]
    if isinstance(model, PackedFile):
        file = model

        def target(part: FilePart) -> Bytes | None:
            """Return the destination of a part in its tensor; None for a part of several tensors."""
            return made[part.tensors[0]][1][part.begin :][: part.size] if len(part.tensors) == 1 else None

        def place(part: FilePart, values: Bytes) -> None:
            for k, offset, at, size in file.places(part):
                if (k,) != part.tensors:  # `k` was not decoded in place: it is in a group, or equals a stored tensor
                    made[k][1][offset : offset + size] = values[at : at + size]

        each_part(file, place, threads, progress, target)
    else:
        for k, (_, memory) in enumerate(made):
            model.read(k, 0, memory)
    by_name = {t.name: x for t, (x, _) in zip(model.header.tensors, made, strict=True)}
    return {name: by_name[name] for name in model.header.names}


def save_npz(model: ModelFile, file: BinaryIO) -> None:
    """Write the tensors of a file to a .npz file, one by one.

    Raises
    ------
    ArgumentError
        numpy lacks a dtype, or a tensor's name cannot be the name of a member of a zip file.
    """
    numbers = {t.name: k for k, t in enumerate(model.header.tensors)}
    members = {name: _member(name) for name in model.header.names}
    with ZipFile(file, "w", ZIP_STORED, allowZip64=True) as archive:
        for name in model.header.names:
            array, memory = new_array(model.header.tensors[numbers[name]])
            model.read(numbers[name], 0, memory)
            with archive.open(members[name], "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _member(name: str) -> str:
    """Return the name of the member of a .npz file that holds a tensor."""
    with suppress(UnicodeEncodeError):
        if "\0" not in name and len(name.encode()) <= _MAX_MEMBER:  # zip files end names at NUL
            return f"{name}.npy"
    raise ArgumentError(
        f"tensor {name[:80]!r} cannot be written to a .npz file, whose names are UTF-8 without NUL, of at most "
        f"{_MAX_MEMBER} bytes: write a .safetensors or .pt file"
    )


def save_torch(model: ModelFile, file: BinaryIO, threads: int | None) -> None:
    """Write the tensors of a file as a dict with torch.save."""
    tensors = read_all(model, new_tensor, threads)
    try:
        torch_module().save(tensors, file)
    except RuntimeError as e:  # of torch's writer, after an OSError of `file`
        if isinstance(e.__context__, OSError):
            raise e.__context__ from None
        raise
