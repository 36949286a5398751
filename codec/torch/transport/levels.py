"""Levels of a group: ranks that reduce plain values within a machine, and ranks that send frames between machines."""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from codec import PeerError

_TREE_FROM = 64  # ranks from which a flat group agrees by a tree: without one, rank 0 has 2 (N - 1) messages


class Members:
    """Some ranks of a group, with indices of their own.

    Parameters
    ----------
    ranks : sequence of int
        Ranks in the group.
    rank : int
        This rank, one of `ranks`.

    Attributes
    ----------
    ranks : tuple of int
        Rank in the group of each member.
    rank : int
        Index of this rank.
    size : int
        Number of members.
    others : list of int
        Indices of all other members, starting with the next one, so that not all members send to the same one first.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self.size = tuple(ranks), len(ranks)
        self.rank = self.ranks.index(rank)
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]

    def contains(self, others: "Members") -> bool:
        """Return True if all of `others` are members, too."""
        return others.size <= self.size and set(others.ranks) <= set(self.ranks)


Gather = Callable[[Members, Sequence[int]], Awaitable[list[list[int]]]]


class Levels:
    """Ranks of a group in two levels: machines (or sites), and the ranks within each of them.

    A flat group is a group of machines with one rank each.

    Parameters
    ----------
    size : int
        Number of ranks in the group.
    rank : int
        This rank.
    between : sequence of int, optional
        Ranks at this rank's place in all machines. Default: all ranks.
    within : sequence of int, optional
        Ranks of this rank's machine, by place. Default: this rank alone.

    Attributes
    ----------
    all, between, within : Members
        All ranks of the group; those that send each other frames; and those of this machine.
    flat : bool
        True if each machine has one rank.
    connected : list of int
        Ranks that are connected to this rank: those of `between` and of `within`.
    """

    def __init__(
        self, size: int, rank: int, between: Sequence[int] | None = None, within: Sequence[int] | None = None
    ) -> None:
        self.all = Members(range(size), rank)
        self.between = self.all if between is None else Members(between, rank)
        self.within = Members((rank,) if within is None else within, rank)
        self.flat = self.within.size == 1
        self.connected = sorted({*self.between.ranks, *self.within.ranks} - {rank})

    def __str__(self) -> str:
        return f"{self.all.size} ranks" if self.flat else f"{self.between.size} x {self.within.size} ranks"

    async def gathered(self, gather: Gather, numbers: Sequence[int]) -> list[list[int]]:
        """Return the integers of all ranks, by rank, as gathered first within machines and then between them.

        Parameters
        ----------
        gather : callable
            gather(members, numbers) returns an awaitable of the integers of each member.
        numbers : sequence of int
            Integers of this rank.

        Raises
        ------
        PeerError
            A rank is in no machine, or in several.
        """
        known, n = [self.all.rank, *numbers], 1 + len(numbers)
        for members in (self.within, self.between):
            known = [number for each in await gather(members, known) for number in each]
        found = {known[i]: known[i + 1 : i + n] for i in range(0, len(known), n)}
        if found.keys() != set(range(self.all.size)):
            raise PeerError("the machines of the ranks overlap: pass the same group= on all ranks")
        return [found[rank] for rank in range(self.all.size)]

    def flattened(self) -> "Levels":
        """Return the levels of the same ranks as a flat group."""
        return self if self.flat else Levels(self.all.size, self.all.rank)

    def signed(self, within: Any) -> dict[str, str]:
        """Return the properties that must be equal on all ranks, by name; `within` is the option, unused if flat."""
        return {} if self.flat else {"levels": str(self), "within": str(within or "uncompressed")}

    @property
    def round_trips(self) -> float:
        """Round trips between machines of an agreement; two ranks report to each other."""
        if self.all.size < 3:
            return 0.5 * (self.all.size - 1)
        return 2.0 if self.flat and self.all.size >= _TREE_FROM else 1.0

    def tree(self) -> tuple[int | None, list[int], int]:
        """Return the parent of this rank in the tree by which ranks agree, None for the root; its children; its depth.

        The first ranks of machines are children of the first rank of all; the other ranks are children of the first
        rank of their machine. Large flat groups are divided into blocks, as if these were machines.
        """
        leaders, block = self.between.ranks, self.within.ranks
        if self.flat:
            if self.all.size < _TREE_FROM:
                leaders, block = (0,), self.all.ranks
            else:
                each = math.isqrt(self.all.size - 1) + 1
                begin = self.all.rank - self.all.rank % each
                leaders, block = self.all.ranks[::each], self.all.ranks[begin : begin + each]
        me = self.all.rank
        if me != block[0]:
            return block[0], [], 1 + (block[0] != leaders[0] if self.flat else self.between.rank > 0)
        if me != leaders[0]:
            return leaders[0], list(block[1:]), 1
        return None, [*leaders[1:], *block[1:]], 0
