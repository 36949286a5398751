"""Schemas of saved states: each declares its fields, and one reader checks all of them before an object changes.

A state is a dict {"format": name, "version": int, field: value, ...} of integers, strings, arrays and nested dicts,
which NumPy, torch.save and torch.distributed.checkpoint can store.
"""

# Saved values may have any type.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from codec.arguments import shown
from codec.errors import CodecError, StateError
from codec.inspection import digest
from codec.tensors.view import on_host, view

REST = "*"  # item of Schema.read()'s result with the entries that Schema.others describes
DIGEST = "digest"
# Errors that reading a value of any type or content can raise; RecursionError is a RuntimeError.
_UNREADABLE = CodecError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError


class WrongField(ValueError):
    """Value that a field does not accept. The text, if any, says what was found."""


class Field(NamedTuple):
    """Kind of a field of a state."""

    accepts: str  # noun phrase for messages, such as "an int from 0 to 3"
    read: Callable[[Any], Any]  # returns the checked value; raises one of _UNREADABLE for a value that is not accepted
    optional: bool = False  # True: the field may be missing, which reads as None


@dataclass(frozen=True)
class Schema:
    """Declaration of the state of a class.

    Parameters
    ----------
    format : str
        Name of the class, which is stored in the state.
    fields : mapping of str to Field
        Kind of each field.
    others : (pattern, Field), optional
        Pattern of the names of further entries, and their kind. By default, there are none.
    signed : bool
        True: the state has a digest of all entries, because tools such as torch.distributed.checkpoint may load only
        some of a state's tensors, or those of several ranks.
    """

    format: str
    fields: Mapping[str, Field]
    others: tuple[re.Pattern[str], Field] | None = None
    signed: bool = False
    version: int = 1

    def save(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with these entries."""
        state = {"format": self.format, "version": self.version, **entries}
        return signed(state) if self.signed else state

    def read(self, saved: Any) -> dict[str, Any]:
        """Check a state; return the values of its fields, and as REST a list of (match of the name, value).

        Raises
        ------
        StateError
            `saved` has another format, version or digest, or an entry is missing, unknown or not accepted.
        """
        what, remedy = f"the {self.format} state", f"load one that state_dict() of {self.format} returned"
        entries: dict[Any, Any] = read_field(what, remedy, mapping(), saved)
        head = {"format": one_of(self.format), "version": number(self.version, self.version)}
        read_fields(what, remedy, head, entries)
        known, rest = {*head, *self.fields, *([DIGEST] if self.signed else ())}, dict[re.Match[str], Field]()
        for name in (name for name in entries if name not in known):
            found = self.others[0].fullmatch(name) if self.others and isinstance(name, str) else None
            if self.others is None or found is None:
                raise StateError(f"{what} has the unknown entry {shown(name)}: {remedy}")
            rest[found] = self.others[1]
        if self.signed and not _is_whole(entries):
            raise StateError(
                f"{what} is incomplete or damaged, or has entries of several ranks, as after "
                "torch.distributed.checkpoint, which saves entries of equal name once: save "
                f"codec.torch.per_rank({self.format.lower()}) with it"
            )
        fields = read_fields(what, remedy, self.fields, entries)
        others = read_fields(what, remedy, {found[0]: kind for found, kind in rest.items()}, entries)
        return fields | {REST: [(found, others[found[0]]) for found in rest]}


def read_fields(what: str, remedy: str, fields: Mapping[Any, Field], entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the checked values of fields, and ignore other entries; raise StateError if one is missing or wrong."""
    if lacking := [name for name, field in fields.items() if not field.optional and name not in entries]:
        raise StateError(f"{what} lacks {lacking[0]!r}: {remedy}")
    return {
        name: read_field(f"{name!r} of {what}", remedy, field, entries[name]) if name in entries else None
        for name, field in fields.items()
    }


def read_field(name: str, remedy: str, field: Field, value: Any) -> Any:
    """Return the checked value of a field; raise StateError if the field does not accept it."""
    try:
        return field.read(value)
    except StateError:  # of a nested state
        raise
    except _UNREADABLE as e:
        reason = f" ({e})" if isinstance(e, CodecError | WrongField) and str(e) else ""
        raise StateError(f"{name} must be {field.accepts}, got {_described(value)}{reason}: {remedy}") from e


def signed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with a digest of all its entries."""
    import hashlib  # here and below, because `import codec` should be fast, and few programs need these modules

    plain = {name: value for name, value in state.items() if name != DIGEST}
    text = repr(sorted(_leaves("", plain))).encode()
    return plain | {DIGEST: int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)}


def _is_whole(state: Mapping[str, Any]) -> bool:
    """Return True if a state has the digest of its entries."""
    try:
        return bool(state[DIGEST] == signed(state)[DIGEST])
    except _UNREADABLE:
        return False


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Return the path of each number, string or array of a nested dict, and a text that identifies its value."""
    if isinstance(value, Mapping):
        for name, each in cast(Mapping[Any, Any], value).items():
            yield from _leaves(f"{path}/{name}", each)
    elif getattr(value, "shape", ()):
        yield path, f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {digest(value)}"
    else:
        yield path, repr(value)


def optional(field: Field) -> Field:
    """Return a kind whose field may be missing."""
    return field._replace(optional=True)


def number(least: int, most: int) -> Field:
    """Return the kind of integers from `least` to `most`."""
    return _where(f"an int from {least} to {most}", lambda x: type(x) is int and least <= x <= most)


def real(limit: float) -> Field:
    """Return the kind of numbers from 0 to below `limit`."""
    return _where(f"a number from 0 to below {limit}", lambda x: type(x) in (int, float) and 0 <= x < limit)


def one_of(*choices: str | bool | None) -> Field:
    """Return the kind of the given values."""
    accepts = " or ".join(map(repr, choices))
    return _where(accepts, lambda x: any(type(x) is type(each) and x == each for each in choices))


def plain(kind: type[Any]) -> Field:
    """Return the kind of the objects of a class."""
    return _where(f"of type {kind.__name__}", lambda x: type(x) is kind)


def _where(accepts: str, fits: Callable[[Any], bool]) -> Field:
    """Return the kind of values for which `fits` returns True. An array of shape (), as in .npz, counts as its item."""
    return Field(accepts, lambda x: _checked(x.item() if getattr(x, "shape", None) == () else x, fits))


def _checked(value: Any, fits: Callable[[Any], bool]) -> Any:
    if not fits(value):
        raise WrongField
    return value


STEPS = number(0, (1 << 48) - 1)  # kind of numbers of steps


def mapping(value: Field | None = None) -> Field:
    """Return the kind of dicts, with values of a kind if `value` is given. The result is a shallow copy."""
    accepts, each = (", each value " + value.accepts, value.read) if value else ("", lambda x: x)
    return Field(f"a dict{accepts}", lambda x: {name: each(x[name]) for name in _checked(x, _is_mapping)})


def items(kind: Field) -> Field:
    """Return the kind of lists and tuples whose items are of a kind."""
    return Field(f"a list, each item {kind.accepts}", lambda x: [kind.read(each) for each in _checked(x, _is_list)])


def row(*kinds: Field) -> Field:
    """Return the kind of lists and tuples with one item of each of the given kinds."""
    accepts = f"a list of {' and '.join(kind.accepts for kind in kinds)}"
    return Field(accepts, lambda x: tuple(k.read(each) for k, each in zip(kinds, _checked(x, _is_list), strict=True)))


def in_json(kind: Field) -> Field:
    """Return the kind of texts in JSON whose contents are of a kind."""

    def read(value: Any) -> Any:
        import json

        return kind.read(json.loads(plain(str).read(value)))

    return Field(f"JSON of {kind.accepts}", read)


def array(dtype: str, least: int | None = None, length: int | None = None) -> Field:
    """Return the kind of arrays and tensors of a dtype in host memory, without NaN and Inf. The result is a flat copy.

    Values below `least`, and another number of values than `length`, are not accepted.
    """

    def read(value: Any) -> np.ndarray[Any, Any]:
        v = on_host("the array", view(value))
        if v.dtype != dtype:
            raise WrongField
        found = v.array(dtype).copy()
        if not np.isfinite(found).all():
            raise WrongField("with NaN or Inf")
        if (least is not None and (found < least).any()) or length not in (None, len(found)):
            raise WrongField(f"with {len(found)} values, the least of them {found.min(initial=0)}")
        return found

    limits = f" with {length} values" * (length is not None) + f" of at least {least}" * (least is not None)
    return Field(f"an array of {dtype}{limits}", read)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _described(value: Any) -> str:
    """Return the dtype and shape of an array, or the text of another value."""
    try:
        return f"{value.dtype} of shape {tuple(value.shape)}" if getattr(value, "shape", ()) else shown(value)
    except _UNREADABLE:
        return type(value).__name__
