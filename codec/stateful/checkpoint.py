"""State dicts of arrays, integers and strings, which any checkpoint format can store."""

import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from codec.arguments import shown as shown_value
from codec.errors import CodecError, StateError
from codec.stateful.ranges import Array, Range, Store, gather, pieces, shared, shown, union
from codec.tensors.view import on_host, view

VERSION = 1
ROLES = ("worker", "server")
_RANGE = re.compile(r"(.*)\[([0-9]{1,18}):([0-9]{1,18})\]", re.DOTALL)


def array_of(name: str, value: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Return a flat copy of a state dict's entry, which must be an array or tensor of `dtype` in host memory.

    Raises
    ------
    StateError
        The entry is something else.
    """
    try:
        v = on_host(name, view(value))
    except CodecError as e:
        raise StateError(f"{name} must be an array of {dtype}: {e}") from None
    if v.dtype != dtype:
        raise StateError(f"{name} must be an array of {dtype}, got {v.dtype}")
    return v.array(dtype).copy()


def plain(saved: Any, name: str, kind: type[Any]) -> Any:
    """Return an entry of a state dict as `kind`, int or str. The entry may be an array of shape (), as in .npz."""
    try:
        value = saved[name]
    except (LookupError, TypeError, ValueError):
        raise StateError(f"the state dict has no {name!r}: load one that state_dict() returned") from None
    value = value.item() if getattr(value, "shape", None) == () else value
    if type(value) is not kind:
        raise StateError(f"{name!r} of this state dict must be of type {kind.__name__}, got {shown_value(value)}")
    return value


def opened(saved: Any) -> dict[str, Any]:
    """Return a shallow copy of a state dict; raise StateError if its version is not VERSION."""
    if (version := plain(saved, "version", int)) != VERSION:
        raise StateError(
            f"this state dict has version {shown_value(version)}, but this library reads version {VERSION}"
        )
    return dict(cast(Mapping[str, Any], saved))


def save(role: str, store: Store) -> dict[str, Any]:
    """Return residuals as a state dict. The dict does not depend on how parameters are grouped into buckets."""
    runs = union(r for r, _ in pieces(store))
    residuals = gather(store, tuple(runs))
    ends = np.cumsum([stop - start for _, start, stop in runs])
    arrays = np.split(residuals, ends[:-1]) if runs else []
    return {"version": VERSION, "role": role, **{shown(r): a for r, a in zip(runs, arrays, strict=True)}}


def load(saved: Any) -> tuple[str, Store]:
    """Return the role and the residuals of a state dict. The residuals are copies.

    Raises
    ------
    StateError
        `saved` is not a state dict, or contains NaN or Inf.
    """
    entries = opened(saved)
    role = plain(entries, "role", str)
    if role not in ROLES:
        raise StateError(
            f"'role' of this state dict must be one of {', '.join(map(repr, ROLES))}, got {shown_value(role)}"
        )
    del entries["version"], entries["role"]
    store: dict[tuple[Range, ...], Array] = {}
    for name, value in entries.items():
        found = _RANGE.fullmatch(str(name))
        array = array_of(name, value, "float32")
        if found is None or len(array) != int(found[3]) - int(found[2]):
            raise StateError(
                f"the entry {shown_value(name)} must be named key[start:stop], and have stop - start values, got "
                f"{len(array)} values"
            )
        if not np.isfinite(array).all():
            raise StateError(f"the residual of {name} holds NaN or Inf")
        store[((found[1], int(found[2]), int(found[3])),)] = array
    if (twice := shared(r for (r,) in store)) is not None:
        raise StateError(f"this state dict has residuals of {shown(twice)} twice")
    return role, store
