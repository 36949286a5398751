"""Header of a .safetensors file: JSON text with dtype, shape and offsets of each tensor."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

from codec._c.library import ITEMSIZE, lib
from codec.errors import ArgumentError, EngineError
from codec.files.opening import FileBytes, MemoryBytes

MAX_JSON = 100_000_000  # maximum bytes of a header, from the specification of the format
MAX_RANK: int = lib.CODEC_MAX_RANK
METADATA = "__metadata__"
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64",
}  # fmt: skip
# dtypes that only torch has: their values are encoded as bytes
_TORCH_ONLY = {"F4": "float4_e2m1fn_x2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
TORCH = SAFETENSORS | _TORCH_ONLY
CODES = {name: code for code, name in TORCH.items()}
_MOST_VALUES = 1 << 60  # limit of the product of the dimensions that are not 0, as in frames
_PER_BYTE = {"F4": 2}  # by dtype whose values are smaller than a byte: values that torch stores in an item of one byte
_WIRE = {"complex64": "uint64"}  # dtypes that frames lack, each with the dtype as which its bits are encoded
_ALIGNMENT = 8  # alignment of the header's end, in bytes


class FileTensor(NamedTuple):
    """Tensor of a file: its dtype as named in the header, and its byte range [begin, end) in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.end - self.begin

    @property
    def wire(self) -> str:
        """Dtype as which the tensor is encoded: uint8 if the dtype is unknown, or its values are less than a byte."""
        known = SAFETENSORS.get(self.dtype, "uint8")
        return _WIRE.get(known, known)

    @property
    def itemsize(self) -> int:
        """Size in bytes of a value of dtype :attr:`wire`."""
        return ITEMSIZE[self.wire]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the torch tensor, in which an item of float4_e2m1fn_x2 is two values of the last dimension."""
        per_byte = _PER_BYTE.get(self.dtype, 1)
        return self.shape if per_byte == 1 else (*self.shape[:-1], self.shape[-1] // per_byte)

    def rows(self, begin: int, end: int) -> "FileTensor":
        """Return the tensor of rows [begin, end) of the first dimension of :attr:`stored_shape`."""
        rows = self.stored_shape[0]
        row, values = self.nbytes // max(1, rows), self.shape[0] // max(1, rows)
        return FileTensor(self.name, self.dtype, ((end - begin) * values, *self.shape[1:]), row * begin, row * end)


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a .safetensors file.

    Parameters
    ----------
    text : bytes
        JSON text, including its padding.
    tensors : tuple of FileTensor
        All tensors, in the order of the data section.
    names : tuple of str
        Names of all tensors, in the order of the text.
    metadata : dict of str to str
        Contents of the entry ``__metadata__``.
    """

    text: bytes
    tensors: tuple[FileTensor, ...]
    names: tuple[str, ...]
    metadata: dict[str, str]

    @property
    def data_nbytes(self) -> int:
        """Size of the data section in bytes."""
        return self.tensors[-1].end if self.tensors else 0

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return 8 + len(self.text) + self.data_nbytes

    @property
    def prefix(self) -> bytes:
        """Bytes of the file that precede the data section: the size of the JSON text, and the text."""
        return len(self.text).to_bytes(8, "little") + self.text


def itemsize_of(dtype: str) -> int:
    """Return the size in bytes of an item of a dtype of TORCH, named as in .safetensors files."""
    return 8 if dtype == "C64" else ITEMSIZE.get(TORCH[dtype], 1)


def described(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape, as in .safetensors files, of a tensor whose dtype numpy or torch names `dtype`.

    Raises
    ------
    ArgumentError
        .safetensors files have no such dtype.
    """
    if dtype not in CODES:
        raise ArgumentError(f"tensor {name!r} has dtype {dtype}: .safetensors files hold {', '.join(CODES)}")
    code = CODES[dtype]
    return code, (*shape[:-1], shape[-1] * _PER_BYTE[code]) if code in _PER_BYTE else shape


def parse(text: bytes) -> Header:
    """Parse the JSON text of a header.

    Raises
    ------
    ValueError
        The text is not a header, or the tensors overlap or leave gaps in the data section.
    """
    try:
        given = json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(given, dict):
        raise ValueError("its header is not a JSON object")
    entries = cast(dict[str, Any], given)
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in cast(dict[str, Any], metadata).values()):
        raise ValueError(f"{METADATA} in its header is not a mapping of strings to strings")
    tensors = sorted((_tensor(name, entry) for name, entry in entries.items()), key=lambda t: (t.begin, t.end))
    if tensors and (tensors[0].begin or any(a.end != b.begin for a, b in pairwise(tensors))):
        raise ValueError("the tensors in its header overlap, or leave gaps")
    return Header(text, tuple(tensors), tuple(entries), cast(dict[str, str], metadata))


def read_header(file: FileBytes | MemoryBytes) -> Header:
    """Read the header of a .safetensors file, and check that the file has the size that follows from the header.

    Raises
    ------
    ValueError
        The file is not a .safetensors file.
    EngineError
        This machine is not little-endian; .safetensors files are.
    """
    if sys.byteorder != "little":
        raise EngineError(".safetensors files are read and written on little-endian machines only")
    length = int.from_bytes(file.get(0, min(8, file.nbytes)).tobytes(), "little")
    if file.nbytes < 8 or length > min(MAX_JSON, file.nbytes - 8):
        raise ValueError(f"its header would have {length} bytes, more than the file or than 100 MB")
    header = parse(file.get(8, length).tobytes())
    if header.nbytes != file.nbytes:
        raise ValueError(f"by its header the file has {header.nbytes} bytes, but it has {file.nbytes}")
    return header


def compose(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> Header:
    """Return the header of a new file.

    Parameters
    ----------
    tensors : iterable of (name, dtype, shape, size in bytes)
        Tensors in the order of the data section; dtypes as named in .safetensors files.
    metadata : mapping of str to str
        Contents of the entry ``__metadata__``.

    Raises
    ------
    ArgumentError
        The metadata are not text, or a tensor is named ``__metadata__``, has no text as its name, or has the name of
        another tensor.
    """
    given: Mapping[Any, Any] = metadata
    if not all(isinstance(each, str) for pair in given.items() for each in pair):
        raise ArgumentError("metadata must be a mapping of str to str")
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at, placed = 0, list[FileTensor]()
    for name, dtype, shape, nbytes in tensors:
        if name == METADATA or not isinstance(cast(Any, name), str):
            raise ArgumentError(f"the name of a tensor must be a str other than {METADATA!r}, got {name!r}: rename it")
        if name in entries:
            raise ArgumentError(f"two tensors have the name {name!r}: rename one of them")
        placed.append(FileTensor(name, dtype, shape, at, at + nbytes))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return Header(text, tuple(placed), tuple(t.name for t in placed), dict(metadata))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raise ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has the same name twice")
    return found


def _tensor(name: str, entry: Any) -> FileTensor:
    """Return the tensor that an entry of a header describes; raise ValueError if its fields are inconsistent."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"the entry of {name!r} lacks a dtype, a shape or offsets") from None
    fits = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    count = 1
    for n in shape if fits else ():
        if (count := count * (n or 1)) >= _MOST_VALUES:
            raise ValueError(f"{name!r} in its header has more values than a tensor can have")
    if not fits or (
        dtype in TORCH and math.prod(shape) * itemsize_of(dtype) != (end - begin) * _PER_BYTE.get(dtype, 1)
    ):
        raise ValueError(f"dtype, shape and offsets of {name!r} in its header do not match")
    return FileTensor(name, dtype, shape, begin, end)
