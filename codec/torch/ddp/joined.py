"""Join consecutive small buckets of a step, so that one collective reduces them together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from codec import ArgumentError, PeerError
from codec.arguments import shown
from codec.torch.ddp.buckets import Bucket, BucketBuffers
from codec.torch.group.work import JoinedWork, Work
from codec.torch.network.waits import Wait
from codec.torch.reduction.algorithms_device import WithinGpus
from codec.torch.reduction.host import Reduction
from codec.torch.transport.collective import Collective
from codec.torch.transport.counters import Counters
from codec.torch.transport.streams import order_after

# Bytes of a rank's slice, before encoding, up to which buckets are joined. A two-shot collective of N ranks has
# 2 (N - 1) messages a rank, each of which costs about 0.1 ms of CPU besides its values, and a value costs about 3.5 ns
# (encoding and decoding, 4 bits). So a message costs as much as 32,000 float32 values, which are 128 KiB.
SLICE_NBYTES = 1 << 17

Transform = Callable[[torch.Tensor, list[tuple[torch.nn.Parameter, torch.Tensor]]], int | str | None]


@dataclass
class BucketRun:
    """Buckets of a step that one collective reduces: a large bucket, or consecutive small ones."""

    members: list[Bucket]
    number: int = 0  # index of the run among those of its step
    bucket: Bucket = field(init=False)  # bucket to reduce, set by :meth:`join`
    counters: Counters = field(default_factory=Counters)  # bytes and seconds of the collective
    names: list[str] = field(default_factory=list[str])  # names of the parameters; empty if sent without frames
    reductions: list[Reduction] = field(default_factory=list[Reduction])  # kernels may still run on GPUs
    follow: list[Callable[[], None]] = field(
        default_factory=list[Callable[[], None]]
    )  # results of :func:`order_after`, by member
    store: Callable[[], object] | None = None  # writes the mean to the buckets, if the step succeeds
    gathers: list[WithinGpus] = field(default_factory=list[WithinGpus])  # to complete after the last bucket
    arrived: Wait = field(default_factory=Wait)  # completes when the data of the buckets has arrived
    returned: Wait = field(default_factory=Wait)  # completes when the collective has resumed after `Step.over`

    @property
    def last(self) -> bool:
        """True for the last run of a step."""
        return self.members[-1].last

    def arrive(self, collective: Collective) -> None:
        """Note that the data of the buckets has arrived, or that the run has failed."""
        self.arrived.complete()
        self.pass_turn(collective)

    def pass_turn(self, collective: Collective) -> None:
        """Let later collectives send values within the machine by NCCL; the last run first gathers all results."""
        if not self.last:
            collective.device.pass_turn(collective.number)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Buffer of each member."""
        return [bucket.buffer for bucket in self.members]

    def join(self, buffers: BucketBuffers) -> None:
        """Set the bucket to reduce: the only member, or a bucket with copies of all gradients, in cached memory."""
        if len(self.members) == 1:
            self.bucket = replace(self.members[0], number=self.number)
            return
        joined = buffers.joined((self.number << 20, "bucket"), self.buffers)
        parameters = [p for bucket in self.members for p in bucket.parameters]
        self.bucket = Bucket(joined, parameters, self.number, self.last)

    def results(self, mean: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that hold the mean of each member after the end of the step.

        DistributedDataParallel reads a result at absolute offsets in its storage. So the means of several members are
        stored in their own buffers, not returned as views of `mean`.
        """
        if len(self.members) == 1:
            return [mean]
        store, buffers = self.store, self.buffers

        def scatter() -> None:
            assert store is not None
            store()
            begin = 0
            for buffer in buffers:
                buffer.copy_(mean[begin : begin + buffer.numel()])
                begin += buffer.numel()

        self.store = scatter
        self.counters.raw_collectives *= len(buffers)  # statistics count buckets
        self.counters.frame_collectives *= len(buffers)
        return buffers


class Joiner:
    """Groups the buckets of a step into runs.

    A run ends when its buckets reach SLICE_NBYTES for each rank or `limit`, with the last bucket of the step, and
    before a bucket that is large, sparse, float64, of another dtype or on another device. So it depends only on sizes,
    dtypes and the limit, which are equal on all ranks.

    Parameters
    ----------
    limit : int, optional
        Bytes of :class:`codec.torch.group.shares.LinkShares`, the same throughout a step; None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        # Run that has not begun, because more buckets may join, and its handle. A run does not hold its handle, which
        # would keep the connections of a former group open.
        self._open: tuple[BucketRun, JoinedWork] | None = None
        self._nbytes = 0  # bytes of its buckets
        self._count = 0  # number of runs that have begun

    def add(
        self, bucket: Bucket, size: int, before_wait: Callable[[], object]
    ) -> tuple[Work, list[tuple[BucketRun, JoinedWork]]]:
        """Add the next bucket.

        Parameters
        ----------
        bucket : Bucket
            The bucket.
        size : int
            Number of ranks.
        before_wait : callable
            As for :class:`Work`.

        Returns
        -------
        work : Work
            Handle of the bucket.
        runs : list of (BucketRun, JoinedWork)
            Runs that must begin now, in this order, and their handles.
        """
        most, buffer = SLICE_NBYTES * size, bucket.buffer
        most = most if self._limit is None else min(most, self._limit)
        small = bucket.has_frames and buffer.nbytes < most
        begun: list[tuple[BucketRun, JoinedWork]] = []
        if self._open is not None and not (small and _is_alike(self._open[0].members[0].buffer, buffer)):
            begun.append(self._close(*self._open))
        self._open = run, joined = self._open or (BucketRun([]), JoinedWork(before_wait))
        run.members.append(bucket)
        work = joined.new_member()
        self._nbytes += buffer.nbytes if small else 0
        if bucket.last or not small or self._nbytes >= most:
            begun.append(self._close(run, joined))
        else:
            run.follow.append(order_after())
        return work, begun

    def _close(self, run: BucketRun, work: JoinedWork) -> tuple[BucketRun, JoinedWork]:
        for follow in run.follow:
            follow()
        run.number = self._count
        self._open, self._nbytes, self._count = None, 0, self._count + 1
        return run, work

    def cancel(self) -> None:
        """End the handles of buckets that have not begun with an error, because the step is cancelled."""
        last, self._open = self._open, None
        if last is not None:
            _, work = last
            work.set_error(PeerError("the step was cancelled before this bucket was sent: make a new group"))
            if (callbacks := work.take_callbacks()) is not None:
                callbacks()


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two buffers have the same dtype and device."""
    return a.dtype == b.dtype and a.device == b.device


def transformed(buckets: Sequence[Bucket], transform: Transform | None) -> int | str | None:
    """Apply ``transform=`` to each bucket of a run; return what all ranks must agree on.

    Raises
    ------
    ArgumentError
        `transform` returned neither None nor an int or str.
    """
    if transform is None:
        return None
    items: list[int | str | None] = []
    for bucket in buckets:
        gradients = list(zip(bucket.parameters, bucket.gradients(), strict=True))
        with torch.no_grad():
            returned: Any = transform(bucket.buffer, gradients)
        if returned is not None and type(returned) not in (int, str):
            raise ArgumentError(
                "the function transform= must change the buffer in place, and return None, or an int or str that is "
                f"equal on all ranks; it returned {shown(returned)}"
            )
        items.append(returned)
    return items[0] if all(item == items[0] for item in items) else str(items)
