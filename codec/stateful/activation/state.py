"""State dicts of stored activations: all entries if the store is in memory, only their checks if it is in files."""

from typing import Any, NamedTuple

import numpy as np

from codec.errors import CodecError, StateError
from codec.stateful.activation.entries import Bytes, SampleEntry, check_entry
from codec.stateful.activation.ledger import Ledger
from codec.stateful.schema import Schema, array, number, one_of, plain
from codec.tensors.view import empty

_NUMBERS = {"numel": 1, "visits": 0, "nbytes": 0}  # arrays with a number for each sample, and its minimum
_STATE = Schema(
    "ActivationDelta",
    {
        "store": one_of("files", "ram"),
        "edge": number(0, (1 << 64) - 1),
        "dtype": plain(str),
        "messages": number(0, (1 << 62) - 1),
        "samples": array("int64"),
        "checks": array("int64"),
        **{name: array("int64", least) for name, least in _NUMBERS.items()},
        "entries": array("uint8"),
    },
)
_NO_BYTES = np.empty(0, np.uint8)


class ActivationState(NamedTuple):
    """Validated contents of a state dict."""

    entries: dict[int, SampleEntry]
    contents: dict[int, Bytes] | None  # bytes of each entry; None: the entries are in the files of a store
    draws: int  # number of messages sent before, which selects the random bits of the next one


def save(ledger: Ledger, edge: int, draws: int, like: Any) -> dict[str, Any]:
    """Return the committed entries as a state dict of arrays, integers and strings. All arrays are copies.

    Parameters
    ----------
    ledger : Ledger
        Ledger with the committed entries.
    edge : int
        Number of the edge.
    draws : int
        Number of messages sent, which selects the random bits of the next one.
    like : array, tensor or None
        Array whose library the arrays of the dict have; None: numpy.
    """
    store, entries = ledger.store, ledger.entries
    contents = [_NO_BYTES if store.persistent else store.entry(sample) for sample in entries]
    found = [_NO_BYTES if c is None else c for c in contents]
    head = {
        "store": "files" if store.persistent else "ram",
        "edge": edge,
        "dtype": ledger.dtype,
        "messages": draws,
    }
    arrays: dict[str, Any] = {
        "samples": np.array(list(entries), np.int64),
        "checks": np.array([e.check for e in entries.values()], np.uint64).view(np.int64),  # torch pickles no uint64
        "numel": np.array([e.n for e in entries.values()], np.int64),
        "visits": np.array([e.visits for e in entries.values()], np.int64),
        "nbytes": np.array([len(c) for c in found], np.int64),
        "entries": np.concatenate(found) if found else _NO_BYTES,
    }
    return _STATE.save(head | {name: _of_kind(x, like) for name, x in arrays.items()})


def _of_kind(array: Any, like: Any) -> Any:
    """Return a copy of a flat numpy array as an array of the library of `like`; return `array` if `like` is None."""
    if like is None:
        return array
    found, v = empty(str(array.dtype), array.shape, like)
    v.array()[:] = array.view(np.uint8)
    return found


def load(saved: Any, dtype: str, edge: int) -> ActivationState:
    """Validate a state dict, and return copies of its entries.

    Raises
    ------
    StateError
        `saved` is not a state dict of this edge and dtype of entries.
    """
    fields = _STATE.read(saved)
    for name, own in (("edge", edge), ("dtype", dtype)):
        if fields[name] != own:
            raise StateError(f"{name!r} of this state dict is {fields[name]!r}, but must be {own!r} here")
    samples, numel, visits, nbytes = (fields[name] for name in ("samples", *_NUMBERS))
    checks = fields["checks"].view(np.uint64)
    if any(len(a) != len(samples) for a in (numel, visits, nbytes, checks)) or len(np.unique(samples)) != len(samples):
        raise StateError("the arrays of this state dict do not have one item for each sample, or a sample occurs twice")
    if (checks == 0).any():
        raise StateError("a check of this state dict is 0: it is damaged")
    numbers = zip(samples.tolist(), checks.tolist(), numel.tolist(), visits.tolist(), strict=True)
    entries = {sample: SampleEntry(check, n, visit) for sample, check, n, visit in numbers}
    contents = None if fields["store"] == "files" else _contents(entries, dtype, nbytes, fields["entries"])
    return ActivationState(entries, contents, fields["messages"])


def _contents(entries: dict[int, SampleEntry], dtype: str, nbytes: Any, contents: Bytes) -> dict[int, Bytes]:
    """Split the concatenated bytes of the entries into one array per sample, and validate each entry."""
    ends = np.cumsum(nbytes).tolist()
    if len(contents) != (expected := ends[-1] if ends else 0):
        raise StateError(
            f"'entries' of this state dict must have {expected} bytes, by its 'nbytes', got {len(contents)}"
        )
    found: dict[int, Bytes] = {}
    for (sample, entry), end, size in zip(entries.items(), ends, nbytes.tolist(), strict=True):
        found[sample] = contents[end - size : end]
        try:
            check_entry(found[sample], dtype, entry.n)
        except CodecError as e:
            raise StateError(f"the entry of sample {sample} in this state dict is invalid: {e}") from None
    return found
