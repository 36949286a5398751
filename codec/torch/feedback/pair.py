"""The two residuals of a rank, which are committed together: worker (own values) and server (its slice of the sums)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from codec import ArgumentError
from codec.specs import Spec
from codec.stateful.checkpoint import ROLES
from codec.stateful.ranges import Layout, Range, cut, scaled, shared, union
from codec.stateful.residual_store import ResidualStore, State
from codec.stateful.schema import mapping, read_fields
from codec.torch.feedback.checkpoint import UNKNOWN, ResidualOwner, of_tensors
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.table import Algorithm
from codec.torch.transport.levels import Levels
from codec.torch.transport.messages import Array
from codec.torch.transport.values import square


class ResidualPair:
    """Residuals of the frames of earlier steps, by parameter and range, on this rank.

    The worker's residual holds the errors of this rank's encoded gradients. The server's residual holds the errors of
    the encoded sums of this rank's slice. A step changes copies: :meth:`commit` replaces the residuals by them, and
    :meth:`rollback` drops them.

    Parameters
    ----------
    spec : Spec
        Spec of the frames. Frames of other specs can use the residuals, too.
    decay : float
        Factor by which a residual is multiplied each time before it is added.
    """

    def __init__(self, spec: Spec, decay: float = 1.0) -> None:
        self.spec, self.decay = spec, decay
        self.worker = ResidualStore("worker", decay)
        self.server = ResidualStore("server", decay)

    def set_decay(self, decay: float) -> None:
        """Set the factor by which residuals are multiplied each time before they are added."""
        self.decay = self.worker.decay = self.server.decay = decay

    def feed(self, r: Reduction, layout: Layout, owned: tuple[int, int], size: int, *, moved: bool) -> Array | None:
        """Make the encoder of a reduction add residuals to values, and store the encoding errors as new residuals.

        Parameters
        ----------
        r : Reduction
            Reduction; this method sets its arrays of residuals.
        layout : Layout
            Ranges of parameters whose values, in this order, are the values of `r`.
        owned : (int, int)
            Begin and end of the values whose sums this rank encodes, as :func:`owned_values` returns them.
        size : int
            Number of ranks.
        moved : bool
            True if other ranks may now encode sums whose residuals this rank holds. These residuals are then added to
            this rank's own values.

        Returns
        -------
        ndarray of float32 or None
            Array for the residual of the sums; None if this rank encodes no sums.

        Raises
        ------
        ArgumentError
            The op of the reduction is "max".
        """
        if r.op == "max":
            raise ArgumentError("error feedback needs op to be a sum or a mean, got a maximum: pass feedback=False")
        begin, end = owned
        if moved:
            elsewhere = cut(layout, 0, begin) + cut(layout, end, r.n)
            self.server.pass_on(elsewhere, self.worker, self._share(r, size), r.memory)
        r.residual = self.worker.begin(layout, r.memory)
        if begin == end:
            return None
        sums = self.server.begin(cut(layout, begin, end), r.memory)
        r.sum_residual = lambda a, b: sums[a - begin : b - begin]
        return sums

    def flush(self, r: Reduction, layout: Layout, size: int) -> None:
        """Remove the residuals of `layout`, and add them to the values of a reduction over `size` ranks."""
        residual = self.server.settle(layout, r.memory) * np.float32(self._share(r, size))
        residual += self.worker.settle(layout, r.memory)
        r.add_residual(residual)

    def flush_outside(self, r: Reduction, layout: Layout, window: tuple[int, int], levels: Levels) -> None:
        """Remove the residuals of `layout` outside of this rank's window, and add them to the values of this rank.

        Parameters
        ----------
        r : Reduction
            Reduction of the whole tensor, before it is reduced within the machine.
        layout : Layout
            Ranges of parameters whose values, in this order, are the values of `r`.
        window : (int, int)
            Begin and end of the values that this rank reduces with other machines.
        levels : Levels
            Levels of the group. The worker's residuals belong to the values of a machine.
        """
        outside = cut(layout, 0, window[0]) + cut(layout, window[1], r.n)
        if shared([*union(outside), *self.ranges()]) is None:
            return
        residual = r.memory.zeros(r.n)
        for begin, end in ((0, window[0]), (window[1], r.n)):
            ranges = cut(layout, begin, end)
            residual[begin:end] += self.server.settle(ranges, r.memory) * np.float32(self._share(r, levels.all.size))
            mine = self.worker.settle(ranges, r.memory) * np.float32(self._share(r, levels.within.size))
            residual[begin:end] += mine
        r.add_residual(residual)

    @staticmethod
    def _share(r: Reduction, size: int) -> int:
        """Return the factor that converts a residual of the result to a residual of one rank's values."""
        return size if r.op == "mean" else 1

    def move(self, before: ResidualOwner, now: ResidualOwner) -> None:
        """Convert the residuals of means over the ranks of `before` to those of means over the ranks of `now`.

        A worker's residual belongs to the mean of a machine, which counts 1 / N in a mean over N machines. It is
        multiplied by M / N for M machines, so that its effect on the mean stays the same. Residuals of sums are errors
        of the mean itself, and need no conversion. If the number of ranks of `before` is unknown, it is that of `now`.
        """
        if UNKNOWN in before:
            before = now._replace(within=before.within)
        self.multiply(now.machines / before.machines, 1.0)

    def multiply(self, worker: float, server: float) -> None:
        """Multiply the residuals of the worker and of the server by one factor each."""
        for store, factor in ((self.worker, worker), (self.server, server)):
            state = store.state
            if factor != 1:
                store.state = State(scaled(state.kept, factor), {}, {}, state.scale)

    def forked(self) -> "ResidualPair":
        """Return a pair with the same residuals, for one collective; changes to it do not affect this object."""
        again = ResidualPair(self.spec, self.decay)
        again.worker, again.server = self.worker.fork(), self.server.fork()
        return again

    def adopt(self, changed: "ResidualPair") -> None:
        """Commit the new residuals of a pair that :meth:`forked` returned, and replace those of this pair by them."""
        changed.commit()
        self.worker, self.server = changed.worker, changed.server

    def rescale(self, scale: float) -> None:
        """Rescale the residuals to gradients that are multiplied by `scale`."""
        self.worker.rescale(scale)
        self.server.rescale(scale)

    def commit(self) -> None:
        """Store the new residuals of a step that has succeeded on all ranks."""
        self.worker.commit()
        self.server.commit()

    def rollback(self) -> None:
        """Drop the new residuals of a step that has failed."""
        self.worker.rollback()
        self.server.rollback()

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's and the server's residuals, as tensors."""
        return {store.role: of_tensors(store.state_dict()) for store in (self.worker, self.server)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals by those of a state; after an error they are unchanged."""
        loaded = ResidualPair(self.spec, self.decay)
        parts = read_fields("the state", "load one that state_dict() returned", dict.fromkeys(ROLES, mapping()), state)
        for store in (loaded.worker, loaded.server):
            store.load_state_dict(parts[store.role])
        self.worker, self.server = loaded.worker, loaded.server

    def ranges(self) -> list[Range]:
        """Return the ranges of parameters that have a residual."""
        return union(r for store in (self.worker, self.server) for r, _ in store.pieces())

    def norms(self) -> dict[str, float]:
        """Return the Euclidean norm of this rank's worker residual, by parameter name."""
        found: dict[str, float] = {}
        for (name, _, _), values in self.worker.pieces():
            found[name] = found.get(name, 0.0) + square(values)
        return {name: float(np.sqrt(square)) for name, square in found.items()}


def owned_values(r: Reduction, algorithm: Algorithm, rank: int, size: int) -> tuple[int, int]:
    """Return the begin and end of the values whose sums a rank encodes; 0, 0 if it encodes none."""
    if not algorithm.encodes_sums:
        return 0, 0
    mine = r.slices(size)[rank]
    return mine[0].begin, mine[-1].end
