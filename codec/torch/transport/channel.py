"""Channel of a group: connections, memory and counters that its collectives share (docs/spec/protocol.md)."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from codec import PeerError
from codec.arguments import Timeout, check_timeout
from codec.torch._compat import timeout_of
from codec.torch.network.connect import connect
from codec.torch.network.endpoint import endpoint_of
from codec.torch.transport.buffers import Buffers
from codec.torch.transport.collective import Collective
from codec.torch.transport.counters import Counters
from codec.torch.transport.levels import Levels
from codec.torch.transport.nccl import DeviceTransfer


class Channel:
    """Connections among the ranks of a group, used only for the messages of codec's collectives.

    Several collectives can be in flight. If a rank is lost, the channel is closed, so that ranks that wait for this
    rank fail at once. A closed channel cannot be opened again.

    Parameters
    ----------
    group : ProcessGroup or None
        Ranks of the channel; None: all ranks. Every rank must create its channel at the same point of the program.
    timeout : float, timedelta or None
        Longest time, in seconds, that a peer may keep this rank waiting; None: the timeout of `group`.
    levels : Levels, optional
        Machines of the ranks. Default: a flat group.

    Attributes
    ----------
    rank, size : int
        Rank of this process, and number of ranks.
    levels : Levels
        Machines of the ranks.
    peers : tuple of int
        Ranks to which this rank sends frames; in two levels, one of each other machine.
    encrypted : bool
        True: connections use TLS.
    connections : str
        Protection of the connections; empty for one rank.
    counters : Counters
        Totals of all collectives that have ended.
    mesh : Mesh
        TCP connections for data in host memory.
    device : DeviceTransfer
        NCCL connections for frames that stay on GPUs; in two levels, for values within the machine.
    buffers : Buffers
        Pool of host memory for messages, results and sums.
    """

    def __init__(self, group: Any, timeout: Timeout | None, levels: Levels | None = None) -> None:
        group = group or dist.group.WORLD
        self.timeout = check_timeout(timeout) or timeout_of(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.levels = levels or Levels(self.size, self.rank)
        between = self.levels.between
        self.peers = tuple(between.ranks[o] for o in between.others)
        self.counters = Counters()
        self.buffers = Buffers()
        self.mesh = connect(group, self.timeout, self.levels.connected)
        security = endpoint_of(group).security if self.size > 1 else None
        self.encrypted = security is not None and security.tls is not None
        self.connections = self.counters.connections = "" if security is None else str(security)
        flat, others = self.levels.flat, (self.levels.all if self.levels.flat else self.levels.within).others
        self.device = DeviceTransfer(self.mesh, others, self.timeout, self.counters.add_wait, within=not flat)
        self._cancelled = False
        self._writing = threading.Lock()

    def collective(self, number: int) -> Collective:
        """Begin a collective.

        Raises
        ------
        PeerError
            The channel is closed or cancelled.
        """
        self.check_open()
        self.device.begin(number)
        collective = Collective(self, number)
        collective.counters.connections = self.connections
        return collective

    def check_open(self) -> None:
        """Raise PeerError if the channel is closed; close it first if it was cancelled."""
        if self._cancelled:
            self.close()
        self.mesh.check_open()

    def count(self, ended: Collective) -> None:
        """Add the counters of a collective that has ended to the totals."""
        waited = self.counters.wire_s  # counted by :meth:`Counters.add_wait`
        self.counters.add(ended.counters)
        self.counters.wire_s = waited
        self._count_cpu_time()

    def totals(self) -> Counters:
        """Return a copy of the totals, with CPU time until now. Call this in the thread that runs collectives."""
        self._count_cpu_time()
        return self.counters.copy()

    def _count_cpu_time(self) -> None:
        self.counters.cpu_s = time.thread_time() + self.mesh.cpu_seconds()

    @property
    def closed(self) -> bool:
        """True after a connection was lost, or after :meth:`close`."""
        return self.mesh.closed

    @property
    def cancelled(self) -> bool:
        """True after :meth:`cancel`."""
        return self._cancelled

    def cancel(self) -> None:
        """Make collectives in flight and later ones fail. After this returns, no tensor of the caller is written to.

        Any thread may call this.
        """
        with self._writing:
            self._cancelled = self.device.cancelled = True

    @contextmanager
    def writing(self) -> Generator[None]:
        """Return a context manager for writing to tensors of the caller.

        :meth:`cancel` waits until the body has ended; after it, entering the context raises PeerError.
        """
        with self._writing:
            if self._cancelled:
                raise PeerError("the collective was cancelled: make a new group")
            yield

    def close(self) -> None:
        """Close the connections: all collectives in flight fail."""
        self.mesh.close()
        self.device.release()
