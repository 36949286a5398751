"""Choose the bit widths of activations and gradients between pipeline stages, from the reports of all ranks."""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from codec.advisor.advise import named
from codec.advisor.cost_model import LinkModel
from codec.specs import Quantize, Spec
from codec.torch.auto.meter import MICRO, PICO, Meter
from codec.torch.auto.selector import Selector
from codec.torch.network.sockets import ConnectionInfo

# A direction switches to a less lossy level if its wire time is then at most this share of the slowest direction's.
_SHARE = 0.5
_KEPT = 0.7  # a direction keeps that level while its wire time is at most this share of the slowest one's
_MOST = 1 << 60  # largest number in a report

Pair = tuple[Spec, Spec]  # specs of activations and of gradients
Direction = tuple[int, int]  # index of the edge; 0 for activations, 1 for gradients

logger = logging.getLogger("codec.torch")


class Sent(NamedTuple):
    """Messages that were sent in one direction of an edge in a step, as their sender reports them."""

    edge: int
    kind: int  # 0: activations, 1: gradients
    picoseconds: int  # time per byte on the link; -1: unknown
    values: int  # number of values whose bit width depends on the level
    nbytes: int  # bytes of all messages


class Sending:
    """Measures the messages that a stage sends in one direction of an edge."""

    def __init__(self, edge: int, kind: int) -> None:
        self._direction: Direction = edge, kind
        self._meter = Meter()
        self._values = self._nbytes = 0

    def begin(self, connection: ConnectionInfo) -> None:
        """Begin a step, and reset the counts."""
        self._meter.begin([connection])
        self._values = self._nbytes = 0

    def add(self, values: int, nbytes: int) -> None:
        """Count a message: its values whose bit width depends on the level, and its bytes."""
        self._values, self._nbytes = self._values + values, self._nbytes + nbytes

    def end(self, connection: ConnectionInfo) -> Sent:
        """End a step after its messages were sent; return their report."""
        self._meter.end([connection])
        found = self._meter.estimate()
        picoseconds = -1 if found is None else round(PICO * found.seconds_per_byte)
        return Sent(*self._direction, picoseconds, self._values, self._nbytes)


class EdgeChoice:
    """Chooses the bit widths of all edges of a pipeline. All stages choose alike, from the same reports.

    A level is a pair of specs. The pipeline's level is the least lossy one with which a step is about as fast as with
    the fastest level. A direction of an edge with a faster link uses a less lossy level, as long as its messages take
    at most half of the time of the slowest direction.

    Parameters
    ----------
    levels : sequence of (Spec, Spec)
        Specs of activations and gradients, least lossy first.
    link : LinkModel or None
        Link that the user has stated; None: measure the link.

    Attributes
    ----------
    steps : dict of str to int
        Number of successful steps, by the names of the level's specs.
    """

    def __init__(self, levels: Sequence[Pair], link: LinkModel | None) -> None:
        self._levels, self._stated = tuple(dict.fromkeys(levels)), link
        self._selector = Selector(0)
        self._at: dict[Direction, int] = {}  # level of each direction; a level above the selector's has no effect
        self._last = 0.0  # time of the last report (perf_counter, in seconds); 0: no report yet
        self.steps: dict[str, int] = {}

    @property
    def description(self) -> str:
        """Text of the arguments, which must be equal on all ranks."""
        return f"{self._stated}, {self._levels}"

    def spec(self, edge: int, kind: int) -> Spec:
        """Return the spec for messages on an edge; `kind` is 0 for activations, 1 for gradients."""
        return self._levels[self._level_of((edge, kind))][kind]

    def _level_of(self, direction: Direction) -> int:
        return min(self._selector.level, self._at.get(direction, self._selector.level))

    def report(self, sent: Iterable[Sent]) -> dict[str, Any]:
        """Return this rank's measurements of a step, in types that JSON supports."""
        last, self._last = self._last, time.perf_counter()
        seconds = round(MICRO * (self._last - last)) if last else 0
        return {"microseconds": seconds, "sent": [list(each) for each in sent if each.nbytes]}

    def learn(self, reports: Sequence[dict[str, Any]], *, logs: bool) -> None:
        """Choose the levels of the next step from all ranks' reports of a step that has succeeded.

        Parameters
        ----------
        reports : sequence of dict
            Report of each rank, which :func:`checked` has accepted.
        logs : bool
            True: log a change of the level.
        """
        name = self._name(self._selector.level)
        self.steps[name] = self.steps.get(name, 0) + 1
        sent = [Sent(*each) for report in reports for each in report["sent"]]
        known = [each for each in sent if self._stated is not None or each.picoseconds >= 0]
        microseconds = max((report["microseconds"] for report in reports), default=0)
        if not known or not all(report["microseconds"] for report in reports):
            return
        wires = {each[:2]: self._wires(each) for each in known}
        predicted = [max(column) for column in zip(*wires.values(), strict=True)]
        switch = self._selector.observe(microseconds / MICRO, predicted)
        slowest = predicted[self._selector.level]
        for direction, seconds in wires.items():
            level = self._level_of(direction)
            if seconds[level] > _KEPT * slowest or switch is not None:
                level = next((i for i, s in enumerate(seconds) if s <= _SHARE * slowest), self._selector.level)
            self._at[direction] = level
        if switch is not None and logs:
            logger.info(
                "auto: stages send %s from now on, not %s: %.3g ms a step expected after %.3g ms measured; the slowest "
                "link takes %.3g ms of a step",
                self._name(switch.level),
                self._name(switch.former),
                1e3 * switch.expected,
                1e3 * switch.seconds,
                1e3 * slowest,
            )

    def _wires(self, sent: Sent) -> list[float]:
        """Return the seconds that the messages of a direction take on the wire at each level."""
        seconds = 8 / self._stated.bits_per_second if self._stated else sent.picoseconds / PICO
        now = _bits(self.spec(sent.edge, sent.kind))
        changed = (_bits(pair[sent.kind]) - now for pair in self._levels)
        return [max(0.0, sent.nbytes + sent.values * bits / 8) * seconds for bits in changed]

    def _name(self, level: int) -> str:
        return " and ".join(named(spec) for spec in self._levels[level])

    def state_dict(self) -> int:
        """Return the level for a checkpoint."""
        return self._selector.level

    def load_state_dict(self, level: Any) -> None:
        """Restore the level of a checkpoint, or 0 if there is no such level. Measurements are dropped."""
        known = type(level) is int and 0 <= level < len(self._levels)
        self._selector, self._at, self._last = Selector(level if known else 0), {}, 0.0


def checked(report: Any) -> dict[str, Any]:
    """Validate the report of another rank, and return it.

    Raises
    ------
    ValueError, TypeError, KeyError
        The object is no report.
    """
    sent = [Sent(*each) for each in report["sent"]]
    numbers = [report["microseconds"], *(n for each in sent for n in each)]
    if not all(type(n) is int and -1 <= n <= _MOST for n in numbers):
        raise ValueError("a number of a report is out of range")
    least = min([report["microseconds"], *(min(each.edge, each.values, each.nbytes) for each in sent)])
    if least < 0 or any(each.kind not in (0, 1) for each in sent):
        raise ValueError("a number of a report is negative, or a direction is neither 0 nor 1")
    return {"microseconds": report["microseconds"], "sent": sent}


def _bits(spec: Spec) -> float:
    """Return the bits per value of a Quantize, scales included; 0 for other specs, which no level changes."""
    return spec.bits + 32 / spec.group_size if isinstance(spec, Quantize) else 0.0
