"""1-bit Adam and 0/1 Adam: steps of torch.optim.Adam, and steps by averaged momenta and unchanged second moments."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Literal

import torch

from codec import ArgumentError, CallOptions, StateError, Status
from codec.arguments import shown
from codec.specs import Lossless, Quantize, Spec
from codec.torch.ddp.policy import Chooser, Policy, policy_of
from codec.torch.ddp.stats import Stats
from codec.torch.one_bit_adam import checkpoint, parameters
from codec.torch.one_bit_adam.averager import Averager
from codec.torch.one_bit_adam.link import EVEN_POLICY, check_clipping, check_scaler, check_spec, check_warmup
from codec.torch.one_bit_adam.model import check_model
from codec.torch.one_bit_adam.phase import Phase
from codec.torch.one_bit_adam.schedule import ZeroOneSchedule, parsed
from codec.torch.one_bit_adam.steps import Steps
from codec.torch.reduction.arguments import plain_spec


class OneBitAdam(torch.optim.Adam):
    """Adam that sends quantized momenta instead of gradients, after a warm-up (1-bit Adam, Tang et al. 2021).

    Momenta are sent in 4 bits by default, with the loss of AdamW; ``spec=Sign(group_size=1024)`` sends their signs, as
    1-bit Adam does. With a :class:`ZeroOneSchedule` the optimizer is 0/1 Adam (Lu et al. 2023).

    For `freeze_step` steps it is :class:`torch.optim.AdamW`, or Adam, over the mean gradients of all ranks. Then the
    second moments v stay as they are. Each rank computes its momentum ``b1 m + (1 - b1) g`` and sends it with error
    feedback. All ranks adopt the decoded mean as m, and step by ``lr m^ / (sqrt(v^) + eps)``, where ^ is Adam's bias
    correction. Values whose v is 0 at the freeze do not move any more, except by weight decay.

    Call :meth:`register` with the DistributedDataParallel; gradients and momenta then travel while backward() runs.
    Without DistributedDataParallel, :meth:`step` averages by itself. Parameter groups, learning rate schedules and
    state dicts are those of torch.optim.Adam.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters or parameter groups, as for torch.optim.Adam: dense, real. A group may have
        ``bias_correction=False``: its moments are not bias-corrected then, as in DeepSpeed.
    lr : float
        Learning rate.
    betas : (float, float)
        Decay rates b1 of the momentum and b2 of the second moments.
    eps : float
        Term added to the denominator.
    weight_decay : float
        Weight decay.
    freeze_step : int, "auto" or ZeroOneSchedule
        Number of steps before second moments are frozen, at least 1: 20 to 40% of a run. "auto": until the sum of
        second moments has changed by at most 4% over 1 / (1 - b2) steps. The learning rate's warm-up should end before
        the freeze. :class:`ZeroOneSchedule`: 0/1 Adam, whose warm-up sends gradients in some steps only, and which
        later takes steps without communication.
    spec : Spec or str
        Codec of momenta, or the name of a preset: lossless or a contraction (:attr:`codec.Spec.contraction`). Signs
        suit long trainings; they can raise the loss of short ones.
    warmup : Spec or str
        Codec of gradients before the freeze. A lossless warm-up sends most of the bytes of a run:
        ``Quantize(4)`` or ``Truncate(...)`` send fewer.
    decoupled_weight_decay : bool
        True: weight decay of AdamW. False: weight decay is added to the gradient, as in Adam.

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
        freeze_step: int | Literal["auto"] | ZeroOneSchedule,
        spec: Spec | str = Quantize(4, levels="odd", rounding="nearest"),  # noqa: B008 - immutable
        warmup: Spec | str = Lossless(),  # noqa: B008 - immutable
        decoupled_weight_decay: bool = True,
    ) -> None:
        self.schedule, self.freeze_step = parsed(freeze_step)
        self.spec, self.warmup = plain_spec(spec), plain_spec(warmup)
        check_spec(self.spec)
        try:
            super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=bool(decoupled_weight_decay))
        except (ValueError, TypeError) as e:
            raise ArgumentError(str(e)) from None
        window = max(parameters.window(group) for group in self.param_groups)
        self._begin(Phase(self.freeze_step, self.schedule, window))

    def _begin(self, phase: Phase) -> None:
        """Make the parts of the optimizer that know its parameters."""
        self._phase = phase
        phase.watch()
        self._arithmetic = Steps(self, refresh=self.schedule is not None)
        self._averager = Averager(self, phase, self._arithmetic, self.warmup, self.spec)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch.optim.Adam does, before second moments are frozen; on all ranks.

        Parameters
        ----------
        param_group : dict
            Parameters and their options.

        Raises
        ------
        ArgumentError
            A parameter or an option is not supported: complex values, ``amsgrad``, ``maximize``, ``fused``,
            ``capturable``, ``differentiable``. Or a parameter is not one of the module that was registered.
        StateError
            Second moments are frozen: parameters that have none would not move.
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

        With a DistributedDataParallel, buckets travel while backward() runs. After the freeze ``p.grad`` then holds the
        averaged momentum, so ``clip_grad_norm_`` between backward() and step() is refused in all steps: use
        `max_grad_norm`. With a plain module, :meth:`step` averages by itself.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel or torch.nn.Module
            The model, its ``torch.compile``, or an FSDP2 model whose replicas are `group`. All of its parameters that
            require gradients are this optimizer's.
            Parameters of the optimizer that a DistributedDataParallel does not average, such as those of a second one,
            are stepped by the gradients that this rank has in :meth:`step`.
        policy : Policy or callable
            Specs of parameters, as for :func:`ddp_hook`; None stands for `warmup` before and `spec` after the freeze.
            Default, and the rules behind a function: norms, biases and parameters of fewer than 4,096 values are sent
            lossless; embeddings are encoded.
        grad_scaler : torch.amp.GradScaler, optional
            Scaler of the gradients of a DistributedDataParallel. All ranks skip a step with NaN or Inf. One that is
            switched off counts as None.
        max_grad_norm : float, optional
            Largest norm of each rank's gradient, all parameters of the model together. Larger ones are scaled before
            they are averaged or added to momenta, as ``clip_grad_norm_`` does. Buckets of a DistributedDataParallel
            then travel after the backward pass. Default: gradients are not clipped.
        group : ProcessGroup, optional
            Ranks; for an FSDP2 model those with the same shard. Default: those of the model, or all.
        options : CallOptions, optional
            ``codec.options(algorithm=, timeout=, engine=, threads=)``, as for :func:`ddp_hook`.

        Returns
        -------
        OneBitAdam
            This optimizer.

        Raises
        ------
        ArgumentError, SpecError
            The model or another argument cannot be used.
        StateError
            A loaded state belongs to another model or rank.
        """
        served = check_model(model, parameters.named(self), group)
        scaler = check_scaler(grad_scaler, served, self.schedule)
        how = {"grad_scaler": scaler, "max_grad_norm": check_clipping(max_grad_norm), "options": options}
        settings = replace(self._averager.settings, policy=policy_of(policy, EVEN_POLICY), **how)
        self._averager.connect(served, group, settings)
        return self

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; without DistributedDataParallel all ranks must call this.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and its gradients.

        Returns
        -------
        loss
            Return value of `closure`, or None.

        Raises
        ------
        ArgumentError
            A gradient holds NaN or Inf that backward() has not averaged. Parameters and state are unchanged on all
            ranks.
        PeerError
            Without DistributedDataParallel: another rank has raised an error, or is gone.
        StateError
            With DistributedDataParallel: gradients were changed after the backward pass, or there was none.
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
        if kind == "local":
            self._arithmetic.take_alone(received if finite else None)
        else:
            self._arithmetic.take(kind, received)
        phase.steps += 1
        self._averager.forget_gradients()
        self._averager.share_buckets(kind)
        if phase.ends(kind, self._averager.second_moments, self._averager.agree):
            self._freeze()
        if not finite:
            raise ArgumentError(
                f"a gradient holds NaN or Inf: this rank has not moved in the local step {phase.steps}. The step "
                "counts: go on with the next one, as the other ranks do",
                Status.NONFINITE,
            )
        return loss

    def _freeze(self) -> None:
        """Freeze the second moments."""
        self._arithmetic.freeze()
        self._phase.frozen = True
        moved = self._averager.shards.any(parameters.have_moments(self))
        self._phase.warn_of_freeze([i for i, is_moved in enumerate(moved) if not is_moved])

    @torch.no_grad()
    def finish(self) -> None:
        """Make parameters and momenta the same on all ranks after local steps of 0/1 Adam; all ranks must call this.

        It sends what local steps have not sent, and counts no step. Call it before parameters are saved or evaluated.
        Nothing happens if the ranks are synchronized, as they always are without local steps.

        Raises
        ------
        PeerError
            Another rank has called something else, or is gone.
        """
        if not self.synchronized:
            self._arithmetic.synchronize(self._averager.finish())

    # State

    @property
    def synchronized(self) -> bool:
        """True if parameters are the same on all ranks: always, except after a local step of 0/1 Adam."""
        return self._arithmetic.synchronized

    @property
    def frozen(self) -> bool:
        """True if second moments are frozen."""
        return self._phase.frozen

    def drift(self) -> float:
        """Return how much second moments have moved lately.

        Returns
        -------
        float
            Relative change, from 0 to 1, of the sum of bias-corrected second moments over the last 1 / (1 - b2) steps,
            or over half of the steps if those are fewer; as last measured. It stays as it is after the freeze. nan
            after fewer than two steps.
        """
        return self._phase.drift.value

    def stats(self) -> Stats:
        """Return statistics of communication on this rank, of warm-up and frozen steps together.

        Returns
        -------
        Stats
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

        Moments are the same on all ranks, residuals are not: each rank saves its own state, or rank 0 saves one file
        for all.

        Parameters
        ----------
        gather : bool
            True: return the residuals of all ranks, on all ranks, for one file; every rank must call this. Any number
            of ranks can load it.

        Returns
        -------
        dict
            State that ``torch.load(weights_only=True)`` and torch.distributed.checkpoint accept, and torch.optim.AdamW.

        Raises
        ------
        StateError
            `gather`, and no model is registered. Or the last step was local, so that parameters of ranks differ: call
            :meth:`finish` before.
        PeerError
            `gather`, and another rank is lost.
        """
        self._phase.check_saving(self.synchronized)
        return checkpoint.with_entry(super().state_dict(), self._phase, self._averager.hook_states(gather))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`, of torch.optim.AdamW or of torch.optim.Adam.

        If a state of torch's optimizers has taken `freeze_step` steps already, second moments are frozen at once.

        Parameters
        ----------
        state_dict : mapping
            State of this rank, or of all ranks by ``gather=True``, maybe of another number of ranks: residuals are then
            redistributed.

        Raises
        ------
        StateError
            The mapping is no such state, or belongs to other parameters, another rank or another number of ranks. The
            optimizer is unchanged.
        """
        saved = checkpoint.Saved(self, state_dict)
        phase = self._phase.loaded(saved.steps, saved.frozen, saved.refreshed, saved.drift)
        hooks = self._averager.new_hooks(saved.hooks)
        try:
            super().load_state_dict(saved.adam)
        except (ValueError, KeyError, TypeError) as e:
            raise StateError(f"the state does not fit the optimizer: {shown(e)}") from e
        self._phase.adopt(phase)
        self._arithmetic.restart()
        self._averager.load(saved.hooks, hooks)
        if phase.is_overdue:
            self._freeze()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of :meth:`__getstate__`; or groups and state alone, which torch's load_state_dict passes."""
        own = dict(state)
        phase, waiting = own.pop("_phase", None), own.pop("_waiting", None)
        super().__setstate__(own)
        if phase is not None:
            self._begin(phase)
            self._averager.waiting = waiting

    def __getstate__(self) -> dict[str, Any]:
        """Return the optimizer without its link, which belongs to this process."""
        self._phase.check_saving(self.synchronized)
        own = {name: getattr(self, name) for name in ("schedule", "freeze_step", "spec", "warmup")}
        waiting = self._averager.hook_states(gather=False)
        return super().__getstate__() | own | {"_phase": copy(self._phase), "_waiting": waiting}
