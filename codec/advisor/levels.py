"""Predictions of all-reduces among machines with several ranks each, in one level and in two."""

import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from codec.advisor.cost_model import (
    Algorithm,
    Cost,
    LinkModel,
    compute_seconds,
    latency_seconds,
    overlapped,
    wire_nbytes,
)
from codec.arguments import MAX_RANKS, shown, whole
from codec.errors import ArgumentError

_TRANSFER = 4 << 20  # bytes of a measured transfer between two threads
_RUNS = 3  # number of measurements, of which the shortest counts


@dataclass(frozen=True, slots=True)
class MachineRanks:
    """Ranks of an all-reduce.

    Attributes
    ----------
    machines : int
        Number of machines.
    each : int
        Ranks of each machine, which share its link.
    """

    machines: int
    each: int = 1

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.machines * self.each

    def __str__(self) -> str:
        return f"{self.machines} ranks" if self.each == 1 else f"{self.machines} x {self.each} ranks"


def ranks_of(world_size: Any) -> MachineRanks:
    """Convert an argument ``world_size=``, a number of ranks or a pair (machines, ranks of each machine).

    Raises
    ------
    ArgumentError
        The argument is neither, or a number is out of range.
    """
    if not isinstance(world_size, tuple):
        return MachineRanks(whole("world_size", world_size, 1, MAX_RANKS))
    pair = cast(tuple[Any, ...], world_size)
    if len(pair) != 2:
        raise ArgumentError(
            f"world_size must be an int, or a pair (machines, ranks of each machine), got {shown(pair)}"
        )
    machines = whole("the number of machines in world_size", pair[0], 2, MAX_RANKS)
    return MachineRanks(machines, whole("the number of ranks of a machine in world_size", pair[1], 1, MAX_RANKS))


@dataclass(frozen=True, slots=True)
class Predicted:
    """Prediction for an all-reduce; see :class:`codec.advisor.advice.AdviceRow`."""

    seconds: float
    wire_seconds: float
    compute_seconds: float
    latency_seconds: float
    nbytes: float


def in_one_level(cost: Cost, link: LinkModel, ranks: MachineRanks, algorithm: Algorithm, chunks: int) -> Predicted:
    """Predict an all-reduce in which each rank sends frames to all others. The ranks of a machine share its link.

    Each of the P ranks of a machine sends N - P of its N - 1 messages to other machines. A ring crosses each link once.
    """
    crossing = 1.0
    if ranks.each > 1 and algorithm != "ring":
        crossing = ranks.each * (ranks.size - ranks.each) / (ranks.size - 1)
    nbytes = crossing * wire_nbytes(cost, ranks.size, algorithm)
    compute = compute_seconds(cost, ranks.size, algorithm)
    return _predicted(nbytes, compute, latency_seconds(link, ranks.size, algorithm), link, chunks)


def in_two_levels(
    cost: Cost, link: LinkModel, ranks: MachineRanks, algorithm: Algorithm, chunks: int, within: float
) -> Predicted:
    """Predict an all-reduce with plain sums within a machine, and frames of a P-th of the tensor by each of its ranks.

    `within` is the number of seconds in which a rank sends, receives and adds plain values; see :func:`plain_seconds`.
    """
    nbytes = wire_nbytes(cost, ranks.machines, algorithm)  # sum over P ranks, each with a P-th of the tensor
    compute = within + compute_seconds(cost, ranks.machines, algorithm) / ranks.each
    return _predicted(nbytes, compute, latency_seconds(link, ranks.machines, algorithm), link, chunks)


def _predicted(nbytes: float, compute: float, waiting: float, link: LinkModel, chunks: int) -> Predicted:
    wire = 8 * nbytes / link.bits_per_second
    return Predicted(overlapped(wire, compute, chunks) + waiting, wire, compute, waiting, nbytes)


def plain_seconds(nbytes: float, ranks: MachineRanks) -> float:
    """Return the seconds in which a rank reduces plain values of `nbytes` bytes within its machine, before and after.

    A rank of P sends (P - 1)/P of the values, receives and adds as many, and sends and receives as many results. The
    costs of a byte are measured: CPU time of a transfer between two threads, and of an addition.
    """
    if ranks.each == 1:
        return 0.0
    transfers, additions = zip(*(_measured() for _ in range(_RUNS)), strict=True)
    return nbytes * (ranks.each - 1) / ranks.each * (2 * min(transfers) + min(additions))


def _measured() -> tuple[float, float]:
    """Measure the seconds in which a byte is sent and received, and in which a byte of float32 is added."""
    x, total = np.ones(_TRANSFER // 4, np.float32), np.ones(_TRANSFER // 4, np.float32)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(x.view(np.uint8).data,))
        room, missing = total.view(np.uint8).data, _TRANSFER
        begin = time.process_time()
        sender.start()
        while missing:
            missing -= mine.recv_into(room[-missing:])
        sender.join()
        between = time.process_time()
    np.add(x, total, out=total)
    end = time.process_time()
    return (between - begin) / _TRANSFER, (end - between) / _TRANSFER
