"""Channel of a group: all that its ranks send each other, a subject in each part (docs/protocol.md)."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from codec import PeerError
from codec.torch.transport.arena import Arena
from codec.torch.transport.connections import Connections
from codec.torch.transport.frames import FrameTransfer
from codec.torch.transport.gloo import Timeout
from codec.torch.transport.nccl import DeviceTransfer
from codec.torch.transport.numbers import Numbers
from codec.torch.transport.requests import Requests


class Channel:
    """Connections among the ranks of a group that carry nothing but the messages of codec's collectives.

    One collective runs at a time, in the same order on all ranks. It begins with :meth:`request` and :meth:`begin`,
    sends its data, and ends with :meth:`Requests.exchange_verdict`. A :class:`PeerError` that breaks a connection
    closes the channel, and the ranks that wait for this rank fail at once.

    Parameters
    ----------
    group : ProcessGroup or None
        Ranks of the channel; None: all. Every rank must make its channel at the same point of the program.
    timeout : float, timedelta or None
        Longest time, in seconds, that a peer may keep this rank waiting; None: the timeout of `group`.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    others : list of int
        All other ranks, a different one first on each rank.
    counters : Counters
        Bytes and seconds of all collectives.
    clock : Stopwatch
        Adds seconds to the counters.
    connections : Connections
        Messages of any kind, and their end.
    arena : Arena
        Memory of messages, results and sums.
    frames : FrameTransfer
        Frames and uncompressed values in host memory.
    device : DeviceTransfer
        Frames that stay on GPUs.
    numbers : Numbers
        Messages of integers.
    requests : Requests
        Requests and verdicts.
    """

    def __init__(self, group: Any, timeout: Timeout | None) -> None:
        self.connections = Connections(group or dist.group.WORLD, timeout)
        self.rank, self.size, self.others = self.connections.rank, self.connections.size, self.connections.others
        self.counters, self.clock = self.connections.counters, self.connections.clock
        self.arena = Arena()
        self.connections.attach(self.arena)
        self.frames = FrameTransfer(self.connections, self.arena)
        self.numbers = Numbers(self.connections)
        self.requests = Requests(self.connections, self.numbers)
        self.device = DeviceTransfer(self.connections, self.numbers)
        self._writing = threading.Lock()

    def request(self, numbers: Sequence[int], error: BaseException | None = None) -> None:
        """Free the memory of the collective before, and send all ranks the request of the next one.

        Parameters
        ----------
        numbers, error
            As for :meth:`Requests.send`.
        """
        self.arena.clear()
        self.requests.send(numbers, error)
        self.frames.renew_mark()

    def begin(self, nbytes: int, meanwhile: Callable[[], None] = lambda: None, *, pinned: bool = False) -> None:
        """Reserve memory for the messages of an algorithm, and wait for the requests of all ranks.

        Parameters
        ----------
        nbytes : int
            Bytes of the arena, by :meth:`Arena.nbytes_of`.
        meanwhile : callable
            Called before this rank waits.
        pinned : bool
            Frames are copied from and to a GPU.
        """
        self.arena.reserve(nbytes, pinned=pinned)
        meanwhile()
        self.requests.await_all()

    @property
    def closed(self) -> bool:
        """True after a connection was lost, or after :meth:`close`."""
        return self.connections.closed

    @property
    def cancelled(self) -> bool:
        """True after :meth:`cancel`."""
        return self.connections.cancelled

    def cancel(self) -> None:
        """Make the collective in flight and all later ones fail; from then on no tensor of the caller is written.

        This is the only method for threads other than the one that runs the collectives.
        """
        with self._writing:
            self.connections.cancel()

    @contextmanager
    def writing(self) -> Generator[None]:
        """Return a context manager for writing to tensors of the caller.

        :meth:`cancel` waits until the body has ended; after it, entering the context raises PeerError.
        """
        with self._writing:
            if self.connections.cancelled:
                raise PeerError("the collective was cancelled: make a new group")
            with self.clock.during("decode_s"):
                yield

    def close(self) -> None:
        """Close the connections, and give up messages in flight and their memory."""
        self.connections.close()
