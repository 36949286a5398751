"""Counters of a channel: bytes on the wire, and the time of its collectives by phase."""

from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any, Literal

from codec.readable import Rounded, count, duration, size

Phase = Literal["encode_s", "wire_s", "decode_s"]


@dataclass(repr=False)
class Counters(Rounded):
    """Totals of the collectives of a group, on this rank. Subtract an earlier copy to get a difference.

    Only the thread that runs the collectives writes a group's counters. :meth:`copy` may be called by any thread; while
    a collective is in flight, the copied values may belong to different moments of that collective.

    Attributes
    ----------
    frame_collectives : int
        Collectives that succeeded and sent frames.
    raw_collectives : int
        All-reduces that succeeded and sent at least one tensor uncompressed.
    raw_nbytes : int
        Bytes of the tensors that this rank has given to collectives.
    sent_nbytes, received_nbytes : int
        Bytes of frames and of uncompressed values, to and from all other ranks together.
    encode_s : float
        Seconds spent encoding.
    wire_s : float
        Seconds spent sending and waiting for other ranks.
    decode_s : float
        Seconds spent decoding, summing and storing results.

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
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0

    def __str__(self) -> str:
        """Return the number of collectives, the bytes and the times of all of them, in a line."""
        raw = f" ({self.raw_collectives} uncompressed)" if self.raw_collectives else ""
        return (
            f"{count(self.frame_collectives + self.raw_collectives, 'collective')}{raw} of {size(self.raw_nbytes)}: "
            f"{size(self.sent_nbytes)} sent, {size(self.received_nbytes)} received; "
            f"encoding {duration(self.encode_s)}, wire {duration(self.wire_s)}, decoding {duration(self.decode_s)}"
        )

    def copy(self) -> "Counters":
        """Return the current totals, which later collectives do not change."""
        return replace(self)

    def __sub__(self, earlier: "Counters") -> "Counters":
        """Return the totals since `earlier` was copied."""
        values: list[Any] = [getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Counters)]
        return Counters(*values)

    def __add__(self, other: "Counters") -> "Counters":
        """Return the sums of the totals of two groups."""
        values: list[Any] = [getattr(self, f.name) + getattr(other, f.name) for f in fields(Counters)]
        return Counters(*values)


class Stopwatch:
    """Adds elapsed time to counters. A phase within another one interrupts the outer phase.

    Parameters
    ----------
    counters : Counters
        Gets the seconds.
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
    """Context manager written as a class: a generator would take four times as long."""

    __slots__ = ("_outer", "_phase", "_watch")

    def __init__(self, watch: Stopwatch, phase: Phase) -> None:
        self._watch = watch
        self._phase: Phase = phase
        self._outer: Phase | None = None

    def __enter__(self) -> None:
        self._outer = self._watch.enter(self._phase)

    def __exit__(self, *_: Any) -> None:
        self._watch.enter(self._outer)
