"""Communication hook of DistributedDataParallel: registration, statistics, and state for checkpoints."""

# no `from __future__ import annotations`: torch checks the annotations of a hook

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, CallOptions, SpecError, StateError
from codec.specs import Spec, check_contraction
from codec.stateful import CodebookRefresher
from codec.torch.collectives.bytes import exchange
from codec.torch.ddp import checkpoint, lifetime
from codec.torch.ddp.buckets import Buffers, n_values, needs_optimizer
from codec.torch.ddp.optimizer import check_has
from codec.torch.ddp.policy import Plan, Policy, feeds_back, plain_names
from codec.torch.ddp.reducer import Reducer, Step, Transform, in_backward
from codec.torch.ddp.residuals import Residuals
from codec.torch.ddp.stats import ParameterStats, Stats
from codec.torch.feedback.checkpoint import ROLES, UNKNOWN, of_tensors
from codec.torch.reduction.arguments import plain_spec
from codec.torch.reduction.table import check_request


class Hook(Reducer):
    """Communication hook that sends the gradients of a DistributedDataParallel as frames.

    :func:`ddp_hook` makes hooks. A hook serves one model, and holds residuals of error feedback and agreed codebooks,
    which belong into checkpoints.

    Attributes
    ----------
    spec : Spec
        Codec of the gradients; :meth:`set_spec` changes it.

    Examples
    --------
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    >>> hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True).register(model)
    >>> model(torch.ones(8, 100)).sum().backward()
    >>> hook.stats().steps
    1
    >>> hook.load_state_dict(hook.state_dict())
    """

    def __init__(
        self,
        spec: Spec,
        optimizer: torch.optim.Optimizer | None,
        feedback: bool | None,
        policy: Policy,
        refresher: CodebookRefresher | None,
        grad_scaler: Any,
        start_step: int,
        transform: Transform | None,
        settings: CallOptions,
    ) -> None:
        plan = Plan(spec, feedback, policy, start_step)
        super().__init__(plan, optimizer, refresher, grad_scaler, transform, settings)
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._owner = UNKNOWN, UNKNOWN  # rank and number of ranks to which the residuals belong
        self.called = False
        self.__name__ = self.__qualname__ = "codec.torch.Hook"  # torch asks a hook for both
        lifetime.watch(self)

    def __repr__(self) -> str:
        on = f"registered, {self._steps} steps" if self._model is not None else "not registered"
        return f"<codec.torch.Hook {self.spec}, feedback={self.plan.feedback}, {on}>"

    @property
    def spec(self) -> Spec:
        """Codec of the gradients; :meth:`set_spec` changes it."""
        return self.plan.spec

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Reduce a bucket; torch calls this in the same order on all ranks."""
        return self.reduce(bucket)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Begin to reduce a bucket; for a communication hook of the caller that does more than this hook.

        The caller's hook must call this for every bucket, on all ranks, and return the future. Errors are raised at the
        end of the backward pass, so the future itself does not fail.

        Parameters
        ----------
        bucket : torch.distributed.GradBucket
            Bucket of DistributedDataParallel.

        Returns
        -------
        torch.futures.Future
            Tensor of the reduced bucket: the mean over all ranks.

        Raises
        ------
        ArgumentError
            The hook serves no model yet, and it is not clear which one: call :meth:`serve` first.

        Examples
        --------
        >>> def clipped(hook: codec.torch.Hook, bucket: torch.distributed.GradBucket):
        ...     bucket.buffer().clamp_(-1, 1)
        ...     return hook.reduce(bucket)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
        >>> model.register_comm_hook(codec.torch.ddp_hook(codec.Float8()), clipped)
        >>> model(torch.ones(8, 100)).sum().backward()
        """
        lifetime.check_bucket(bucket)
        self.called = True
        try:
            if self._model is None or self._model() is None:  # registered by torch's own register_comm_hook
                self.serve(lifetime.model_of(self, bucket.parameters()[0]))
            work = self.begin_bucket(bucket)
            if bucket.is_last():
                work.wait()  # the model would wait, too, but Ctrl-C would not interrupt it
        except BaseException:
            self.cancel_step(self._step)
            raise
        if bucket.is_last() and not in_backward():  # within join(), for ranks without inputs left
            self.end_step()
        return work.get_future()

    def register(self, model: Any, *, group: Any = None) -> "Hook":
        """Send the gradients of a model through this hook.

        A hook serves one model. It can be registered again to a new DistributedDataParallel of the same model, such as
        after a rank was lost; only the last one may then be used.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel
            The model, or its ``torch.compile``.
        group : ProcessGroup, optional
            Ranks. Default: those of the model.

        Returns
        -------
        Hook
            This hook.

        Raises
        ------
        ArgumentError
            The model, or a spec that the policy returns for its parameters, cannot be used; or the hook serves another
            model.
        StateError
            A loaded state belongs to another model or rank.

        Examples
        --------
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
        >>> hook = codec.torch.ddp_hook().register(model)
        >>> model(torch.ones(8, 100)).sum().backward()
        """
        model = getattr(model, "_orig_mod", model)
        if not isinstance(model, DistributedDataParallel):
            raise ArgumentError(f"a hook is for a DistributedDataParallel, not for {type(model).__name__}")
        group = group or model.process_group
        names = self._check_model(model, group)
        model.register_comm_hook(None, self)
        self._adopt(model, names, group)
        return self

    def serve(self, model: DistributedDataParallel, *, group: Any = None) -> None:
        """Serve a model to which a communication hook is registered that calls :meth:`reduce`.

        :meth:`reduce` finds the model by itself in the first step. A hook that served another model of the same
        parameters before, such as before a rank was lost, must be told.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel
            The model.
        group : ProcessGroup, optional
            Ranks. Default: those of the model.

        Raises
        ------
        ArgumentError, StateError
            As for :meth:`register`.
        """
        group = group or model.process_group
        self._adopt(model, self._check_model(model, group), group)

    def _check_model(self, model: DistributedDataParallel, group: Any) -> dict[torch.nn.Parameter, str]:
        """Check that this hook can serve a model; return the names of its parameters."""
        lifetime.check_reducer(model)
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        names = dict(zip((p for _, p in named), plain_names(name for name, _ in named), strict=True))
        if self._model is not None and self._model() is not None and _sizes(names) != _sizes(self.plan.names):
            raise ArgumentError(
                "this hook is registered to another model: a hook serves one model, make another one by ddp_hook()"
            )
        for p, name in names.items():
            check_has(self.optimizer, self.plan.spec_of(name, p), name)
        self._check_residuals(names, group.rank(), group.size())
        return names

    def _check_residuals(self, names: Mapping[torch.nn.Parameter, str], rank: int, size: int) -> None:
        """Raise StateError if the hook has residuals that belong to another rank or model."""
        if self._residuals is None or not (ranges := self._residuals.ranges()):
            return
        if self._model is None:  # they were loaded
            checkpoint.check_rank(self._owner, (rank, size))
        checkpoint.check_ranges(ranges, _sizes(names))

    def _adopt(self, model: Any, names: dict[torch.nn.Parameter, str], group: Any) -> None:
        """Serve a model from now on, over the ranks of a group."""
        if self._step.in_flight:
            self.cancel_step(self._step)
        if self._codebooks is not None:
            self._codebooks.wait()
            self._codebooks.require_sync()
        self._model, self._in_sync, self._loaded_buckets = weakref.ref(model), False, self._buckets
        self.plan.serve(model, names)
        self._parts.clear()
        self._group = group  # perhaps a new one, after a rank was lost
        self._owner = self._group.rank(), self._group.size()
        lifetime.warn_of_adam(self)

    def set_spec(self, spec: Spec | str, *, feedback: bool | None = None) -> None:
        """Encode gradients with another spec from the next step on; all ranks must do so between the same two steps.

        Residuals that the new spec does not use are added to the gradients of the next step.

        Parameters
        ----------
        spec : Spec or str
            As for :func:`ddp_hook`.
        feedback : bool, optional
            As for :func:`ddp_hook`.

        Raises
        ------
        ArgumentError
            The spec does not go with the other arguments of the hook, which is unchanged.

        Examples
        --------
        >>> hook = codec.torch.ddp_hook(codec.Float8())
        >>> hook.set_spec(codec.Quantize(4), feedback=True)
        >>> hook.spec.bits
        4
        """
        spec = check(spec, self.optimizer, feedback, self._algorithm, self.refresher)
        self.plan.spec, self.plan.feedback_argument = spec, feedback
        if self.plan.feedback and self._residuals is None:
            self._residuals = Residuals(spec)
        lifetime.warn_of_adam(self)

    def stats(self, *, by_parameter: bool = False) -> Stats:
        """Return statistics of this hook on this rank.

        Parameters
        ----------
        by_parameter : bool
            Fill in ``parameters``, which takes a copy of the residuals.

        Returns
        -------
        Stats
            Totals since the hook was made. Later steps do not change them.
        """
        ratios = {} if self._residuals is None else self._residuals.ratios
        stats = replace(
            self._stats,
            residual_ratio=max(ratios.values(), default=0.0),
            world_size=max(1, self._owner[1]),
            parameters={},
        )
        if by_parameter:
            norms = {} if self._residuals is None else self._residuals.norms()
            for p, name in self.plan.names.items():
                spec, _ = self.plan.chosen.get(p, (self.spec, False))
                stats.parameters[name] = ParameterStats(spec, n_values(p), norms.get(name, 0.0), ratios.get(name, 0.0))
        return stats

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the state that a checkpoint needs: residuals, agreed codebooks, and the number of steps.

        Parameters
        ----------
        gather : bool
            True: return the states of all ranks, on all ranks, for one file; every rank must call this. False: return
            the state of this rank, which each rank saves for itself.

        Returns
        -------
        dict
            Tensors, integers and strings, which ``torch.load(weights_only=True)`` accepts.

        Raises
        ------
        StateError
            `gather`, and the hook is not registered.
        PeerError
            `gather`, and another rank is lost.
        """
        if self._codebooks is not None:
            self._codebooks.wait()
        state = checkpoint.head(*self._owner, self._steps, self.plan.sparse, self._buckets)
        if self._residuals is not None:
            state |= self._residuals.state_dict()
        if self.refresher is not None:
            state["refresher"] = of_tensors(self.refresher.state_dict())
        if not gather:
            return state
        if self._model is None:
            raise StateError("register the hook before the states of all ranks are gathered")
        size = self._group.size()
        data = exchange([checkpoint.packed(state)] * size, group=self._group, options=self._settings)
        return {"version": checkpoint.VERSION, "ranks": [checkpoint.unpacked(each) for each in data]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`, which is copied.

        :meth:`register` or this method, whichever is called last, compares the state with the model.

        Parameters
        ----------
        state : mapping
            State of this rank, or of all ranks by ``gather=True``.

        Raises
        ------
        StateError
            The mapping is no state of such a hook; or residuals belong to another rank, another number of ranks, or to
            parameters or values that the model does not have. The hook is unchanged.
        """
        saved = checkpoint.Saved(state, *self._owner)
        expected = ROLES if self._residuals is not None else ()
        saved.check_parts([*expected, *(["refresher"] if self.refresher is not None else ())])
        residuals = None
        if self._residuals is not None:
            checkpoint.check_rank((saved.rank, saved.world_size), self._owner)
            residuals = Residuals(self.spec)
            residuals.load_state_dict(saved.parts)
            if self.plan.names:
                checkpoint.check_ranges(residuals.ranges(), _sizes(self.plan.names))
        if self._codebooks is not None and self.refresher is not None:
            self._codebooks.wait()
            self.refresher.load_state_dict(saved.parts["refresher"])
            self._codebooks.restart()
        self._residuals, self._steps, self._in_sync = residuals, saved.steps, False
        self.plan.sparse, self._buckets, self._loaded_buckets = saved.sparse, saved.buckets, saved.buckets
        if self._model is None:
            self._owner = saved.rank, saved.world_size
        self._parts.clear()

    @staticmethod
    def reshard(states: Any, world_size: int) -> list[dict[str, Any]]:
        """Return states for another number of ranks, whose residuals correct parameters by as much as the given ones.

        Parameters
        ----------
        states : sequence of dict, or dict
            States of all old ranks in their order, or the one that ``state_dict(gather=True)`` returned.
        world_size : int
            Number of new ranks.

        Returns
        -------
        list of dict
            State of each new rank, for :meth:`load_state_dict`.

        Raises
        ------
        StateError
            `states` are not those of all ranks of one hook.
        """
        return checkpoint.reshard(states, world_size)

    def __getstate__(self) -> dict[str, Any]:
        """Return the hook without the process group and the model, which belong to this process."""
        local = {"_group": None, "_model": None, "_parts": {}}
        return self.__dict__ | local | {"_buffers": Buffers(), "_step": Step(), "_in_sync": False}


def _sizes(names: Mapping[torch.nn.Parameter, str]) -> dict[str, int]:
    """Return the number of values of each parameter, by name."""
    return {name: n_values(p) for p, name in names.items()}


def check(
    spec: Spec | str,
    optimizer: torch.optim.Optimizer | None,
    feedback: bool | None,
    algorithm: str,
    refresher: CodebookRefresher | None,
) -> Spec:
    """Check that these arguments of :func:`ddp_hook` go together; return the spec."""
    spec = plain_spec(spec)
    if needs_optimizer(spec) and optimizer is None:
        raise SpecError(f"{spec} drops bits by the optimizer's step: pass optimizer=")
    if feedback not in (None, True, False):
        raise ArgumentError(f"feedback must be True, False or None, got {feedback!r}")
    if feedback:
        check_contraction(spec)
    check_request(algorithm, spec, "mean", feedback=feeds_back(spec) if feedback is None else feedback)
    if refresher is not None and refresher.spec != spec:
        raise ArgumentError(f"refresher= is of {refresher.spec}, but the spec is {spec}: make a refresher of that spec")
    return spec
