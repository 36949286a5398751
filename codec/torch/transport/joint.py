"""Combine the engine calls of concurrent reductions on GPUs, so that all of them share kernel launches."""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from codec import CodecError
from codec._c.library import lib
from codec.engines import choose
from codec.torch.network.waits import Wait
from codec.torch.transport.buffers import ScratchCounter
from codec.torch.transport.collective import CollectivePart
from codec.torch.transport.counters import Phase
from codec.torch.transport.messages import Array
from codec.torch.transport.nccl import DeviceTransfer

_LARGE = 1 << 18  # values in collected calls above which these are launched before the host waits for messages
_BEGIN, _ADD = lib.CODEC_INTO_FLOAT32, lib.CODEC_INTO_ADD


class Found(NamedTuple):
    """Frame of a rank."""

    frame: Any  # uint8 tensor on the GPU, or uint8 array in host memory
    head: Array | None  # for a frame on the GPU: copy of its header and side section in host memory; header is checked
    arriving: Array | None = None  # received head, valid after `settle`; `head` is then the expected head


class Copied(NamedTuple):
    """Frame of this rank, on the GPU and in host memory."""

    there: torch.Tensor
    here: Array

    @property
    def found(self) -> Found:
        """Frame of this rank, in the form of frames received from other ranks."""
        return Found(self.there, self.here)


class JointSum(NamedTuple):
    """Float32 sum, mean or maximum of the frames of all ranks.

    Attributes
    ----------
    frames : sequence of DecodeRequest or None
        Frame of each rank; None: this rank's own values.
    op : {"sum", "mean", "max"}
    explain : callable
        Called with the error for NaN or Inf in the result.
    n : int
        Number of values.
    add_own : callable
        add_own(first) adds this rank's values to the result, or begins it with them.
    complete : callable
        Called when the kernels of the sum have been launched.
    """

    frames: Sequence[Any]
    op: str
    explain: Callable[[CodecError], None]
    n: int
    add_own: Callable[[bool], None]
    complete: Callable[[], None]


class JointEncoding(NamedTuple):
    """Tensors that a reduction encodes, and copies to the host that it then waits for.

    Attributes
    ----------
    requests : sequence of EncodeRequest
        Tensors to encode, with their specs and destinations.
    explain : callable
        explain(error, i) explains the error of request i.
    encoded : callable
        Called when the requests have been launched.
    read : callable or None
        Requests copies of frames to the host. None: the host does not wait.
    """

    requests: Sequence[Any]
    explain: Callable[[CodecError, int], None]
    encoded: Callable[[], None]
    read: Callable[[], None] | None


class JointFrames:
    """Frames of one :class:`JointEncoding`, a range of those in :class:`codec.engines.cuda.deferred.EncodedSizes`."""

    def __init__(self, whole: Any, begin: int, end: int) -> None:
        self._whole, self._range = whole, slice(begin, end)

    @property
    def sizes(self) -> Any:
        """Bytes of each frame, on the GPU."""
        return self._whole.sizes[self._range]

    @property
    def lengths(self) -> list[int]:
        """Bytes of each frame, when the host has waited for them."""
        return [] if self._whole is None else self._whole.lengths[self._range]


class Joint:
    """CUDA engine calls of several concurrent reductions, the members.

    Before they encode or send, members wait for each other (a meeting). Their calls are then combined to one engine
    call, in the order of the members, so that NCCL messages have the same order on all ranks. All ranks must have the
    same members. Sums and frames to decode are collected, and launched at meetings or before waits for messages.

    Parameters
    ----------
    members : int
        Number of reductions.
    """

    def __init__(self, members: int = 1) -> None:
        self._members = members
        self._part: CollectivePart | None = None
        self._here: dict[int, tuple[Any, Callable[[list[Any]], list[Any]], Wait]] = {}
        self._returned: dict[int, Any] = {}
        self._sums: list[JointSum] = []
        self._frames: list[Any] = []  # requests to decode
        self._after: list[Callable[[], None]] = []
        self._collected = 0  # number of values in collected calls

    @functools.cached_property
    def calls(self) -> Any:
        """Calls for which the host has not waited: :class:`codec.engines.cuda.DeferredCalls`."""
        engine: Any = choose("cuda", "a tensor", "cuda")
        return engine.DeferredCalls((ScratchCounter() if self._part is None else self._part.device.scratch).note)

    def join(self, part: CollectivePart) -> None:
        """Set the part of the collective, which records the seconds and the GPU memory of the engine's calls."""
        self._part = part

    def _during(self, phase: Phase) -> AbstractContextManager[Any]:
        return nullcontext() if self._part is None else self._part.clock.during(phase)

    # Meetings

    async def meet(self, member: int, item: Any, act: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait until all members have called this; return this member's item of the list act(items of all members).

        All members must call this equally often, with equal `act`. One of them calls `act`, and raises its errors.
        """
        wait = Wait()
        self._here[member] = item, act, wait
        self._act()
        await wait
        return self._returned.pop(member)

    def leave(self) -> None:
        """Note that a member has ended without an error."""
        self._members -= 1
        if self._members:
            self._act()
        else:
            self.launch()

    def _act(self) -> None:
        """Call the function of a meeting if all members are here."""
        if not self._here or len(self._here) < self._members:
            return
        here, self._here = dict(sorted(self._here.items())), {}
        items, acts, waits = zip(*here.values(), strict=True)
        self._returned |= zip(here, acts[0]([*items]), strict=True)
        for wait in waits:
            wait.complete()

    def launch_for(self, items: list[None]) -> list[None]:
        """Launch all collected calls; a function for :meth:`meet`."""
        self.launch()
        return items

    # Calls

    def sum(self, each: JointSum) -> None:
        """Collect a sum."""
        self._sums.append(each)
        self._collected += each.n

    def decode(self, requests: Sequence[Any], n: int) -> None:
        """Collect requests to decode frames of `n` values."""
        self._frames += requests
        self._collected += n

    def after(self, call: Callable[[], None]) -> None:
        """Make :meth:`launch` call a function after the sums collected so far."""
        self._after.append(call)

    def launch_large(self) -> None:
        """Launch all collected calls if they have many values; called before the host waits for messages."""
        if self._collected >= _LARGE:
            self.launch()

    def launch(self) -> None:
        """Launch all collected calls."""
        self._collected = 0
        if self._sums or self._after or self._frames:
            with self._during("decode_s"):
                self._launch()

    def _launch(self) -> None:
        (sums, self._sums), (after, self._after) = (self._sums, []), (self._after, [])
        if sums:
            self._launch_sums(sums)
        for call in after:
            call()
        frames, self._frames = self._frames, []
        if frames:
            self.calls.decode_many(frames)

    def _launch_sums(self, sums: Sequence[JointSum]) -> None:
        engine: Any = choose("cuda", "a tensor", "cuda")
        whole = [each for each in sums if None not in each.frames]
        if whole:
            self.calls.reduce_many([engine.FrameSum(each.frames, each.op, each.explain) for each in whole])
        mixed = [each for each in sums if None in each.frames]
        for i in range(max((len(each.frames) for each in mixed), default=0)):
            for each in mixed:
                if each.frames[i] is None:
                    each.add_own(i == 0)
            if requests := [each.frames[i] for each in mixed if each.frames[i] is not None]:
                self.calls.accumulate_many(requests, _ADD if i else _BEGIN)
        for each in sums:
            each.complete()

    def encode(self, items: list[JointEncoding]) -> list[JointFrames]:
        """Encode the tensors of all members; wait once if one of them copies frames to the host."""
        self.launch()
        requests = [request for item in items for request in item.requests]
        ends = [*itertools.accumulate(len(item.requests) for item in items)]
        begins = [end - len(item.requests) for end, item in zip(ends, items, strict=True)]

        def explain(e: CodecError) -> None:
            if isinstance(e.item, int):
                member = bisect.bisect_right(ends, e.item)
                items[member].explain(e, e.item - begins[member])

        with self._during("encode_s"):
            encoded = self.calls.encode_many(requests, explain) if requests else None
            for item in items:
                item.encoded()
            self.read([item.read for item in items if item.read is not None])
        return [JointFrames(encoded, begin, end) for begin, end in zip(begins, ends, strict=True)]

    def read(self, reads: Sequence[Callable[[], None]]) -> None:
        """Call functions that request copies to the host, and wait for all calls so far."""
        if not reads:
            return
        assert self._part is not None
        try:
            for read in reads:
                read()
            self.settle(self._part.device)
        finally:  # wait for the copies even after an error, since their memory may be reused
            self.calls.wait()

    def settle(self, transfer: DeviceTransfer) -> None:
        """Wait for all calls so far, and raise the error of the first one that has failed.

        `transfer` is the transfer between GPUs for whose messages the calls may wait.
        """
        self.launch()
        self.calls.request()
        try:
            transfer.settle()
        except BaseException:
            self.calls.wait()  # the stream may still copy to host memory, which is about to be freed
            raise
        self.calls.conclude()
