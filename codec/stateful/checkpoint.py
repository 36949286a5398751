"""State dicts of residuals: arrays, integers and strings, which any checkpoint format can store."""

import re
from typing import Any

import numpy as np

from codec.arguments import shown as shown_value
from codec.errors import StateError
from codec.stateful.ranges import Array, Range, Store, gather, pieces, shared, shown, union
from codec.stateful.schema import REST, Schema, array, one_of

ROLES = ("worker", "server")
RESIDUALS = Schema(
    "ErrorFeedback",
    {"role": one_of(*ROLES)},
    (re.compile(r"(.*)\[([0-9]{1,18}):([0-9]{1,18})\]", re.DOTALL), array("float32")),
)


def save(role: str, store: Store) -> dict[str, Any]:
    """Return residuals as a state dict. The dict does not depend on how parameters are grouped into buckets."""
    runs = union(r for r, _ in pieces(store))
    residuals = gather(store, tuple(runs))
    ends = np.cumsum([stop - start for _, start, stop in runs])
    arrays = np.split(residuals, ends[:-1]) if runs else []
    return RESIDUALS.save({"role": role, **{shown(r): a for r, a in zip(runs, arrays, strict=True)}})


def load(saved: Any) -> tuple[str, Store]:
    """Return the role and the residuals of a state dict. The residuals are copies.

    Raises
    ------
    StateError
        `saved` is not a state dict, or contains NaN or Inf.
    """
    entries = RESIDUALS.read(saved)
    store: dict[tuple[Range, ...], Array] = {}
    for name, residual in entries[REST]:
        key, start, stop = name[1], int(name[2]), int(name[3])
        if len(residual) != stop - start:
            raise StateError(
                f"the entry {shown_value(name[0])} must be named key[start:stop], and have stop - start values, got "
                f"{len(residual)} values"
            )
        store[((key, start, stop),)] = residual
    if (twice := shared(r for (r,) in store)) is not None:
        raise StateError(f"this state dict has residuals of {shown(twice)} twice")
    return entries["role"], store
