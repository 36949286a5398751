"""Execution of reductions: signature, choice of an algorithm, data, verdict."""

import functools
from collections.abc import Callable, Sequence

from codec import CallOptions
from codec.specs import Ternary
from codec.tensors.segments import Records, unpack
from codec.torch.group.autotune import Choice, report
from codec.torch.group.communicator import Communicator, close_on_error, hash64, request, storing_results
from codec.torch.reduction import algorithms
from codec.torch.reduction.host import Reduction, Result, Values
from codec.torch.reduction.table import ALL_GATHER, ALL_REDUCES, RAW, SHARED_SCALE, TWO_SHOT, Algorithm
from codec.torch.transport.channel import Channel

_CHOICES = 256  # signatures whose choice between frames and uncompressed values a group remembers
_SMALL = 1 << 16  # bytes of a tensor up to which one phase with N - 1 frames is faster than two phases

Planned = tuple[Reduction, Algorithm]  # the algorithm is chosen once, when the reduction is prepared
Store = Callable[[Values, Reduction], None]
Agree = Callable[[], int | str | None]


def algorithm_of(settings: CallOptions) -> str:
    """Return the value of ``algorithm=`` for all-reduces: "auto" unless the settings name an algorithm."""
    return "auto" if settings.algorithm is None else settings.algorithm


def choose(requested: str, r: Reduction, channel: Channel) -> Algorithm:
    """Return the algorithm of an all-reduce (docs/protocol.md, section 7).

    Parameters
    ----------
    requested : str
        Value of ``algorithm=``, which :func:`check_request` has accepted.
    r : Reduction
        The reduction.
    channel : Channel
        Channel of the group.
    """
    algorithm = ALL_REDUCES.get(requested)
    if algorithm is SHARED_SCALE:
        if isinstance(r.spec, Ternary):
            return SHARED_SCALE
        algorithm = None  # a parameter to which a hook's policy gave another spec
    if channel.size == 1 or (algorithm is None and (channel.size == 2 or r.x.nbytes <= _SMALL)):
        algorithm = ALL_GATHER
    return _placed(algorithm or TWO_SHOT, r, channel)


def _placed(algorithm: Algorithm, r: Reduction, channel: Channel) -> Algorithm:
    """Return the variant of an algorithm whose frames stay on GPUs, if there is one and it can run."""
    return algorithm.on_device if algorithm.on_device and channel.device.connected and r.on_device else algorithm


def run(comm: Communicator, algorithm: Algorithm, prepare: Callable[[], Reduction], store: Store) -> None:
    """Run a collective other than an all-reduce.

    Parameters
    ----------
    comm : Communicator
        Communicator of the group.
    algorithm : Algorithm
        The algorithm.
    prepare : callable
        Checks the arguments and returns the reduction; its errors are errors on all ranks.
    store : callable
        store(result, reduction) stores the result, after all ranks have succeeded.
    """
    channel = comm.channel

    def begin() -> tuple[Planned, list[int]]:
        r = prepare()
        chosen = _placed(algorithm, r, channel)
        return (r, chosen), [signature(r, chosen.name)]

    r, chosen = request(channel, begin)
    with close_on_error(channel):
        result, error = chosen.run(channel, r)
    channel.requests.exchange_verdict(error)
    _count(channel, [r])
    with storing_results(channel):
        store(result, r)


def run_all_reduce(
    comm: Communicator, requested: str, prepare: Callable[[], Planned], store: Store, agree: Agree = lambda: None
) -> None:
    """Run an all-reduce.

    Parameters
    ----------
    comm : Communicator
        Communicator of the group.
    requested : str
        Value of ``algorithm=``.
    prepare : callable
        Checks the arguments, and returns the reduction with the algorithm that :func:`choose` returned; its errors are
        errors on all ranks.
    store : callable
        store(result, reduction) stores the result, after all ranks have succeeded.
    agree : callable
        As for :func:`all_reduce_several`.
    """
    [(result, r)] = all_reduce_several(comm, requested, lambda: [prepare()], agree)
    with storing_results(comm.channel):
        store(result, r)


def all_reduce_several(
    comm: Communicator, requested: str, prepare: Callable[[], list[Planned]], agree: Agree = lambda: None
) -> list[tuple[Values, Reduction]]:
    """Run an all-reduce of several tensors: all of them are reduced, or none.

    Parameters
    ----------
    comm, requested, prepare
        As for :func:`run_all_reduce`, with a list of reductions.
    agree : callable
        Returns, after `prepare`, an int or str that must be the same on all ranks; None: nothing else must be.

    Returns
    -------
    list of (ndarray or tensor, Reduction)
        Results, which the caller stores.
    """
    channel = comm.channel
    number = 0  # signature of the collective

    def begin() -> tuple[list[Planned], list[int]]:
        nonlocal number
        planned = prepare()
        # "auto" is part of the signature: it may become another algorithm on all ranks later
        number = hash64(requested, [signature(r, algorithm.name) for r, algorithm in planned])
        return planned, [agreed(number, agree())]

    planned = request(channel, begin)
    reductions = [r for r, _ in planned]
    choice = comm.choices.get(number) or Choice(_describe(reductions))
    may_be_raw = requested == "auto" and channel.size > 1 and all(algorithm.raw_fallback for _, algorithm in planned)
    before = channel.counters.sent_nbytes
    with close_on_error(channel):
        largest = max(reductions, key=lambda r: r.n, default=None)
        for r in reductions:
            if r is not largest and r.out is None and r.deferred is None:  # the channel has memory for one result
                r.out = r.empty(r.n)
        if may_be_raw and choice.kind == "values":
            planned = [(r, RAW if r.x.nbytes > _SMALL else algorithm) for r, algorithm in planned]
        ended = _run_each(channel, planned)
    first = next((error for _, error in ended if error is not None), None)
    nbytes = sum(2 * r.x.nbytes * (channel.size - 1) // channel.size for r in reductions)
    reports = channel.requests.exchange_verdict(
        first, report(channel.requests.started, channel.counters.sent_nbytes - before, nbytes)
    )
    if may_be_raw:
        choice.learn(reports)
    _count(channel, reductions, raw=any(algorithm is RAW for _, algorithm in planned))
    comm.choices.pop(number, None)
    comm.choices[number] = choice
    if len(comm.choices) > _CHOICES:  # drop the least recently used one, which is the same on all ranks
        del comm.choices[next(iter(comm.choices))]
    return [(result, r) for r, (result, _) in zip(reductions, ended, strict=True)]


def _run_each(channel: Channel, planned: Sequence[Planned]) -> list[Result]:
    """Run the algorithm of each reduction: interleaved if all of them have steps, else one after the other."""
    for r, algorithm in planned:
        if not algorithm.defers:
            r.deferred = None
    steps = [algorithm.steps(channel, r) for r, algorithm in planned if algorithm.steps]
    if len(steps) == len(planned):
        return algorithms.interleave(steps)
    return [algorithm.run(channel, r) for r, algorithm in planned]


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


def signature(r: Reduction, algorithm: str) -> int:
    """Return the hash of all that must be equal on all ranks (docs/protocol.md, section 5.1)."""
    book = r.codebook and r.codebook.id
    inside = None if r.segments is None else _hashed_segments(r.segments)
    return hash64(r.spec, r.dtype, r.n, r.op, algorithm, inside, r.bound_spec is None, book)


def agreed(number: int, item: int | str | None) -> int:
    """Return the signature that a collective sends, whose own is `number`; all ranks must agree on `item`, too."""
    return number if item is None else hash64(number, item)


@functools.lru_cache(256)
def _hashed_segments(segments: Records) -> int:
    return hash64(unpack(segments))  # not of the records, which have this machine's byte order
