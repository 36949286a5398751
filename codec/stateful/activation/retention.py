"""Choose the samples whose activations fit a store's budget; both sides of a pipeline edge choose the same samples."""

import bisect
from collections.abc import Iterable

import numpy as np

from codec.errors import ArgumentError
from codec.stateful.activation.message import mix


def rank(sample: int) -> int:
    """Return a hash of the sample id. Samples with the lowest hashes are kept."""
    return int(mix(np.array([sample], np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15))[0])


class Retention:
    """Samples that have an entry, with the size of each, within a budget.

    Training reads samples in a new random order in each epoch. So least-recently-used eviction would often remove
    samples just before their next use. Instead, the samples with the lowest hashes are kept, a fixed subset of the data
    set. This subset hardly depends on the order of messages, so both sides agree on most samples even after a lost
    message.

    Parameters
    ----------
    budget : int or None
        Maximum total size of all entries, in bytes. None: no limit.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        self._order: list[tuple[int, int]] = []  # pairs (hash, sample), ascending
        self._sizes: dict[int, int] = {}
        self.nbytes = 0

    def check_size(self, nbytes: int) -> None:
        """Raise ArgumentError if an entry of `nbytes` bytes is larger than the whole budget."""
        if self._budget is not None and nbytes > self._budget:
            raise ArgumentError(f"budget={self._budget} must be at least the size of one stored sample, {nbytes} bytes")

    def add(self, sample: int, nbytes: int) -> list[int]:
        """Add a sample, or change its size. Return the samples to evict, which may include the added one."""
        self.remove(sample)
        if self._budget is not None:
            bisect.insort(self._order, (rank(sample), sample))
        self._sizes[sample] = nbytes
        self.nbytes += nbytes
        evicted: list[int] = []
        while self._budget is not None and self.nbytes > self._budget:
            _, last = self._order.pop()
            self.nbytes -= self._sizes.pop(last)
            evicted.append(last)
        return evicted

    def remove(self, sample: int) -> None:
        """Remove a sample from the samples that have an entry; ignore an unknown sample."""
        nbytes = self._sizes.pop(sample, None)
        if nbytes is None:
            return
        self.nbytes -= nbytes
        if self._budget is not None:
            del self._order[bisect.bisect_left(self._order, (rank(sample), sample))]

    def reset(self, sizes: Iterable[tuple[int, int]]) -> list[int]:
        """Replace all samples by the given (sample, size) pairs. Return the samples to evict."""
        self._order, self._sizes, self.nbytes = [], {}, 0
        return [evicted for sample, nbytes in sizes for evicted in self.add(sample, nbytes)]
