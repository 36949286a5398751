"""Error feedback of a DDP hook: residuals of its frames, and a warning if residuals grow."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from codec.specs import Spec
from codec.stateful.ranges import NOBODY, Layout, Range, cut
from codec.torch.ddp.buckets import BucketPart
from codec.torch.feedback.pair import ResidualPair
from codec.torch.reduction import raw
from codec.torch.reduction.host import Reduction
from codec.torch.transport.levels import Levels
from codec.torch.transport.messages import Array
from codec.torch.transport.values import square

logger = logging.getLogger("codec.torch")

_INTERVAL = 8  # steps between two measurements of norms, each of which reads all residuals and gradients again
_DECAY = 0.75  # weight of earlier measurements in a running mean
_FIRST = 3  # measurements before a warning may be logged, since the magnitude of gradients changes in the first steps
_BOUND = 20.0  # norm of residual / norm of gradient above which to warn; stable runs stay below 15 (convergence.md)


class HookResiduals(ResidualPair):
    """Residuals of a hook's parameters, with running means of the squared norms of residuals and gradients.

    Parameters
    ----------
    spec : Spec
        Spec of the hook, for the warning. Frames of other specs can use the residuals, too.
    decay : float
        Factor by which a residual is multiplied each time before it is added.
    """

    def __init__(self, spec: Spec, decay: float = 1.0) -> None:
        super().__init__(spec, decay)
        # By parameter: running means of the squared norms of its residual and of its gradient.
        self._squares: dict[str, tuple[float, float]] = {}
        self._measuring = False
        self._measurements = 0
        self._measured: list[
            tuple[list[Range], Array, list[float]]
        ] = []  # measurements: ranges, residual, squared norm of the gradient in each range
        self._moved: list[BucketPart] = []  # parts that were first used in the current step
        self._warned = False

    def begin_step(self, step: int, scale: float) -> None:
        """Roll back a step that did not end, and rescale the residuals to gradients that are multiplied by `scale`."""
        self.rollback()
        self.rescale(scale)
        self._measuring = step % _INTERVAL == 0

    def flush_moved(self, whole: Sequence[Reduction], parts: Sequence[BucketPart], levels: Levels) -> None:
        """Add residuals of values that new parts assign to other ranks of this machine to this rank's gradients.

        Parameters
        ----------
        whole : sequence of Reduction
            The whole tensor of each part, before it is reduced within the machine.
        parts : sequence of BucketPart
            The parts.
        levels : Levels
            Levels of the group.
        """
        if levels.flat:
            return
        for r, part in zip(whole, parts, strict=True):
            if part.new:
                self.flush_outside(r, part.layout, raw.window_of(r, levels.within), levels)

    def feed_part(
        self, r: Reduction, part: BucketPart, window: tuple[int, int], owned: tuple[int, int], size: int
    ) -> None:
        """Make the encoder of a part add residuals to gradients, and store the encoding errors as new residuals.

        A part without error feedback, such as a lossless one, adds the residuals once, in its first step.

        Parameters
        ----------
        r : Reduction
            Reduction of the part's window; this method sets its arrays of residuals.
        part : BucketPart
            Parameters of the reduction.
        window : (int, int)
            Begin and end of the part's values that this rank reduces with other machines.
        owned, size
            As for :meth:`feed`.
        """
        if part.new:
            self._moved.append(part)
        layout = tuple(cut(part.layout, *window))
        if not part.feedback:
            if part.new:
                self.flush(r, layout, size)
            return
        # A new part may assign other slices to ranks: other ranks then encode sums whose residuals this rank holds.
        sums = self.feed(r, layout, owned, size, moved=part.new)
        if self._measuring and r.residual is not None:
            self._measure(r, layout, (0, r.n), r.residual)
            if sums is not None:
                self._measure(r, layout, owned, sums)

    def may_wait(self, parts: Sequence[BucketPart]) -> bool:
        """Return True if :meth:`feed_part` may read values of `parts` on the host, which then waits for the GPU."""
        return self._measuring or any(part.new for part in parts)

    def _measure(self, r: Reduction, layout: Layout, within: tuple[int, int], residual: Array) -> None:
        """Compute the squared norms of the gradients in the range `within`, whose new residuals are in `residual`."""
        ranges, offset, squares = cut(layout, *within), within[0], list[float]()
        for _, start, stop in ranges:
            n = stop - start
            squares.append(square(r.as_float32(r.x[offset : offset + n])))
            offset += n
        self._measured.append((ranges, residual, squares))

    def commit(self) -> None:
        """Store the new residuals and norms of a step that has succeeded on all ranks."""
        measured, self._measured = self._measured, []
        for part in self._moved:
            part.new = False
        self._moved = []
        self._note(measured)
        super().commit()

    def rollback(self) -> None:
        """Drop the new residuals and norms of a step that has failed."""
        self._measured, self._moved = [], []
        super().rollback()

    @property
    def ratios(self) -> dict[str, float]:
        """Norm of each parameter's residual divided by the norm of its gradient, from running means of the squares."""
        return {name: float(np.sqrt(e / g)) for name, (e, g) in self._squares.items()}

    def _note(self, measured: list[tuple[list[Range], Array, list[float]]]) -> None:
        """Update the running means of squared norms; log a warning, once, if a residual is too large."""
        found: dict[str, tuple[float, float]] = {}
        for ranges, residual, squares in measured:
            offset = 0
            for (name, start, stop), g in zip(ranges, squares, strict=True):
                here, offset = residual[offset : offset + stop - start], offset + stop - start
                e, former = square(here), found.get(name, (0.0, 1.0))
                # Record the worker's or the server's residual, whichever has the larger ratio to the gradient.
                if name != NOBODY and g > 0 and e * former[1] >= former[0] * g:
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
                self.spec,
                worst,
                ratios[worst],
            )

    def copied(self) -> "HookResiduals":
        """Return a deep copy of the residuals."""
        again = HookResiduals(self.spec, self.decay)
        again.load_state_dict(self.state_dict())
        again._squares, again._measurements, again._warned = self._squares, self._measurements, self._warned
        return again

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals by those of a state; after an error they are unchanged."""
        super().load_state_dict(state)
        self._measured, self._moved = [], []
