"""Frames that stay on GPUs: NCCL carries them, by connections of its own (docs/protocol.md, section 18)."""

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from codec import PeerError
from codec.torch.transport.connections import CLOSED, Connections
from codec.torch.transport.numbers import Numbers
from codec.torch.transport.streams import engine_is_usable, logger

_POLL_SECONDS = 20e-6  # between two looks at a message in flight
_NEVER = timedelta(days=3653)


class DeviceTransfer:
    """Collectives of frames between GPUs, by NCCL connections that :meth:`connect` makes.

    They are not those of the group itself, which the caller may use in another thread: NCCL needs the same order of
    collectives on all ranks.

    A rank that is lost or does not answer in time, and :meth:`Connections.cancel`, end a collective with PeerError and
    close all connections of the channel.

    Parameters
    ----------
    connections : Connections
        Connections in host memory; the GPUs' are closed with them.
    numbers : Numbers
        Tells other ranks that this one can encode on its GPU.
    """

    def __init__(self, connections: Connections, numbers: Numbers) -> None:
        self._connections, self._numbers = connections, numbers
        self._pg: Any = None  # None: not connected, or closed
        self._abort: Callable[[], Any] | None = None  # closes the connections, also while messages are in flight
        connections.attach(self)

    @property
    def connected(self) -> bool:
        """True if frames need not cross to host memory."""
        return self._pg is not None

    def connect(self, group: Any) -> None:
        """Connect the GPUs of all ranks if NCCL carries the tensors of `group` there and all ranks can encode there."""
        if self._connections.size == 1 or not uses_nccl(group):
            return
        usable = self._numbers.gather([int(engine_is_usable())])
        if [0] in usable:
            logger.info("rank %d cannot encode on its GPU: frames cross to host memory", usable.index([0]))
            return
        self._pg = connect_nccl(group)
        self._abort = weakref.finalize(self, _abort, self._pg)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row i of bytes on the GPU to rank i; return the rows from all ranks, by rank."""
        received = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._run(lambda pg: pg.alltoall_base(received, rows, [], []), rows.nbytes // self._connections.size)
        return received

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of bytes on the GPUs of all ranks, by rank, from this rank's row."""
        received = torch.empty((self._connections.size, *row.shape), dtype=row.dtype, device=row.device)
        self._run(lambda pg: pg._allgather_base(received.view(-1), row.view(-1)), row.nbytes)
        return received

    def _run(self, begin: Callable[[Any], Any], nbytes: int) -> None:
        """Run the collective that begin(NCCL's connections) begins; it sends `nbytes` bytes to each other rank.

        Raises
        ------
        PeerError
            A rank is lost or does not answer in time, the collective was cancelled, or the connections are closed.
        """
        if self._pg is None:
            raise PeerError(CLOSED)
        try:
            with self._connections.clock.during("wire_s"):
                self._await(begin)
        except PeerError:
            self._connections.close()
            raise
        total = nbytes * len(self._connections.others)
        self._connections.counters.sent_nbytes += total
        self._connections.counters.received_nbytes += total

    def _await(self, begin: Callable[[Any], Any]) -> None:
        """Begin a collective, and wait for it on the host: a stream that waits for a lost rank would never go on."""
        timeout = self._connections.timeout
        end = time.monotonic() + timeout.total_seconds()
        try:
            work = begin(self._pg)
            while not work.is_completed():
                if self._connections.cancelled:
                    raise PeerError("the collective was cancelled: make a new group")
                if time.monotonic() > end:
                    raise PeerError(f"frames from other GPUs did not arrive within {timeout}")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except PeerError:
            raise
        except RuntimeError as e:
            raise PeerError(f"a rank is gone or does not answer: {e}") from e

    def release(self) -> None:
        """Close the connections between GPUs."""
        abort, self._abort, self._pg = self._abort, None, None
        if abort is not None:
            abort()


def _abort(pg: Any) -> None:
    with suppress(RuntimeError):
        pg.abort()


def uses_nccl(group: Any) -> bool:
    """Return True if NCCL carries a group's tensors on GPUs."""
    cuda = torch.device("cuda")
    return cuda in group._device_types and group._get_backend(cuda).name() == "nccl"


def connect_nccl(group: Any) -> Any:
    """Return new NCCL connections of a group's ranks, without a timeout: NCCL's own ends the process."""
    store = PrefixStore("codec/nccl", group.get_group_store().clone())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
