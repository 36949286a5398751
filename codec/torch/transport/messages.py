"""Bodies of messages between ranks (docs/spec/protocol.md, sections 3.1 and 6.2): integers, aborts."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from codec import PeerError, Status

Array = np.ndarray[Any, Any]

# Statuses of an abort, in ascending order of severity. OTHER_RANK: another rank's error is the cause.
OTHER_RANK, ERROR, NONFINITE, DIFFERS = range(1, 5)

_ABORT = struct.Struct("<qq")  # status, rank that is the cause; a text follows
_MOST_TEXT = 1 << 12  # maximum bytes of the text of an abort
_SHOWN = 400  # maximum number of characters of another rank's text in an error message
_MOST_FIELDS = 32  # maximum number of arguments in the text of an abort
_NUMBERS_NBYTES = 8

Fields = Mapping[str, str]  # arguments that a signature is computed from, by name


def pack_numbers(numbers: Sequence[int]) -> Array:
    """Return signed integers of 64 bits as the body of a message."""
    return np.array(numbers, "<i8").view(np.uint8)


def unpack_numbers(body: Array) -> list[int]:
    """Return the integers in the body of a message."""
    return [int(n) for n in body.view("<i8")] if body.flags.aligned else np.frombuffer(body.tobytes(), "<i8").tolist()


def numbers_nbytes(count: int) -> int:
    """Return the bytes of a body with `count` integers."""
    return _NUMBERS_NBYTES * count


def largest(reports: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each position in the reports, the largest integer at that position."""
    return [max(column) for column in zip(*reports, strict=True)]


def status_of(error: BaseException) -> int:
    """Return the status that a rank sends when it aborts a collective because of an error."""
    if isinstance(error, PeerError):
        return OTHER_RANK
    return NONFINITE if getattr(error, "code", None) == Status.NONFINITE else ERROR


class Cause(NamedTuple):
    """Reason for which ranks abort a collective.

    Parameters
    ----------
    status : int
        Status of the abort.
    rank : int
        Rank that is the cause; with DIFFERS, the rank whose signature differs from the sender's.
    text : str
        Text of the error; with DIFFERS, the arguments of the collective, packed by :func:`pack_fields`.
    """

    status: int
    rank: int
    text: str

    def pack(self) -> bytes:
        """Return the body of an abort."""
        return _ABORT.pack(self.status, self.rank) + self.text.encode(errors="replace")[:_MOST_TEXT]

    @staticmethod
    def unpack(body: bytes) -> "Cause":
        """Return the reason in the body of an abort; status 0 if it has none."""
        if len(body) < _ABORT.size:
            return Cause(0, 0, "")
        status, rank = _ABORT.unpack_from(body)
        return Cause(status, rank, body[_ABORT.size :].decode(errors="replace"))

    def error(self) -> PeerError:
        """Return the PeerError to raise here, because the rank of this cause has aborted a collective."""
        what = {
            NONFINITE: "has NaN or Inf",
            OTHER_RANK: "has lost another rank, or was cancelled",
        }.get(self.status, "could not do its part")
        text = f" ({_printable(self.text)})" if self.text else ""
        code = Status.NONFINITE if self.status == NONFINITE else None
        return PeerError(f"rank {self.rank} {what}: nothing was changed{text}", code)


def pack_fields(fields: Fields) -> str:
    """Return the arguments of a collective as the text of an abort."""
    return json.dumps(dict(fields))


def unpack_fields(text: str) -> dict[str, str]:
    """Return the arguments in the text of an abort; empty if there are none, or if the text is damaged."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    items = cast(dict[Any, Any], found).items()
    return {_printable(str(name)): _printable(str(value)) for name, value in list(items)[:_MOST_FIELDS]}


def _printable(text: str) -> str:
    """Return the first characters of another rank's text, with spaces in place of unprintable characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_SHOWN])


def nearest(theirs: Fields, parts: Sequence[Fields]) -> Fields:
    """Return the arguments of the part of this rank that another rank's arguments are for; {} without parts.

    A collective of several tensors has a part for each of them, and another rank sends the arguments of one part that
    differs. Return the arguments with the most equal items among those that differ.
    """

    def score(mine: Fields) -> tuple[bool, int]:
        names = _differing(theirs, mine)
        return bool(names), len(mine.keys() & theirs.keys()) - len(names)

    return max(parts, key=score) if parts else {}


def _differing(theirs: Fields, mine: Fields) -> list[str]:
    """Return the names of the arguments that both ranks have, and that differ."""
    return [name for name in mine if name in theirs and theirs[name] != _printable(mine[name])]


def difference(rank: int, theirs: Fields, mine: Fields) -> PeerError:
    """Return the PeerError to raise here, because `rank` has begun another collective or has passed other arguments."""
    names = _differing(theirs, mine)
    if names and theirs.get("collective") == mine.get("collective"):
        what = "; ".join(f"{name} is {theirs[name]} there and {mine[name]} here" for name in names)
        return PeerError(f"rank {rank} has passed other arguments: {what}; nothing was changed")
    return PeerError(
        f"rank {rank} has begun {_named(theirs)}, and this rank {_named(mine)}: all ranks must begin the same "
        "collectives in the same order; nothing was changed"
    )


def other_difference(rank: int, other: int, fields: Fields) -> PeerError:
    """Return the PeerError to raise here, because `rank` has other arguments than `other`, which has those of here."""
    return PeerError(
        f"rank {rank} has passed other arguments than rank {other} and this rank, which have begun {_named(fields)}; "
        "nothing was changed"
    )


def _named(fields: Fields) -> str:
    """Return the name of a collective, with its step if ranks must agree on one."""
    name, step = fields.get("collective", "another collective"), fields.get("step")
    return name if step is None else f"{name} ({step})"
