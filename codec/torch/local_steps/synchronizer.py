"""Synchronizations of parameters and buffers, which succeed on all ranks or on none."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from codec import ArgumentError, CodecError, StateError
from codec.torch.local_steps import checkpoint
from codec.torch.local_steps.replica import Outer, Replica
from codec.torch.local_steps.settings import Settings
from codec.torch.replicas import model
from codec.torch.replicas.agreement import Position
from codec.torch.replicas.changes import Changes
from codec.torch.replicas.landing import Landing, carry
from codec.torch.replicas.mean import Problem
from codec.torch.replicas.ranks import Flight, Ranks
from codec.torch.replicas.undone import LEAST_STEPS, Probe

_log = logging.getLogger("codec.torch")


@dataclass
class Pending:
    """Synchronization that has started, and whose mean is not applied yet."""

    numbers: list[int]  # indices of the fragments
    due: int | None  # step after which the mean is applied; None: as soon as it is known
    landing: Landing
    flight: Flight | None = None  # collective in flight; None if the mean is known
    changes: Changes | None = None  # values of the collective
    former: int = 0  # number of steps of the round that ended with this synchronization; 0: none has ended


class Synchronizer(Replica):
    """Synchronizes parameters and buffers of this rank; see :class:`Replica` for the arguments.

    Attributes
    ----------
    pending : Pending or None
        Synchronization that has started.
    failed : int
        Number of synchronizations that failed.
    agreement : float
        Agreement of the ranks' changes in the last synchronization, as :meth:`Changes.agreement` returns it.
    """

    def __init__(self, settings: Settings, module: Any, optimizer: Any, outer: Outer | None) -> None:
        super().__init__(settings, module, optimizer, outer)
        self.pending: Pending | None = None
        self.failed = 0
        self.agreement = float("nan")
        self._probe: Probe | None = None  # samples of the last synchronization, until the next step of an optimizer
        self._warned = False

    def start(
        self,
        ranks: Ranks,
        step: int,
        numbers: Sequence[int],
        *,
        due: int | None = None,
        buffers: bool = False,
        outer: bool = True,
        exact: bool = False,
    ) -> None:
        """Start a synchronization of some fragments; :meth:`settle` or :meth:`land` completes it.

        Parameters
        ----------
        ranks : Ranks
            The ranks.
        step : int
            Number of steps so far.
        numbers : sequence of int
            Indices of the fragments.
        due : int, optional
            Step after which the mean is applied. Default: as soon as it is known.
        buffers : bool
            True: also average the buffers.
        outer : bool
            True: the outer optimizer, if there is one, takes a step with the mean change. False: the mean change is
            added to the anchors, and the outer optimizer's next step includes it.
        exact : bool
            True: send the changes, with all residuals added, lossless.
        """
        some, averaged = [self.fragments[i] for i in numbers], self.buffers if buffers else {}
        if not some and not averaged:
            return
        changes = Changes(some, self.masters(), averaged)
        problem = self.problem(changes, step)
        former, length = 0, self.schedule.length
        if outer and some and self.schedule.ends(step):
            former = length
            try:
                length = self.schedule.following(step)
            except ArgumentError as e:
                problem = problem or Problem(str(e))
            self.schedule.advance(length)
        if exact and self.feedback is not None and problem is None:
            changes.add_residuals(self.feedback, ranks.size)
        mine = None if due is None else [[x.clone() for x in parts] for parts in changes.parts]
        landing = Landing(some, changes.parts, mine, self.outer if outer else None, changes.buffer_means(), exact)
        terms = self.terms(changes, self.feedback, exact=exact)
        item = f"{ranks.call}, synchronization {self.rounds}, then {length} steps"
        try:
            flight = ranks.begin(terms, problem, item)
        except BaseException:
            self._repeat_round(former)
            raise
        self.pending = Pending(list(numbers), due, landing, flight, changes, former)

    def problem(self, changes: Changes, step: int) -> Problem | None:
        """Return the reason why changes cannot be sent; None if they can be sent."""
        if text := model.change_of(self.module, self.parameters):
            return Problem(text)
        return changes.problem(step)

    def land(self, ranks: Ranks) -> None:
        """Wait for the synchronization in flight, and apply its mean to the parameters; all ranks must call this.

        Raises
        ------
        ArgumentError, PeerError
            A parameter or buffer of this rank holds NaN or Inf, or parameters of the model were replaced, removed or
            added; or another rank has raised an error, or is lost. The synchronization is dropped.
        """
        if (pending := self.pending) is None:
            return
        pending.due = None
        try:
            if pending.flight is not None:
                ranks.wait(pending.flight)
        except CodecError:
            self._drop()
            raise
        except BaseException:  # such as KeyboardInterrupt: the next call waits for the collective again
            pending.landing.hold(self.masters())
            raise
        pending.flight = None
        self._apply(pending)

    def settle(self, ranks: Ranks, *, joint: bool) -> None:
        """Complete a synchronization whose end was interrupted in an earlier call on this rank.

        `joint`: the other ranks begin a collective now, which fails if this rank cannot complete the earlier one.
        """
        if self.pending is None or self.pending.due is not None:
            return
        try:
            self.land(ranks)
        except CodecError as e:
            _log.warning("a synchronization that was interrupted on this rank has failed: %s", e)
        except Exception as e:
            if joint:
                with suppress(CodecError):  # raised for the same reason
                    ranks.mean([], Problem(f"the last synchronization could not be completed: {e}"))
            raise

    def leave(self) -> None:
        """Wait for the synchronization in flight; apply its mean, or drop it if it has failed.

        A collective fails on all ranks or on none, so all ranks apply or drop without exchanging messages.
        """
        if (pending := self.pending) is None:
            return
        try:
            if pending.flight is not None:
                pending.flight.work.wait()
        except CodecError:
            self._drop()
            return
        pending.due = pending.flight = None
        self._apply(pending)

    def _drop(self) -> None:
        """Drop the synchronization in flight, which has failed on all ranks."""
        assert self.pending is not None
        self._repeat_round(self.pending.former)
        self.pending = None
        self.failed += 1

    def _repeat_round(self, former: int) -> None:
        """Give the next round the length of the former one (0: none has ended), if the ranks have not agreed on it."""
        if former:
            self.schedule.length = former

    def _apply(self, pending: Pending) -> None:
        """Apply a mean. If this is interrupted, `pending` stays, and the next call applies it."""
        landing = pending.landing
        if landing.outer is None and self.outer is not None:
            carry(landing.fragments)
        try:
            landing.move_anchors()
            landing.write(self.masters())
        except BaseException:
            landing.hold(self.masters())
            raise
        if landing.outer is not None:
            for f in landing.fragments:
                f.bases = None
        with torch.no_grad():
            for name, mean in landing.buffers.items():
                self.buffers[name].copy_(mean)
        if landing.is_exact:
            self.feedback = self.new_feedback()
        if pending.changes is not None and landing.fragments:
            self.agreement = pending.changes.agreement()
        self._probe = landing.probe
        self.pending = None
        self.rounds += 1

    def after_step(self) -> None:
        """Warn if the step of an optimizer has undone the last synchronization."""
        probe, self._probe = self._probe, None
        if probe is None or self._warned or self.schedule.length < LEAST_STEPS:
            return
        if name := probe.overwritten():
            self._warned = True
            _log.warning(
                "the optimizer has overwritten parameters, such as %r, with copies of its own from before the last "
                "synchronization, so that ranks do not come together: LocalSteps sets copies only if they are entries "
                "of optimizer.state",
                name,
            )

    # State

    def take_from(self, ranks: Ranks, source: int, receivers: Sequence[int], position: Position) -> list[str]:
        """As :meth:`Replica.take_from`; drop the synchronization in flight of a receiver."""
        if ranks.rank in receivers:
            self.pending = None
        return super().take_from(ranks, source, receivers, position)

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that this object restores; wait for the synchronization in flight first.

        Raises
        ------
        StateError
            The synchronization in flight has failed.
        """
        pending: dict[str, Any] = {}
        if (p := self.pending) is not None:
            try:
                if p.flight is not None:
                    p.flight.work.wait()
            except CodecError as e:
                raise StateError(
                    "the state cannot be saved, because the synchronization in flight has failed: call synchronize() "
                    "first, or change_group() if a rank is lost"
                ) from e
            [number], mine = p.numbers, p.landing.mine or [[]]
            names = [piece.name for piece in self.fragments[number].pieces]
            for key, values in (("mine", mine[0]), ("mean", p.landing.means[0])):
                pending[key] = {name: x.clone() for name, x in zip(names, values, strict=True)}
            pending |= {"fragment": number, "due": p.due}
        return self.entries() | {"pending": pending}

    def load_state_dict(self, state: Any, place: tuple[int, int]) -> checkpoint.Saved:
        """Replace the state by a saved one, and return its parsed form; see :meth:`Replica.load`."""
        saved = self.load(state, place)
        self.pending = None
        if p := saved.pending:
            number: int = p["fragment"]
            f = self.fragments[number]
            pairs = list(zip(f.pieces, f.anchors, strict=True))
            mine, mean = ([p[k][x.name].to(a.device, copy=True) for x, a in pairs] for k in ("mine", "mean"))
            self.pending = Pending([number], p["due"], Landing([f], [mean], [mine], self.outer, {}))
        return saved
