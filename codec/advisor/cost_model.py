"""Cost model of an all-reduce: predicts seconds from the costs of frames and the rate of the link."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from codec.arguments import MAX_RANKS, shown, whole
from codec.errors import ArgumentError

Algorithm = Literal["two_shot", "ring", "all_gather"]  # all-reduce algorithms of codec.torch that have a cost model

MAX_PIECES = 1 << 62  # maximum number of chunks per slice

# "bps" is accepted only with the prefixes M, G and T: in the tool tc, "mbps" means megabytes per second
_RATE = re.compile(
    r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?:([kmgtKMGT]?)(?i:bit(?:s?/s)?)|([MGT])bps)?\s*", re.ASCII
)
_DURATION = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(s|ms|us)?\s*", re.ASCII)
_SECONDS = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_TIMES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}  # factor of each prefix, ascending
_UNITS = {unit.lower(): times for unit, times in _TIMES.items()}


def _number(name: str, value: Any, bounds: str, least: float, most: float) -> float:
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:  # this form also rejects NaN
        raise ArgumentError(f"{name} must be {bounds}, got {shown(value)}")
    return number


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Link of a rank to the network.

    Parameters
    ----------
    bits_per_second : float
        Rate of each direction, full duplex; may be infinite.
    rtt : float
        Round-trip time in seconds: from sending a small message to receiving the answer.

    Raises
    ------
    ArgumentError
        The rate is not above 0, or the round trip is negative or infinite.
    """

    bits_per_second: float
    rtt: float = 2e-4

    def __post_init__(self) -> None:
        _number("bits_per_second", self.bits_per_second, "a number above 0", 5e-324, math.inf)
        _number("rtt", self.rtt, "seconds, 0 or more", 0.0, 1e300)

    def __str__(self) -> str:
        unit = [u for u, times in _TIMES.items() if self.bits_per_second >= times or not u][-1]
        return f"{self.bits_per_second / _TIMES[unit]:.4g} {unit}bit/s, round trip {1e3 * self.rtt:.3g} ms"


LinkLike = LinkModel | str | float | tuple[str | float, str | float]  # argument `link` of codec.advise


def link_of(link: Any, rtt: Any = None) -> LinkModel:
    """Convert the arguments ``link=`` and ``rtt=`` to a LinkModel.

    Parameters
    ----------
    link : str, number, tuple or LinkModel
        Text such as ``"100mbit"``, bits per second, a pair of these and a round-trip time, or a LinkModel.
    rtt : str or number, optional
        Round-trip time in seconds, or text such as ``"40ms"``. Default: ``link.rtt``, or that of :class:`LinkModel`.

    Raises
    ------
    ArgumentError
        An argument has another type, or text that cannot be parsed.
    """
    if rtt is not None:
        return replace(link_of(link), rtt=_seconds(rtt))
    if isinstance(link, LinkModel):
        return link
    if isinstance(cast(object, link), tuple) and len(link) == 2:
        return link_of(*link)
    if isinstance(link, str) and (found := _RATE.fullmatch(link)):
        return LinkModel(float(found[1]) * _UNITS[(found[2] or found[3] or "").lower()])
    if hasattr(link, "__float__") and not isinstance(link, bool):
        return LinkModel(cast(float, link))
    raise ArgumentError(
        'link must be text such as "100mbit" or "10Gbps", bits per second, or a pair of these and a round-trip time, '
        f"got {shown(link)}"
    )


def _seconds(rtt: Any) -> float:
    """Convert a number of seconds, or text such as ``"40ms"``, to seconds."""
    if isinstance(rtt, str):
        if found := _DURATION.fullmatch(rtt):
            return float(found[1]) * _SECONDS[found[2]]
        raise ArgumentError(f'rtt must be seconds, 0 or more, or text such as "40ms", got {shown(rtt)}')
    return _number("rtt", rtt, "seconds, 0 or more", 0.0, 1e300)


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one rank's tensor with one spec. The sum of several Costs is the cost of all their tensors.

    Parameters
    ----------
    frame_nbytes, sum_nbytes : float
        Size in bytes of the tensor's frame, and of the frame of the mean over ranks.
    encode, encode_sum, reduce, decode : float
        Seconds to encode the tensor, to encode the mean, to add one frame by :func:`codec.reduce`, and to decode one
        frame. 0 for uncompressed tensors.
    """

    frame_nbytes: float
    sum_nbytes: float
    encode: float = 0.0
    encode_sum: float = 0.0
    reduce: float = 0.0
    decode: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, name) + getattr(other, name) for name in Cost.__slots__))

    def __mul__(self, factor: float) -> "Cost":
        return Cost(*(factor * getattr(self, name) for name in Cost.__slots__))


@dataclass(frozen=True, slots=True)
class _Model:
    """Formulas of an algorithm, functions of a tensor's cost and the number of ranks: see :func:`predict_seconds`."""

    nbytes: Callable[[Cost, int], float]  # bytes that each rank sends, with 2 or more ranks
    seconds: Callable[[Cost, int], float]  # seconds of compute per rank
    round_trips: Callable[[int], int]  # consecutive round trips, including those for requests and verdicts


_MODELS: dict[Algorithm, _Model] = {
    "two_shot": _Model(
        lambda cost, n: (n - 1) / n * (cost.frame_nbytes + cost.sum_nbytes),
        lambda cost, n: cost.encode + cost.reduce + cost.encode_sum / n + cost.decode,
        lambda n: 2 if n > 2 else 1,
    ),
    "ring": _Model(
        lambda cost, n: (cost.frame_nbytes + (n - 2) * cost.sum_nbytes + (n - 1) * cost.sum_nbytes) / n,
        lambda cost, n: (cost.encode + (n - 1) * (cost.reduce + cost.encode_sum)) / n + cost.decode,
        lambda n: n,
    ),
    "all_gather": _Model(
        lambda cost, n: (n - 1) * cost.frame_nbytes,
        lambda cost, n: cost.encode + n * cost.reduce,
        lambda n: 2 if n > 2 else 1,
    ),
}


def wire_nbytes(cost: Cost, world_size: int, algorithm: Algorithm = "two_shot") -> float:
    """Return the bytes that each rank sends; it receives as many. See :func:`predict_seconds`."""
    return _MODELS[algorithm].nbytes(cost, world_size) if world_size > 1 else 0.0


def compute_seconds(cost: Cost, world_size: int, algorithm: Algorithm = "two_shot") -> float:
    """Return the seconds for which each rank encodes, adds and decodes; see :func:`predict_seconds`."""
    return _MODELS[algorithm].seconds(cost, world_size)


def latency_seconds(link: LinkModel, world_size: int, algorithm: Algorithm = "two_shot") -> float:
    """Return the seconds that each rank waits for round trips; see :func:`predict_seconds`."""
    return _MODELS[algorithm].round_trips(world_size) * link.rtt if world_size > 1 else 0.0


def predict_seconds(
    cost: Cost, link: LinkLike, world_size: int, *, algorithm: Algorithm = "two_shot", chunks: int = 1
) -> float:
    """Predict the seconds of an all-reduce from measured costs and the rate of the link.

    Let N be the number of ranks, f the bytes of a tensor's frame, and s the bytes of the sum's frame. Encoding a tensor
    takes e seconds, adding one frame a, encoding the sum e', and decoding a frame d. Each rank then needs

    ============  ==================================  ===============================  =================
    algorithm     bytes on the wire                   seconds of compute               round trips
    ============  ==================================  ===============================  =================
    two_shot      (N - 1)/N (f + s)                   e + a + e'/N + d                 2; of 2 ranks 1
    ring          (f + (N - 2) s + (N - 1) s)/N       (e + (N - 1)(a + e'))/N + d      N
    all_gather    (N - 1) f                           e + N a                          2; of 2 ranks 1
    ============  ==================================  ===============================  =================

    In two_shot, a rank encodes its tensor, sends all slices but its own, adds N frames of its slice, encodes their sum,
    sends the sum to all other ranks, and decodes the sums of all slices. A tensor is sent in chunks: while one chunk is
    on the wire, another is encoded, added or decoded. Only the start of the first chunk and the end of the last chunk
    do not overlap with other work::

        wire    = 8 bytes / bits_per_second
        seconds = max(wire, compute) + min(wire, compute) / chunks + round trips * rtt

    The number of round trips per step does not depend on the number of buckets, because request, data and verdict of
    all buckets are sent together. With one chunk, nothing overlaps. An uncompressed tensor has Cost(nbytes, nbytes);
    the time to add it is neglected.

    Parameters
    ----------
    cost : Cost
        Costs of the tensor, measured by :func:`advise` (``advice.table[i].cost``) or by the caller.
    link : str, number, tuple or LinkModel
        Link of each rank, as for :func:`codec.advise`.
    world_size : int
        Number of ranks, 1 to 2^20. A single rank sends nothing.
    algorithm : {"two_shot", "ring", "all_gather"}
        Algorithm of the all-reduce.
    chunks : int
        Number of chunks per slice, 1 to 2^62.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    ArgumentError
        An argument has another type or is out of range.

    Examples
    --------
    >>> from codec.advisor.cost_model import Cost, predict_seconds
    >>> slow, raw = ("100mbit", 0), Cost(25e6, 25e6)
    >>> predict_seconds(raw, slow, 4)
    3.0
    >>> frames = Cost(5e6, 5e6, encode=0.01, encode_sum=0.01, reduce=0.01, decode=0.01)
    >>> predict_seconds(frames, slow, 4, chunks=8) < 0.61
    True
    """
    check_algorithm(algorithm)
    if not isinstance(cost, Cost):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"cost must be a Cost, got {shown(cost)}")
    link = link_of(link)
    world_size = whole("world_size", world_size, 1, MAX_RANKS)
    chunks = whole("chunks", chunks, 1, MAX_PIECES)
    wire = 8 * wire_nbytes(cost, world_size, algorithm) / link.bits_per_second
    compute = compute_seconds(cost, world_size, algorithm)
    return overlapped(wire, compute, chunks) + latency_seconds(link, world_size, algorithm)


def overlapped(wire: float, compute: float, chunks: int) -> float:
    """Return the seconds in which `chunks` chunks are sent and computed; see :func:`predict_seconds`."""
    return max(wire, compute) + min(wire, compute) / chunks


def check_algorithm(algorithm: Any) -> Algorithm:
    """Return the argument; raise ArgumentError if it is not the name of an algorithm."""
    if not isinstance(algorithm, str) or algorithm not in get_args(Algorithm):
        raise ArgumentError(f"algorithm must be one of {', '.join(get_args(Algorithm))}, got {shown(algorithm)}")
    return cast(Algorithm, algorithm)
