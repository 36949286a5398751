"""Training of one model by local steps: what its calls have in common."""

from contextlib import suppress
from typing import Any

import torch

from codec import CallOptions, CodecError, StateError
from codec.torch.local_steps.settings import LocalSettings
from codec.torch.local_steps.synchronizer import Synchronizer
from codec.torch.local_steps.warmup import Warmup, listen
from codec.torch.replicas.ranks import Ranks


class Training:
    """Counts the steps of a rank, and checks each call; base class of :class:`LocalSteps`.

    Parameters
    ----------
    settings : LocalSettings
        Arguments of LocalSteps.
    state : Synchronizer
        State of this rank.
    ranks : Ranks
        The ranks, all of which must create this object together.
    options : CallOptions
        Settings of the collectives.
    """

    def __init__(self, settings: LocalSettings, state: Synchronizer, ranks: Ranks, options: CallOptions) -> None:
        self._settings, self._state, self._options = settings, state, options
        self._steps = 0
        self._apart = False  # True: this rank has taken steps since the last synchronization of all parameters
        self._finished = self._reading = False
        self._agreed = False  # True: the ranks are known to have equal arguments and positions
        self._join(ranks)
        self._ranks = ranks
        self._warmup = Warmup(state, settings.warmup_spec)
        self._handles = [
            *(listen(each.register_step_pre_hook, self._before_step) for each in state.optimizers),
            *(listen(each.register_step_post_hook, state.after_step) for each in state.optimizers),
        ]

    def _join(self, ranks: Ranks) -> bool:
        """Compare the ranks; return True if this rank has taken the state of another one."""
        self._agreed = False
        steps = self._state.join(ranks, self._steps)
        self._agreed = True
        if steps is not None:
            self._steps, self._apart, self._state.pending = steps, False, None
        return steps is not None

    def _synchronize(self, call: str, *, exact: bool, outer: bool) -> None:
        """Synchronize the fragments that a rank has changed; all of them if residuals are sent, too."""
        self._begin_call(call)
        state, ranks = self._state, self._ranks
        state.settle(ranks, joint=True)
        with suppress(CodecError):  # a synchronization in flight that has failed: its changes are sent now
            state.land(ranks)
        masters = state.masters()
        changed = ranks.agreed(call, {}, [int(f.has_changed(masters)) for f in state.fragments])
        some: list[int] = []
        if self._steps >= self._settings.warmup:
            some = [i for i, flags in enumerate(zip(*changed, strict=True)) if exact or any(flags)]
        state.start(ranks, self._steps, some, buffers=True, outer=outer, exact=exact)
        state.land(ranks)
        self._apart = False

    def _local_step(self) -> None:
        """Count a step after the warm-up, and synchronize if scheduled."""
        self._begin_call(f"step() after step {self._steps + 1}")
        settings, state, ranks = self._settings, self._state, self._ranks
        self._steps += 1
        self._apart = True
        due = state.schedule.due(self._steps)
        state.settle(ranks, joint=bool(due))
        if state.pending is not None and state.pending.due is not None and self._steps >= state.pending.due:
            state.land(ranks)
        for number in due:
            if settings.delay:
                state.start(ranks, self._steps, [number], due=self._steps + settings.delay)
            else:
                state.start(ranks, self._steps, [number], buffers=settings.is_joint)
                state.land(ranks)
                self._apart = not settings.is_joint

    def _begin_call(self, call: str) -> None:
        """Check that a method may be called; compare the ranks if a state was loaded since the last comparison."""
        self._check_open()
        self._ranks.call = call
        self._state.replaced = None
        if not self._agreed:
            self._state.compare(self._ranks, self._steps)
            self._agreed = True

    def _check_open(self) -> None:
        if self._finished:
            raise StateError("finish() was called before: make a new LocalSteps to go on")
        self._check_reading()

    def _check_reading(self) -> None:
        if self._reading:
            raise StateError("the model has the mean of all ranks now: end the block of averaged() first")

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...]) -> None:
        """Average the gradients if this is a step of the warm-up; an optimizer calls this before each step."""
        if not self._finished and self._steps < self._settings.warmup:
            self._begin_call(f"step {self._steps + 1} of the warm-up")
            self._warmup.before_step(self._ranks, self._steps, optimizer, arguments)

    def _end_warmup_step(self) -> None:
        """Count a step of the warm-up; after the last one, record the parameters from which local steps start."""
        self._begin_call(f"step {self._steps + 1} of the warm-up")
        self._warmup.end_step(self._ranks, self._steps)
        self._steps += 1
        if self._steps < self._settings.warmup:
            return
        try:
            self._state.schedule.begin()
        except Exception as e:
            self._ranks.fail(e)
            raise
        self._state.reset()
        self._join(self._ranks)
