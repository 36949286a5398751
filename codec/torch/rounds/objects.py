"""Objects of a run: changes of a site, manifests of rounds, and snapshots. All bytes are checked before they are used.

An object is magic, tag, size of the head, head and payload. The head is a JSON object. The tag is an HMAC of the
object's name and all bytes that follow, by the secret of the sites, or zeros without a secret.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self, cast

from codec import FrameError, StateError
from codec._secret import Secret
from codec.stateful.schema import Field, WrongField, items, mapping, number, one_of, plain, read_fields, row
from codec.torch.rounds.names import MOST_ROUNDS, SITE, ChangeName

_MAGIC = b"\x89CRND1\r\n"
_TAG_NBYTES = 32
_FIXED_NBYTES = len(_MAGIC) + _TAG_NBYTES + 4
HEAD_NBYTES = 1 << 20  # maximum size of a head
MOST_CHANGES = 1 << 12  # maximum number of changes in a manifest
MOST_LIVES = 1 << 10  # maximum number of processes that a snapshot names
MOST_WEIGHT = 1e30  # maximum weight of a change: sums of weights stay finite
_NO_TAG = bytes(_TAG_NBYTES)


def digest(data: Any) -> str:
    """Return the digest of an object's bytes, by which manifests name changes, and each other."""
    return hashlib.sha256(data).hexdigest()


def sealed(name: str, head: Mapping[str, Any], payload: Iterable[Any], secret: Secret | None) -> bytes:
    """Return the bytes of an object.

    Parameters
    ----------
    name : str
        Name of the object, which the tag covers: an object cannot be moved to another name.
    head : mapping
        Contents of the head.
    payload : iterable of buffer
        Bytes after the head.
    secret : Secret or None
        Secret of the sites.
    """
    text = json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    rest = b"".join([len(text).to_bytes(4, "little"), text, *payload])
    return b"".join([_MAGIC, _NO_TAG if secret is None else _tag(name, rest, secret), rest])


def unsealed(name: str, data: bytes, secret: Secret | None) -> tuple[dict[str, Any], memoryview]:
    """Return head and payload of an object.

    Raises
    ------
    FrameError
        The bytes are damaged, are those of another object, or are not signed with this secret.
    """
    rest = memoryview(data)[len(_MAGIC) + _TAG_NBYTES :]
    if not data.startswith(_MAGIC) or len(rest) < 4:
        raise FrameError(f"{name!r} in the store is not an object of codec.torch.Rounds")
    tag = data[len(_MAGIC) : len(_MAGIC) + _TAG_NBYTES]
    if secret is None and tag != _NO_TAG:
        raise FrameError(f"{name!r} in the store is signed: set CODEC_SECRET_FILE, or options(secret=), on this site")
    if secret is not None and tag == _NO_TAG:
        raise FrameError(f"{name!r} in the store is not signed: set CODEC_SECRET_FILE on all sites, or on none")
    if secret is not None and not hmac.compare_digest(tag, _tag(name, rest, secret)):
        raise FrameError(f"{name!r} in the store was changed, or is signed with another secret")
    return head_of(name, memoryview(data))


def head_of(name: str, data: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return head and payload of an object, whose tag is not checked; see :func:`unsealed`."""
    rest = data[len(_MAGIC) + _TAG_NBYTES :]
    n = int.from_bytes(rest[:4], "little")
    if n > min(HEAD_NBYTES, len(rest) - 4):
        raise FrameError(f"the head of {name!r} in the store is damaged")
    try:
        head: Any = json.loads(bytes(rest[4 : 4 + n]), parse_constant=_refuse)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise FrameError(f"the head of {name!r} in the store is damaged")
    return cast(dict[str, Any], head), rest[4 + n :]


def _tag(name: str, rest: Any, secret: Secret) -> bytes:
    return secret.prove(b"codec rounds\n" + name.encode() + b"\n" + hashlib.sha256(rest).digest())


def _refuse(constant: str) -> float:
    raise ValueError(constant)


class ListedChange(NamedTuple):
    """Change that a manifest lists."""

    name: ChangeName
    digest: str
    nbytes: int


@dataclass(frozen=True)
class Head:
    """Head of an object: identity of the run, and the number of a round."""

    run: str  # random identity of the run
    round: int

    @classmethod
    def read(cls, name: str, head: Mapping[str, Any]) -> Self:
        """Check a head.

        Raises
        ------
        FrameError
            A field is missing, unknown or wrong.
        """
        kinds = {f.name: _FIELDS[f.name] for f in fields(cls)}
        if set(head) != set(kinds):
            raise FrameError(f"the head of {name!r} in the store has other fields")
        try:
            return cls(**read_fields(f"the head of {name!r} in the store", "the object is damaged", kinds, head))
        except StateError as e:
            raise FrameError(str(e)) from None

    def entries(self) -> dict[str, Any]:
        """Return the contents of the head."""
        return dict(vars(self))


@dataclass(frozen=True)
class ChangeHead(Head):
    """Head of a change, whose payload is frames."""

    life: str
    site: str
    early: bool
    base: str  # digest of the anchors that the change is relative to
    weight: float
    leaves: bool  # True: the site does not send a change in the next round
    frames: list[int]  # sizes of the frames

    @property
    def name(self) -> ChangeName:
        """Name of the object."""
        return ChangeName(self.round, self.life, self.site, self.early)


@dataclass(frozen=True)
class ManifestHead(Head):
    """Contents of a manifest: the changes that a round merges, in this order."""

    before: str  # digest of the previous manifest; "" in the first round
    anchors: str  # digest of the anchors, and of the outer optimizer's state, before the round
    changes: list[ListedChange]
    awaited: list[str]  # sites for which the next round waits


@dataclass(frozen=True)
class SnapshotHead(Head):
    """Head of a snapshot, whose payload is the state before a round."""

    arguments: dict[str, str]  # arguments that must be equal on all sites
    before: str  # digest of the previous manifest
    anchors: str  # as in the manifest of the round
    awaited: list[str]
    merged: dict[str, int]  # round of the last change that was merged, by process


def _text(pattern: str) -> Field:
    """Return the kind of texts that match a pattern."""
    whole = re.compile(pattern)

    def read(value: Any) -> str:
        if type(value) is not str or whole.fullmatch(value) is None:
            raise WrongField
        return value

    return Field(f"a text like {pattern}", read)


def _few(kind: Field, least: int, most: int) -> Field:
    """Return the kind of collections with `least` to `most` items."""

    def read(value: Any) -> Any:
        if not least <= len(value) <= most:
            raise WrongField
        return kind.read(value)

    return Field(f"{kind.accepts}, with {least} to {most} items", read)


def _listed(kind: Field) -> Field:
    """Return the kind of the entries of a manifest, of which `kind` is the plain form."""

    def read(value: Any) -> ListedChange:
        name, sha, nbytes = kind.read(value)
        return ListedChange(ChangeName(*name), sha, nbytes)

    return Field(kind.accepts, read)


def _weight(value: Any) -> float:
    if type(value) is not float or not 0 < value <= MOST_WEIGHT:
        raise WrongField
    return value


_RUN, _LIFE, _DIGEST = _text("[0-9a-f]{32}"), _text("[0-9a-f]{16}"), _text("[0-9a-f]{64}")
_ROUND, _SITE, _NBYTES = number(0, MOST_ROUNDS), _text(SITE.pattern), number(1, 1 << 50)
_FIELDS = {
    "run": _RUN,
    "round": _ROUND,
    "life": _LIFE,
    "site": _SITE,
    "base": _RUN,
    "weight": Field(f"a float above 0, at most {MOST_WEIGHT:g}", _weight),
    **dict.fromkeys(("leaves", "early"), one_of(True, False)),
    "frames": _few(items(_NBYTES), 1, 8),
    "before": _text("|[0-9a-f]{64}"),
    "anchors": _RUN,
    "changes": _few(
        items(_listed(row(row(_ROUND, _LIFE, _SITE, one_of(True, False)), _DIGEST, _NBYTES))), 1, MOST_CHANGES
    ),
    "awaited": _few(items(_SITE), 0, MOST_CHANGES),
    "arguments": _few(mapping(plain(str)), 0, 64),
    "merged": _few(mapping(_ROUND), 0, MOST_LIVES),
}
