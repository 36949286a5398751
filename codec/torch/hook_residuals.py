"""Error feedback of a DDP hook: the residuals of its frames, and a guard that notices when they grow."""

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from codec.specs import Spec
from codec.stateful import ErrorFeedback
from codec.stateful.feedback import Role
from codec.stateful.ranges import NOBODY, Range, pieces, union
from codec.torch import partition
from codec.torch.buckets import Part
from codec.torch.hook_state import of_tensors
from codec.torch.messages import Array
from codec.torch.reduction import Reduction, floats

logger = logging.getLogger("codec.torch")

_EVERY = 8  # steps between two measurements of norms, which read residuals and gradients once more
_KEPT = 0.75  # weight of earlier measurements in a running mean
_FIRST = 3  # measurements before the guard looks at them: the first gradients differ in size
_BOUND = 20.0  # norm of a residual over that of its gradient: stable ones stay below 15 (docs/convergence.md)


class Residuals:
    """Residuals of the frames of earlier steps, by parameter and range, on this rank.

    Workers lose something when gradients are encoded, owners of a slice when its sum is. A step changes copies;
    :meth:`commit` keeps them, :meth:`rollback` forgets them.

    Parameters
    ----------
    spec : Spec
        The hook's; frames of other specs can use the residuals, too.
    """

    def __init__(self, spec: Spec) -> None:
        self.worker = ErrorFeedback(spec, role="worker")
        self.server = ErrorFeedback(spec, role="server")
        self._squares: dict[str, tuple[float, float]] = {}  # by parameter: running means of both squared norms
        self._measuring = False
        self._measurements = 0
        self._measured: list[tuple[list[Range], Array, list[float]]] = []  # ranges, their residuals, gradients' squares
        self._moved: list[Part] = []  # parts that take part in their first step
        self._warned = False

    def begin_step(self, step: int, scale: float) -> None:
        """Forget what a failed step began; gradients are multiplied by `scale` from now on."""
        self.rollback()
        self.worker.rescale(scale)
        self.server.rescale(scale)
        self._measuring = step % _EVERY == 0

    def feed(self, r: Reduction, part: Part, rank: int, size: int, two_phases: bool) -> None:
        """Have frames of a part add the residuals, and keep what the frames lose.

        Frames without feedback, such as lossless ones, add the residuals once: when the part is new.

        Parameters
        ----------
        r : Reduction
            Gets the arrays to read and to write.
        part : Part
            The parameters of the reduction.
        rank, size : int
            This rank, and how many there are.
        two_phases : bool
            Each rank sums a slice and encodes the sum, so that it has a residual of its own.
        """
        if part.new:
            self._moved.append(part)
        if not part.feedback:
            if part.new:
                residual = self.server.settle(part.layout) * np.float32(size)
                residual += self.worker.settle(part.layout)
                r.add_residual(residual)
            return
        begin = end = 0
        if two_phases:
            mine = partition.cut(r.x.size, size, r.x.itemsize, r.segments)[rank]
            begin, end = mine[0].begin, mine[-1].end
        if part.new:  # sums of its other ranges belong to other ranks now
            elsewhere = part.ranges(0, begin) + part.ranges(end, part.n)
            self.server.pass_on(elsewhere, self.worker, size)
        r.residual = self.worker.begin(part.layout)
        self._measure(r, part, 0, part.n, r.residual)
        if begin < end:
            sums = self.server.begin(part.ranges(begin, end))
            r.sum_residual = lambda a, b: sums[a - begin : b - begin]
            self._measure(r, part, begin, end, sums)

    def _measure(self, r: Reduction, part: Part, begin: int, end: int, residual: Array) -> None:
        """Note the squared norms of gradients whose residuals a step writes to `residual`."""
        if not self._measuring:
            return
        ranges, offset, squares = part.ranges(begin, end), begin, list[float]()
        for _, start, stop in ranges:
            n = stop - start
            squares.append(_square(floats(r.x[offset : offset + n], r)))
            offset += n
        self._measured.append((ranges, residual, squares))

    def commit(self) -> None:
        """Keep the residuals of a step that has succeeded on all ranks."""
        measured, self._measured = self._measured, []
        for part in self._moved:
            part.new = False
        self._moved = []
        self._note(measured)
        self.worker.commit()
        self.server.commit()

    def rollback(self) -> None:
        """Forget what a step has begun."""
        self._measured, self._moved = [], []
        self.worker.rollback()
        self.server.rollback()

    @property
    def ratios(self) -> dict[str, float]:
        """By parameter: norm of its residual over that of its gradient, from running means of their squares."""
        return {name: float(np.sqrt(e / g)) for name, (e, g) in self._squares.items()}

    def _note(self, measured: list[tuple[list[Range], Array, list[float]]]) -> None:
        """Update the running means, and warn once of a parameter whose residual is out of bounds."""
        found: dict[str, tuple[float, float]] = {}
        for ranges, residual, squares in measured:
            offset = 0
            for (name, start, stop), g in zip(ranges, squares, strict=True):
                here, offset = residual[offset : offset + stop - start], offset + stop - start
                e, former = _square(here), found.get(name, (0.0, 1.0))
                if name != NOBODY and g > 0 and e * former[1] >= former[0] * g:  # of worker and server the larger one
                    found[name] = e, g
        for name, new in found.items():
            old = self._squares.get(name, new)
            self._squares[name] = (_KEPT * old[0] + (1 - _KEPT) * new[0], _KEPT * old[1] + (1 - _KEPT) * new[1])
        self._measurements += bool(found)
        ratios = self.ratios if self._measurements >= _FIRST and not self._warned else {}
        worst = max(ratios, key=ratios.__getitem__, default="")
        if ratios.get(worst, 0.0) > _BOUND:
            self._warned = True
            logger.warning(
                "error feedback of %s: the residual of %s has %.0f times the norm of its gradient, and training may "
                "diverge. Send this parameter lossless by policy=, or use a codec with a smaller error.",
                self.worker.spec,
                worst,
                ratios[worst],
            )

    def copied(self) -> "Residuals":
        """Return the same residuals in memory of their own."""
        again = Residuals(self.worker.spec)
        again.load_state_dict(self.state_dict())
        again._squares, again._measurements, again._warned = self._squares, self._measurements, self._warned
        return again

    def state_dict(self) -> dict[str, Any]:
        """Return what both keep, as tensors."""
        return {role: of_tensors(feedback.state_dict()) for role, feedback in self._by_role().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals; after an error they are as before."""
        loaded = Residuals(self.worker.spec)
        for role, feedback in loaded._by_role().items():
            feedback.load_state_dict(state[role])
        self.worker, self.server = loaded.worker, loaded.server
        self._measured, self._moved = [], []

    def ranges(self) -> list[Range]:
        """Return the ranges of parameters that have a residual."""
        stores = (feedback._now.kept for feedback in (self.worker, self.server))
        return union(r for store in stores for r, _ in pieces(store))

    def norms(self) -> dict[str, float]:
        """Return the norm of this rank's residual of each parameter."""
        found: dict[str, float] = defaultdict(float)
        for (name, _, _), values in pieces(self.worker._now.kept):
            found[name] += _square(values)
        return {name: float(np.sqrt(square)) for name, square in found.items()}

    def _by_role(self) -> dict[Role, ErrorFeedback]:
        return {"worker": self.worker, "server": self.server}


def _square(x: Array) -> float:
    return float(np.dot(x, x))
