"""Frames that stay on GPUs: NCCL carries them, by connections of its own (docs/protocol.md, section 18)."""

import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from codec import PeerError
from codec.torch.network.mesh import CLOSED, Mesh
from codec.torch.network.store import own_store
from codec.torch.network.timeouts import timeout_of
from codec.torch.transport.counters import Counters
from codec.torch.transport.streams import engine_is_usable, logger

_POLL_SECONDS = 20e-6  # between two looks at a message in flight
_NEVER = timedelta(days=3653)


class DeviceTransfer:
    """Collectives of frames between GPUs, by NCCL connections that :meth:`connect` makes.

    They are not those of the group itself, which the caller may use in another thread: NCCL needs the same order of
    collectives on all ranks.

    A rank that is lost or does not answer in time, and closed connections, end a collective with PeerError.

    Parameters
    ----------
    mesh : Mesh
        Connections in host memory, which are closed with those of GPUs.
    others : sequence of int
        Other ranks.
    timeout : timedelta
        Longest time that other ranks may keep this rank waiting.
    on_wait : callable
        on_wait(seconds, None) is called after each wait.

    Attributes
    ----------
    cancelled : bool
        A thread has cancelled the collective in flight, and closes the connections.
    """

    def __init__(
        self, mesh: Mesh, others: Sequence[int], timeout: timedelta, on_wait: Callable[[float, int | None], Any]
    ) -> None:
        self._mesh, self._others, self._timeout, self._on_wait = mesh, others, timeout, on_wait
        self._pg: Any = None  # None: not connected, or closed
        self._abort: Callable[[], Any] | None = None  # closes the connections, also while messages are in flight
        self._closing = threading.Lock()
        self.cancelled = False

    @property
    def connected(self) -> bool:
        """True if frames need not cross to host memory."""
        return self._pg is not None

    def connect(self, group: Any, usable: Sequence[Sequence[int]]) -> None:
        """Connect the GPUs of all ranks, unless `usable`, by rank, says that one of them cannot encode there."""
        if [0] in usable:
            logger.info("rank %d cannot encode on its GPU: frames cross to host memory", usable.index([0]))
            return
        self._pg = connect_nccl(group)
        self._abort = weakref.finalize(self, _abort, self._pg)

    @contextmanager
    def phase(self) -> Generator[None]:
        """Return a context manager for all that a rank does once other ranks may wait for its frames.

        An error closes all connections of the channel: a collective of NCCL cannot be ended in another way.
        """
        try:
            yield
        except BaseException as e:
            self._mesh.close()
            self.release()
            if self.cancelled:  # by a thread that may have closed the connections first
                raise PeerError("the collective was cancelled: make a new group") from e
            raise

    def all_to_all(self, rows: torch.Tensor, counters: Counters) -> torch.Tensor:
        """Send row i of bytes on the GPU to rank i; return the rows from all ranks, by rank. In :meth:`phase`."""
        received = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._run(lambda pg: pg.alltoall_base(received, rows, [], []), rows.nbytes // (1 + len(self._others)), counters)
        return received

    def all_gather(self, row: torch.Tensor, counters: Counters) -> torch.Tensor:
        """Return the rows of bytes on the GPUs of all ranks, by rank, from this rank's row. In :meth:`phase`."""
        received = torch.empty((1 + len(self._others), *row.shape), dtype=row.dtype, device=row.device)
        self._run(lambda pg: pg._allgather_base(received.view(-1), row.view(-1)), row.nbytes, counters)
        return received

    def _run(self, begin: Callable[[Any], Any], nbytes: int, counters: Counters) -> None:
        """Run the collective that begin(NCCL's connections) begins; it sends `nbytes` bytes to each other rank.

        Raises
        ------
        PeerError
            A rank is lost or does not answer in time, or the connections are closed.
        """
        since = time.perf_counter()
        self._await(begin)
        total = nbytes * len(self._others)
        self._on_wait(time.perf_counter() - since, None)
        counters.sent_nbytes += total
        counters.received_nbytes += total

    def _await(self, begin: Callable[[Any], Any]) -> None:
        """Begin a collective, and wait for it on the host: a stream that waits for a lost rank would never go on."""
        timeout, pg = self._timeout, self._pg
        end = time.monotonic() + timeout.total_seconds()
        if pg is None:
            raise PeerError(CLOSED)
        try:
            work = begin(pg)
            while not work.is_completed():
                self._mesh.check_open()  # NCCL does not notice a lost rank
                if time.monotonic() > end:
                    raise PeerError(f"frames from other GPUs did not arrive within {timeout}")
                time.sleep(_POLL_SECONDS)
            work.wait()
        except PeerError:
            raise
        except RuntimeError as e:
            raise PeerError(f"a rank is gone or does not answer: {e}") from e

    def release(self) -> None:
        """Close the connections between GPUs. NCCL writes no memory any more when this returns, in any thread."""
        with self._closing:
            abort, self._abort, self._pg = self._abort, None, None
            if abort is not None:
                abort()


def _abort(pg: Any) -> None:
    with suppress(RuntimeError):
        pg.abort()


def rank_is_usable() -> int:
    """Return 1 if this rank can encode on its GPU, else 0."""
    return int(engine_is_usable())


def uses_nccl(group: Any) -> bool:
    """Return True if NCCL carries a group's tensors on GPUs."""
    cuda = torch.device("cuda")
    return cuda in group._device_types and group._get_backend(cuda).name() == "nccl"


def connect_nccl(group: Any) -> Any:
    """Return new NCCL connections of a group's ranks, without a timeout: NCCL's own ends the process."""
    store = own_store(group, "codec/nccl", timeout_of(group).total_seconds())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
