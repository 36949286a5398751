"""State dicts of activations in memory."""

from typing import Any

import numpy as np

from codec.arguments import shown
from codec.errors import CodecError, StateError
from codec.stateful.activation.ledger import Entry, Ledger
from codec.stateful.activation.store_ram import RamStore
from codec.stateful.checkpoint import VERSION, array_of, opened, plain

KIND = "activations"


def save(ledger: Ledger, edge: int) -> dict[str, Any]:
    """Return the committed entries as a state dict of arrays, integers and strings. All arrays are copies."""
    entries = ledger.entries
    contents = [ledger.store.entry(sample) for sample in entries]
    return {
        "version": VERSION,
        "kind": KIND,
        "edge": edge,
        "dtype": ledger.dtype,
        "samples": np.array(list(entries), np.int64),
        "checks": np.array([e.check for e in entries.values()], np.uint64),
        "numel": np.array([e.n for e in entries.values()], np.int64),
        "visits": np.array([e.visits for e in entries.values()], np.int64),
        "nbytes": np.array([len(c) for c in contents], np.int64),
        "entries": np.concatenate(contents) if contents else np.empty(0, np.uint8),
    }


def load(saved: Any, dtype: str, edge: int) -> tuple[RamStore, dict[int, Entry]]:
    """Return the store and the entries of a state dict. Both are copies.

    Raises
    ------
    StateError
        `saved` is not a state dict of this edge and dtype of entries.
    """
    fields = opened(saved)
    for name, kind, own in (("kind", str, KIND), ("edge", int, edge), ("dtype", str, dtype)):
        if (found := plain(fields, name, kind)) != own:
            raise StateError(f"{name!r} of this state dict is {shown(found)}, not {own!r}")
    arrays = {name: _array(fields, name, "int64") for name in ("samples", "numel", "visits", "nbytes")}
    samples, numel, visits, nbytes = arrays.values()
    checks, contents = _array(fields, "checks", "uint64"), _array(fields, "entries", "uint8")
    if any(len(a) != len(samples) for a in (*arrays.values(), checks)) or len(np.unique(samples)) != len(samples):
        raise StateError("this state dict does not have one check and one entry for each of its samples")
    if (numel < 1).any() or (visits < 0).any() or (nbytes < 0).any() or (checks == 0).any():
        raise StateError("this state dict has a number out of range")
    ends = np.cumsum(nbytes)
    if len(contents) != (ends[-1] if len(ends) else 0):
        raise StateError(
            f"the entries of this state dict have {len(contents)} bytes, not {ends[-1] if len(ends) else 0}"
        )
    store = RamStore(dtype)
    entries: dict[int, Entry] = {}
    for i, sample in enumerate(samples.tolist()):
        try:
            store.restore(sample, int(numel[i]), contents[ends[i] - nbytes[i] : ends[i]])
        except CodecError as e:
            raise StateError(f"the entry of sample {sample} in this state dict is invalid: {e}") from None
        entries[sample] = Entry(int(checks[i]), int(numel[i]), int(visits[i]))
    return store, entries


def _array(fields: dict[str, Any], name: str, dtype: str) -> Any:
    if name not in fields:
        raise StateError(f"this is not a state dict: it has no {name!r}")
    return array_of(name, fields[name], dtype)
