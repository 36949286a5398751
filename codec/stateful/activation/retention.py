"""Choice of the samples whose activations a store keeps within its budget, equal on both sides of an edge."""

import bisect
from collections.abc import Iterable

import numpy as np

from codec.errors import ArgumentError
from codec.stateful.activation.message import mix


def rank(sample: int) -> int:
    """Return the number by which samples are ordered: a hash of the sample id. Lower ranks are kept."""
    return int(mix(np.array([sample], np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15))[0])


class Retention:
    """Samples that have an entry, with the size of each, within a budget.

    Training reads samples in a new random order in each epoch. Evicting the least recently used one would often evict
    samples just before their next use. So the samples with the lowest hash are kept: a fixed part of the data set. The
    set hardly depends on the order of messages, so both sides agree on most samples even after a lost message.

    Parameters
    ----------
    budget : int or None
        Largest sum of the sizes of all entries, in bytes. None: no limit.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        self._order: list[tuple[int, int]] = []  # rank and sample, ascending
        self._sizes: dict[int, int] = {}
        self.nbytes = 0

    def check_size(self, nbytes: int) -> None:
        """Raise ArgumentError for an entry that is larger than the whole budget."""
        if self._budget is not None and nbytes > self._budget:
            raise ArgumentError(f"budget={self._budget} bytes holds no sample: an entry takes {nbytes} bytes")

    def add(self, sample: int, nbytes: int) -> list[int]:
        """Add a sample, or change its size. Return the samples to evict, maybe the added one."""
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
        """Remove a sample, if it is there."""
        nbytes = self._sizes.pop(sample, None)
        if nbytes is None:
            return
        self.nbytes -= nbytes
        if self._budget is not None:
            del self._order[bisect.bisect_left(self._order, (rank(sample), sample))]

    def reset(self, sizes: Iterable[tuple[int, int]]) -> list[int]:
        """Start again with the given samples and sizes. Return the samples to evict."""
        self._order, self._sizes, self.nbytes = [], {}, 0
        return [evicted for sample, nbytes in sizes for evicted in self.add(sample, nbytes)]
