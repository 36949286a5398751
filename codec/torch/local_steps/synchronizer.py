"""Synchronizations of parameters and buffers, which succeed on all ranks or on none."""

import copy
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from codec import ArgumentError, CodecError, StateError
from codec.specs import Lossless
from codec.torch.feedback.feedback import Feedback
from codec.torch.local_steps import checkpoint
from codec.torch.local_steps.overlap import Overlap
from codec.torch.local_steps.replica import Outer, Replica
from codec.torch.local_steps.settings import LocalSettings
from codec.torch.replicas import model
from codec.torch.replicas.changes import Changes
from codec.torch.replicas.landing import Landing
from codec.torch.replicas.ranks import Flight, Ranks
from codec.torch.replicas.undone import LEAST_STEPS, Probe

_log = logging.getLogger("codec.torch")


class Synchronizer(Replica):
    """Synchronizes parameters and buffers of this rank; see :class:`Replica` for the arguments.

    Attributes
    ----------
    pending : Landing or None
        Synchronization that has started, and whose mean is not applied yet.
    failed : int
        Number of synchronizations that failed.
    agreement : float
        Agreement of the ranks' changes in the last synchronization, as :meth:`Changes.agreement` returns it.
    overlap : Overlap
        Time in which the program has waited.
    """

    def __init__(self, settings: LocalSettings, module: Any, optimizer: Any, outer: Outer | None) -> None:
        super().__init__(settings, module, optimizer, outer)
        self.pending: Landing | None = None
        self.failed = 0
        self.agreement = float("nan")
        self.overlap = Overlap(settings.delay)
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
        """Start a synchronization of the fragments `numbers`; :meth:`settle` or :meth:`land` completes it.

        Parameters
        ----------
        ranks, step, numbers
            The ranks, the number of steps so far, and indices of fragments.
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
        changes = Changes(some, self.masters(), averaged, self.holders)
        error, former, length = self._error(changes, step), 0, self.schedule.length
        if outer and some and self.schedule.ends(step):
            former = length
            try:
                length = self.schedule.following(step)
            except ArgumentError as e:
                error = error or e
            self.schedule.advance(length)
        mine = None if due is None else [[x.clone() for x in parts] for parts in changes.parts]
        landing = Landing(some, changes.parts, mine, self.outer if outer else None, due, exact, changes, former=former)
        item = f"synchronization {self.rounds}, then {length} steps"
        self.overlap.begin()
        try:
            landing.flight = self._begin(ranks, changes, self.feedback, error, item, exact=exact)
        except BaseException:
            self._repeat_round(former)
            raise
        self.pending = landing

    def _error(self, changes: Changes, step: int) -> ArgumentError | None:
        """Return the reason why changes cannot be sent; None if they can be sent."""
        model.reshard(self.module)
        if text := model.change_of(self.module, self.parameters):
            return ArgumentError(text)
        return changes.error(step)

    def _begin(
        self,
        ranks: Ranks,
        changes: Changes,
        feedback: Feedback | None,
        error: Exception | None,
        item: str,
        *,
        exact: bool,
    ) -> Flight:
        """Start to compute the mean of changes; if `exact`, lossless, with the residuals added."""
        if exact and self.feedback is not None and error is None:
            changes.add_residuals(self.feedback, ranks.sites)
        if exact:
            terms = changes.terms(Lossless(), None, 0, "")
        else:
            terms = changes.terms(self.settings.spec, feedback, self.rounds, self.settings.algorithm)
        return ranks.begin(terms, error, f"{ranks.call}, {item}")

    def land(self, ranks: Ranks) -> None:
        """Wait for the synchronization in flight, and apply its mean to the parameters.

        A collective succeeds on all ranks or on none, so all ranks apply the mean, or drop the synchronization.

        Raises
        ------
        ArgumentError, PeerError
            A parameter or buffer of this rank holds NaN or Inf, or parameters of the model were replaced, removed or
            added; or another rank has raised an error, or is lost. The synchronization is dropped.
        """
        if (pending := self.pending) is None:
            return
        delayed, pending.due = pending.due is not None, None
        try:
            if pending.flight is not None:
                with self.overlap.waiting(delayed=delayed):
                    ranks.wait(pending.flight)
        except CodecError:
            self._repeat_round(pending.former)
            self.pending = None
            self.failed += 1
            raise
        except BaseException:  # such as KeyboardInterrupt: the next call waits for the collective again
            pending.hold(self.masters())
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
                text = f"the last synchronization could not be completed: {e}"
                ranks.fail(ArgumentError(text))
            raise

    def _repeat_round(self, former: int) -> None:
        """Give the next round the length of the former one (0: none has ended), if the ranks have not agreed on it."""
        if former:
            self.schedule.length = former

    def _apply(self, pending: Landing) -> None:
        """Apply a mean. If this is interrupted, `pending` stays, and the next call applies it."""
        if pending.outer is None and self.outer is not None:  # the next step of the outer optimizer begins here
            for f in pending.fragments:
                f.bases = f.bases or [a.detach().clone() for a in f.anchors]
        model.reshard(self.module)
        try:
            pending.move_anchors()
            pending.write(self.masters())
        except BaseException:
            pending.hold(self.masters())
            raise
        if pending.outer is not None:
            for f in pending.fragments:
                f.bases = None
        if pending.changes is not None:
            with torch.no_grad():
                for name, mean in pending.changes.means.items():
                    self.buffers[name].copy_(mean)
            if pending.fragments:
                self.agreement = pending.changes.agreement()
        if pending.is_exact:
            self.feedback = self.new_feedback()
        self._probe = pending.probe
        self.pending = None
        self.rounds += 1

    @contextmanager
    def averaged(self, ranks: Ranks, step: int, *, exact: bool) -> Generator[None]:
        """Return a context manager within which the model has the mean of all ranks; all of them must enter it."""
        some = self.fragments if step >= self.settings.warmup else []
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            if some or self.buffers:
                changes = Changes(some, self.masters(), self.buffers, self.holders)
                feedback = None if exact else copy.copy(self.feedback)  # its residuals are dropped with it
                item = f"synchronization {self.rounds}"
                ranks.wait(self._begin(ranks, changes, feedback, self._error(changes, step), item, exact=exact))
                means = [
                    (piece.values, anchor.detach() + mean.to(anchor))
                    for f, parts in zip(some, changes.parts, strict=True)
                    for piece, anchor, mean in zip(f.pieces, f.anchors, parts, strict=True)
                ]
                means += [(self.buffers[name].detach(), x) for name, x in changes.means.items()]
                own = [(x, x.clone()) for x, _ in means]
                for x, mean in means:
                    x.copy_(mean)
            yield
        finally:
            model.reshard(self.module)
            for x, values in own:
                x.copy_(values)

    def after_step(self, *_: Any) -> None:
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
            [f], mine = p.fragments, p.mine or [[]]
            for key, values in (("mine", mine[0]), ("mean", p.means[0])):
                pending[key] = {piece.name: x.clone() for piece, x in zip(f.pieces, values, strict=True)}
            pending |= {"fragment": self.fragments.index(f), "due": p.due}
        return self.entries() | {"pending": pending}

    def load_state_dict(self, state: Any, place: tuple[int, int]) -> checkpoint.LocalState:
        """Replace the state by a saved one, and return its parsed form; see :meth:`Replica.load`."""
        saved = self.load(state, place)
        self.pending = None
        if p := saved.pending:
            number: int = p["fragment"]
            f = self.fragments[number]
            pairs = list(zip(f.pieces, f.anchors, strict=True))
            mine, mean = ([p[k][x.name].to(a.device, copy=True) for x, a in pairs] for k in ("mine", "mean"))
            self.pending = Landing([f], [mean], [mine], self.outer, p["due"])
        return saved
