"""Training by local steps: the steps of this rank, and the calls in which it meets the other ranks."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from codec import StateError
from codec.torch.local_steps import checkpoint, membership
from codec.torch.local_steps.reading import Reading
from codec.torch.local_steps.settings import Settings
from codec.torch.local_steps.stats import LocalStats
from codec.torch.local_steps.synchronizer import Synchronizer
from codec.torch.local_steps.warmup import Warmup, listen_after, listen_before
from codec.torch.replicas import agreement
from codec.torch.replicas.ranks import Ranks


class Training:
    """Training of one model; its methods are those of :class:`LocalSteps`, which documents them.

    Parameters
    ----------
    settings : Settings
        Arguments of LocalSteps.
    state : Synchronizer
        State of this rank.
    ranks : Ranks
        The ranks, all of which must create this object together.

    Attributes
    ----------
    steps : int
        Number of calls of :meth:`step`.
    apart : bool
        True if this rank has taken steps since the last synchronization of all parameters.
    finished : bool
        True after :meth:`finish`.
    """

    def __init__(self, settings: Settings, state: Synchronizer, ranks: Ranks) -> None:
        self.settings, self.state, self._options = settings, state, ranks.given_options
        self.steps = 0
        self.apart = self.finished = self._reading = False
        self._join(ranks)
        self._ranks = ranks
        self._warmup = Warmup(state.parameters, state.optimizers, settings.warmup_spec)
        self._handles = listen_after(state.optimizers, state.after_step)
        if settings.warmup:
            self._handles += listen_before(state.optimizers, self._before_step)

    def step(self) -> None:
        """Count a step, and synchronize if scheduled; see :meth:`LocalSteps.step`."""
        settings, state = self.settings, self.state
        if self.steps < settings.warmup:
            self._begin_call(f"step {self.steps + 1} of the warm-up")
            self._end_warmup_step()
            return
        self._begin_call(f"step() after step {self.steps + 1}")
        self.steps += 1
        self.apart = True
        due = state.schedule.due(self.steps)
        state.settle(self._ranks, joint=bool(due))
        if state.pending is not None and state.pending.due is not None and self.steps >= state.pending.due:
            state.land(self._ranks)
        for number in due:
            if settings.delay:
                state.start(self._ranks, self.steps, [number], due=self.steps + settings.delay)
            else:
                state.start(self._ranks, self.steps, [number], buffers=settings.is_joint)
                state.land(self._ranks)
                self.apart = not settings.is_joint

    def synchronize(self, call: str, *, exact: bool, outer: bool) -> None:
        """Synchronize the fragments that a rank has changed; all of them if residuals are sent, too.

        `call` names the program's call; `outer`: the outer optimizer takes a step.
        """
        self._begin_call(call)
        state = self.state
        state.settle(self._ranks, joint=True)
        state.leave()  # if the synchronization in flight has failed, it is dropped, and its changes are sent now
        masters = state.masters()
        changed = [f.has_changed(masters) for f in state.fragments]
        theirs = self._ranks.compare(changed)
        some: list[int] = []
        if self.steps >= self.settings.warmup:
            some = [i for i in range(len(changed)) if exact or any(each[i] for each in theirs)]
        state.start(self._ranks, self.steps, some, buffers=True, outer=outer, exact=exact)
        state.land(self._ranks)
        self.apart = False

    def finish(self, *, exact: bool) -> None:
        """Synchronize a last time; see :meth:`LocalSteps.finish`."""
        self.synchronize("finish()", exact=exact, outer=True)
        for handle in self._handles:
            handle.remove()
        self.finished = True

    @contextmanager
    def averaged(self, *, exact: bool) -> Generator[None]:
        """Show the mean of all ranks in the model; see :meth:`LocalSteps.averaged`."""
        self._begin_call("averaged()")
        self.state.settle(self._ranks, joint=True)
        reading = Reading(self.state, self._ranks, self.steps, exact=exact)
        self._reading = True
        try:
            yield
        finally:
            self._reading = False
            reading.end()

    def _begin_call(self, call: str) -> None:
        """Check that a method may be called; compare the ranks if a state was loaded since the last comparison."""
        self._check_open()
        self._ranks.call = call
        self.state.replaced = None
        if not self._agreed:
            membership.check(self.state, self._ranks, self.steps)
            self._agreed = True

    def _check_open(self) -> None:
        if self.finished:
            raise StateError("finish() was called before: make a new LocalSteps to go on")
        self._check_reading()

    def _check_reading(self) -> None:
        if self._reading:
            raise StateError("the model has the mean of all ranks now: end the block of averaged() first")

    # Warm-up

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...]) -> None:
        """Average the gradients if this is a step of the warm-up; an optimizer calls this before each step."""
        if not self.finished and self.steps < self.settings.warmup:
            self._begin_call(f"step {self.steps + 1} of the warm-up")
            self._warmup.before_step(self._ranks, self.steps, optimizer, arguments)

    def _end_warmup_step(self) -> None:
        """Count a step of the warm-up; after the last one, record the parameters from which local steps start."""
        self._warmup.end_step(self._ranks, self.steps)
        self.steps += 1
        if self.steps < self.settings.warmup:
            return
        try:
            self.state.schedule.begin()
        except Exception as e:
            agreement.refuse(self._ranks, e)
            raise
        self.state.reset()
        self._join(self._ranks)

    # Ranks

    def change_group(self, group: Any) -> None:
        """Continue with another group; see :meth:`LocalSteps.change_group`."""
        ranks = Ranks(group, self._options)
        state = self.state
        try:
            self._check_open()
            state.leave()
            if self.steps < self.settings.warmup:
                state.reset()
            moved = state.moved_residuals(ranks)
        except Exception as e:
            agreement.refuse(ranks, e)
            raise
        if not self._join(ranks):
            state.feedback = moved
        ranks.traffic = self._ranks.traffic
        self._ranks = ranks

    def _join(self, ranks: Ranks) -> bool:
        """Compare the ranks; return True if this rank has taken the state of another one."""
        self._agreed = False
        steps = membership.join(self.state, ranks, self.steps)
        self._agreed = True
        if steps is not None:
            self.steps, self.apart = steps, False
        return steps is not None

    # Statistics and state

    def stats(self) -> LocalStats:
        """Return statistics of this rank."""
        state = self.state
        norms = {} if state.feedback is None else state.feedback.norms()
        return LocalStats(
            **vars(self._ranks.traffic),
            steps=self.steps,
            synchronizations=state.rounds,
            failed_synchronizations=state.failed,
            values=sum(f.n for f in state.fragments),
            residual_norm=sum(x * x for x in norms.values()) ** 0.5,
            agreement=state.agreement,
            world_size=self._ranks.size,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state; see :meth:`LocalSteps.state_dict`."""
        self._check_reading()
        self.state.settle(self._ranks, joint=False)
        own = {"version": checkpoint.VERSION, "rank": self._ranks.rank, "world_size": self._ranks.size}
        return own | {"steps": self.steps, "apart": int(self.apart)} | self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state; see :meth:`LocalSteps.load_state_dict`."""
        self._check_reading()
        agreed, self._agreed = self._agreed, False  # also after a KeyboardInterrupt, which may leave a part of a state
        try:
            saved = self.state.load_state_dict(state, (self._ranks.rank, self._ranks.size))
        except StateError:  # nothing was changed
            self._agreed = agreed
            raise
        self.steps, self.apart = saved.steps, saved.apart
