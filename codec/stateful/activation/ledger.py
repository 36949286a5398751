"""Committed activations m of an edge by sample, and staged updates of the current step."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from codec.errors import ArgumentError
from codec.stateful.activation.entries import Bytes, Floats, SampleEntry, largest_nbytes
from codec.stateful.activation.message import Checks
from codec.stateful.activation.retention import Retention


class Store(Protocol):
    """Interface of a storage for entries, the m of samples. :class:`Retention` decides which samples have an entry."""

    persistent: bool  # True: entries survive the process

    def read(self, sample: int, row: Floats) -> bool:
        """Write the values of an entry to `row`. Return False if the entry is damaged."""
        ...

    def write(self, sample: int, entry: SampleEntry, row: Floats) -> None:
        """Store values, rounded to the dtype of entries. With dtype "8bit", NaN and Inf raise ArgumentError."""
        ...

    def delete(self, sample: int) -> None:
        """Remove the entry of a sample, if there is one."""
        ...

    def entry(self, sample: int) -> Bytes | None:
        """Return the bytes of a sample's entry; None if the entry is damaged."""
        ...

    def restore(self, sample: int, entry: SampleEntry, contents: Bytes) -> None:
        """Store an entry given as bytes. Raise CodecError if the bytes are not a valid entry."""
        ...

    def prefetch(self, samples: Iterable[int]) -> None:
        """Start to read the entries of samples in the background."""
        ...

    def flush(self) -> None:
        """Wait until all entries are on the disk."""
        ...

    def close(self) -> None:
        """Wait until all entries are written, and close the files."""
        ...


class Staging(NamedTuple):
    """New m of some samples in a message, for :meth:`Ledger.stage`."""

    samples: list[int]
    checks: Checks  # check of each new m
    rows: Floats  # new m of each sample, in a buffer of the ledger
    visits: list[int]  # number of deltas of each sample since it was sent raw


class _Staged(NamedTuple):
    entry: SampleEntry
    row: Floats


class Ledger:
    """Entries of samples, with commit and rollback.

    The entry of a sample consists of its check, in this object, and its m, in the store. Even after an interrupt (an
    exception in a signal handler), a sample has either both or neither.

    Parameters
    ----------
    store : Store
        Storage for the entries.
    dtype : {"float32", "bfloat16", "8bit"}
        Dtype of the entries.
    budget : int or None
        Maximum total size of all entries, in bytes. None: no limit.
    entries : dict of int to SampleEntry
        Entries that the store already contains.
    """

    def __init__(self, store: Store, dtype: str, budget: int | None, entries: dict[int, SampleEntry]) -> None:
        self.store = store
        self.dtype = dtype
        self.evicted = self.damaged = 0
        self._entries = entries
        self._staged: dict[int, _Staged] = {}
        self._retention = Retention(budget)
        self._consistent = False  # False if an interrupt may have left different samples in _retention and _entries
        self._buffers: list[Floats] = []  # buffers to which staged rows may refer
        self._spare: list[Floats] = []  # unused buffers, which later messages reuse
        self._reconcile()

    @property
    def in_step(self) -> bool:
        """True if there are staged samples, which are neither committed nor rolled back."""
        return bool(self._staged)

    @property
    def entries(self) -> dict[int, SampleEntry]:
        """By sample id: metadata of the committed entries."""
        return self._entries

    @property
    def nbytes(self) -> int:
        """Size of all entries in bytes."""
        return self._retention.nbytes

    def checks(self, samples: Sequence[int], n: int | None = None) -> Checks:
        """Return the checks of samples; 0 for a sample without an entry, or whose entry does not have n values."""
        found = (self._entries.get(s) for s in samples)
        return np.array([e.check if e is not None and n in (None, e.n) else 0 for e in found], np.uint64)

    def visits(self, samples: Sequence[int]) -> list[int]:
        """Return, for samples that have an entry, the number of deltas since they were sent raw."""
        return [self._entries[s].visits for s in samples]

    def buffer(self, rows: int, n: int) -> Floats:
        """Return an uninitialized float32 array of shape (rows, n), whose rows can be passed to :meth:`stage`."""
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
        """Write the m of samples to the rows of `out`. Forget samples with a damaged entry; return their indices."""
        damaged = [i for i, s in enumerate(samples) if s not in self._entries or not self.store.read(s, out[i])]
        for sample in {samples[i] for i in damaged} & self._entries.keys():
            self.forget([sample])
            self.damaged += 1
        return damaged

    def stage(self, parts: Iterable[Staging]) -> None:
        """Stage the new m of a message for the next commit. Samples that are already staged are ignored.

        If an interrupt (an exception in a signal handler) stops this method, either all of `parts` are staged or
        none is.
        """
        found = dict(self._staged)
        for samples, checks, rows, visits in parts:
            for sample, check, row, visit in zip(samples, checks.tolist(), rows, visits, strict=True):
                if sample not in found:
                    found[sample] = _Staged(SampleEntry(check, len(row), visit), row)
        self._staged = found

    def commit(self) -> None:
        """Replace m by the staged m for all staged samples, and evict the entries that exceed the budget."""
        self._reconcile()
        self._consistent = False
        for sample, (entry, row) in self._staged.items():
            self._entries.pop(sample, None)  # an interrupt must not leave an old entry with a new m
            try:
                self.store.write(sample, entry, row)
            except ArgumentError:  # NaN or Inf, which entries of dtype "8bit" cannot represent
                self._retention.remove(sample)
                self.store.delete(sample)
                continue
            self._entries[sample] = entry
            self._evict(self._retention.add(sample, largest_nbytes(self.dtype, entry.n)))
        self._consistent = True
        self.rollback()

    def rollback(self) -> None:
        """Drop the staged m of all samples."""
        self._staged = {}
        if self._buffers:
            self._spare, self._buffers = self._buffers, []

    def forget(self, samples: Iterable[int]) -> None:
        """Remove the committed and the staged m of samples."""
        self._reconcile()
        for sample in samples:
            self._staged.pop(sample, None)
            if self._entries.pop(sample, None) is not None:
                self.store.delete(sample)
                self._retention.remove(sample)

    def everything(self) -> list[int]:
        """Return the ids of all samples with a committed or a staged m."""
        return [*self._entries, *self._staged]

    def check_size(self, n: int) -> None:
        """Raise ArgumentError if the budget is too small for an entry of n values."""
        self._retention.check_size(largest_nbytes(self.dtype, n))

    def replace(self, entries: dict[int, SampleEntry], contents: dict[int, Bytes] | None) -> None:
        """Replace all entries by `entries`, whose bytes are `contents`.

        If `contents` is None, keep only the entries that are equal in `entries` and in the store.
        """
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
