"""Communication hook of DistributedDataParallel: registration, statistics, and state for checkpoints."""

# No `from __future__ import annotations`: torch checks that the annotations of a hook are types, not strings.

import weakref
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, StateError
from codec.specs import Preset, Spec
from codec.stateful import CodebookRefresher
from codec.torch._compat import count_parameters, place_of
from codec.torch.ddp import checkpoint, lifetime
from codec.torch.ddp.buckets import Bucket, n_values, sizes_of
from codec.torch.ddp.policy import names_of
from codec.torch.ddp.reducer import Reducer
from codec.torch.ddp.stats import HookStats, ParameterStats
from codec.torch.feedback.checkpoint import packed
from codec.torch.group.communicator import buffer_nbytes, scratch_nbytes
from codec.torch.group.exchange import all_to_all_bytes
from codec.torch.group.levels import NON_MEMBER, group_of, proposal


class Hook(lifetime.Watched):
    """Communication hook that sends the gradients of a DistributedDataParallel as frames.

    :func:`ddp_hook` creates hooks. A hook serves one model. Save its state in checkpoints: it holds the residuals of
    error feedback and the codebooks that the ranks have agreed on.

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

    def __init__(self, reducer: Reducer, group: Any = None) -> None:
        super().__init__()
        self.reducer, self._group = reducer, group
        self._model: weakref.ref[DistributedDataParallel] | None = None  # model that calls this hook; None: unknown
        self._n_parameters = 0  # of its buckets
        self.__name__ = self.__qualname__ = "codec.torch.Hook"  # torch reads both attributes of a hook

    def __repr__(self) -> str:
        on = "not registered" if self.reducer.group is None else f"registered, {self.reducer.state.count} steps"
        how = "" if self.reducer.plan.auto is None else "auto: "
        return f"<codec.torch.Hook {how}{self.spec}, feedback={self.reducer.plan.feedback}, {on}>"

    @property
    def spec(self) -> Spec:
        """Codec of the gradients. :meth:`set_spec` changes it, and a hook with "auto" changes it by itself."""
        return self.reducer.plan.spec

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Argument ``optimizer=`` of :func:`ddp_hook` as a tuple, without the wrappers of Accelerate or Lightning."""
        return self.reducer.optimizers.all

    @property
    def refresher(self) -> CodebookRefresher | None:
        """Argument ``refresher=`` of :func:`ddp_hook`: refresher of the codebooks."""
        return self.reducer.refresher

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Reduce a bucket. Torch calls this for each bucket, in the same order on all ranks."""
        return self.reduce(bucket)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Begin to reduce a bucket. Call this from your own communication hook, if it does more than reduce.

        Your hook must call this for every bucket, on all ranks, and return the future. The future never fails: errors
        are raised at the end of the backward pass.

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
            The hook serves no model yet, and no model, or more than one, could be the caller: call :meth:`serve` first.

        Examples
        --------
        >>> def clipped(hook: codec.torch.Hook, bucket: torch.distributed.GradBucket):
        ...     bucket.buffer().clamp_(-1, 1)
        ...     return hook.reduce(bucket)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
        >>> model.register_comm_hook(codec.torch.ddp_hook(codec.Float8()), clipped)
        >>> model(torch.ones(8, 100)).sum().backward()
        """
        given = Bucket.of(bucket)
        self.called = True
        if self._model is None or self._model() is None:  # registered by torch's own register_comm_hook
            try:
                self.serve(lifetime.model_of(self, given.parameters[0]))
            except BaseException:
                self.reducer.cancel()
                raise
        number, last = place_of(cast(Any, self._model)(), bucket, self._n_parameters)
        return self.reducer.reduce(replace(given, number=number, last=last)).get_future()

    def register(self, model: Any, *, group: Any = None) -> "Hook":
        """Send the gradients of a model through this hook.

        A hook serves one model. It can be registered again to a new DistributedDataParallel of the same model, for
        example after a rank was lost. Do not use the old DistributedDataParallel after that.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel
            The model, or its ``torch.compile``.
        group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
            As for :func:`ddp_hook`, whose argument this one replaces.

        Returns
        -------
        Hook
            This hook.

        Raises
        ------
        ArgumentError
            The model, or a spec that the policy returns for a parameter, is not supported; the hook serves another
            model; or the model already has a communication hook.
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
            raise ArgumentError(f"model must be a DistributedDataParallel, got {type(model).__name__}")
        names, group = self._check_model(model, group)
        lifetime.register(model, self)
        self._adopt(model, names, group)
        return self

    def serve(self, model: DistributedDataParallel, *, group: Any = None) -> None:
        """Set the model whose own communication hook calls :meth:`reduce`.

        In the first step, :meth:`reduce` finds the model by itself. Call this if the hook served an earlier
        DistributedDataParallel of the same parameters, for example before a rank was lost.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel
            The model.
        group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
            As for :func:`ddp_hook`, whose argument this one replaces.

        Raises
        ------
        ArgumentError, StateError
            As for :meth:`register`.
        """
        self._adopt(model, *self._check_model(model, group))

    def change_group(self, group: Any = None) -> None:
        """Continue with another group, after ranks were lost; all of its ranks must call this.

        The DistributedDataParallel stays the same, with the process group that it was created with, over which it must
        send nothing. If it does, for example because it broadcasts buffers in each forward pass, or if ranks join, wrap
        the module in a new one, and call :meth:`register`, which treats residuals in the same way. Repeat the step that
        has failed.

        Ranks keep their residuals. In a mean over M instead of N ranks, residuals of a rank's own gradients are
        multiplied by M / N, so that their effect on the mean stays the same. Residuals of sums that another rank now
        encodes are added to this rank's gradients in the next step. Residuals of ranks that were lost cannot be
        recovered.

        Parameters
        ----------
        group : ProcessGroup, DeviceMesh or pair of ProcessGroup, optional
            The new group. Default: all ranks.

        Raises
        ------
        ArgumentError
            The hook is not registered, `group` is no group with this rank, or the DistributedDataParallel itself sends
            messages. The hook keeps its former group.

        Examples
        --------
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
        >>> hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True).register(model)
        >>> for _ in range(2):
        ...     model(torch.ones(8, 100)).sum().backward()
        >>> hook.change_group(torch.distributed.new_group([0]))
        >>> model(torch.ones(8, 100)).sum().backward()
        """
        model = None if self._model is None else self._model()
        if model is None:
            raise ArgumentError("the hook is not registered, so that it has no group: call register(model)")
        lifetime.check_silent(model)
        given = group_of(group)
        self._adopt(model, *self._check_model(model, given))
        self._group = given

    def _check_model(self, model: DistributedDataParallel, group: Any) -> tuple[dict[torch.nn.Parameter, str], Any]:
        """Check that this hook can serve a model; return the names of its parameters, and the process group."""
        lifetime.check_reducer(model)
        ddp: Any = model  # torch does not type its attributes
        given = self._group if group is None else group
        names, group = names_of(ddp.module.named_parameters()), ddp.process_group if given is None else group_of(given)
        if group is NON_MEMBER:
            raise ArgumentError("group=: this rank is not in the group over which gradients are averaged")
        former = None if self._model is None else self._model()
        if former is not None and sizes_of(names) != sizes_of(self.reducer.plan.names):
            raise ArgumentError(
                "this hook is registered with another model, and a hook serves a single model: create another hook by "
                "ddp_hook()"
            )
        self.reducer.check(names, group)
        return names, group

    def _adopt(self, model: DistributedDataParallel, names: Mapping[torch.nn.Parameter, str], group: Any) -> None:
        """Start to serve a model whose gradients are averaged over the ranks of a group."""
        self.reducer.serve(names, group, model)
        self._model, self._n_parameters = weakref.ref(model), count_parameters(model)
        lifetime.warn_of_adam(self.reducer)
        lifetime.propose_levels(group)

    def set_spec(self, spec: Spec | Preset, *, feedback: bool | float | None = None) -> None:
        """Encode gradients with another spec from the next step on.

        All ranks must call this between the same two steps. It ends the automatic choice of a hook with "auto". In the
        next step, residuals of parameters that no longer have error feedback are added to their gradients.

        Parameters
        ----------
        spec : Spec or str
            As for :func:`ddp_hook`.
        feedback : bool or float, optional
            As for :func:`ddp_hook`.

        Raises
        ------
        ArgumentError
            The spec contradicts the other arguments of the hook. The hook is unchanged.

        Examples
        --------
        >>> hook = codec.torch.ddp_hook(codec.Float8())
        >>> hook.set_spec(codec.Quantize(4), feedback=True)
        >>> hook.spec.bits
        4
        """
        plan = self.reducer.plan
        plan.spec = lifetime.check(spec, self.reducer.optimizers, feedback, self.reducer.algorithm, self.refresher)
        plan.feedback_argument = feedback
        self.reducer.state.begin_feedback()
        lifetime.warn_of_adam(self.reducer)

    def stats(self, *, by_parameter: bool = False) -> HookStats:
        """Return statistics of this hook on this rank.

        Parameters
        ----------
        by_parameter : bool
            True: also fill in ``parameters``, the statistics of each parameter. This copies the residuals to compute
            their norms.

        Returns
        -------
        HookStats
            Totals since the hook was created. Later steps do not change this object.
        """
        plan, state = self.reducer.plan, self.reducer.state
        ratios = {} if state.residuals is None else state.residuals.ratios
        stats = replace(
            state.stats,
            residual_ratio=max(ratios.values(), default=0.0),
            world_size=max(1, state.owner.world_size),
            levels=state.owner.levels,
            advice="" if self.reducer.group is None else proposal(self.reducer.group),
            buffer_nbytes=buffer_nbytes(self.reducer.group),
            scratch_nbytes=scratch_nbytes(self.reducer.group),
            parameters={},
            **({} if plan.auto is None else {"choices": plan.auto.steps.copy(), "link": plan.auto.link}),
        )
        if by_parameter:
            norms = {} if state.residuals is None else state.residuals.norms()
            sent = {name for bucket in state.buckets for name in bucket}
            for p, name in plan.names.items():
                if not p.requires_grad and name not in sent:
                    continue
                spec, _ = plan.chosen.get(p, (self.spec, False))
                stats.parameters[name] = ParameterStats(spec, n_values(p), norms.get(name, 0.0), ratios.get(name, 0.0))
        return stats

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the state that a checkpoint needs: residuals, agreed codebooks, and the number of steps.

        Parameters
        ----------
        gather : bool
            True: return the states of all ranks, to be saved in one file. All ranks must call this, and all receive the
            same result. False: return the state of this rank; each rank must save its own. For
            torch.distributed.checkpoint, use :func:`codec.torch.per_rank`.

        Returns
        -------
        dict
            Tensors, integers and strings, in nested dicts and lists that ``torch.load(weights_only=True)`` accepts.

        Raises
        ------
        StateError
            `gather` is True, and the hook is not registered.
        PeerError
            `gather` is True, and another rank is lost.
        """
        state = self.reducer.state.state_dict()
        if not gather:
            return state
        group = self.reducer.group
        if group is None:
            raise StateError(
                "the hook is not registered, so that it has no ranks: register it before state_dict(gather=True)"
            )
        data = all_to_all_bytes([packed(state)] * group.size(), group=group, options=self.reducer.settings)
        return checkpoint.gathered(data)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state by a copy of one that :meth:`state_dict` returned.

        Call this before or after :meth:`register`; the later call of the two compares the state with the model.

        Parameters
        ----------
        state : mapping
            State of this rank, or of all ranks, as ``state_dict(gather=True)`` returns it. The ranks may be on other
            machines than before (``group=``): residuals are converted.

        Raises
        ------
        StateError
            The mapping is no state of a hook with these arguments, or is incomplete; or its residuals belong to another
            rank, another number of ranks, or to parameters or shapes that the model does not have. The hook is
            unchanged.
        """
        self.reducer.load_state_dict(state)

    @staticmethod
    def reshard(states: Any, world_size: int) -> list[dict[str, Any]]:
        """Return states for another number of ranks, whose residuals have the same total effect as the given ones.

        Parameters
        ----------
        states : sequence of dict, or dict
            States of all old ranks, in rank order, or the state that ``state_dict(gather=True)`` returned.
        world_size : int
            Number of new ranks.

        Returns
        -------
        list of dict
            State of each new rank, for :meth:`load_state_dict` of a hook with any ``group=`` of so many ranks.

        Raises
        ------
        StateError
            `states` are not the states of all ranks of one hook.
        """
        return checkpoint.reshard(states, world_size)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and copy, without the process group and the model of this process."""
        return self.__dict__ | {"reducer": copy(self.reducer), "_model": None, "_group": None}
