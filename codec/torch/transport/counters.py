"""Counters of a channel: bytes on the wire, and the time of its collectives by phase."""

from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any, Literal

from codec.readable import Rounded, count, duration, size

Phase = Literal["encode_s", "decode_s"]


@dataclass(repr=False)
class Counters(Rounded):
    """Totals of the collectives of a group, on this rank. Subtract an earlier copy to get the totals of a period.

    Collectives are counted when they have ended. Only the thread that runs them writes a group's counters;
    :meth:`copy` may be called by any thread.

    Attributes
    ----------
    frame_collectives : int
        Collectives that succeeded and sent frames.
    raw_collectives : int
        All-reduces that succeeded and sent at least one tensor uncompressed.
    raw_nbytes : int
        Bytes of the tensors that this rank has passed to collectives.
    sent_nbytes, received_nbytes : int
        Bytes of frames and of uncompressed values, to and from all other ranks together; in two levels, to and from
        other machines.
    local_nbytes : int
        Bytes of uncompressed values that this rank has sent to the other ranks of its machine, in two levels.
    encode_s : float
        Seconds spent encoding.
    wire_s : float
        Seconds in which this rank only waited for other ranks. If several collectives are in flight, each of them
        counts these seconds, while :func:`group_stats` counts them once.
    decode_s : float
        Seconds spent decoding, summing and storing results.
    cpu_s : float
        Seconds of CPU time of the threads that run collectives, including other work of these threads. If several
        threads encode or decode, only one of them is counted.
    round_trips : float
        Minimum number of round trips between ranks, 0.5 for each message that waits for another one. The buckets of a
        step count as one collective.
    waited_s : dict of int to float
        Seconds of `wire_s` by the rank whose message ended the wait.
    connections : str
        Protection of the connections: "encrypted, authenticated", "not encrypted, authenticated" or "not encrypted, not
        authenticated" (``docs/guides/multi-node.md``); empty before the first collective, and for one rank.

    Examples
    --------
    >>> before = codec.torch.group_stats()
    >>> codec.torch.all_reduce(torch.ones(1000))
    >>> (codec.torch.group_stats() - before).frame_collectives
    1
    """

    frame_collectives: int = 0
    raw_collectives: int = 0
    raw_nbytes: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    local_nbytes: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    cpu_s: float = 0.0
    round_trips: float = 0.0
    waited_s: dict[int, float] = field(default_factory=dict[int, float])
    connections: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        """Return one line: number of collectives, total bytes and total times."""
        raw = f" ({self.raw_collectives} uncompressed)" if self.raw_collectives else ""
        return (
            f"{count(self.frame_collectives + self.raw_collectives, 'collective')}{raw} of {size(self.raw_nbytes)}: "
            f"{size(self.sent_nbytes)} sent, {size(self.received_nbytes)} received; "
            f"encoding {duration(self.encode_s)}, wire {duration(self.wire_s)}, decoding {duration(self.decode_s)}"
        )

    def copy(self) -> "Counters":
        """Return the current totals, which later collectives do not change."""
        return replace(self, waited_s=self.waited_s.copy())

    def __sub__(self, earlier: "Counters") -> "Counters":
        """Return the totals since `earlier` was copied."""
        return self._combined(earlier, -1)

    def __add__(self, other: "Counters") -> "Counters":
        """Return the sums of the totals of two groups."""
        return self._combined(other, 1)

    def add(self, other: "Counters") -> None:
        """Add the totals of other collectives to these."""
        for name in _TOTALS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.connections = self.connections or other.connections
        for rank, seconds in other.waited_s.items():
            self.waited_s[rank] = self.waited_s.get(rank, 0.0) + seconds

    def add_wait(self, seconds: float, source: int | None) -> None:
        """Add seconds of waiting. `source`: rank whose message ended the wait; None: unknown."""
        self.wire_s += seconds
        if source is not None:
            self.waited_s[source] = self.waited_s.get(source, 0.0) + seconds

    def _combined(self, other: "Counters", sign: int) -> "Counters":
        found = Counters(connections=self.connections or other.connections)
        for name in _TOTALS:
            setattr(found, name, getattr(self, name) + sign * getattr(other, name))
        for rank in sorted({*self.waited_s, *other.waited_s}):
            found.waited_s[rank] = self.waited_s.get(rank, 0.0) + sign * other.waited_s.get(rank, 0.0)
        return found


_TOTALS = [f.name for f in fields(Counters) if f.name not in ("waited_s", "connections")]


class Stopwatch:
    """Adds elapsed time to counters. A phase within another one interrupts the outer phase.

    Parameters
    ----------
    counters : Counters
        Counters to which the seconds are added.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._current: Phase | None = None
        self._since = 0.0

    def during(self, phase: Phase) -> "_During":
        """Return a context manager whose body counts towards `phase`."""
        return _During(self, phase)

    def enter(self, phase: Phase | None) -> Phase | None:
        """Charge the time since the last call to the current phase; make `phase` current, and return the former one."""
        now, former = perf_counter(), self._current
        if former is not None:
            setattr(self._counters, former, getattr(self._counters, former) + now - self._since)
        self._current, self._since = phase, now
        return former


class _During:
    """Context manager of a phase. It is a class, because a generator would take four times as long."""

    __slots__ = ("_outer", "_phase", "_watch")

    def __init__(self, watch: Stopwatch, phase: Phase) -> None:
        self._watch = watch
        self._phase: Phase = phase
        self._outer: Phase | None = None

    def __enter__(self) -> None:
        self._outer = self._watch.enter(self._phase)

    def __exit__(self, *_: Any) -> None:
        self._watch.enter(self._outer)
