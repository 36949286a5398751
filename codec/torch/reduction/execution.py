"""Run reductions: compute the signature, choose an algorithm, exchange data, and agree on the outcome."""

import functools
from collections.abc import Callable, Sequence

from codec import CallOptions
from codec.specs import Ternary
from codec.tensors.segments import Records, unpack
from codec.torch.group.autotune import RawFallback, Tuner, Way
from codec.torch.group.communicator import Communicator
from codec.torch.group.tasks import Together
from codec.torch.network.version import hash64
from codec.torch.reduction.algorithms_device import WithinGpus
from codec.torch.reduction.device import DeviceReduction
from codec.torch.reduction.host import Reduction, Values
from codec.torch.reduction.raw import Within
from codec.torch.reduction.table import ALL_GATHER, ALL_REDUCES, PLAIN, RAW, SHARED_SCALE, TWO_SHOT, Algorithm
from codec.torch.transport.channel import Channel
from codec.torch.transport.collective import Collective, NoFrameError
from codec.torch.transport.joint import Joint
from codec.torch.transport.levels import Members

_CHOICES = 256  # maximum number of signatures for which a group stores the choice of frames or uncompressed values
# Size in bytes up to which a tensor is small: its values are never sent uncompressed, and between two ranks its time is
# latency. Of N ranks with tensors of S bytes, each sends (N - 1) S in the one phase of all-gather, and 2 (N - 1) S / N
# in the two phases of two-shot. So all-gather saves one latency L, and sends (N - 1) (N - 2) S / N more. It is faster
# below S = L * rate * N / ((N - 1) (N - 2)), which is about L * rate / N for many ranks. Therefore "auto" takes
# all-gather up to S = 2 * _SMALL / N: for any N, it then sends less than 2 * _SMALL before encoding.
_SMALL = 1 << 16

# Reduction and its algorithm, which is chosen once, when the reduction is prepared
Planned = tuple[Reduction, Algorithm]
Store = Callable[[Values, Reduction], None]
Feed = Callable[[Reduction, Algorithm, tuple[int, int]], object]


def _no_feedback(r: Reduction, algorithm: Algorithm, window: tuple[int, int]) -> None:
    """Leave a reduction without residuals."""


def algorithm_of(settings: CallOptions) -> str:
    """Return the value of ``algorithm=`` for all-reduces: "auto" unless the settings name an algorithm."""
    return "auto" if settings.algorithm is None else settings.algorithm


def choose(requested: str, r: Reduction, channel: Channel) -> Algorithm:
    """Return the algorithm of an all-reduce (docs/spec/protocol/collectives.md, section 2).

    Parameters
    ----------
    requested : str
        Value of ``algorithm=``, which :func:`check_request` has accepted.
    r : Reduction
        The reduction.
    channel : Channel
        Channel of the group.
    """
    levels = channel.levels
    size, nbytes = levels.between.size, r.x.nbytes
    if r.whole is not None:  # the mean size of the windows, so that all of them have one algorithm
        nbytes = r.whole[0] * r.x.itemsize // levels.within.size
    algorithm = ALL_REDUCES.get(requested)
    if algorithm is SHARED_SCALE:
        if isinstance(r.spec, Ternary):
            return SHARED_SCALE
        algorithm = None  # the policy of a hook has chosen another codec for this parameter
    if size == 1 or (algorithm is None and (size == 2 or nbytes * size <= 2 * _SMALL)):
        algorithm = ALL_GATHER
    return placed(algorithm or TWO_SHOT, r, channel)


def placed(algorithm: Algorithm, r: Reduction, channel: Channel) -> Algorithm:
    """Return the variant of an algorithm whose frames stay on GPUs if it can run, otherwise the algorithm."""
    return algorithm.on_device if algorithm.on_device and channel.device.connected and r.on_device else algorithm


async def run(
    comm: Communicator, collective: Collective, algorithm: Algorithm, prepare: Callable[[], Reduction], store: Store
) -> None:
    """Run a collective other than an all-reduce.

    Parameters
    ----------
    comm, collective : Communicator, Collective
        Communicator of the group, and the collective in flight.
    algorithm : Algorithm
        The algorithm.
    prepare : callable
        Checks the arguments and returns the reduction; its errors are errors on all ranks.
    store : callable
        store(result, reduction) stores the result, after all ranks have succeeded.
    """
    r = prepare()
    chosen = placed(algorithm, r, comm.channel)
    result = await _run(collective, chosen, r, collective.levels.all)
    await settle(collective, r)
    await collective.agree()
    _count(collective, [r])
    with collective.storing():
        store(result, r)


def within_of(
    collective: Collective,
    whole: Sequence[Reduction],
    item: int | str | None = None,
    later: list[WithinGpus] | None = None,
) -> Within:
    """Return the reduction of tensors within a machine: on its GPUs if NCCL connects them, else in host memory.

    Arguments are as for :class:`Within` and :class:`WithinGpus`.
    """
    if collective.device.connected_within:
        on_gpus = [r for r in whole if isinstance(r, DeviceReduction) and r.settings.within is None]
        if len(on_gpus) == len(whole) and len({r.dtype for r in whole}) == 1:
            return WithinGpus(collective, on_gpus, item, later)
    return Within(collective, whole, item)


async def run_all_reduce(
    comm: Communicator,
    collective: Collective,
    requested: str,
    prepare: Callable[[], Reduction],
    store: Store,
    feed: Feed = _no_feedback,
) -> None:
    """Run an all-reduce.

    Parameters
    ----------
    comm, collective, store
        As for :func:`run`.
    requested : str
        Value of ``algorithm=``.
    prepare : callable
        Checks the arguments, and returns the reduction without residuals; its errors are errors on all ranks.
    feed : callable
        feed(reduction, algorithm, window) sets the residuals of the reduction that sends frames: that of the values
        [begin, end) = `window` of the tensor.
    """
    whole = prepare()
    within = within_of(collective, [whole])
    [r] = await within.scatter()
    algorithm = choose(requested, r, comm.channel)
    feed(r, algorithm, within.window(whole))
    tunes = requested == "auto" and collective.size > 1 and algorithm.raw_fallback
    timing = (_tuner(comm, r, algorithm) if tunes else Tuner()).begin(comm.channel)
    try:
        algorithm = in_way(await timing.wait(), r, algorithm, comm.channel)
        results = await run_several(collective, requested, [(r, algorithm)])
        await settle(collective, r)
        [result] = await within.gather(results)
        collective.device.pass_turn(collective.number)
        sent, trips = collective.counters.sent_nbytes, collective.counters.round_trips
        timing.learn(await collective.agree(timing.report(sent, r.x.nbytes, trips, on_device=r.on_device)))
    finally:
        timing.end()
    _count(collective, [whole], raw=algorithm.uncompressed)
    with collective.storing():
        store(result, whole)


def in_way(way: Way, r: Reduction, algorithm: Algorithm, channel: Channel) -> Algorithm:
    """Return the algorithm for sending frames or uncompressed values; small tensors are always sent as frames."""
    if way == "frames" or r.x.nbytes <= _SMALL:
        return algorithm
    if r.on_device and channel.device.connected:
        return algorithm if r.op == "max" else PLAIN
    return RAW


async def run_several(
    collective: Collective, requested: str, planned: Sequence[Planned], item: int | str | None = None
) -> list[Values]:
    """Reduce several tensors between machines, concurrently. Return their results, which may use the arena's memory.

    `item`, such as the result of a hook's ``transform=``, must be equal on all ranks. Between GPUs, reductions run one
    after the other unless all of them are in one :class:`Joint`, since NCCL needs the same order of messages on all
    ranks.
    """
    between = collective.levels.between
    joined = [r for r, algorithm in planned if isinstance(r, DeviceReduction) and algorithm.joins]
    apart = collective.device.connected and len(joined) < len(planned)
    joint = Joint(len(joined))
    for i, r in enumerate(joined):
        r.joint, r.member = (Joint(), 0) if apart else (joint, i)
    # `requested` is part of the signature: "auto" may later select another algorithm, on all ranks at once.
    if len(planned) == 1 or apart:
        return [await _run(collective, algorithm, r, between, requested, item) for r, algorithm in planned]
    return await Together([_run(collective, algorithm, r, between, requested, item) for r, algorithm in planned])


async def _run(
    collective: Collective,
    algorithm: Algorithm,
    r: Reduction,
    members: Members,
    requested: str = "",
    item: int | str | None = None,
) -> Values:
    """Run an algorithm as one part of a collective, under the signature of its arguments."""
    if not algorithm.defers or r.settings.max_norm is not None:  # norms of results are checked before the agreement
        r.deferred = None
    fields = signed(r, algorithm.name, requested) | agreed(item)
    if requested:
        fields |= collective.levels.signed(r.settings.within)
        if collective.device.connected_within and r.on_device and r.whole is not None:
            fields["within a machine"] = "NCCL"
    try:
        result = await algorithm.run(collective.part(hash64(*fields.items()), fields, members), r)
        if isinstance(r, DeviceReduction) and algorithm.joins:
            r.joint.leave()
        return result
    except NoFrameError as e:
        await collective.blame(e.rank)
        raise


async def settle(collective: Collective, r: Reduction) -> None:
    """Wait until the GPU has completed all work of a reduction, and raise errors of that work."""
    try:
        r.settle(collective.device)
    except NoFrameError as e:
        await collective.blame(e.rank)
        raise


def _tuner(comm: Communicator, r: Reduction, algorithm: Algorithm) -> RawFallback:
    """Return the tuner of all-reduces with the same arguments."""
    number = hash64(*signed(r, algorithm.name, "auto").items())
    tuner = comm.tuners.pop(number, None) or RawFallback(_describe([r]))
    comm.tuners[number] = tuner
    if len(comm.tuners) > _CHOICES:  # drop the least recently used one, which is the same on all ranks
        del comm.tuners[next(iter(comm.tuners))]
    return tuner


def _describe(reductions: list[Reduction]) -> str:
    """Return the total size, dtypes and specs of some reductions, for log messages."""
    specs = ", ".join(dict.fromkeys(f"{r.dtype} by {r.spec}" for r in reductions))
    return f"{sum(r.x.nbytes for r in reductions)} bytes ({specs})"


def _count(collective: Collective, reductions: Sequence[Reduction], *, raw: bool = False) -> None:
    """Count a collective that has succeeded."""
    counters = collective.counters
    counters.raw_nbytes += sum(r.x.nbytes for r in reductions)
    if raw:
        counters.raw_collectives += 1
    else:
        counters.frame_collectives += 1


def signed(r: Reduction, algorithm: str, requested: str = "") -> dict[str, str]:
    """Return the properties that must be equal on all ranks, by name (docs/spec/protocol.md, section 5.1)."""
    n, segments = r.whole or (r.n, r.segments)  # windows differ between the ranks of a machine
    return {
        "collective": f"{algorithm}, requested as {requested}" if requested else algorithm,
        "spec": repr(r.spec),
        "dtype": r.dtype,
        "number of values": str(n),
        "op": r.op,
        "segments": "none" if segments is None else f"{_hashed_segments(segments) % (1 << 64):016x}",
        "optimizer": "none" if r.bound_spec is None else "bound",
        "codebook": "none" if r.codebook is None else str(r.codebook.id),
    } | ({} if r.weights is None else {"slices": str(r.weights)})


def agreed(item: int | str | None) -> dict[str, str]:
    """Return the part of :func:`signed` for an item on which all ranks must agree; empty for None."""
    return {} if item is None else {"step": str(item)}


@functools.lru_cache(256)
def _hashed_segments(segments: Records) -> int:
    return hash64(unpack(segments))  # the records themselves have this machine's byte order
