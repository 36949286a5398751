"""Execution of reductions: signature, choice of an algorithm, data, verdict."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from codec import ArgumentError, CallOptions
from codec.arguments import shown
from codec.specs import Ternary
from codec.tensors.segments import Records, unpack
from codec.torch.group.autotune import Choice, report
from codec.torch.group.communicator import Communicator, close_on_error, hash64, request, storing_results
from codec.torch.reduction import algorithms, algorithms_device, raw, shared_scale
from codec.torch.reduction.host import Reduction, Values
from codec.torch.transport.channel import Channel

Algorithm = Literal["auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"]

_ALGORITHMS = {
    "two_shot": algorithms.two_shot,
    "all_gather": algorithms.all_gather,
    "ring": algorithms.ring,
    "raw": raw.two_shot,
    "shared_scale": shared_scale.shared_scale,
}
_ON_GPUS: dict[str, Any] = {f"{name} on GPUs": each for name, each in algorithms_device.ALGORITHMS.items()}
_WITH_FRAMES = ("two_shot", "all_gather", "ring")  # algorithms whose results can stay in frames until the verdict
_CHOICES = 256  # signatures whose choice between frames and uncompressed values a group remembers
_SMALL = 1 << 16  # bytes of a tensor up to which one phase with N - 1 frames is faster than two phases


def run(comm: Communicator, prepare: Callable[[], Reduction], algorithm: Algorithm) -> tuple[Values, Reduction]:
    """Run an all-reduce; return its result and reduction after all ranks have succeeded.

    Parameters
    ----------
    comm : Communicator
        Communicator of the group.
    prepare : callable
        Checks the arguments and returns the reduction; its errors are errors on all ranks.
    algorithm : str
        As for :func:`codec.torch.all_reduce`.
    """
    return all_reduce_several(comm, lambda: [prepare()], algorithm)[0]


def all_reduce_several(
    comm: Communicator, prepare: Callable[[], list[Reduction]], algorithm: Algorithm
) -> list[tuple[Values, Reduction]]:
    """Run an all-reduce of several tensors as :func:`run` does: all of them are reduced, or none."""
    channel = comm.channel
    number = 0  # signature of the collective

    def begin() -> tuple[list[Reduction], list[int]]:
        nonlocal number
        reductions = prepare()
        # "auto" is part of the signature: it may become another algorithm on all ranks later
        number = hash64(algorithm, [signature(r, _way(channel, algorithm, r)) for r in reductions])
        return reductions, [number]

    reductions = request(channel, begin)
    choice = comm.choices.get(number) or Choice(_describe(reductions))
    names = [_way(channel, algorithm, r) for r in reductions]
    may_be_raw = algorithm == "auto" and channel.size > 1 and not any(name in _ON_GPUS for name in names)
    before = channel.counters.sent_nbytes
    with close_on_error(channel):
        largest = max(reductions, key=lambda r: r.n, default=None)
        for r in reductions:
            if r is not largest and r.out is None and r.deferred is None:  # the channel has memory for one result
                r.out = r.empty(r.n)
        if may_be_raw and choice.kind == "values":
            names = ["raw" if r.x.nbytes > _SMALL else name for r, name in zip(reductions, names, strict=True)]
        ended = _run_each(channel, reductions, names)
    first = next((error for _, error in ended if error is not None), None)
    nbytes = sum(2 * r.x.nbytes * (channel.size - 1) // channel.size for r in reductions)
    reports = channel.requests.exchange_verdict(
        first, report(channel.requests.started, channel.counters.sent_nbytes - before, nbytes)
    )
    if may_be_raw:
        choice.learn(reports)
    _count(channel, reductions, raw="raw" in names)
    comm.choices.pop(number, None)
    comm.choices[number] = choice
    if len(comm.choices) > _CHOICES:  # drop the least recently used one, which is the same on all ranks
        del comm.choices[next(iter(comm.choices))]
    return [(result, r) for r, (result, _) in zip(reductions, ended, strict=True)]


def _describe(reductions: list[Reduction]) -> str:
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


def _way(channel: Channel, algorithm: Algorithm, r: Reduction) -> str:
    """Return the algorithm of a reduction, and whether its frames stay on GPUs."""
    return _on_gpus(channel, r, choose_algorithm(algorithm, r, channel.size))


def _on_gpus(channel: Channel, r: Reduction, name: str) -> str:
    """Return the name of an algorithm; of its version on GPUs, if there is one and it can run."""
    there = f"{name} on GPUs"
    return there if channel.device.connected and r.on_device and there in _ON_GPUS else name


def _run_each(channel: Channel, reductions: list[Reduction], names: list[str]) -> list[tuple[Values, Exception | None]]:
    """Run an algorithm for each reduction: interleaved if all of them have steps, else one after the other."""
    if all(name in algorithms.STEPS for name in names):
        return algorithms.interleave(
            [algorithms.STEPS[name](channel, r) for r, name in zip(reductions, names, strict=True)]
        )
    ended: list[tuple[Values, Exception | None]] = []
    for r, name in zip(reductions, names, strict=True):
        if name not in _WITH_FRAMES:
            r.deferred = None
        if name in algorithms.STEPS:
            ended.append(_ALGORITHMS[name](channel, r))
        elif name in _ON_GPUS:
            ended.append(_ON_GPUS[name](channel, r))
        else:
            result, error = _ALGORITHMS[name](channel, r.on_host())
            ended.append((r.from_host(result), error))
    return ended


def signature(r: Reduction, algorithm: str) -> int:
    """Return the hash of all that must be equal on all ranks (docs/protocol.md, section 5.1)."""
    book = r.codebook and r.codebook.id
    inside = None if r.segments is None else _hashed_segments(r.segments)
    return hash64(r.spec, r.dtype, r.n, r.op, algorithm, inside, r.bound_spec is None, book)


@functools.lru_cache(256)
def _hashed_segments(segments: Records) -> int:
    return hash64(unpack(segments))  # not of the records, which have this machine's byte order


def algorithm_of(settings: CallOptions) -> Algorithm:
    """Return the algorithm of all-reduces, "auto" unless the settings name one; :func:`check_algorithm` checks it."""
    return "auto" if settings.algorithm is None else settings.algorithm


def check_algorithm(algorithm: Any) -> None:
    """Raise ArgumentError unless `algorithm` is the name of an algorithm."""
    if not isinstance(algorithm, str) or algorithm not in ("auto", *_ALGORITHMS):
        raise ArgumentError(f"algorithm must be 'auto' or one of {tuple(_ALGORITHMS)}, got {shown(algorithm)}")


def choose_algorithm(algorithm: Algorithm, r: Reduction, size: int) -> str:
    """Return the algorithm of a reduction over `size` ranks (docs/protocol.md, section 7)."""
    check_algorithm(algorithm)
    if algorithm == "shared_scale":
        if isinstance(r.spec, Ternary):
            return algorithm
        algorithm = "auto"  # a parameter to which a hook's policy gave another spec
    if size == 1 or (algorithm == "auto" and (size == 2 or r.x.nbytes <= _SMALL)):
        return "all_gather"
    return "two_shot" if algorithm == "auto" else algorithm


def run_algorithm(
    comm: Communicator,
    algorithm: Callable[[Channel, Reduction], tuple[Values, Exception | None]],
    prepare: Callable[[int], Reduction],
    store: Callable[[Values, Reduction], None],
) -> None:
    """Run a collective other than an all-reduce.

    Parameters
    ----------
    comm : Communicator
        Communicator of the group.
    algorithm : callable
        Function of :mod:`codec.torch.reduction.algorithms`.
    prepare : callable
        prepare(number of ranks) checks the arguments and returns the reduction; its errors are errors on all ranks.
    store : callable
        store(result, reduction) stores the result, after all ranks have succeeded.
    """
    channel = comm.channel

    def begin() -> tuple[tuple[Reduction, str], list[int]]:
        r = prepare(channel.size)
        name = _on_gpus(channel, r, algorithm.__name__)
        return (r, name), [signature(r, name)]

    r, name = request(channel, begin)
    with close_on_error(channel):
        result, error = _ON_GPUS[name](channel, r) if name in _ON_GPUS else algorithm(channel, r)
    channel.requests.exchange_verdict(error)
    _count(channel, [r])
    with storing_results(channel):
        store(result, r)
