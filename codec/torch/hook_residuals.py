"""Error feedback of a DDP hook: residuals of its frames, and a guard against residuals that grow."""

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
from codec.torch.reduction import Reduction, as_float32

logger = logging.getLogger("codec.torch")

_INTERVAL = 8  # steps between two measurements of norms, which read residuals and gradients once more
_DECAY = 0.75  # weight of earlier measurements in a running mean
_FIRST = 3  # measurements before the guard may warn, since first gradients differ in size
_BOUND = 20.0  # largest norm of a residual over that of its gradient; stable runs stay below 15 (docs/convergence.md)


class Residuals:
    """Residuals of the frames of earlier steps, by parameter and range, on this rank.

    A worker's residual holds the errors of encoded gradients, a server's those of the encoded sums of its slice. A step
    changes copies, which :meth:`commit` keeps and :meth:`rollback` drops.

    Parameters
    ----------
    spec : Spec
        Spec of the hook. Frames of other specs can use the residuals, too.
    """

    def __init__(self, spec: Spec) -> None:
        self.worker = ErrorFeedback(spec, role="worker")
        self.server = ErrorFeedback(spec, role="server")
        self._squares: dict[str, tuple[float, float]] = {}  # running means of both squared norms, by parameter
        self._measuring = False
        self._measurements = 0
        self._measured: list[
            tuple[list[Range], Array, list[float]]
        ] = []  # ranges, residual, squared norms of gradients
        self._moved: list[Part] = []  # parts in their first step
        self._warned = False

    def begin_step(self, step: int, scale: float) -> None:
        """Roll a failed step back; from now on gradients have the factor `scale`."""
        self.rollback()
        self.worker.rescale(scale)
        self.server.rescale(scale)
        self._measuring = step % _INTERVAL == 0

    def feed(self, r: Reduction, part: Part, rank: int, size: int, two_phases: bool) -> None:
        """Make the frames of a part add the residuals, and keep their own errors.

        A part without error feedback, such as a lossless one, adds the residuals once, in its first step.

        Parameters
        ----------
        r : Reduction
            Gets the arrays of the residuals.
        part : Part
            The parameters of the reduction.
        rank, size : int
            This rank, and number of ranks.
        two_phases : bool
            True if each rank encodes the sum of its slice, for which it then has a residual.
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
        if part.new:  # other ranks encode the sums of its other ranges now
            elsewhere = part.ranges(0, begin) + part.ranges(end, part.n)
            self.server.pass_on(elsewhere, self.worker, size)
        r.residual = self.worker.begin(part.layout)
        self._measure(r, part, 0, part.n, r.residual)
        if begin < end:
            sums = self.server.begin(part.ranges(begin, end))
            r.sum_residual = lambda a, b: sums[a - begin : b - begin]
            self._measure(r, part, begin, end, sums)

    def _measure(self, r: Reduction, part: Part, begin: int, end: int, residual: Array) -> None:
        """Note the squared norms of the gradients whose residuals a step writes to `residual`."""
        if not self._measuring:
            return
        ranges, offset, squares = part.ranges(begin, end), begin, list[float]()
        for _, start, stop in ranges:
            n = stop - start
            squares.append(_square(as_float32(r.x[offset : offset + n], r)))
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
        """Drop the residuals of a step that has failed."""
        self._measured, self._moved = [], []
        self.worker.rollback()
        self.server.rollback()

    @property
    def ratios(self) -> dict[str, float]:
        """Norm of each parameter's residual divided by that of its gradient, from running means of their squares."""
        return {name: float(np.sqrt(e / g)) for name, (e, g) in self._squares.items()}

    def _note(self, measured: list[tuple[list[Range], Array, list[float]]]) -> None:
        """Update the running means, and warn once if the residual of a parameter is too large."""
        found: dict[str, tuple[float, float]] = {}
        for ranges, residual, squares in measured:
            offset = 0
            for (name, start, stop), g in zip(ranges, squares, strict=True):
                here, offset = residual[offset : offset + stop - start], offset + stop - start
                e, former = _square(here), found.get(name, (0.0, 1.0))
                if name != NOBODY and g > 0 and e * former[1] >= former[0] * g:  # the larger one of worker and server
                    found[name] = e, g
        for name, new in found.items():
            old = self._squares.get(name, new)
            self._squares[name] = (_DECAY * old[0] + (1 - _DECAY) * new[0], _DECAY * old[1] + (1 - _DECAY) * new[1])
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
        """Return the residuals of both roles, as tensors."""
        return {role: of_tensors(feedback.state_dict()) for role, feedback in self._by_role().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals; an error leaves them unchanged."""
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
