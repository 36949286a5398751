"""Collectives over torch.distributed whose tensors travel as frames."""

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

import codec
from codec import FrameError, PeerError, SpecError
from codec.segmenting import Records, Segments, unpack
from codec.specs import Lossless, Spec, Ternary
from codec.torch import algorithms, raw, ternary
from codec.torch.arguments import as_array, check_dense, publish, reduction_of
from codec.torch.channel import Array, Channel, Incoming, Timeout
from codec.torch.choosing import Choice, report
from codec.torch.phases import Attempt, copied
from codec.torch.reduction import Reduction
from codec.torch.worker import Pending, Worker
from codec.view import mark_written

Algorithm = Literal["auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"]
T = TypeVar("T")

_ALGORITHMS = {
    "two_shot": algorithms.two_shot,
    "all_gather": algorithms.all_gather,
    "ring": algorithms.ring,
    "raw": raw.two_shot,
    "shared_scale": ternary.shared_scale,
}
_OF_FRAMES = ("two_shot", "all_gather", "ring")  # their results can wait in them
_CHOICES = 256  # that a group remembers
_MOST_NBYTES = 1 << 36  # of what one rank sends another by exchange()
_SMALL = 1 << 16  # bytes of a tensor: two phases take longer than what one sends more


class Line:
    """A group's channel, with the thread that alone uses it."""

    def __init__(self, group: Any, timeout: Timeout | None) -> None:
        self.worker = Worker(f"codec, rank {group.rank()}")
        weakref.finalize(self, self.worker.stop)
        # a thread that waits for another one hears Ctrl-C, one that waits for peers does not
        self.channel: Channel = self.worker.submit(lambda: Channel(group, timeout)).wait()
        self.choices: dict[int, Choice] = {}
        self.finish(lambda: self.channel.check_same("version of codec", [hashed(codec.__version__)]))

    def finish(self, work: Callable[[], T]) -> T:
        """Run `work` after what was submitted before, and return its result.

        Where Ctrl-C ends the wait, the collective is given up: the caller's tensors are not written any more.
        """
        self.worker.check_thread()
        pending = None
        try:
            pending = self.worker.submit(work)
            return pending.wait()
        except BaseException:
            if pending is None or not pending.is_completed():
                self.give_up()
            raise

    def give_up(self) -> None:
        """Have the collective in flight and all later ones fail without writing a tensor; peers learn of it."""
        if self.worker.forked:  # the connections are the parent's
            return
        self.channel.abandon()
        self.worker.submit(self.channel.close)


_lines: "weakref.WeakKeyDictionary[Any, Line]" = weakref.WeakKeyDictionary()


def line_of(group: Any, timeout: Timeout | None = None) -> Line:
    """The line of a group, made when it is first asked for: a collective call then."""
    key = group or dist.group.WORLD
    if key is None:
        raise SpecError("torch.distributed is not initialized: call init_process_group first")
    line = _lines.get(key)
    if line is None:
        line = _lines[key] = Line(key, timeout)
    return line


def _is_apart(group: Any, what: str) -> bool:
    """Whether this rank is not of a group: it does nothing then, with a warning, as torch.distributed has it."""
    apart = dist.distributed_c10d._rank_not_in_group(group)
    if apart:
        dist.distributed_c10d._warn_not_in_group(what)
    return apart


def hang_up(group: Any, *, now: bool) -> None:
    """End a group's line, after what was begun; or now: what is under way fails and writes nothing."""
    line = _lines.get(group)
    if line is None or line.worker.forked:
        return
    if now:
        line.give_up()
    else:
        line.worker.submit(line.channel.close).wait()


def hashed(*what: Any) -> int:
    """64 bits that tell arguments apart on different ranks."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little", signed=True)


def all_reduce(
    tensor: torch.Tensor,
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    group: Any = None,
    op: Any = "mean",
    algorithm: Algorithm = "auto",
    segments: Segments | None = None,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
    stream: int = 0,
    out: torch.Tensor | None = None,
    timeout: Timeout | None = None,
    async_op: bool = False,
) -> Pending | None:
    """Reduce a tensor over all ranks of a group, in place, as ``dist.all_reduce`` does, with frames on the wire.

    Values are summed in float32, in the order of ranks, so that all ranks get the same bits; lossless, the bits of that
    sum. A rank's own values are encoded as all others'. If anything goes wrong on any rank, all of them raise, and all
    tensors are as they were.

    Parameters
    ----------
    tensor : torch.Tensor
        float32, bfloat16 or float16; of the same shape on all ranks.
    spec : Spec
        How frames are encoded; lossless if left out.
    group : ProcessGroup, optional
        Whose ranks; all if left out. It gets connections of its own, over Gloo, with its first collective.
    op : {"mean", "sum", "max"} or ReduceOp
        What is made of the values.
    algorithm : {"auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"}
        Who sends what to whom. Two-shot: each rank reduces a slice, 2 (N - 1) / N frames on the wire; all-gather: one
        phase, N - 1 frames; ring: as much as two-shot, to one neighbour, encoded N - 1 times; raw: two-shot without
        frames, values as they are; shared scale: two-shot for :class:`codec.Ternary`, each parameter under one scale of
        all ranks, so that sums come back whole. Left out: all-gather for two ranks and small tensors, else two-shot;
        but raw where ranks are busy encoding and it has turned out to be faster, which is tried out by the first calls
        with tensors of a size. Then what lossy codecs give depends on the time: name an algorithm if runs must be
        alike.
    segments : list of (int, tuple of int), optional
        Parameters inside a flat bucket, as :func:`codec.encode` takes them. Left out: the tensor's own shape.
    metric, state : optional
        What :class:`codec.Truncate` goes by. State tensors have as many values as `tensor`.
    stream : int
        Tells tensors of one step apart, where a codec draws at random.
    out : torch.Tensor, optional
        Where to put the result instead of into `tensor`, which then stays as it is: contiguous, of the same dtype and
        size, in host memory of its own. In place nothing may be written before all have succeeded, so that frames are
        decoded aside and what comes out is copied, or, low-bit codecs' of large tensors, decoded last of all; with
        `out` while others are on the wire. After an error it holds anything.
    timeout : float or timedelta, optional
        Seconds that a rank may keep others waiting, set with the group's first collective; left out: the group's.
    async_op : bool
        Return at once, and reduce in the background, in the order of calls.

    Returns
    -------
    None, or Pending if `async_op`
        With ``wait()`` and ``get_future()``.

    Raises
    ------
    SpecError
        The tensor or an argument cannot be used; the values hold NaN or Inf, which lossy codecs refuse.
    FrameError
        What another rank sent was damaged.
    PeerError
        Another rank raised one of these, asked for something else, is gone or did not answer in time. If a connection
        was lost a new group is needed.

    Examples
    --------
    >>> codec.torch.all_reduce(gradient, codec.Float8(row=128))  # doctest: +SKIP
    """
    if _is_apart(group, "all_reduce"):
        return None
    line = line_of(group, timeout)

    def work() -> torch.Tensor:
        return _all_reduce(line, tensor, spec, op, algorithm, segments, metric, state, stream, out)

    if async_op:
        return line.worker.submit(work)
    line.finish(work)
    return None


def _all_reduce(
    line: Line,
    tensor: torch.Tensor,
    spec: Spec,
    op: Any,
    algorithm: Algorithm,
    segments: Segments | None,
    metric: Any,
    state: Mapping[str, Any] | None,
    stream: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    def prepare() -> Reduction:
        whole = [(0, tuple(tensor.shape))] if len(getattr(tensor, "shape", ())) > 1 else None
        inside = whole if segments is None else segments
        r = reduction_of(tensor, spec, op, inside, metric, state, stream)
        if algorithm == "shared_scale":
            ternary.check(r.spec, r.op)
        r.out = None if out is None else _place(out, tensor, r)
        if out is None and r.can_wait and r.x.ctypes.data == tensor.data_ptr():
            r.late = []
        return r

    result, r = run(line, prepare, algorithm)
    if out is not None:
        return out
    with line.channel.writing():
        for each in r.late or ():
            each()
        if r.late is None:
            publish(result, r, tensor)
        else:
            mark_written(tensor)
    return tensor


def _place(out: torch.Tensor, tensor: torch.Tensor, r: Reduction) -> Array:
    """Where a result goes that is not written to the tensor itself."""
    check_dense(out)
    like = (tensor.dtype, tensor.numel(), "cpu")
    if (out.dtype, out.numel(), out.device.type) != like or not out.is_contiguous():
        raise SpecError(f"out= must be contiguous, in host memory, with {tensor.numel()} values of {tensor.dtype}")
    place = as_array(out)
    inside = out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if np.may_share_memory(place, r.x) or (inside and not tensor.is_contiguous()):
        raise SpecError("out= shares memory with the tensor")
    return place


def run(line: Line, prepare: Callable[[], Reduction], asked: Algorithm) -> tuple[Array, Reduction]:
    """The reduced values of what prepare() returns, once all ranks have them."""
    return run_all(line, lambda: [prepare()], asked)[0]


def run_all(line: Line, prepare: Callable[[], list[Reduction]], asked: Algorithm) -> list[tuple[Array, Reduction]]:
    """The same for several: all are reduced, or none."""
    channel = line.channel
    sign = 0

    def begin() -> tuple[list[Reduction], list[int]]:
        nonlocal sign
        reductions = prepare()
        # what is left to us may come to be another algorithm later: all must have left it
        sign = hashed(asked, [signature(r, choose_algorithm(asked, r, channel.size)) for r in reductions])
        return reductions, [sign]

    reductions = ask(channel, begin)
    choice = line.choices.get(sign) or Choice(_described(reductions))
    as_they_are = asked == "auto" and channel.size > 1 and choice.kind == "values"
    before = channel.sent_nbytes
    with in_step(channel):
        largest = max(reductions, key=lambda r: r.x.size, default=None)
        for r in reductions:
            if r is not largest and r.out is None and r.late is None:  # there is memory for one result
                r.out = np.empty(r.x.size, r.x.dtype)
        names = [choose_algorithm(asked, r, channel.size) for r in reductions]
        if as_they_are:
            names = ["raw" if r.x.nbytes > _SMALL else name for r, name in zip(reductions, names, strict=True)]
        ended = _run_each(channel, reductions, names)
    first = next((error for _, error in ended if error is not None), None)
    nbytes = sum(2 * r.x.nbytes * (channel.size - 1) // channel.size for r in reductions)
    choice.learn(channel.conclude(first, report(channel.began, channel.sent_nbytes - before, nbytes)))
    _count(channel, reductions, raw="raw" in names)
    line.choices.pop(sign, None)
    line.choices[sign] = choice
    if len(line.choices) > _CHOICES:  # that of the longest ago, on all ranks
        del line.choices[next(iter(line.choices))]
    return [(result, r) for r, (result, _) in zip(reductions, ended, strict=True)]


def _described(reductions: list[Reduction]) -> str:
    """Return the total size, dtypes and specs of some reductions, for log messages."""
    specs = ", ".join(dict.fromkeys(f"{r.dtype} by {r.spec}" for r in reductions))
    return f"{sum(r.x.nbytes for r in reductions)} bytes ({specs})"


def _count(channel: Channel, reductions: Sequence[Reduction], *, raw: bool = False) -> None:
    """Count a collective that has succeeded."""
    counters = channel.counters
    counters.raw_nbytes += sum(r.x.nbytes for r in reductions)
    if raw:
        counters.raw_collectives += 1
    else:
        counters.frame_collectives += 1


def _run_each(channel: Channel, reductions: list[Reduction], names: list[str]) -> list[tuple[Array, Exception | None]]:
    """What algorithms of these names give: together, if they have steps, else one after the other."""
    if all(name in algorithms.STEPS for name in names):
        return algorithms.in_turn(
            [algorithms.STEPS[name](channel, r) for r, name in zip(reductions, names, strict=True)]
        )
    ended: list[tuple[Array, Exception | None]] = []
    for r, name in zip(reductions, names, strict=True):
        if name not in _OF_FRAMES:
            r.late = None
        ended.append(_ALGORITHMS[name](channel, r))
    return ended


@contextmanager
def in_step(channel: Channel) -> Iterator[None]:
    """What ends this on one rank alone, such as want of memory, ends the channel.

    No rank waits for what never comes, or takes for this collective what belongs to the next one.
    """
    try:
        yield
    except BaseException:
        if not channel.declined:
            channel.close()
        raise


def ask(channel: Channel, prepare: Callable[[], tuple[T, list[int]]]) -> T:
    """What prepare() returns; the numbers beside it are told all ranks, and the first must be the same on all.

    An error on one rank is an error on all: on others when they hear of it, before anything else is sent.
    """
    try:
        prepared, numbers = prepare()
    except Exception:
        with in_step(channel):
            channel.ask([0], able=False)
            with suppress(PeerError):  # this rank is the cause
                channel.agree()
        raise
    with in_step(channel):
        channel.ask(numbers, able=True)
    return prepared


def agree(channel: Channel, prepare: Callable[[], tuple[T, list[int]]]) -> tuple[T, list[list[int]]]:
    """The same, once all ranks are known to do the same; and all ranks' numbers."""
    prepared = ask(channel, prepare)
    with in_step(channel):
        return prepared, channel.agree()


def signature(r: Reduction, algorithm: str) -> int:
    """What must be the same on all ranks."""
    book = r.codebook and r.codebook.id
    inside = None if r.segments is None else _hashed_segments(r.segments)
    return hashed(r.spec, r.dtype, r.x.size, r.op, algorithm, inside, r.metric is None, book)


@functools.lru_cache(256)
def _hashed_segments(segments: Records) -> int:
    return hashed(unpack(segments))  # records are in this machine's byte order


def check_algorithm(asked: Any) -> None:
    """Raise SpecError unless there is such an algorithm."""
    if not isinstance(asked, str) or asked not in ("auto", *_ALGORITHMS):
        raise SpecError(f"algorithm must be 'auto' or one of {tuple(_ALGORITHMS)}, got {asked!r}")


def choose_algorithm(asked: Algorithm, r: Reduction, size: int) -> str:
    """Who sends what to whom."""
    check_algorithm(asked)
    if asked == "shared_scale":
        if isinstance(r.spec, Ternary):
            return asked
        asked = "auto"  # of what a hook's policy has beside
    if size == 1 or (asked == "auto" and (size == 2 or r.x.nbytes <= _SMALL)):
        return "all_gather"
    return "two_shot" if asked == "auto" else asked


def exchange(frames: Sequence[Any], *, group: Any = None, timeout: Timeout | None = None) -> list[bytes]:
    """Send a frame to each rank and get one from each: what ``all_to_all`` is for tensors.

    Parameters
    ----------
    frames : sequence of bytes or buffers
        For each rank of the group one, in order, this rank's own included; any bytes, up to 64 GiB.
    group, timeout : optional
        As for :func:`all_reduce`.

    Returns
    -------
    list of bytes
        From each rank, in order; none where this rank is not of the group.

    Raises
    ------
    PeerError, SpecError
        As for :func:`all_reduce`.
    FrameError
        A rank announces a frame of a size that cannot be; a new group is needed.
    """
    if _is_apart(group, "exchange"):
        return []
    line = line_of(group, timeout)
    return line.finish(lambda: _exchange(line.channel, frames))


def _exchange(channel: Channel, frames: Sequence[Any]) -> list[bytes]:
    def prepare() -> tuple[list[Array], list[int]]:
        try:
            arrays = [np.frombuffer(frame, np.uint8) for frame in frames]
        except (TypeError, ValueError, BufferError) as e:
            raise SpecError(f"frames must be bytes or buffers, for each rank one: {e}") from None
        if len(arrays) != channel.size:
            raise SpecError(f"there are {channel.size} ranks, so as many frames, not {len(arrays)}")
        if max(a.nbytes for a in arrays) > _MOST_NBYTES:
            raise SpecError(f"a frame has more than {_MOST_NBYTES} bytes")
        return arrays, [0]

    arrays, _ = agree(channel, prepare)
    with in_step(channel):
        received, error = _swap(channel, arrays)
    channel.conclude(error)
    channel.counters.frame_collectives += 1
    channel.counters.raw_nbytes += sum(a.nbytes for a in arrays)
    return [received.get(rank, b"") for rank in range(channel.size)]


def _swap(channel: Channel, arrays: Sequence[Array]) -> tuple[dict[int, bytes], Exception | None]:
    sizes, others = channel.scatter([a.nbytes for a in arrays]), channel.others
    for rank, nbytes in enumerate(sizes):
        if not 0 <= nbytes <= _MOST_NBYTES:
            raise FrameError(f"rank {rank} announces a frame of {nbytes} bytes, which cannot be")
    channel.begin(Channel.room_for([sizes[o] for o in others] + [arrays[o].nbytes for o in others]))
    incoming = {o: channel.receive(sizes[o], o) for o in others if sizes[o]}
    attempt = Attempt(channel)
    for o in others:
        if arrays[o].nbytes:
            channel.send(attempt(copied, channel, arrays[o]), o)
    received = {o: attempt(_bytes_of, incoming[o]) for o in incoming}
    received[channel.rank] = arrays[channel.rank].tobytes()
    channel.finish()
    return received, attempt.error


def _bytes_of(incoming: Incoming) -> bytes:
    return incoming.frame().tobytes()


def reduce_scatter(
    output: torch.Tensor,
    tensor: torch.Tensor,
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    group: Any = None,
    op: Any = "mean",
    stream: int = 0,
    timeout: Timeout | None = None,
    async_op: bool = False,
) -> Pending | None:
    """Reduce a tensor over all ranks and give each rank its part, as ``dist.reduce_scatter_tensor`` does.

    Parameters
    ----------
    output : torch.Tensor
        Gets the part of this rank: the `rank`-th of N equal parts of the flattened sum. It may be a part of `tensor`.
    tensor : torch.Tensor
        N times as many values, of the same dtype: float32, bfloat16 or float16.
    spec, group, op, stream, timeout, async_op
        As for :func:`all_reduce`, and so are the errors.
    """

    def prepare(size: int) -> Reduction:
        _check_sizes(tensor, size, output)
        return reduction_of(tensor, spec, op, None, None, None, stream)

    return _begin(group, timeout, async_op, algorithms.reduce_scatter, prepare, output)


def all_gather(
    output: torch.Tensor,
    tensor: torch.Tensor,
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    group: Any = None,
    stream: int = 0,
    timeout: Timeout | None = None,
    async_op: bool = False,
) -> Pending | None:
    """Give all ranks the tensors of all, as ``dist.all_gather_single`` does. The sender sees its own as others do.

    Parameters
    ----------
    output : torch.Tensor
        N times as many values: those of rank 0 first.
    tensor : torch.Tensor
        float32, bfloat16 or float16.
    spec, group, stream, timeout, async_op
        As for :func:`all_reduce`, and so are the errors.
    """

    def prepare(size: int) -> Reduction:
        _check_sizes(output, size, tensor)
        return reduction_of(tensor, spec, "sum", None, None, None, stream)

    return _begin(group, timeout, async_op, algorithms.gather, prepare, output)


def all_to_all(
    output: torch.Tensor,
    tensor: torch.Tensor,
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    group: Any = None,
    stream: int = 0,
    timeout: Timeout | None = None,
    async_op: bool = False,
) -> Pending | None:
    """Send the i-th of N equal parts of a flattened tensor to rank i, as ``dist.all_to_all_single`` does.

    Parameters
    ----------
    output : torch.Tensor
        As many values as `tensor`: the part that rank 0 sent first.
    tensor : torch.Tensor
        float32, bfloat16 or float16.
    spec, group, stream, timeout, async_op
        As for :func:`all_reduce`, and so are the errors.
    """

    def prepare(size: int) -> Reduction:
        _check_sizes(output, 1, tensor)
        if tensor.numel() % size:
            raise SpecError(f"{tensor.numel()} values cannot be cut into {size} equal parts")
        return reduction_of(tensor, spec, "sum", None, None, None, stream)

    return _begin(group, timeout, async_op, algorithms.all_to_all, prepare, output)


def _check_sizes(large: torch.Tensor, times: int, small: torch.Tensor) -> None:
    check_dense(large)
    check_dense(small)
    have, want, dtype, other = large.numel(), times * small.numel(), large.dtype, small.dtype
    if have != want or dtype != other:
        raise SpecError(f"output and tensor do not go together: {have} values for {want}, {dtype} and {other}")


def _begin(
    group: Any, timeout: Timeout | None, async_op: bool, algorithm: Any, prepare: Any, output: torch.Tensor
) -> Pending | None:
    """Run an algorithm over what prepare(size) returns, into `output`."""
    if _is_apart(group, algorithm.__name__):
        return None
    line = line_of(group, timeout)
    channel = line.channel

    def work() -> torch.Tensor:
        def both() -> tuple[Reduction, list[int]]:
            r = prepare(channel.size)
            return r, [signature(r, algorithm.__name__)]

        r = ask(channel, both)
        with in_step(channel):
            result, error = algorithm(channel, r)
        channel.conclude(error)
        _count(channel, [r])
        with channel.writing():
            publish(result, r, output)
        return output

    if async_op:
        return line.worker.submit(work)
    line.finish(work)
    return None
