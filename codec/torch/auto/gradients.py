"""Choose the specs of gradients from agreed measurements (docs/spec/protocol/collectives.md, section 6.1)."""

import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch

from codec import CallOptions, Link, StateError, predict_seconds
from codec.advisor.advise import CHUNK_NBYTES, MAX_CHUNKS, named
from codec.advisor.cost_model import Algorithm, Cost
from codec.specs import Lossless, Spec
from codec.torch.auto import costs
from codec.torch.auto.meter import Meter
from codec.torch.auto.quality import Quality
from codec.torch.auto.selector import Selector, Switch
from codec.torch.group.autotune import Way
from codec.torch.network.mesh import Mesh
from codec.torch.network.version import hash64
from codec.torch.transport.channel import Channel

_SECOND, _PERIOD = 16, 256  # step of the second measurement of gradients; steps between later measurements
_PICO, _MICRO = 1e12, 1e6
_BASE = 3  # number of integers at the start of every hook's report: duration, load and wait, see Measurement.report
# Number of integers that follow: microseconds since the last report, picoseconds per byte, microseconds per round trip.
_LINK = 3
_UNKNOWN = [-1, -1]  # picoseconds per byte and microseconds per round trip of a rank that has not measured its link
# Norm of residual / norm of gradient above which a tensor gets a less lossy spec; stable runs stay below 15.
_MOST_RATIO = 10.0

logger = logging.getLogger("codec.torch")


class GradientChoice:
    """Chooses the specs of a hook's gradients, and between frames and uncompressed gradients.

    Levels are "raw", if `raw` is True, and the specs of a quality. In steps 0 and 16, and every 256 steps, each rank
    measures errors and costs of all specs on samples of its gradients. Its report of the step contains these
    measurements and the rate of its link. All ranks receive the maxima of the reports, so they choose alike.

    A tensor is never sent with a lossy spec that was not measured on it, or whose measured error exceeds the limit.

    Parameters
    ----------
    quality : Quality
        Specs that may be chosen, and limit of the relative error.
    link : Link or None
        Link that the user has stated; None: measure the link.
    raw : bool
        True: gradients may be sent uncompressed.
    options : CallOptions
        Number of threads for the measurements.

    Attributes
    ----------
    version : int
        Number that increases whenever specs may have changed.
    paused : bool
        True if the current step sends all gradients lossless, regardless of the level.
    link : Link or None
        Slowest link of any rank as last measured, or the link that the user stated.
    steps : dict of str to int
        Number of successful steps, by the name of the level's spec, or "raw".
    """

    def __init__(self, quality: Quality, link: Link | None, *, raw: bool, options: CallOptions) -> None:
        self.quality, self.stated, self.link = quality, link, link
        self.version, self.paused = 0, False
        self.steps: dict[str, int] = {}
        self._options = options
        self.offset = int(raw)  # level of lossless frames: 1 if level 0 is raw, else 0
        specs: list[tuple[Way, int]] = [("frames", i) for i in range(len(quality.specs))]
        self._levels: list[tuple[Way, int]] = [("values", 0), *specs] if raw else specs
        self._sizes: dict[str, int] = {}  # number of values of each tensor whose spec is chosen here
        self._nbytes = 0  # uncompressed bytes of the tensors in `_sizes`
        self._rank, self._world_size = 0, 1
        self._reset()

    def _reset(self) -> None:
        """Drop all measurements, and return to lossless frames."""
        self._count = 0  # steps since this reset
        self._begun = False  # True after the first choice
        self._numbers: list[int] = []  # agreed measurements of gradients; [] before the first measurement
        self._errors: dict[str, list[int]] = {}
        self._costs: list[Cost] = []  # for each spec: cost of a step that sends all values with it
        self._add_costs()
        self._selector = Selector(self.offset)
        self._forget_link()
        self.version += 1

    def _forget_link(self) -> None:
        """Drop the measurements of steps and of the link, which may differ between ranks; keep the level."""
        self._selector = Selector(self._selector.level)
        self._meter, self._taken = Meter(), costs.Samples()
        self.link = self.stated
        self._ratios: Mapping[str, float] = {}
        self._last = 0.0  # time of the last report (perf_counter, in seconds); 0: no report yet

    def __getstate__(self) -> dict[str, Any]:
        """Return the choice without the measurements that belong to this process."""
        return self.__dict__ | {"_meter": Meter(), "_taken": costs.Samples(), "_ratios": {}, "_last": 0.0}

    @property
    def description(self) -> str:
        """Text of the arguments, which must be equal on all ranks."""
        specs = ", ".join(map(named, self.quality.specs))
        return f"quality={self.quality.name} ({specs}), link={self.stated}"

    # Specs

    @property
    def spec(self) -> Spec:
        """Spec of the current level."""
        return self.quality.specs[self._levels[self._selector.level][1]]

    @property
    def way(self) -> Way:
        """Way in which the current level sends gradients: "frames", or "values" for raw."""
        return self._levels[self._selector.level][0]

    def spec_of(self, name: str) -> Spec:
        """Return the spec of a tensor: that of the current level, or a less lossy one if its error is too large."""
        return self.quality.specs[self._allowed(name, self._levels[self._selector.level][1])]

    def _allowed(self, name: str, most: int) -> int:
        """Return the index of the lossiest spec, up to index `most`, whose error on a tensor is within the limit."""
        errors, limit = self._errors.get(name, []), self.quality.limit * costs.MILLION
        fitting = (i for i in range(min(most, len(errors)), 0, -1) if costs.UNKNOWN < errors[i - 1] <= limit)
        return next(fitting, 0)

    def serve(self, sizes: Mapping[str, int], nbytes: int) -> None:
        """Set the tensors whose specs are chosen: their numbers of values by name, and their total size in bytes."""
        if self._numbers and list(sizes) != list(self._sizes):
            self._reset()
        self._sizes, self._nbytes = dict(sizes), nbytes
        self._add_costs()
        self.version += 1

    # A step

    def begin(self, mesh: Mesh) -> "GradientChoice":
        """Begin a step: start to measure the connections of a group."""
        self._meter.begin(mesh.connections())
        return self

    async def wait(self) -> Way:
        """Return the way in which this step sends gradients."""
        return self.way

    def end(self) -> None:
        """End the step, and drop its samples."""
        self._taken = costs.Samples()

    @property
    def is_due(self) -> bool:
        """True if the gradients of this step are measured."""
        return self._count in (0, _SECOND) or self._count % _PERIOD == 0

    def sample(self, name: str, gradient: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Store a sample of a tensor's flat gradient, in a step in which :attr:`is_due` is True."""
        if name in self._sizes and gradient.numel():
            self._taken.values[name] = costs.take(gradient, shape, self._values, len(self._sizes))
            self._taken.on_device |= gradient.device.type != "cpu"

    def note_residuals(self, ratios: Mapping[str, float]) -> None:
        """Set the ratios of the norm of the residual to the norm of the gradient, by tensor name."""
        self._ratios = ratios

    def report(self, channel: Channel) -> list[int]:
        """Return the integers that this rank adds to its report of the step: link, and measurements if due."""
        self._rank, self._world_size = channel.rank, channel.size
        self._meter.end(channel.mesh.connections())
        link = self._meter.estimate()
        last, self._last = self._last, time.perf_counter()
        numbers = [round(_MICRO * (self._last - last)) if last else 0]
        numbers += _UNKNOWN if link is None else [round(_PICO * link.seconds_per_byte), round(_MICRO * link.rtt)]
        if self.is_due:
            names, specs = list(self._sizes), self.quality.specs
            found = costs.numbers_of(self._taken, names, self._values, specs, channel.size, self._options)
            numbers += self._without_growing(found)
        return numbers

    def _without_growing(self, numbers: list[int]) -> list[int]:
        """Return `numbers` with errors above any limit for tensors that have large residuals.

        The errors of the current and all lossier specs are replaced, so that these tensors are sent with a less lossy
        spec, and their residuals do not grow.
        """
        i, lossy = self._levels[self._selector.level][1], len(self.quality.specs) - 1
        begin = len(numbers) - lossy * len(self._sizes)
        for k, name in enumerate(self._sizes):
            if i and self._ratios.get(name, 0.0) > _MOST_RATIO:
                for j in range(i - 1, lossy):
                    numbers[begin + k * lossy + j] = 1 << 30
        return numbers

    def learn(self, largest: list[int]) -> None:
        """Choose the level of the next step, after a successful step, from the maxima of all ranks' reports."""
        microseconds, picoseconds, rtt = largest[_BASE : _BASE + _LINK]
        level = self._levels[self._selector.level]
        name = self._name(self._selector.level) if not self.paused else named(Lossless())
        self.steps[name] = self.steps.get(name, 0) + 1
        if self.stated is None and picoseconds >= 0:
            self.link = Link(8 * _PICO / picoseconds if picoseconds else math.inf, 1e-6 * rtt)
        if self.is_due:
            self._adopt(largest[_BASE + _LINK :])
        self._count += 1
        if self.link is None or not self._sizes:
            return
        first, self._begun = not self._begun, True
        switch = self._decide(microseconds / _MICRO, first=first)
        if level != self._levels[self._selector.level]:
            self.version += 1
        if switch is not None and self._rank == 0:
            self._log(switch, measured=not first)

    def _decide(self, seconds: float, *, first: bool) -> Switch | None:
        """Choose the level of the next step, given the seconds of this step (0 if unknown)."""
        predicted = self._predicted()
        if first:
            return self._selector.begin(predicted)
        return self._selector.observe(seconds, predicted) if seconds and not self.paused else None

    def _adopt(self, numbers: list[int]) -> None:
        """Replace the measurements of gradients by `numbers`, the measurements that all ranks agree on."""
        self._numbers, specs = numbers, len(self.quality.specs)
        self._costs = costs.costs_of(numbers, specs)
        self._errors = costs.errors_of(numbers, list(self._sizes), specs)
        self._add_costs()
        self.version += 1

    def _add_costs(self) -> None:
        """Compute the cost of a step at each level, from each spec's cost and the values sent with that spec."""
        self._values = sum(self._sizes.values())
        self._totals: list[Cost] = []
        for way, i in self._levels if self._costs else []:
            if way == "values":
                self._totals.append(Cost(self._nbytes, self._nbytes))
                continue
            counts = [0] * len(self._costs)
            for name, n in self._sizes.items():
                counts[self._allowed(name, i)] += n
            shares = (count / max(1, self._values) for count in counts)
            parts = (cost * share for cost, share in zip(self._costs, shares, strict=True))
            self._totals.append(sum(parts, Cost(0.0, 0.0)))

    def _predicted(self) -> list[float]:
        """Return the predicted seconds of a step at each level."""
        assert self.link is not None
        size = self._world_size
        frames: Algorithm = "all_gather" if size == 2 else "two_shot"
        ways: dict[Way, Algorithm] = {"values": "two_shot", "frames": frames}
        chunks = max(1, min(MAX_CHUNKS, self._nbytes // size // CHUNK_NBYTES))
        return [
            predict_seconds(cost, self.link, size, algorithm=ways[way], chunks=chunks)
            for cost, (way, _) in zip(self._totals, self._levels, strict=True)
        ]

    def _name(self, level: int) -> str:
        way, i = self._levels[level]
        return named(self.quality.specs[i]) if way == "frames" else named(None)

    def _log(self, switch: Switch, *, measured: bool) -> None:
        most = self._levels[switch.level][1]
        others = sum(self._allowed(name, most) != most for name in self._sizes)
        logger.info(
            "auto, step %d: gradients are sent by %s from now on, not by %s: %.3g ms a step expected after %.3g ms %s; "
            "%s%s",
            self._count,
            self._name(switch.level),
            self._name(switch.former),
            1e3 * switch.expected,
            1e3 * switch.seconds,
            "measured" if measured else "predicted",
            self.link,
            f"; {others} of {len(self._sizes)} tensors by less lossy specs" if others else "",
        )

    # State

    @property
    def key(self) -> int:
        """Hash of the state that must be equal on all ranks, so that they choose alike."""
        return hash64(self._count, self._selector.level, self._numbers)

    def synchronize(self, *, equal: bool) -> None:
        """Keep the level if :attr:`key` is equal on all ranks, else reset to lossless frames."""
        if equal:
            self._forget_link()
        else:
            self._reset()

    def state_dict(self) -> str:
        """Return the choice for a checkpoint, as JSON."""
        return json.dumps(
            {
                "quality": self.quality.name,
                "raw": self.offset,
                "count": self._count,
                "level": self._selector.level,
                "names": list(self._sizes),
                "numbers": self._numbers,
            }
        )

    def parsed(self, text: Any) -> "Saved | None":
        """Parse the state of a checkpoint; return None if it is of another quality.

        Raises
        ------
        StateError
            The text is no state of a GradientChoice.
        """
        return _parsed(text, self)

    def load(self, saved: "Saved | None") -> None:
        """Restore a saved state; reset to lossless frames if it is None or belongs to other tensors."""
        self._reset()
        if saved is None or not saved.numbers:
            return
        self._sizes = self._sizes or dict.fromkeys(saved.names, 0)
        if list(self._sizes) == saved.names:
            self._adopt(saved.numbers)
            self._count, self._begun, self._selector = saved.steps, True, Selector(saved.level)


class Saved(NamedTuple):
    """Parsed state of a GradientChoice, from a checkpoint."""

    steps: int
    level: int
    names: list[str]
    numbers: list[int]


def _parsed(text: Any, choice: GradientChoice) -> Saved | None:
    """Parse the state of a checkpoint; see :meth:`GradientChoice.parsed`."""
    damaged = StateError("'auto' of this state is not the choice of a hook: it is damaged")
    specs = len(choice.quality.specs)
    try:
        state = cast(dict[str, Any], json.loads(text))
        steps, level, names, numbers = (state[key] for key in ("count", "level", "names", "numbers"))
        if (state["quality"], state["raw"]) != (choice.quality.name, choice.offset):
            return None
        is_valid = (
            all(isinstance(name, str) for name in names)
            and all(type(n) is int and -1 <= n < 1 << 53 for n in [steps, level, *numbers])
            and steps >= 0
            and 0 <= level < choice.offset + specs
            and len(numbers) in (0, costs.length(len(names), specs))
            and min(numbers[: costs.length(0, specs)], default=0) >= 0
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise damaged from None
    if not is_valid:
        raise damaged
    return Saved(steps, level, names, numbers)
