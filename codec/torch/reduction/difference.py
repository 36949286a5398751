"""Differences between the collectives that two ranks have begun, for the message of their error.

Requests carry a hash of a collective. After a mismatch, ranks can exchange the fields themselves: :func:`to_bytes` and
:func:`from_bytes` are their encoding, :func:`describe` names the field that differs.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, cast, get_args

from codec import FrameError
from codec.arguments import shown
from codec.decoding import Op
from codec.torch.reduction.host import Reduction

MAX_NBYTES = 2048  # of an encoded collective
_MOST_REDUCTIONS = 8  # reductions that are encoded; a DDP bucket has one for each spec
_MAX_TEXT = 240  # characters of a text
_OPS = get_args(Op)


class Fields(NamedTuple):
    """What ranks must agree on in one reduction: the items of its signature, and the shape."""

    spec: str  # repr of the spec
    dtype: str
    n: int  # values on one rank
    op: str
    algorithm: str
    segments: int | None  # hash of the segments
    unbound: bool  # the spec is not bound to an optimizer
    codebook: int | None  # id
    shape: tuple[int, ...] | None  # of a tensor that is one segment


class Collective(NamedTuple):
    """What ranks must agree on in a collective."""

    name: str  # "all_reduce", "all_gather", "exchange", ...
    algorithm: str  # the algorithm requested, "auto" included; "" if the collective has no choice
    n_reductions: int  # number of reductions
    reductions: tuple[Fields, ...]  # the first ones of them


# Names of fields in messages; all but the shape are compared by the ranks.
_LABELS = {
    "dtype": "dtype",
    "n": "number of values",
    "spec": "spec",
    "op": "op",
    "shape": "shape",
    "segments": "shapes of parameters",
    "algorithm": "algorithm",
    "unbound": "optimizer",
    "codebook": "codebook",
}


def collective_of(name: str, requested: str, planned: Sequence[tuple[Reduction, str, int | None]]) -> Collective:
    """Return the fields of a collective.

    Parameters
    ----------
    name : str
        Name of the collective.
    requested : str
        Value of ``algorithm=``; "" for collectives without it.
    planned : sequence of (Reduction, str, int or None)
        Each reduction, the name of its algorithm, and the hash of its segments.
    """
    fields = tuple(_fields_of(r, algorithm, segments) for r, algorithm, segments in planned[:_MOST_REDUCTIONS])
    return Collective(name, requested, len(planned), fields)


def _fields_of(r: Reduction, algorithm: str, segments: int | None) -> Fields:
    shape = r.whole_shape
    book = None if r.codebook is None else r.codebook.id
    return Fields(repr(r.spec)[:_MAX_TEXT], r.dtype, r.n, r.op, algorithm, segments, r.bound_spec is None, book, shape)


def describe(mine: Collective, theirs: Collective, me: int, rank: int) -> str:
    """Return a sentence that names the first field in which two collectives differ, with both values.

    Parameters
    ----------
    mine, theirs : Collective
        Collectives that this rank and the other one have begun.
    me, rank : int
        Numbers of this rank and of the other one.

    Returns
    -------
    str
        Such as "spec: Quantize(bits=4, ...) on rank 0, Sign(...) on rank 1".
    """

    def between(label: str, here: object, there: object) -> str:
        return f"{label}: {here} on rank {me}, {there} on rank {rank}"

    if mine.name != theirs.name:
        return between("collective", _summary(mine), _summary(theirs))
    if mine.n_reductions != theirs.n_reductions:
        return between("number of specs in a bucket", mine.n_reductions, theirs.n_reductions)
    for i, (a, b) in enumerate(zip(mine.reductions, theirs.reductions, strict=False)):
        where = "" if mine.n_reductions == 1 else f" of part {i}"
        for field, label in _LABELS.items():
            here, there = getattr(a, field), getattr(b, field)
            if here != there:
                return between(label + where, _value(field, here), _value(field, there))
    if mine.algorithm != theirs.algorithm:
        return between("algorithm=", repr(mine.algorithm), repr(theirs.algorithm))
    return f"rank {me} and rank {rank} differ in a field that is not exchanged"


def _summary(collective: Collective) -> str:
    if not collective.reductions:
        return collective.name
    first = collective.reductions[0]
    return f"{collective.name} of {first.n} values of {first.dtype}"


def _value(field: str, value: Any) -> object:
    if field == "segments":
        return "none" if value is None else f"hash {value & (1 << 64) - 1:016x}"
    if field == "unbound":
        return "not bound" if value else "bound to the spec"
    if field == "shape" and value is None:
        return "no shape of its own"
    return "none" if value is None else value


def to_bytes(collective: Collective) -> bytes:
    """Return a collective as compact JSON of at most `MAX_NBYTES` bytes; last reductions are left out if need be."""
    for kept in range(len(collective.reductions), -1, -1):
        entries = [*collective[:3], collective.reductions[:kept]]
        data = json.dumps(entries, separators=(",", ":")).encode()
        if len(data) <= MAX_NBYTES:
            return data
    raise AssertionError("names of collectives are short")


def from_bytes(data: bytes) -> Collective:
    """Return the collective that another rank has encoded.

    Raises
    ------
    FrameError
        `data` is not such an encoding: it is too long, is no JSON, or has other entries, types or ranges.
    """
    try:
        if len(data) > MAX_NBYTES:
            raise ValueError(f"{len(data)} bytes, the limit is {MAX_NBYTES}")
        name, algorithm, n, reductions = _list(json.loads(bytes(data).decode()), 4)
        found = tuple(_checked(*_list(entry, len(Fields._fields))) for entry in _list(reductions))
        if not len(found) <= min(_whole(n), _MOST_REDUCTIONS):
            raise ValueError(f"{len(found)} reductions of {n}")
        return Collective(_text(name), _text(algorithm), n, found)
    except (ValueError, RecursionError) as e:
        raise FrameError(f"a rank describes its collective by what cannot be: {e}") from None


def _checked(*entry: Any) -> Fields:
    """Return the fields of a reduction; raise ValueError for a value of another type or range."""
    spec, dtype, n, op, algorithm, segments, unbound, codebook, shape = entry
    if op not in _OPS or not isinstance(unbound, bool):
        raise ValueError(f"op {shown(op)}, unbound {shown(unbound)}")
    return Fields(
        _text(spec),
        _text(dtype),
        _whole(n),
        op,
        _text(algorithm),
        None if segments is None else _whole(segments, -(1 << 63)),
        unbound,
        None if codebook is None else _whole(codebook),
        None if shape is None else tuple(_whole(size) for size in _list(shape)),
    )


def _list(value: Any, length: int | None = None) -> list[Any]:
    items = cast(list[Any], value)
    if not isinstance(value, list) or (length is not None and len(items) != length):
        raise ValueError(f"a list expected, got {shown(items)}")
    return items


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise ValueError(f"a short printable text expected, got {shown(value)}")
    return value


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 64:
        raise ValueError(f"an int of 64 bits expected, got {shown(value)}")
    return value
