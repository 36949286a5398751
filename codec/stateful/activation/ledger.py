"""Committed activations of an edge by sample, and those of a step that is neither committed nor rolled back."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from codec.errors import ArgumentError
from codec.stateful.activation.entries import Bytes, Entry, Floats, largest_nbytes
from codec.stateful.activation.message import Checks
from codec.stateful.activation.retention import Retention


class Store(Protocol):
    """Memory for entries. Another object decides which samples have one."""

    persistent: bool  # entries outlive the process

    def read(self, sample: int, row: Floats) -> bool:
        """Write an entry's values to `row`. Return False if the entry is damaged."""
        ...

    def write(self, sample: int, entry: Entry, row: Floats) -> None:
        """Store values, rounded to the dtype of entries. Raise ArgumentError for NaN or Inf in entries of 8 bits."""
        ...

    def delete(self, sample: int) -> None:
        """Remove an entry, if there is one."""
        ...

    def entry(self, sample: int) -> Bytes | None:
        """Return the bytes of an entry; None if it is damaged."""
        ...

    def restore(self, sample: int, entry: Entry, contents: Bytes) -> None:
        """Store the bytes of an entry. Raise CodecError if they are something else."""
        ...

    def prefetch(self, samples: Iterable[int]) -> None:
        """Begin to read entries."""
        ...

    def flush(self) -> None:
        """Wait until all entries are stored."""
        ...

    def close(self) -> None:
        """Release files, after all entries are stored."""
        ...


class Staging(NamedTuple):
    """Rows of a message that advance m; arguments of :meth:`Ledger.stage`."""

    samples: list[int]
    checks: Checks
    rows: Floats  # rows in a buffer of the ledger
    visits: list[int]


class _Staged(NamedTuple):
    entry: Entry
    row: Floats


class Ledger:
    """Entries of samples, with commit and rollback.

    A sample's entry is the pair of its check and its m in the store. An interrupt at any point leaves a sample either
    with both, or without an entry.

    Parameters
    ----------
    store : Store
        Memory for the entries.
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype of the entries.
    budget : int or None
        Largest sum of the sizes of all entries, in bytes.
    entries : dict of int to Entry
        Entries that the store already holds.
    """

    def __init__(self, store: Store, dtype: str, budget: int | None, entries: dict[int, Entry]) -> None:
        self.store = store
        self.dtype = dtype
        self.evicted = self.damaged = 0
        self._entries = entries
        self._staged: dict[int, _Staged] = {}
        self._retention = Retention(budget)
        self._consistent = False  # False: an interrupt may have separated retention and entries
        self._buffers: list[Floats] = []  # in use by staged rows
        self._spare: list[Floats] = []
        self._reconcile()

    @property
    def in_step(self) -> bool:
        """True if there is something to commit."""
        return bool(self._staged)

    @property
    def entries(self) -> dict[int, Entry]:
        """Committed entries by sample."""
        return self._entries

    @property
    def nbytes(self) -> int:
        """Size of all entries in bytes."""
        return self._retention.nbytes

    def checks(self, samples: Sequence[int], n: int | None = None) -> Checks:
        """Return the checks of samples; 0 for those without an entry, or with an entry of another size than n."""
        found = (self._entries.get(s) for s in samples)
        return np.array([e.check if e is not None and n in (None, e.n) else 0 for e in found], np.uint64)

    def visits(self, samples: Sequence[int]) -> list[int]:
        """Return the visits of samples that have an entry."""
        return [self._entries[s].visits for s in samples]

    def buffer(self, rows: int, n: int) -> Floats:
        """Return uninitialized float32 memory of shape (rows, n), whose rows :meth:`stage` may keep."""
        size = rows * n
        for i, spare in enumerate(self._spare):
            if size <= spare.size <= 2 * size:
                del self._spare[i]
                break
        else:
            spare = np.empty(size, np.float32)
        self._buffers.append(spare)
        return spare[:size].reshape(rows, n)

    def gather(self, samples: Sequence[int], out: Floats) -> list[int]:
        """Write the m of samples to the rows of `out`. Forget samples whose entry is damaged, and return their rows."""
        damaged = [i for i, s in enumerate(samples) if s not in self._entries or not self.store.read(s, out[i])]
        for sample in {samples[i] for i in damaged} & self._entries.keys():
            self.forget([sample])
            self.damaged += 1
        return damaged

    def stage(self, parts: Iterable[Staging]) -> None:
        """Keep the rows of a message for the next commit. Samples that this step already has are ignored.

        Rows are taken part by part. All of a message or, after an interrupt, nothing is staged.
        """
        found = dict(self._staged)
        for samples, checks, rows, visits in parts:
            for sample, check, row, visit in zip(samples, checks.tolist(), rows, visits, strict=True):
                if sample not in found:
                    found[sample] = _Staged(Entry(check, len(row), visit), row)
        self._staged = found

    def commit(self) -> None:
        """Replace the m of all staged samples, then evict entries until all fit the budget."""
        self._reconcile()
        self._consistent = False
        for sample, (entry, row) in self._staged.items():
            self._entries.pop(sample, None)  # until the store has the new m
            try:
                self.store.write(sample, entry, row)
            except ArgumentError:  # NaN or Inf, which entries of 8 bits cannot hold
                self._retention.remove(sample)
                self.store.delete(sample)
                continue
            self._entries[sample] = entry
            self._evict(self._retention.add(sample, largest_nbytes(self.dtype, entry.n)))
        self._consistent = True
        self.rollback()

    def rollback(self) -> None:
        """Drop all staged samples."""
        self._staged = {}
        if self._buffers:
            self._spare, self._buffers = self._buffers, []

    def forget(self, samples: Iterable[int]) -> None:
        """Remove the entries of samples, committed and staged."""
        self._reconcile()
        for sample in samples:
            self._staged.pop(sample, None)
            if self._entries.pop(sample, None) is not None:
                self.store.delete(sample)
                self._retention.remove(sample)

    def everything(self) -> list[int]:
        """Return all samples, committed and staged."""
        return [*self._entries, *self._staged]

    def check_size(self, n: int) -> None:
        """Raise ArgumentError if the budget is too small for an entry of n values."""
        self._retention.check_size(largest_nbytes(self.dtype, n))

    def replace(self, entries: dict[int, Entry], contents: dict[int, Bytes] | None) -> None:
        """Replace all entries. `contents`: their bytes; None: keep entries that the store has, and forget others."""
        self.rollback()
        kept = contents is None
        self.forget([s for s, e in self._entries.items() if not kept or entries.get(s) != e])
        self._consistent = False
        for sample, data in (contents or {}).items():
            self.store.restore(sample, entries[sample], data)
            self._entries[sample] = entries[sample]
        self._reconcile()

    def _evict(self, samples: Iterable[int]) -> None:
        for sample in samples:
            if self._entries.pop(sample, None) is not None:
                self.store.delete(sample)
                self.evicted += 1

    def _reconcile(self) -> None:
        if not self._consistent:
            sizes = [(sample, largest_nbytes(self.dtype, e.n)) for sample, e in self._entries.items()]
            self._evict(self._retention.reset(sizes))
            self._consistent = True
