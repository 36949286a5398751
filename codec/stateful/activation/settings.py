"""Validate the arguments of :class:`codec.ActivationDelta`."""

from pathlib import Path
from typing import Any

from codec._c.traits import rejects_nonfinite
from codec.arguments import shown
from codec.errors import ArgumentError, SpecError
from codec.presets import resolve
from codec.specs import Spec, TopK, Truncate
from codec.stateful.activation.message import ENTRY_CODES
from codec.stateful.activation.store_file import FileStore
from codec.stateful.activation.store_ram import RamStore


def spec_of(name: str, given: Any) -> Spec:
    """Return an argument as a Spec; raise SpecError for Truncate and for bound specs."""
    spec, is_bound = resolve(given)
    if isinstance(spec, Truncate) or is_bound is not None:
        raise SpecError(f"{name} must be a spec that needs no optimizer, such as Quantize(4), got {shown(given)}")
    return spec


def delta_spec_of(given: Any) -> Spec:
    """Return an argument as a Spec for deltas; raise SpecError if deltas cannot be encoded with it."""
    spec = spec_of("spec", given)
    if isinstance(spec, TopK):
        raise SpecError(f"spec must be a codec that sends all values, such as Quantize(4), got {spec}")
    if not rejects_nonfinite(spec):
        raise SpecError(f"spec must be a lossy codec that refuses NaN and Inf, such as Quantize(4), got {spec}")
    return spec


def entries_of(given: Any) -> str:
    """Return the dtype of entries; raise ArgumentError if it is not supported."""
    if not isinstance(given, str) or given not in ENTRY_CODES:
        raise ArgumentError(f"dtype must be one of {', '.join(map(repr, ENTRY_CODES))}, got {shown(given)}")
    return given


def store_of(given: Any, dtype: str, edge: int) -> RamStore | FileStore:
    """Open the store that an argument describes: "ram" or the path of a folder."""
    if isinstance(given, str) and given == "ram":
        return RamStore(dtype)
    try:
        path = Path(given)
    except TypeError:
        raise ArgumentError(f"store must be 'ram' or the path of a folder, got {shown(given)}") from None
    try:
        return FileStore(path, dtype, edge)
    except (OSError, ValueError) as e:
        raise ArgumentError(f"store={shown(given)} cannot be opened: {getattr(e, 'strerror', None) or e}") from e
