"""Execution of reductions: signature, choice of an algorithm, data, verdict."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from codec import ArgumentError
from codec.specs import Ternary
from codec.tensors.segments import Records, unpack
from codec.torch import algorithms, raw, ternary
from codec.torch.autotune import Choice, report
from codec.torch.channel import Channel
from codec.torch.communicator import Communicator, close_on_error, hash64, request, storing_results
from codec.torch.messages import Array
from codec.torch.reduction import Reduction

Algorithm = Literal["auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"]

_ALGORITHMS = {
    "two_shot": algorithms.two_shot,
    "all_gather": algorithms.all_gather,
    "ring": algorithms.ring,
    "raw": raw.two_shot,
    "shared_scale": ternary.shared_scale,
}
_OF_FRAMES = ("two_shot", "all_gather", "ring")  # their results can wait in them
_CHOICES = 256  # that a group remembers
_SMALL = 1 << 16  # bytes of a tensor: two phases take longer than what one sends more


def run(comm: Communicator, prepare: Callable[[], Reduction], asked: Algorithm) -> tuple[Array, Reduction]:
    """The reduced values of what prepare() returns, once all ranks have them."""
    return all_reduce_several(comm, lambda: [prepare()], asked)[0]


def all_reduce_several(
    comm: Communicator, prepare: Callable[[], list[Reduction]], asked: Algorithm
) -> list[tuple[Array, Reduction]]:
    """The same for several: all are reduced, or none."""
    channel = comm.channel
    sign = 0

    def begin() -> tuple[list[Reduction], list[int]]:
        nonlocal sign
        reductions = prepare()
        # what is left to us may come to be another algorithm later: all must have left it
        sign = hash64(asked, [signature(r, choose_algorithm(asked, r, channel.size)) for r in reductions])
        return reductions, [sign]

    reductions = request(channel, begin)
    choice = comm.choices.get(sign) or Choice(_described(reductions))
    raw_chosen = asked == "auto" and channel.size > 1 and choice.kind == "values"
    before = channel.sent_nbytes
    with close_on_error(channel):
        largest = max(reductions, key=lambda r: r.x.size, default=None)
        for r in reductions:
            if r is not largest and r.out is None and r.deferred is None:  # there is memory for one result
                r.out = np.empty(r.x.size, r.x.dtype)
        names = [choose_algorithm(asked, r, channel.size) for r in reductions]
        if raw_chosen:
            names = ["raw" if r.x.nbytes > _SMALL else name for r, name in zip(reductions, names, strict=True)]
        ended = _run_each(channel, reductions, names)
    first = next((error for _, error in ended if error is not None), None)
    nbytes = sum(2 * r.x.nbytes * (channel.size - 1) // channel.size for r in reductions)
    choice.learn(channel.exchange_verdict(first, report(channel.started, channel.sent_nbytes - before, nbytes)))
    _count(channel, reductions, raw="raw" in names)
    comm.choices.pop(sign, None)
    comm.choices[sign] = choice
    if len(comm.choices) > _CHOICES:  # that of the longest ago, on all ranks
        del comm.choices[next(iter(comm.choices))]
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
        return algorithms.interleave(
            [algorithms.STEPS[name](channel, r) for r, name in zip(reductions, names, strict=True)]
        )
    ended: list[tuple[Array, Exception | None]] = []
    for r, name in zip(reductions, names, strict=True):
        if name not in _OF_FRAMES:
            r.deferred = None
        ended.append(_ALGORITHMS[name](channel, r))
    return ended


def signature(r: Reduction, algorithm: str) -> int:
    """What must be the same on all ranks."""
    book = r.codebook and r.codebook.id
    inside = None if r.segments is None else _hashed_segments(r.segments)
    return hash64(r.spec, r.dtype, r.x.size, r.op, algorithm, inside, r.metric is None, book)


@functools.lru_cache(256)
def _hashed_segments(segments: Records) -> int:
    return hash64(unpack(segments))  # records are in this machine's byte order


def check_algorithm(asked: Any) -> None:
    """Raise ArgumentError unless there is such an algorithm."""
    if not isinstance(asked, str) or asked not in ("auto", *_ALGORITHMS):
        raise ArgumentError(f"algorithm must be 'auto' or one of {tuple(_ALGORITHMS)}, got {asked!r}")


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


def run_algorithm(
    comm: Communicator,
    algorithm: Callable[[Channel, Reduction], tuple[Array, Exception | None]],
    prepare: Callable[[int], Reduction],
    store: Callable[[Array, Reduction], None],
) -> None:
    """Run an algorithm over what prepare(number of ranks) returns; store(result, reduction) once all have succeeded.

    What `prepare` raises is an error on all ranks.
    """
    channel, name = comm.channel, algorithm.__name__

    def begin() -> tuple[Reduction, list[int]]:
        r = prepare(channel.size)
        return r, [signature(r, name)]

    r = request(channel, begin)
    with close_on_error(channel):
        result, error = algorithm(channel, r)
    channel.exchange_verdict(error)
    _count(channel, [r])
    with storing_results(channel):
        store(result, r)
