"""Steps of any optimizer without communication (local steps), with synchronizations of the parameters in between."""

import atexit
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from codec import StateError
from codec._options import settings_of
from codec.arguments import truth
from codec.specs import Quantize, Spec
from codec.torch.feedback.feedback import Feedback
from codec.torch.local_steps import agreement, checkpoint, residuals
from codec.torch.local_steps import warmup as warmup_
from codec.torch.local_steps.ranks import Problem, Ranks
from codec.torch.local_steps.settings import Settings
from codec.torch.local_steps.stats import LocalStats
from codec.torch.local_steps.synchronizer import Outer, Synchronizer

_log = logging.getLogger("codec.torch")


class LocalSteps:
    """Optimizer steps without communication (local steps), and a synchronization of the ranks after every few steps.

    Each rank trains the module by itself. Every `every` steps, the ranks average the changes of their parameters since
    the last synchronization, which they send as frames with error feedback, and continue from the mean. This is local
    SGD, or DiLoCo with an outer optimizer. Call :meth:`step` once after each step of the optimizer, on all ranks, and
    :meth:`finish` at the end.

    All ranks must create this object together, with the same arguments. Ranks whose parameters differ then adopt those
    of rank 0. Only buffers, and parameters that require gradients, are synchronized. Timeout, engine, threads and
    algorithm of the collectives are set by the ``with codec.options(...)`` blocks around the constructor. By default,
    the algorithm is "all_gather" for two ranks, and "two_shot" for more.

    Memory, in bytes per value of the parameters: 4 for the value of the last synchronization (8 if a parameter is
    float64), and up to 8 for residuals. A synchronization in flight needs as much again for residuals, and 4 for the
    changes (8 with `delay`).

    Parameters
    ----------
    model : torch.nn.Module
        The module, or the return value of ``torch.compile`` for it; a DistributedDataParallel is not supported. Its
        parameters may have any real floating-point dtype, be tied, be frozen, or have no gradients.
    optimizer : torch.optim.Optimizer
        Optimizer of the module, or its wrapper by Accelerate or Lightning. LocalSteps never calls its ``step``.
    every : int
        Number of steps between two synchronizations of a parameter.
    spec : Spec, str or Feedback
        Codec of the changes, or the name of a preset. Error feedback is applied if it is a lossy contraction
        (:attr:`codec.Spec.contraction`). A :class:`codec.torch.Feedback` sets the codec and the decay of residuals,
        such as ``Feedback(codec.TopK(), decay=0.95)``; the residuals that it holds are not used.
    warmup : int or (int, Spec)
        Number of initial steps in which the ranks average their gradients before each step of the optimizer, as
        DistributedDataParallel does, in place of local steps; and the codec of these gradients, lossless by default.
        Gradients are sent as float32.
    fragments : int
        Number of parts of the model that are synchronized one after the other, at equal intervals within `every` steps
        (streaming DiLoCo), to lower the peaks of traffic. At most `every`.
    delay : int
        Number of steps for which a synchronization runs in the background. The mean then replaces the changes that were
        sent. Changes of the steps since the start stay in the parameters, and the next synchronization sends them. At
        most ``every // fragments``.
    outer : callable, optional
        ``outer(parameters)`` returns an optimizer of the list of all synchronized parameters, whose gradient is minus
        the mean change, such as ``lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)``. Its steps
        must be bit-identical on all ranks. Default: the mean change is added to the parameters.
    group : ProcessGroup, optional
        Ranks that train together. Default: all ranks.

    Raises
    ------
    ArgumentError, SpecError
        An argument has a wrong type or value, or torch.distributed is not initialized.
    PeerError
        Another rank has raised an error, has different arguments or a different model, or is lost.

    Examples
    --------
    >>> model = torch.nn.Linear(100, 100)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> local = codec.torch.LocalSteps(model, optimizer, every=4)
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 100)).square().mean().backward()
    ...     optimizer.step()
    ...     local.step()
    >>> local.finish()
    >>> local.stats().synchronizations
    3
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        every: int = 10,
        spec: Spec | str | Feedback = Quantize(4),  # noqa: B008 - immutable
        warmup: int | tuple[int, Spec | str] = 0,
        fragments: int = 1,
        delay: int = 0,
        outer: Outer | None = None,
        group: Any = None,
    ) -> None:
        self._options = settings_of(None)
        ranks = Ranks(group, self._options)
        self._steps = 0
        self._apart = False  # True if this rank has taken steps since the last synchronization of all parameters
        self._averaged = False  # True if the gradients of the current step of the warm-up were averaged
        self._finished = False
        try:
            self._settings = Settings.of(every, spec, warmup, fragments, delay)
            self._state = Synchronizer(self._settings, model, optimizer, outer)
        except Exception as e:
            agreement.refuse(ranks, e)
            raise
        self._take_part(ranks)
        self._ranks = ranks
        self._handle = warmup_.listen(self._state.optimizer, self._before_step) if self._settings.warmup else None
        _all.add(self)

    def __repr__(self) -> str:
        state = "finished, " if self._finished else ""
        return (
            f"<codec.torch.LocalSteps every={self._settings.every}, {self._settings.spec}, {state}{self._steps} steps, "
            f"{self._state.rounds} synchronizations>"
        )

    # Steps

    @property
    def steps(self) -> int:
        """Number of calls of :meth:`step`."""
        return self._steps

    @property
    def synchronized(self) -> bool:
        """True if parameters are equal on all ranks: in the warm-up, and after a synchronization of all of them."""
        return not self._apart

    def step(self) -> None:
        """Count a step of the optimizer, and synchronize if scheduled; call this after each ``optimizer.step()``.

        All ranks must call this equally often, even if a GradScaler has skipped the optimizer's step. With gradient
        accumulation, call it once for each step of the optimizer, not for each backward pass.

        Raises
        ------
        ArgumentError
            On this rank, a parameter or buffer, or a gradient in the warm-up, holds NaN or Inf; or parameters of the
            model were replaced, removed or added. The message names the parameter.
        PeerError
            Another rank has raised an error, which the message contains, or is lost. If a rank is lost, continue by
            calling :meth:`change_group`.
        StateError
            :meth:`finish` was called before.

        Notes
        -----
        After an error on any rank, all ranks raise an error. Parameters, values of the last synchronization and
        residuals are unchanged, and the step is counted (not in the warm-up). To continue, take further steps, whose
        next synchronization includes the changes so far; or synchronize immediately by :meth:`synchronize`.
        """
        self._begin_call()
        settings, state = self._settings, self._state
        if self._steps < settings.warmup:
            self._end_warmup_step()
            return
        self._steps += 1
        self._apart = True
        if state.pending is not None and self._steps >= state.pending.due:
            state.land(self._ranks)
        for number in settings.due(self._steps):
            if settings.delay:
                state.launch(self._ranks, self._steps, number)
            else:
                state.synchronize(self._ranks, self._steps, [state.fragments[number]], buffers=settings.is_joint)
                self._apart = not settings.is_joint

    def synchronize(self, *, exact: bool = False) -> None:
        """Synchronize all parameters now, so that they are equal on all ranks; all ranks must call this.

        Float32, bfloat16 and float16 buffers, such as running statistics of batch norms, are also averaged, lossless.
        Scheduled synchronizations average buffers only with ``fragments=1`` and ``delay=0``.

        Parameters
        ----------
        exact : bool
            True: send the changes, with all residuals added, lossless. The mean change is then exact (in float32), it
            includes all earlier encoding errors, and no residuals remain. The model's state dict is then a complete
            checkpoint for any number of ranks, except for the state of an outer optimizer.

        Raises
        ------
        ArgumentError, PeerError, StateError
            As for :meth:`step`. Nothing is changed, except that a synchronization in flight has ended.
        """
        exact = truth("exact", exact)
        self._begin_call()
        self._state.leave()  # if the synchronization in flight has failed, it is dropped, and its changes are sent now
        some = self._state.fragments if self._steps >= self._settings.warmup else []
        self._state.synchronize(self._ranks, self._steps, some, buffers=True, exact=exact)
        self._apart = False

    def finish(self, *, exact: bool = False) -> None:
        """Synchronize all parameters a last time; later calls of :meth:`step` raise StateError.

        Parameters
        ----------
        exact : bool
            As for :meth:`synchronize`.

        Raises
        ------
        ArgumentError, PeerError, StateError
            As for :meth:`synchronize`. After an error, this method can be called again.
        """
        self.synchronize(exact=exact)
        if self._handle is not None:
            self._handle.remove()
        self._finished = True

    def _begin_call(self) -> None:
        """Check that the ranks are at the same step, if a state was loaded since the last check."""
        if self._finished:
            raise StateError("finish() was called before: make a new LocalSteps to go on")
        if not self._agreed:
            agreement.check_equal(agreement.agree(self._ranks, *self._head(self._ranks)))
            self._agreed = True

    # Warm-up

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...]) -> None:
        """Average the gradients if this is a step of the warm-up; the optimizer calls this before each step."""
        if not self._finished and self._steps < self._settings.warmup:
            self._begin_call()
            self._average_gradients(warmup_.problem_of(optimizer, arguments))
            self._averaged = True

    def _average_gradients(self, problem: Problem | None) -> None:
        spec = self._settings.warmup_spec
        warmup_.average_gradients(self._state.parameters, self._ranks, spec, problem, stream=self._steps)

    def _end_warmup_step(self) -> None:
        """Count a step of the warm-up; after the last one, record the parameters from which local steps start."""
        if not self._averaged:  # a GradScaler has skipped this rank's step, and other ranks wait for its gradients
            self._average_gradients(Problem("the optimizer has taken no step", skipped=True))
        self._averaged = False
        self._steps += 1
        if self._steps == self._settings.warmup:
            self._state.reset()
            self._take_part(self._ranks)

    # Ranks

    def change_group(self, group: Any = None) -> None:
        """Continue with another group, after ranks were lost or have joined; all of its ranks must call this.

        At the same time, each new rank creates a LocalSteps with the same arguments and this group. It receives the
        parameters of the last synchronization, the buffers, the state of the outer optimizer and the number of steps.
        Its own optimizer starts without state, unless the program copies one. Ranks that stay keep their parameters,
        and their residuals, scaled to the new number of ranks. Residuals of ranks that were lost cannot be recovered. A
        synchronization in flight is applied if it has succeeded, else dropped.

        Parameters
        ----------
        group : ProcessGroup, optional
            The new group. Default: all ranks.

        Raises
        ------
        ArgumentError
            `group` is not a group with this rank.
        PeerError
            Ranks have different arguments or models, or are lost. This object keeps its former group.

        Examples
        --------
        >>> model = torch.nn.Linear(100, 100)
        >>> local = codec.torch.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> local.change_group(torch.distributed.new_group([0]))
        """
        ranks = Ranks(group, self._options)
        state = self._state
        try:
            if self._finished:
                raise StateError("finish() was called before: make a new LocalSteps to go on")
            state.leave()
            if self._steps < self._settings.warmup:
                state.reset()
            moved = None if state.feedback is None else residuals.moved(state.feedback, ranks.rank, ranks.size)
        except Exception as e:
            agreement.refuse(ranks, e)
            raise
        if not self._take_part(ranks):
            state.feedback = moved
        ranks.traffic = self._ranks.traffic
        self._ranks = ranks

    def _head(self, ranks: Ranks) -> tuple[dict[str, Any], agreement.Position]:
        """Return the arguments and the position of this rank, for comparison with other ranks."""
        return self._state.arguments(ranks), self._state.position(self._steps)

    def _take_part(self, ranks: Ranks) -> bool:
        """Compare the ranks; return True if this rank was behind, and has received the most advanced rank's state."""
        self._agreed = False
        positions = agreement.agree(ranks, *self._head(ranks))
        source = agreement.source_of(positions)
        receivers = [rank for rank, theirs in enumerate(positions) if theirs != positions[source]]
        if receivers:
            self._state.take_from(ranks, source, receivers, positions[source].rounds)
        if takes := ranks.rank in receivers:
            self._steps, self._apart = positions[source].steps, False
            _log.info("rank %d of %d has taken the parameters of rank %d", ranks.rank, ranks.size, source)
        self._agreed = True
        return takes

    # Statistics and state

    def stats(self) -> LocalStats:
        """Return statistics of this rank.

        Returns
        -------
        LocalStats
            Totals since this object was created. They include other collectives of :mod:`codec.torch` that the program
            runs over the same group while a synchronization is in flight.
        """
        state = self._state
        norms = {} if state.feedback is None else state.feedback.norms()
        return LocalStats(
            **vars(self._ranks.traffic),
            steps=self._steps,
            synchronizations=state.rounds,
            failed_synchronizations=state.failed,
            values=sum(f.n for f in state.fragments),
            residual_norm=sum(x * x for x in norms.values()) ** 0.5,
            world_size=self._ranks.size,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state for a checkpoint. Each rank must save it with its model and optimizer.

        A run that resumes from the three states is bit-identical to the uninterrupted one. This method waits for a
        synchronization in flight.

        Returns
        -------
        dict
            Tensors, numbers and strings, in nested dicts that ``torch.load(weights_only=True)`` accepts.

        Raises
        ------
        StateError
            The synchronization in flight has failed: call :meth:`synchronize` first.
        """
        own = {"version": checkpoint.VERSION, "rank": self._ranks.rank, "world_size": self._ranks.size}
        return own | {"steps": self._steps, "apart": int(self._apart)} | self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state by a copy of one that :meth:`state_dict` returned. Load the model and the optimizer, too.

        The next call of :meth:`step` or :meth:`synchronize` compares the ranks: all of them must have loaded states
        that were saved at the same step.

        Parameters
        ----------
        state : mapping
            State of this rank.

        Raises
        ------
        StateError
            `state` is damaged, or belongs to another rank, another number of ranks or fragments, or a model with other
            parameters. Nothing is changed.
        """
        saved = self._state.load_state_dict(state, (self._ranks.rank, self._ranks.size))
        self._steps, self._apart = saved.steps, saved.apart
        self._agreed = self._averaged = False


_all: "weakref.WeakSet[LocalSteps]" = weakref.WeakSet()


@atexit.register
def _warn_of_unsynchronized() -> None:
    """Log a warning at the end of the process for each model that was not synchronized after its last step."""
    for local in _all:
        if not local.synchronized:
            _log.warning(
                "%r was not synchronized after its last step, so that ranks have different parameters: call finish() "
                "before the model is saved",
                local,
            )
