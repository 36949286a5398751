"""Updates in parts: each rank of a trainer writes the part with its shards; a file of the store names all parts.

The file is a JSON object. docs/spec/weight-updates.md specifies its entries. The sum of the parts' digests, numbers of
tensors and sizes are those of the update.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from codec.errors import FrameError
from codec.files.signing import SigningKey
from codec.weight_sync.updates.digests import sum_of
from codec.weight_sync.updates.identity import MAX_VERSION, NO_DIGEST, UpdateHead
from codec.weight_sync.updates.kinds import Bytes, WeightsSize
from codec.weight_sync.updates.listing import MAX_PARTS, Listed
from codec.weight_sync.updates.shards import Name
from codec.weight_sync.updates.signatures import check_list, signed_list
from codec.weight_sync.updates.update import TensorEntry, Update, head_and_index

MAX_NBYTES = 1 << 24  # maximum size of the file that names the parts, in bytes
_FORMAT = 1
_LONGEST_URL = 512  # characters


_DIGESTS = {"base_digest": 16, "digest": 16, "sha256": 32}  # sizes in bytes


class Part(NamedTuple):
    """Entry of a part: its header, size, size of its tensors, SHA-256, and the URL of the store that has its file.

    A URL of None means the store of the update itself.
    """

    base_digest: bytes
    digest: bytes
    nbytes: int
    total: WeightsSize
    sha256: bytes
    url: str | None = None

    @classmethod
    def of(cls, update: Update, url: str | None = None) -> "Part":
        """Return the entry of an update that is a part."""
        return cls(update.base_digest, update.digest, update.nbytes, update.total, update.sha256, url)

    def fields(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        digests = {name: getattr(self, name).hex() for name in _DIGESTS}
        where = {} if self.url is None else {"url": self.url}
        return {"nbytes": self.nbytes, "tensors": list(self.total), **digests, **where}

    @classmethod
    def read(cls, entry: Any) -> "Part":
        """Return the entry that :meth:`fields` has written; raise an error of :data:`INVALID` for something else."""
        digests = [bytes.fromhex(entry[name]) for name in _DIGESTS]
        numbers, url = [entry["nbytes"], *entry["tensors"]], entry.get("url")
        if [*map(len, digests)] != [*_DIGESTS.values()] or not all(
            type(n) is int and 0 <= n <= MAX_VERSION for n in numbers
        ):
            raise ValueError("a part has no digests or sizes")
        if url is not None and not (type(url) is str and len(url) <= _LONGEST_URL and url.isprintable()):
            raise ValueError("the URL of a part is invalid")
        nbytes, *size = numbers
        return cls(digests[0], digests[1], nbytes, WeightsSize(*size), digests[2], url)


INVALID = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # errors of reading another JSON object


class Parts(NamedTuple):
    """Contents of the file that names the parts of an update, by rank."""

    head: UpdateHead
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, run: bytes, version: int, base: int | None, parts: Sequence[Part]) -> "Parts":
        """Return the contents for parts of an update."""
        before, after = _sum([p.base_digest for p in parts]), _sum([p.digest for p in parts])
        return cls(UpdateHead(run, version, base, NO_DIGEST if base is None else before, after), tuple(parts))

    @property
    def total(self) -> WeightsSize:
        """Size of the weights."""
        return WeightsSize(sum(p.total.tensors for p in self.parts), sum(p.total.nbytes for p in self.parts))

    def listed(self, rank: int) -> Listed:
        """Return the entry with which the file of a part is read."""
        return Listed(self.head_of(rank), self.parts[rank].nbytes, self.parts[rank].sha256, rank=rank)

    def head_of(self, rank: int) -> UpdateHead:
        """Return the header of a part."""
        return self.head._replace(base_digest=self.parts[rank].base_digest, digest=self.parts[rank].digest)

    def to_bytes(self, key: SigningKey | None = None) -> bytes:
        """Return the contents of the file, signed if there is a key."""
        head = {"format": _FORMAT, "version": self.head.version, "base": self.head.base}
        run = None if self.head.run is None else self.head.run.hex()
        encoded = json.dumps({**head, "run": run, "parts": [part.fields() for part in self.parts]}).encode()
        return encoded if key is None else signed_list(encoded, key)

    @classmethod
    def parse(cls, body: bytes, key: SigningKey | None = None) -> "Parts":
        """Return the contents of a file; check its signature if there is a key.

        Raises
        ------
        FrameError
            The bytes are something else, or not signed with `key`.
        """
        if key is not None:
            check_list(body, key)
        try:
            if len(body) > MAX_NBYTES or body.count(b",") > 64 + len(body) // 16:
                raise ValueError("it is too long")
            found = json.loads(body)
            version, base, run = found["version"], found["base"], bytes.fromhex(found["run"])
            if found["format"] != _FORMAT or len(run) != len(NO_DIGEST) or not 0 < len(found["parts"]) <= MAX_PARTS:
                raise ValueError("it has another format, no run or no parts")
            if not all(type(n) is int and 0 <= n <= MAX_VERSION for n in (version, 0 if base is None else base)):
                raise ValueError("it has no version or base")
            if base is not None and base >= version:
                raise ValueError(f"version {version} does not follow base version {base}")
            return cls.of(run, version, base, [Part.read(entry) for entry in found["parts"]])
        except INVALID as e:
            raise FrameError(f"not the list of the parts of an update: {e}") from None


def _sum(digests: Sequence[bytes]) -> bytes:
    return sum_of(int.from_bytes(digest, "little") for digest in digests)


class PartedUpdate(Update):
    """Update in parts, of which all or some are at hand. Its bytes are the list of its parts.

    Parameters
    ----------
    contents : bytes
        List of the parts.
    parts : Parts
        The same list, parsed.
    found : mapping of int to Update
        Parts by rank.

    Raises
    ------
    FrameError
        A part is another update, or a tensor is in two parts.
    """

    __slots__ = ("_memory_of", "absent", "found", "parts")

    def __init__(self, contents: bytes, parts: Parts, found: Mapping[int, Update]) -> None:
        self.memory = np.frombuffer(contents, np.uint8)
        self._sha256 = None
        self.parts, self.found = parts, found
        self.head, self.total, self.signature = parts.head, parts.total, None
        absent = [part for rank, part in enumerate(parts.parts) if rank not in found]
        self.absent = sum(
            int.from_bytes(part.digest, "little") - int.from_bytes(part.base_digest, "little") for part in absent
        )
        self.entries: dict[Name, TensorEntry] = {}
        self._memory_of: dict[Name, Bytes] = {}
        for rank, update in found.items():
            if not parts.listed(rank).describes(update) or update.total != parts.parts[rank].total:
                raise FrameError(f"part {rank} of the update to version {parts.head.version} is another update")
            if twice := update.entries.keys() & self.entries.keys():
                raise FrameError(f"{next(iter(twice))!r} is in two parts of an update")
            self.entries.update(update.entries)
            self._memory_of.update(dict.fromkeys(update.entries, update.memory))

    @property
    def nparts(self) -> int:
        """Number of parts."""
        return len(self.parts.parts)

    def frame(self, name: Name, piece: int) -> Bytes | None:
        """Return the frame of a piece; None if the piece is unchanged."""
        if (entry := self.entries.get(name)) is None:
            return None
        begin, end = entry.frames[piece]
        return self._memory_of[name][begin:end] if begin < end else None

    def chunks(self) -> Iterator[memoryview | bytes]:
        """Yield the bytes of an unsigned update of the same values in one file."""
        sizes = [(key, e.kind, [end - begin for begin, end in e.frames]) for key, e in self.entries.items()]
        yield head_and_index(self.head, self.total, sizes)
        for key, entry in self.entries.items():
            for begin, end in entry.frames:
                yield self._memory_of[key][begin:end].data

    def check_signature(self, key: SigningKey) -> None:
        """Raise FrameError unless the list and all parts are signed with `key`."""
        check_list(bytes(self.memory), key)
        for update in self.found.values():
            update.check_signature(key)
