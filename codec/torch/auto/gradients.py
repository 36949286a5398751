"""Choose the specs of gradients from agreed measurements (docs/spec/protocol/collectives.md, section 6.1)."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from codec import CallOptions
from codec.advisor.advise import CHUNK_NBYTES, MAX_CHUNKS, named
from codec.advisor.cost_model import Algorithm, Cost, LinkModel, predict_seconds
from codec.specs import Lossless, Spec
from codec.torch.auto.measurements import Measurements
from codec.torch.auto.meter import STEP, StepMeter
from codec.torch.auto.quality import Quality
from codec.torch.auto.saved import SavedChoice
from codec.torch.auto.selector import Selector, Switch
from codec.torch.group.autotune import TIMES, Timing, Tuner, Way
from codec.torch.network.version import hash64
from codec.torch.transport.channel import Channel
from codec.torch.transport.levels import Levels

_SECOND, _PERIOD = 16, 256  # step of the second measurement of gradients; steps between later measurements
_MOST_WIRE = 3  # a step whose time on the wire is longer than this many times its other time is slow
_SLOW_STEPS = 4  # number of slow steps in a row after which a lossless choice logs advice, once

logger = logging.getLogger("codec.torch")


class GradientChoice(Tuner):
    """Chooses the specs of a hook's gradients, and between frames and uncompressed gradients.

    Levels are "raw", if `raw` is True, and the specs of a quality. In steps 0 and 16, and every 256 steps, each rank
    measures errors and costs of all specs on samples of its gradients. Its report of the step contains these
    measurements and the rate of its link. All ranks receive the maxima of the reports, so they choose alike.

    A tensor is never sent with a lossy spec that was not measured on it, or whose measured error exceeds the limit.

    Parameters
    ----------
    quality : Quality
        Specs that may be chosen, and limit of the relative error.
    link : LinkModel or None
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
    steps : dict of str to int
        Number of successful steps, by the name of the level's spec, or "raw".
    measurements : Measurements
        Receives samples of gradients in the steps in which :attr:`is_due` is True.
    """

    def __init__(self, quality: Quality, link: LinkModel | None, *, raw: bool, options: CallOptions) -> None:
        self.quality = quality
        self.version, self.paused = 0, False
        self.steps: dict[str, int] = {}
        self._raw = int(raw)  # level of lossless frames: 1 if level 0 is raw, else 0
        self._meter, self.measurements = StepMeter(link), Measurements(quality, options)
        self._rank, self._levels = 0, Levels(1, 0)
        self._slow_steps = 0
        self._reset()

    def _reset(self) -> None:
        """Drop all measurements, and return to lossless frames."""
        self._count = 0  # steps since this reset
        self._begun = False  # True after the first choice
        self.measurements.adopt([])
        self._meter.reset()
        self._selector = Selector(self._raw)
        self.version += 1

    @property
    def description(self) -> str:
        """Text of the arguments, which must be equal on all ranks."""
        specs = ", ".join(map(named, self.quality.specs))
        return f"quality={self.quality.name} ({specs}), link={self._meter.stated}"

    @property
    def link(self) -> LinkModel | None:
        """Slowest link of any rank as last measured, or the link that the user stated."""
        return self._meter.link

    # Specs

    def _index(self, level: int) -> int:
        """Return the index of the spec of a level; that of lossless frames for raw."""
        return max(0, level - self._raw)

    @property
    def spec(self) -> Spec:
        """Spec of the current level."""
        return self.quality.specs[self._index(self._selector.level)]

    def spec_of(self, name: str) -> Spec:
        """Return the spec of a tensor: that of the current level, or a less lossy one if its error is too large."""
        return self.quality.specs[self.measurements.allowed(name, self._index(self._selector.level))]

    def serve(self, sizes: Mapping[str, int], nbytes: int) -> None:
        """Set the tensors whose specs are chosen: their numbers of values by name, and their total size in bytes."""
        if self.measurements.numbers and list(sizes) != list(self.measurements.sizes):
            self._reset()
        self.measurements.serve(sizes, nbytes)
        self.version += 1

    # A step

    def begin(self, channel: Channel) -> Timing:
        """Begin a step: start to measure the connections of the group."""
        self._rank, self._levels = channel.rank, channel.levels
        self._meter.begin(channel.mesh.connections(channel.peers))
        self.measurements.begin()
        return super().begin(channel)

    def way(self, index: int) -> Way:
        """Return the way in which the current level sends gradients: "frames", or "values" for raw."""
        return "values" if self._selector.level < self._raw else "frames"

    @property
    def is_due(self) -> bool:
        """True if the gradients of this step are measured."""
        return self._count in (0, _SECOND) or self._count % _PERIOD == 0

    def report(self, channel: Channel) -> list[int]:
        """Return the numbers of the link, and the measurements of gradients if they are due."""
        numbers = self._meter.report(channel.mesh.connections(channel.peers))
        if self.is_due:
            numbers += self.measurements.report(channel.size, self._index(self._selector.level))
        return numbers

    def learn(self, index: int, way: Way, largest: list[int]) -> None:
        """Choose the level of the next step, after a successful step, from the maxima of all ranks' reports."""
        numbers, level = largest[TIMES:], self._selector.level
        name = named(Lossless()) if self.paused else self._name(level)
        self.steps[name] = self.steps.get(name, 0) + 1
        seconds = self._meter.learn(numbers[:STEP])
        if self.is_due:
            self.measurements.adopt(numbers[STEP:])
            self.version += 1
        self._count += 1
        if self.link is None or not self.measurements.sizes:
            return
        first, self._begun = not self._begun, True
        predicted = self._predicted(self.link)
        if first:
            switch = self._selector.begin(predicted)
        else:
            switch = self._selector.observe(seconds, predicted) if seconds and not self.paused else None
        if self._rank == 0 and seconds and switch is None:
            self._advise(seconds, predicted[self._selector.level])
        if switch is not None:
            self.version += 1
            if self._rank == 0:
                self._log(switch, measured=not first)

    def _advise(self, seconds: float, wire: float) -> None:
        """Log once that lossy codecs exist, if a lossless choice waits for the wire during most of several steps."""
        if self.quality.limit > 0 or self._slow_steps == _SLOW_STEPS:
            return
        self._slow_steps = self._slow_steps + 1 if wire > _MOST_WIRE * max(0.0, seconds - wire) else 0
        if self._slow_steps == _SLOW_STEPS:
            logger.info(
                'auto, step %d: of %.3g ms a step, gradients take %.3g ms on the wire (%s). "auto" is lossless: to '
                'send fewer bytes, pass codec.torch.Auto("small"), or use codec.torch.LocalSteps',
                self._count,
                1e3 * seconds,
                1e3 * min(wire, seconds),
                self.link,
            )

    def _predicted(self, link: LinkModel) -> list[float]:
        """Return the predicted seconds of a step at each level.

        In two levels, a rank sends frames of its windows. Its machine's ranks share a stated link; of a measured link,
        the rate is that of this rank's part.
        """
        size, share = self._levels.between.size, self._levels.within.size
        nbytes = self.measurements.nbytes // share
        if self._meter.stated is not None:
            link = replace(link, bits_per_second=link.bits_per_second / share)
        frames: Algorithm = "all_gather" if size == 2 else "two_shot"
        chunks = max(1, min(MAX_CHUNKS, nbytes // size // CHUNK_NBYTES))
        raw = [predict_seconds(Cost(nbytes, nbytes), link, size, algorithm="two_shot", chunks=chunks)] * self._raw
        costs = [cost * (1 / share) for cost in self.measurements.costs]
        return raw + [predict_seconds(cost, link, size, algorithm=frames, chunks=chunks) for cost in costs]

    def _name(self, level: int) -> str:
        return named(None if level < self._raw else self.quality.specs[self._index(level)])

    def _log(self, switch: Switch, *, measured: bool) -> None:
        names, most = self.measurements.sizes, self._index(switch.level)
        others = sum(self.measurements.allowed(name, most) != most for name in names)
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
            f"; {others} of {len(names)} tensors by less lossy specs" if others else "",
        )

    # State

    @property
    def key(self) -> int:
        """Hash of the state that must be equal on all ranks, so that they choose alike."""
        return hash64(self._count, self._selector.level, self.measurements.numbers)

    def synchronize(self, *, equal: bool) -> None:
        """Keep the level if :attr:`key` is equal on all ranks, else reset to lossless frames.

        Measurements of steps and of the link are dropped, because they may differ between ranks.
        """
        if not equal:
            self._reset()
        self._meter.reset()
        self._selector = Selector(self._selector.level)

    def state_dict(self) -> str:
        """Return the choice for a checkpoint, as JSON."""
        found = self.measurements
        saved = SavedChoice(self._count, self._selector.level, list(found.sizes), found.numbers)
        return saved.text(self.quality.name, self._raw)

    def parsed(self, text: Any) -> SavedChoice | None:
        """Parse the state of a checkpoint; see :meth:`SavedChoice.parsed`."""
        return SavedChoice.parsed(text, self.quality.name, self._raw, len(self.quality.specs))

    def load(self, saved: SavedChoice | None) -> None:
        """Restore a saved state; reset to lossless frames if it is None or belongs to other tensors."""
        self._reset()
        if saved is None or not saved.numbers:
            return
        found = self.measurements
        if not found.sizes:
            found.serve(dict.fromkeys(saved.names, 0), 0)
        if list(found.sizes) == saved.names:
            found.adopt(saved.numbers)
            self._count, self._begun, self._selector = saved.steps, True, Selector(saved.level)
            self.version += 1
