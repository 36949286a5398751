"""Send frames between GPUs with NCCL (docs/spec/protocol/collectives.md, section 7)."""

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
from codec.torch._compat import timeout_of
from codec.torch.network.mesh import CLOSED, Mesh
from codec.torch.network.store import own_store
from codec.torch.network.waits import Turns, Wait
from codec.torch.transport.buffers import ScratchCounter
from codec.torch.transport.counters import Counters
from codec.torch.transport.streams import engine_is_usable, logger, passed_by_gpu

_POLL_SECONDS = 20e-6  # seconds between two checks of a message in flight
_NEVER = timedelta(days=3653)


class DeviceTransfer:
    """Collectives that send frames between GPUs, over NCCL connections that :meth:`connect` opens.

    These are not the connections of the group, which the caller may use in another thread: NCCL needs the same order
    of collectives on all ranks.

    A rank that is lost or does not answer in time, and closed connections, end a collective with PeerError.

    Parameters
    ----------
    mesh : Mesh
        TCP connections, which are closed together with the NCCL connections.
    others : sequence of int
        Other ranks.
    within : bool
        True: the ranks are those of a machine in two levels, so that only uncompressed values travel by NCCL.
    timeout : timedelta
        Longest time that other ranks may keep this rank waiting.
    on_wait : callable
        on_wait(seconds, None) is called after each wait.

    Attributes
    ----------
    scratch : ScratchCounter
        Counter of the GPU memory that the CUDA engine uses to encode and decode for the collectives.
    cancelled : bool
        True: another thread has cancelled the collective in flight, and closes the connections.
    """

    def __init__(
        self,
        mesh: Mesh,
        others: Sequence[int],
        timeout: timedelta,
        on_wait: Callable[[float, int | None], Any],
        *,
        within: bool = False,
    ) -> None:
        self._mesh, self._others, self._timeout, self._on_wait = mesh, others, timeout, on_wait
        self._within = within
        self._order, self._turns = Turns(), dict[int, tuple[Wait | None, Wait]]()  # turns by number of the collective
        self._pg: Any = None  # None: not connected, or closed
        self._abort: Callable[[], Any] | None = None  # closes the connections, also while messages are in flight
        self._in_flight: list[Any] = []  # collectives of NCCL for which the host has not waited
        self._closing = threading.Lock()
        self.scratch = ScratchCounter()
        self.cancelled = False

    @property
    def connected(self) -> bool:
        """True if frames can be sent from GPU to GPU, without copies to host memory."""
        return self._pg is not None and not self._within

    @property
    def connected_within(self) -> bool:
        """True if, in two levels, values of the ranks of a machine can be reduced on their GPUs."""
        return self._pg is not None and self._within

    def connect(self, group: Any, usable: Sequence[Sequence[int]]) -> None:
        """Connect the GPUs of a group, unless `usable`, by rank, has [0] for a rank that cannot encode on its GPU."""
        if [0] in usable:
            logger.info("rank %d cannot encode on its GPU: all ranks send frames from host memory", usable.index([0]))
            return
        self._pg = connect_nccl(group, "codec/nccl/within" if self._within else "codec/nccl")
        self._abort = weakref.finalize(self, _abort, self._pg)

    # Turns: in two levels, several collectives are in flight, but NCCL needs the same order of messages on all ranks

    def begin(self, number: int) -> None:
        """Note that a collective begins. Its messages within the machine follow those of all earlier collectives."""
        if self._within:
            self._turns[number] = self._order.ask()

    async def turn(self, number: int) -> None:
        """Wait until all earlier collectives have called :meth:`pass_turn`."""
        before, _ = self._turns[number]
        if before is not None:
            await before

    def pass_turn(self, number: int) -> None:
        """Note that a collective sends no more messages within the machine; later calls do nothing."""
        before, own = self._turns.pop(number, (None, Wait()))
        if before is None or not before.call_when_done(own.complete):
            own.complete()

    @contextmanager
    def phase(self) -> Generator[None]:
        """Return a context manager for the operations of a rank while other ranks may wait for its frames.

        An error closes all connections of the channel: a collective of NCCL cannot be ended in another way.
        """
        try:
            yield
        except BaseException as e:
            self._mesh.close()
            self.release()
            if self.cancelled:  # another thread has cancelled the collective; closing connections may have caused `e`
                raise PeerError("the collective was cancelled: make a new group") from e
            raise

    def all_to_all(self, rows: torch.Tensor, counters: Counters) -> torch.Tensor:
        """Send row i of a byte tensor to rank i; return the received rows, by rank. Call this inside :meth:`phase`."""
        received = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._run(lambda pg: pg.alltoall_base(received, rows, [], []), rows.nbytes // (1 + len(self._others)), counters)
        return received

    def scatter(self, values: torch.Tensor, nbytes: Sequence[int], rank: int, counters: Counters) -> torch.Tensor:
        """Send part i of a byte tensor, of `nbytes[i]` bytes, to rank i; return the parts for `rank`, this rank.

        Call this inside :meth:`phase`.
        """
        received = torch.empty((len(nbytes), nbytes[rank]), dtype=values.dtype, device=values.device)
        sizes = [nbytes[rank]] * len(nbytes)
        total = (values.nbytes - nbytes[rank]) // max(1, len(self._others))
        self._run(lambda pg: pg.alltoall_base(received.view(-1), values, sizes, [*nbytes]), total, counters)
        return received

    def all_gather(self, row: torch.Tensor, counters: Counters) -> torch.Tensor:
        """Gather one row of bytes from each rank; return the rows, by rank. Call this inside :meth:`phase`."""
        received = torch.empty((1 + len(self._others), *row.shape), dtype=row.dtype, device=row.device)
        self._run(lambda pg: pg._allgather_base(received.view(-1), row.view(-1)), row.nbytes, counters)
        return received

    def all_reduce(self, x: torch.Tensor, counters: Counters) -> None:
        """Replace a GPU tensor by its sum over all ranks, added in NCCL's order. Call this inside :meth:`phase`."""
        total = 2 * x.nbytes * len(self._others) // (1 + len(self._others))
        self._run(lambda pg: pg.allreduce([x]), total // max(1, len(self._others)), counters)

    def _run(self, begin: Callable[[Any], Any], nbytes: int, counters: Counters) -> None:
        """Start a collective, begin(NCCL process group), in the stream. It sends `nbytes` bytes to each other rank.

        Raises
        ------
        PeerError
            A rank is lost or does not answer in time, or the connections are closed.
        """
        if (pg := self._pg) is None:
            raise PeerError(CLOSED)
        with _as_peer_errors():
            self._follow(begin(pg))
        total = nbytes * len(self._others)
        if self._within:
            counters.local_nbytes += total
            return
        counters.sent_nbytes += total
        counters.received_nbytes += total

    def _follow(self, work: Any) -> None:
        """Make the current stream wait for a collective of NCCL; the host does not wait before :meth:`settle`."""
        self._in_flight.append(work)
        work.wait()

    def settle(self) -> None:
        """Wait on the host until the GPU has done all work of the current stream, if messages are in flight.

        If a rank is lost, the stream waits for its message forever. So the host must not wait for the stream without a
        timeout before it has called this.

        Raises
        ------
        PeerError
            A rank is lost or does not answer in time. The connections are closed, so that the stream no longer waits
            for messages.
        """
        if not self._in_flight:
            return
        works, self._in_flight = self._in_flight, []
        since = time.perf_counter()
        with self.phase():
            for work in works:
                self._await(work.is_completed)
            self._await(passed_by_gpu())
        self._on_wait(time.perf_counter() - since, None)

    def drain(self) -> None:
        """After an error, wait for messages in flight, in which other ranks still take part."""
        with suppress(PeerError):
            self.settle()

    def _await(self, done: Callable[[], bool]) -> None:
        """Wait on the host until done() returns True, for at most the group's timeout."""
        end = time.monotonic() + self._timeout.total_seconds()
        with _as_peer_errors():
            while not done():
                self._mesh.check_open()  # NCCL does not notice a lost rank
                if time.monotonic() > end:
                    raise PeerError(
                        f"frames from other GPUs did not arrive within the timeout, {self._timeout}: make a new group"
                    )
                time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Close the connections between GPUs. After this returns, in any thread, NCCL writes to no memory."""
        with self._closing:
            abort, self._abort, self._pg = self._abort, None, None
            if abort is not None:
                abort()


@contextmanager
def _as_peer_errors() -> Generator[None]:
    """Return a context manager in which errors of NCCL are PeerError."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as e:
        raise PeerError(f"a rank is gone or does not answer: {e}; make a new group") from e


def _abort(pg: Any) -> None:
    with suppress(RuntimeError):
        pg.abort()


def rank_is_usable() -> int:
    """Return 1 if this rank can encode on its GPU, else 0."""
    return int(engine_is_usable())


def uses_nccl(group: Any) -> bool:
    """Return True if NCCL carries a group's tensors on GPUs.

    Torch 2.15 has several classes for NCCL, whose names are "nccl" and "nccl2", with the suffix "-lazy" if they connect
    ranks later.
    """
    cuda = torch.device("cuda")
    return cuda in group._device_types and group._get_backend(cuda).name().removesuffix("-lazy") in ("nccl", "nccl2")


def connect_nccl(group: Any, prefix: str) -> Any:
    """Return new NCCL connections of a group's ranks, without NCCL's own timeout, which would end the process.

    `prefix` is that of the keys in the group's store.
    """
    store = own_store(group.get_group_store(), prefix, timeout_of(group).total_seconds())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
