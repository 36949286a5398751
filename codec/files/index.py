"""Index of a packed model file (container): the original file's header, and the parts that encode its data section."""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, cast

from codec.arguments import shown
from codec.errors import FrameError, UnsupportedError
from codec.files.header import Header, parse

FORMAT = 1  # version of the container
VERSION_KEY, DIGEST_KEY = "codec.container", "codec.index"  # metadata keys of the version and of the index's digest
INDEX, GROUPS = "codec.index", "codec.groups"  # names of the container's entries for the index and for small tensors
PART_NBYTES = 1 << 23  # maximum number of uncompressed bytes in a part
# Maximum size of the decompressed index: the larger of _MAX_GROWTH times its compressed size and _MIN_JSON bytes.
_MAX_GROWTH, _MIN_JSON = 32, 1 << 20


class FilePart(NamedTuple):
    """Bytes of one tensor, or of several whole tensors, that are encoded together.

    Parameters
    ----------
    tensors : tuple of int
        Numbers of the tensors, counted in the order of the data section.
    begin : int
        Offset of the part in its tensor, in bytes; 0 for several tensors.
    size : int
        Uncompressed size in bytes, at most PART_NBYTES.
    coding : str
        Encoding of the part, one of :data:`codec.files.parts.CODINGS`.
    at, nbytes : int
        Offset in the data section of the container, and stored size, in bytes.
    digest : int
        :func:`codec.digest` of the uncompressed bytes.
    """

    tensors: tuple[int, ...]
    begin: int
    size: int
    coding: str
    at: int
    nbytes: int
    digest: int


@dataclass(frozen=True)
class Index:
    """Contents of a container.

    Parameters
    ----------
    header : Header
        Header of the original file.
    parts : tuple of FilePart
        All parts, in the order of the container's data section.
    equal : dict of int to int
        For each tensor that is not stored, the number of a stored tensor with equal bytes.
    """

    header: Header
    parts: tuple[FilePart, ...]
    equal: dict[int, int]

    @cached_property
    def by_tensor(self) -> dict[int, list[FilePart]]:
        """By number of a stored tensor: the parts that contain its bytes."""
        found: dict[int, list[FilePart]] = {}
        for part in self.parts:
            for k in part.tensors:
                found.setdefault(k, []).append(part)
        return found

    def stored_as(self, k: int) -> list[FilePart]:
        """Return the parts that contain tensor `k`, or the tensor equal to it; an empty list if it has no bytes."""
        return self.by_tensor.get(self.equal.get(k, k), [])

    def to_bytes(self) -> bytes:
        """Serialize and compress the index, as it is stored in a container."""
        rows = [[p.tensors, p.size, p.coding, p.nbytes, f"{p.digest:016x}"] for p in self.parts]
        equal = sorted(self.equal.items())
        given = {"header": self.header.text.decode(), "parts": rows, "equal": equal}
        text = json.dumps(given, separators=(",", ":"), ensure_ascii=False).encode()
        packed = zlib.compress(text, 9)
        return packed if len(text) <= _limit(packed) else zlib.compress(text, 0)

    @classmethod
    def from_bytes(cls, data: bytes, data_nbytes: int) -> "Index":
        """Parse the index of a container whose other entries take `data_nbytes` bytes.

        Raises
        ------
        FrameError
            The bytes are not an index, or the index contradicts its header or the size of the container.
        """
        try:
            given = json.loads(_inflated(data))
            header = parse(given["header"].encode())
            parts = tuple(_parts(given["parts"], header))
            equal = {_number(k, header): _number(other, header) for k, other in given["equal"]}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error) as e:
            raise damaged(f"the index is damaged: {e}") from None
        index = cls(header, parts, equal)
        _check(index, data_nbytes)
        return index


def damaged(message: str) -> FrameError:
    """Return the error for a damaged container."""
    return FrameError(f"not a valid packed file: {message}")


def index_digest(data: bytes) -> str:
    """Return the digest of an index, which is stored in the container's metadata."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def is_container(header: Header) -> bool:
    """Return True if a .safetensors file is a container of any version, that is, if it has two of three marks.

    Two marks suffice, so that a container with one damaged mark is not mistaken for an ordinary .safetensors file.
    """
    marks = (VERSION_KEY in header.metadata, DIGEST_KEY in header.metadata, INDEX in header.names)
    return sum(marks) >= 2


def check_version(header: Header) -> None:
    """Raise UnsupportedError for a container of a later version."""
    if (found := header.metadata.get(VERSION_KEY)) != str(FORMAT):
        if found is None:
            raise damaged(f"its metadata lack {VERSION_KEY!r}")
        raise UnsupportedError(
            f"the packed file has version {found!r}, but this library reads version {FORMAT}: update codec"
        )


def _limit(packed: bytes) -> int:
    return max(_MIN_JSON, _MAX_GROWTH * len(packed))


def _inflated(data: bytes) -> bytes:
    """Decompress the text of an index; raise ValueError if it is truncated or exceeds the maximum size."""
    inflate = zlib.decompressobj()
    text = inflate.decompress(data, _limit(data))
    if not inflate.eof or inflate.unused_data:
        raise ValueError("it is truncated, or too large")
    return text


def _number(k: Any, header: Header) -> int:
    if type(k) is not int or not 0 <= k < len(header.tensors):
        raise ValueError(f"tensor {shown(k)} is not one of the {len(header.tensors)} tensors")
    return k


def _parts(rows: Sequence[Any], header: Header) -> Iterator[FilePart]:
    """Yield the parts that the rows of an index describe."""
    at, last, end = 0, -1, 0  # `last`, `end`: tensor and end of the previous part, if it has only one tensor
    for tensors, size, coding, nbytes, digest in rows:
        numbers = tuple(_number(k, header) for k in cast(list[Any], tensors))
        begin = end if numbers == (last,) else 0
        if not numbers or not isinstance(coding, str) or not all(type(n) is int and n > 0 for n in (size, nbytes)):
            raise ValueError("a field of a part has the wrong type, or is not positive")
        whole = sum(header.tensors[k].nbytes for k in numbers)
        fits = begin + size <= whole if len(numbers) == 1 else size == whole
        if not fits or size > PART_NBYTES or len({header.tensors[k].dtype for k in numbers}) != 1:
            raise ValueError("the size of a part is not that of its tensors")
        if size % header.tensors[numbers[0]].itemsize:
            raise ValueError("a part ends inside a value")
        yield FilePart(numbers, begin, size, coding, at, nbytes, int(digest, 16))
        last, end = (numbers[0], begin + size) if len(numbers) == 1 else (-1, 0)
        at += nbytes


def _check(index: Index, data_nbytes: int) -> None:
    """Raise FrameError unless the parts fill the container, and contain each tensor exactly once."""
    if sum(p.nbytes for p in index.parts) != data_nbytes:
        raise damaged(
            f"its parts have {sum(p.nbytes for p in index.parts)} bytes together, but its data has {data_nbytes}"
        )
    stored: dict[int, int] = {}
    for numbers, run in groupby(index.parts, key=lambda p: p.tensors):
        together = list(run)
        if stored.keys() & set(numbers) or len(set(numbers)) != len(numbers) or len(together) > 1 < len(numbers):
            raise damaged("a tensor is stored twice")
        for k in numbers:
            stored[k] = sum(p.size for p in together) if len(numbers) == 1 else index.header.tensors[k].nbytes
    for k, t in enumerate(index.header.tensors):
        other = index.equal.get(k, k)
        if (k in stored) == (k in index.equal) and t.nbytes:
            raise damaged(f"{t.name!r} is stored twice, or not at all")
        if stored.get(other, 0) != t.nbytes:
            raise damaged(f"the parts of {t.name!r} do not have the {t.nbytes} bytes of the tensor")
