"""1-bit Adam and 0/1 Adam: steps of torch.optim.Adam, then steps with averaged momenta and frozen second moments."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Literal

import torch

from codec import ArgumentError, CallOptions, StateError, Status
from codec.arguments import shown
from codec.specs import Lossless, Quantize, Spec
from codec.torch.ddp.policy import Chooser, Policy, policy_of
from codec.torch.ddp.stats import HookStats
from codec.torch.one_bit_adam import checkpoint, parameters
from codec.torch.one_bit_adam.averager import Averager
from codec.torch.one_bit_adam.link import EVEN_POLICY, check_positive, check_scaler, check_spec, check_warmup
from codec.torch.one_bit_adam.model import check_model
from codec.torch.one_bit_adam.phase import AdamPhase
from codec.torch.one_bit_adam.schedule import VarianceSchedule, parsed
from codec.torch.one_bit_adam.steps import AdamSteps
from codec.torch.reduction.arguments import plain_spec


class OneBitAdam(torch.optim.Adam):
    """Adam that sends quantized momenta instead of gradients, after a warm-up (1-bit Adam, Tang et al. 2021).

    Provisional: may change in any version.
    By default momenta are sent in 4 bits. ``spec=Sign(group_size=1024)`` sends only their signs, as 1-bit Adam does.
    With a :class:`VarianceSchedule` the optimizer is 0/1 Adam (Lu et al. 2023).

    In the first `freeze_step` steps, the warm-up, this is :class:`torch.optim.AdamW` (or Adam) with the mean gradients
    of all ranks. After these steps the second moments v are frozen. In each later step, every rank computes its
    momentum ``b1 m + (1 - b1) g`` and sends it with error feedback. All ranks set m to the decoded mean, limited to
    `max_ratio` times sqrt(v), and subtract ``lr m^ / (sqrt(v^) + eps)`` from the parameters, where ^ is Adam's bias
    correction. Values whose v is 0 at the freeze no longer change, except by weight decay.

    Call :meth:`register` with the DistributedDataParallel; gradients and momenta are then sent in the backward pass.
    Without it, :meth:`step` averages them. Parameter groups, schedules and state dicts work as with torch.optim.Adam.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters or parameter groups, as for torch.optim.Adam: real, and with dense gradients. With
        the option ``bias_correction=False``, the moments of a group are not bias-corrected, as in DeepSpeed.
    lr : float
        Learning rate.
    betas : (float, float)
        Decay rates b1 of the momentum and b2 of the second moments.
    eps : float
        Term added to the denominator.
    weight_decay : float
        Weight decay.
    freeze_step : int, "auto" or VarianceSchedule
        Number of steps before second moments are frozen, at least 1. Use 20 to 40% of the steps of a run. "auto":
        freeze as soon as the sum of second moments has changed by at most 4% over the last 1 / (1 - b2) steps. The
        warm-up of the learning rate should end before the freeze. :class:`VarianceSchedule`: 0/1 Adam, which sends
        gradients in only some steps before the freeze, and takes steps without communication after it.
    spec : Spec or str
        Codec of momenta, or the name of a preset. It must be lossless or a contraction
        (:attr:`codec.Spec.contraction`). Use :class:`codec.Sign` for long runs; it can raise the loss of short ones.
    warmup : Spec or str
        Codec of gradients before the freeze. With a lossless codec, the warm-up sends most of the bytes of a run.
    decoupled_weight_decay : bool
        True: weight decay as in AdamW. False: weight decay is added to the gradient, as in Adam.
    max_ratio : float or None
        Upper bound of abs(m) / sqrt(v) in steps that do not update v. No value then moves by more than about
        `max_ratio` times `lr`. None: no bound, as in the papers. Values with a tiny v, such as rarely used rows of an
        embedding, can then move by thousands of `lr`, so that the run diverges.

    Raises
    ------
    ArgumentError, SpecError
        An argument has a wrong type or value.

    Examples
    --------
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    >>> optimizer = codec.torch.OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2).register(model)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 100)).square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.frozen
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | Literal["auto"] | VarianceSchedule,
        spec: Spec | str = Quantize(4, levels="odd", rounding="nearest"),  # noqa: B008 - immutable
        warmup: Spec | str = Lossless(),  # noqa: B008 - immutable
        decoupled_weight_decay: bool = True,
        max_ratio: float | None = 1.0,
    ) -> None:
        self.schedule, self.freeze_step = parsed(freeze_step)
        self.max_ratio = check_positive("max_ratio", max_ratio)
        self.spec, self.warmup = plain_spec(spec), plain_spec(warmup)
        check_spec(self.spec)
        try:
            super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=bool(decoupled_weight_decay))
        except (ValueError, TypeError) as e:
            raise ArgumentError(str(e)) from None
        window = max(parameters.window(group) for group in self.param_groups)
        self._begin(AdamPhase(self.freeze_step, self.schedule, window))

    def _begin(self, phase: AdamPhase) -> None:
        """Create the objects that hold the optimizer's phase, arithmetic and communication."""
        self._phase = phase
        phase.watch()
        self._arithmetic = AdamSteps(self, self.schedule is not None, self.max_ratio)
        self._averager = Averager(self, phase, self._arithmetic, self.warmup, self.spec)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch.optim.Adam does. All ranks must call this, before the freeze.

        Parameters
        ----------
        param_group : dict
            Parameters and their options.

        Raises
        ------
        ArgumentError
            A parameter is complex or does not belong to the registered module; or an option is not supported:
            ``amsgrad``, ``maximize``, ``fused``, ``capturable``, ``differentiable``.
        StateError
            Second moments are frozen. New parameters have none, so they would not change.
        """
        super().add_param_group(param_group)
        try:
            parameters.check_group(self.param_groups[-1])
            check_warmup(self.warmup, self.param_groups[-1])
            if "_averager" in self.__dict__:  # absent while torch's constructor adds the first groups
                self._averager.check_new()
        except (ArgumentError, StateError):
            self.param_groups.pop()
            raise

    # Communication

    def register(
        self,
        model: Any,
        *,
        policy: Policy | Chooser = EVEN_POLICY,
        grad_scaler: Any = None,
        max_grad_norm: float | None = None,
        group: Any = None,
        options: CallOptions | None = None,
    ) -> "OneBitAdam":
        """Send the gradients, and later the momenta, of a model as frames.

        With a DistributedDataParallel, buckets are sent during the backward pass. After the freeze ``p.grad`` then
        holds the averaged momentum. Therefore :meth:`step` raises StateError in all steps if ``clip_grad_norm_`` was
        called after the backward pass; use `max_grad_norm`. With another module, :meth:`step` averages.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel or torch.nn.Module
            The model, the return value of ``torch.compile`` for it, or an FSDP2 model whose replicas are the ranks of
            `group`. All of its parameters that require gradients must belong to this optimizer. The optimizer may have
            more parameters, such as those of a second DistributedDataParallel. Their gradients are not averaged:
            :meth:`step` uses those of this rank.
        policy : Policy or callable
            Specs of parameters, as for :func:`ddp_hook`; None stands for `warmup` before and `spec` after the freeze.
            By default, and for parameters for which a function returns None, norms, biases and parameters of fewer than
            4,096 values are sent lossless, and embeddings are encoded.
        grad_scaler : torch.amp.GradScaler, optional
            Scaler of the gradients of a DistributedDataParallel. All ranks skip a step with NaN or Inf. A disabled
            scaler counts as None.
        max_grad_norm : float, optional
            Largest norm of each rank's gradient, over all parameters of the model. If the norm is larger, the gradient
            is scaled down, as by ``clip_grad_norm_``, before it is averaged or added to the momentum. Buckets of a
            DistributedDataParallel are then sent only at the end of the backward pass. Default: no clipping.
        group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
            Ranks to average over, as for :func:`all_reduce`; for an FSDP2 model, the ranks that hold the same shard, or
            the mesh of replicas and shards. Default: the group of the DistributedDataParallel, or all ranks.
        options : CallOptions, optional
            ``codec.options(algorithm=, timeout=, engine=, threads=)``, as for :func:`ddp_hook`.

        Returns
        -------
        OneBitAdam
            This optimizer.

        Raises
        ------
        ArgumentError, SpecError
            The model or another argument is not supported.
        StateError
            A loaded state belongs to another model or rank.
        """
        served = check_model(model, parameters.named(self), group)
        scaler = check_scaler(grad_scaler, served, self.schedule)
        norm = check_positive("max_grad_norm", max_grad_norm)
        how = {"policy": policy_of(policy, EVEN_POLICY), "grad_scaler": scaler, "max_grad_norm": norm}
        settings = replace(self._averager.settings, options=options, **how)
        self._averager.connect(served, group, settings)
        return self

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Without DistributedDataParallel, this averages over the ranks, so all must call it.

        Parameters
        ----------
        closure : callable, optional
            Function that computes the gradients, and returns the loss.

        Returns
        -------
        loss
            Return value of `closure`, or None.

        Raises
        ------
        ArgumentError
            A gradient that the backward pass has not averaged holds NaN or Inf. Parameters and state are unchanged on
            all ranks.
        PeerError
            Without DistributedDataParallel: another rank has raised an error, or is lost.
        StateError
            An error has interrupted an earlier step of this rank while it updated parameters. With
            DistributedDataParallel, also: gradients were changed after the backward pass, or there was no such pass.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        phase = self._phase
        kind = phase.kind
        received = self._averager.received(kind)
        if self._averager.starts(received):
            self._arithmetic.start()
            return loss
        finite = kind != "local" or self._averager.is_finite(received)
        with self._averager.updating():
            if kind == "local":
                self._arithmetic.take_alone(received if finite else None)
            else:
                self._arithmetic.take(kind, received)
            phase.steps += 1
            self._averager.forget_gradients()
            self._averager.share_buckets(kind)
            ends = phase.ends(kind, self._averager.second_moments, self._averager.agree)
            unfit = self._averager.freeze() if ends else None
        phase.warn_of_freeze(unfit)
        if not finite:
            raise ArgumentError(
                "a gradient holds NaN or Inf: the parameters of this rank are unchanged by the local step "
                f"{phase.steps}, which counts nevertheless. Continue with the next step, as the other ranks do",
                Status.NONFINITE,
            )
        return loss

    @torch.no_grad()
    def finish(self) -> None:
        """Synchronize parameters and momenta of all ranks after local steps of 0/1 Adam; all ranks must call this.

        It averages the momenta of the local steps since the last synchronization, and is not a step. Call it before
        parameters are saved or evaluated. Nothing happens if ranks are synchronized.

        Raises
        ------
        PeerError
            Another rank has called another method, or is lost.
        """
        if self._phase.updating or not self.synchronized:
            received = self._averager.finish()
            with self._averager.updating():
                self._arithmetic.synchronize(received)

    # State

    @property
    def synchronized(self) -> bool:
        """True if parameters are equal on all ranks, which holds at all times except after a local step of 0/1 Adam."""
        return self._arithmetic.synchronized

    @property
    def frozen(self) -> bool:
        """True if second moments are frozen, so that all further steps send momenta or nothing."""
        return self._phase.frozen

    def drift(self) -> float:
        """Return the relative change of the second moments over the last steps.

        Returns
        -------
        float
            Relative change, from 0 to 1, of the sum of bias-corrected second moments, as last measured before the
            freeze: over 1 / (1 - b2) steps, or the last half of all steps if these are fewer. NaN at first.
        """
        return self._phase.drift.value

    def stats(self) -> HookStats:
        """Return statistics of communication on this rank, over the steps before and after the freeze.

        Returns
        -------
        HookStats
            Totals since :meth:`register`, or since a state was loaded.
        """
        return self._averager.stats()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, as torch.optim.Optimizer does.

        Parameters
        ----------
        set_to_none : bool
            True: set gradients to None. False: fill them with zeros.
        """
        super().zero_grad(set_to_none)
        self._averager.forget_gradients()

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the state, in the layout of torch.optim.Adam; its first parameter group has an entry ``one_bit``.

        Moments are equal on all ranks, but residuals are not: each rank saves its own, or rank 0 those of all ranks.

        Parameters
        ----------
        gather : bool
            True: return the residuals of all ranks, which any number of ranks can load; all ranks must call this.
            False: return those of this rank only.

        Returns
        -------
        dict
            State that ``torch.load(weights_only=True)``, torch.distributed.checkpoint and torch.optim.AdamW accept.

        Raises
        ------
        StateError
            `gather` is True, and no model is registered. Or the last step was local, so that parameters differ between
            ranks: call :meth:`finish` first.
        PeerError
            `gather` is True, and another rank is lost.
        """
        self._phase.check_saving(self.synchronized)
        return checkpoint.with_entry(super().state_dict(), self._phase, self._averager.hook_states(gather))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of OneBitAdam, torch.optim.AdamW or torch.optim.Adam.

        If a state of torch's optimizers has already taken `freeze_step` steps, second moments are frozen immediately.

        Parameters
        ----------
        state_dict : mapping
            State of this rank, or of all ranks (``gather=True``). The residuals of a state of all ranks are
            redistributed if the number of ranks has changed.

        Raises
        ------
        StateError
            The mapping is no such state, or belongs to other parameters, another rank or another number of ranks. The
            optimizer is unchanged.
        """
        saved = checkpoint.AdamState(self, state_dict)
        phase = self._phase.loaded(saved.steps, saved.frozen, saved.refreshed, saved.drift)
        hooks = self._averager.new_hooks(saved.hooks)
        updating, self._phase.updating = self._phase.updating, True
        try:
            super().load_state_dict(saved.adam)
        except (ValueError, KeyError, TypeError, RuntimeError) as e:  # such as a tensor on the device meta
            self._phase.updating = updating
            raise StateError(f"the state does not fit the optimizer: {shown(e)}") from e
        self._phase.adopt(phase)
        self._arithmetic.restart()
        self._averager.load(saved.hooks, hooks)
        unfit = self._averager.freeze() if phase.is_overdue else None
        self._phase.updating = False
        self._phase.warn_of_freeze(unfit)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`__getstate__`; or groups and state, which torch's load_state_dict passes."""
        own = dict(state)
        phase, waiting = own.pop("_phase", None), own.pop("_waiting", None)
        super().__setstate__(own)
        if phase is not None:
            self._begin(phase)
            self._averager.waiting = waiting

    def __getstate__(self) -> dict[str, Any]:
        """Return the optimizer without its connection to other ranks, which belongs to this process."""
        self._phase.check_saving(self.synchronized)
        own = {name: getattr(self, name) for name in ("schedule", "freeze_step", "spec", "warmup", "max_ratio")}
        waiting = self._averager.hook_states(gather=False)
        return super().__getstate__() | own | {"_phase": copy(self._phase), "_waiting": waiting}
