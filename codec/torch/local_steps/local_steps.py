"""Steps of any optimizer without communication (local steps), with synchronizations of the parameters in between."""

import atexit
import logging
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from codec import CodecError, StateError
from codec._options import settings_of
from codec.arguments import truth
from codec.specs import Quantize, Spec
from codec.torch.feedback.feedback import Feedback
from codec.torch.local_steps import checkpoint
from codec.torch.local_steps.replica import Outer
from codec.torch.local_steps.settings import Every, LocalSettings
from codec.torch.local_steps.stats import LocalStats
from codec.torch.local_steps.synchronizer import Synchronizer
from codec.torch.local_steps.training import Training
from codec.torch.replicas.holders import sites_group
from codec.torch.replicas.ranks import Ranks

_log = logging.getLogger("codec.torch")


class LocalSteps(Training):
    """Optimizer steps without communication (local steps), and a synchronization of the ranks after every few steps.

    Each rank trains the module by itself. Every `every` steps, the ranks average the changes of their parameters since
    the last synchronization, which they send as frames with error feedback, and continue from the mean. This is local
    SGD, or DiLoCo with an outer optimizer. Call :meth:`step` once after each step of the optimizer, on all ranks, and
    :meth:`finish` at the end.

    All ranks must create this object together, with the same arguments. Ranks whose parameters or buffers differ then
    adopt those of rank 0, and log a warning. Only parameters that require gradients are synchronized later, and
    buffers. Timeout, engine, threads and algorithm of the collectives are set by the ``with codec.options(...)`` blocks
    around the constructor. By default, the algorithm is "all_gather" for two ranks or sites, and "two_shot" for more.
    For :class:`codec.TopK`, by default, all ranks gather the frames, and the sum of a value's changes is divided by the
    number of ranks whose frame has a change of this value. If the options name an algorithm, it is divided by the
    number of all ranks.

    Memory, in bytes per value of the parameters: 4 for the value of the last synchronization (8 if a parameter is
    float64), and up to 8 for residuals. A synchronization in flight needs as much again for residuals, and 8 for the
    changes and the values before them (12 with `delay`).

    Parameters
    ----------
    model : torch.nn.Module
        The module, or the return value of ``torch.compile`` for it; a DistributedDataParallel is not supported. Its
        parameters may have any real floating-point dtype, be tied, be frozen, have no gradients, or be sharded by
        FSDP2.
    optimizer : torch.optim.Optimizer or list of Optimizer
        Optimizer of the module, or all of them, or their wrappers by Accelerate or Lightning. LocalSteps never calls
        their ``step``. If their states contain copies of parameters in float32, synchronizations set these, too.
    every : int or callable
        Number of steps between two synchronizations of a parameter. A function ``every(steps)`` returns this number,
        and is called whenever each parameter was synchronized, with the number of steps so far. It must return the same
        on all ranks.
    spec : Spec, str or Feedback
        Codec of the changes, or the name of a preset. Error feedback is applied if it is a lossy contraction
        (:attr:`codec.Spec.contraction`). A :class:`codec.torch.Feedback` sets the codec and the decay of residuals,
        such as ``Feedback(codec.TopK(), decay=0.95)``; the residuals that it holds are not used. Norms, biases and
        other small parameters are sent lossless if together they have at most 1/32 of all values.
    warmup : int or (int, Spec)
        Number of initial steps in which the ranks average their gradients before each step of an optimizer, as
        DistributedDataParallel does, in place of local steps; and the codec of these gradients, lossless by default.
        Gradients are sent as float32. Each parameter that requires a gradient must be in one of the optimizers.
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
        must be bit-identical on all ranks. Default: the mean change is added to the parameters. With `fragments`, the
        list has the rows of a divided parameter as several parameters.
    group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
        Ranks that train together. Default: all ranks. With several ranks a site, which average gradients in each step:
        a DeviceMesh of two dimensions, between sites and within them, or the groups (between, within).

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
        every: Every = 10,
        spec: Spec | str | Feedback = Quantize(4),  # noqa: B008 - immutable
        warmup: int | tuple[int, Spec | str] = 0,
        fragments: int = 1,
        delay: int = 0,
        outer: Outer | None = None,
        group: Any = None,
    ) -> None:
        options = settings_of(None)
        ranks = Ranks(sites_group(group, model), options)
        try:
            settings = LocalSettings.of(every, spec, warmup, fragments, delay, options)
            state = Synchronizer(settings, model, optimizer, outer)
        except Exception as e:
            ranks.fail(e)
            raise
        super().__init__(settings, state, ranks, options)
        _all.add(self)

    def __repr__(self) -> str:
        finished = "finished, " if self._finished else ""
        return (
            f"<codec.torch.LocalSteps every={self._state.schedule.length}, {self._settings.spec}, {finished}"
            f"{self._steps} steps, {self._state.rounds} synchronizations>"
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
        accumulation, call it once for each step of the optimizer, not for each backward pass. With several optimizers,
        call it once after the steps of all of them.

        Raises
        ------
        ArgumentError
            On this rank, a parameter or buffer, or a gradient in the warm-up, holds NaN or Inf; or parameters of the
            model were replaced, removed or added; or the function `every` has failed. The message names the cause.
        PeerError
            Another rank has raised an error, which the message contains, is in another call, or is lost. If a rank is
            lost, continue by calling :meth:`change_group`.
        StateError
            :meth:`finish` was called before.

        Notes
        -----
        After an error on any rank, all ranks raise an error. Parameters, values of the last synchronization and
        residuals are unchanged, and the step is counted (not in the warm-up). To continue, take further steps, whose
        next synchronization includes the changes so far; or synchronize immediately by :meth:`synchronize`.

        An exception in the outer optimizer, or a KeyboardInterrupt, is raised on one rank alone, when the others have
        already synchronized. The next call of any method on this rank completes the synchronization.
        """
        if self._steps < self._settings.warmup:
            self._end_warmup_step()
        else:
            self._local_step()

    def synchronize(self, *, exact: bool = False) -> None:
        """Synchronize all parameters now, so that they are equal on all ranks; all ranks must call this.

        If no rank has changed a parameter since its last synchronization, its changes are not sent. An outer optimizer
        takes no step: its next one, in :meth:`step` or :meth:`finish`, includes the changes that this call has
        averaged. To evaluate the mean of the ranks without any effect on the training, use :meth:`averaged`.

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
        self._synchronize("synchronize()", exact=truth("exact", exact), outer=False)

    def finish(self, *, exact: bool = False) -> None:
        """Synchronize all parameters a last time; later calls of :meth:`step` raise StateError.

        An outer optimizer takes a step for the parameters that a rank has changed since their last synchronization.

        Parameters
        ----------
        exact : bool
            As for :meth:`synchronize`.

        Raises
        ------
        ArgumentError, PeerError, StateError
            As for :meth:`synchronize`. After an error, this method can be called again.
        """
        self._synchronize("finish()", exact=truth("exact", exact), outer=True)
        for handle in self._handles:
            handle.remove()
        self._finished = True

    @contextmanager
    def averaged(self, *, exact: bool = False) -> Generator[None]:
        """Return a context manager within which the model has the mean parameters and buffers of all ranks.

        Use it to evaluate the model, or to save it, without any effect on the training: the values are those that
        :meth:`synchronize` would set, and at the end of the ``with`` block, each rank has its own parameters and
        buffers again. All ranks must enter the block. Do not train within it.

        Parameters
        ----------
        exact : bool
            True: send the changes lossless, with all residuals added.

        Raises
        ------
        ArgumentError, PeerError, StateError
            As for :meth:`synchronize`, on entering the block. Nothing is changed.

        Examples
        --------
        >>> model = torch.nn.Linear(100, 100)
        >>> local = codec.torch.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with local.averaged():
        ...     loss = model(torch.randn(8, 100)).square().mean()
        """
        exact = truth("exact", exact)
        self._begin_call("averaged()")
        self._state.settle(self._ranks, joint=True)
        with self._state.averaged(self._ranks, self._steps, exact=exact):
            self._reading = True
            try:
                yield
            finally:
                self._reading = False

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
        group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
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
        state = self._state
        ranks = Ranks(sites_group(group, state.module), self._options)
        try:
            self._check_open()
            with suppress(CodecError):  # the synchronization in flight has failed on all ranks, and is dropped
                state.land(self._ranks)
            if self._steps < self._settings.warmup:
                state.reset()
            moved = state.moved_residuals(self._ranks, ranks)
        except Exception as e:
            ranks.fail(e)
            raise
        former, state.feedback = (state.feedback, state.holders), moved
        try:
            self._join(ranks)
        except BaseException:
            state.feedback, state.holders = former
            raise
        ranks.traffic = self._ranks.traffic
        self._ranks = ranks

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
            blocked_s=state.overlap.blocked_s,
            values=state.share(),
            residual_norm=sum(x * x for x in norms.values()) ** 0.5,
            agreement=state.agreement,
            world_size=self._ranks.sites,
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
            The synchronization in flight has failed: call :meth:`synchronize` first. Or the block of :meth:`averaged`
            has not ended.
        """
        self._check_reading()
        self._state.settle(self._ranks, joint=False)
        own = {"rank": self._ranks.rank, "world_size": self._ranks.size, "steps": self._steps}
        return checkpoint.STATE.save(own | {"apart": int(self._apart)} | self._state.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state by a copy of one that :meth:`state_dict` returned, after the model's state was loaded.

        The model may be loaded before or after this object is created. Load the optimizer's state, too.

        The next call of :meth:`step` or :meth:`synchronize` compares the ranks: all of them must have loaded states
        that were saved at the same step.

        Parameters
        ----------
        state : mapping
            State of this rank.

        Raises
        ------
        StateError
            `state` is damaged, or belongs to another rank, another number of ranks or fragments, or to parameters that
            the model does not have: load the model's state of this rank first. Nothing is changed.
        """
        self._check_reading()
        agreed, self._agreed = self._agreed, False  # also after a KeyboardInterrupt, which may leave a part of a state
        try:
            saved = self._state.load_state_dict(state, (self._ranks.rank, self._ranks.size))
        except StateError:  # nothing was changed
            self._agreed = agreed
            raise
        self._steps, self._apart = saved.steps, saved.apart


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
