"""Collectives of FSDP2 that send frames: reduce-scatter, all-gather, and the all-reduce between replicas."""

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from codec import ArgumentError, CallOptions, StateError
from codec._options import settings_of
from codec.specs import Lossless, Spec, check_contraction
from codec.stateful.checkpoint import VERSION, opened, plain
from codec.torch import _compat
from codec.torch.feedback.single import JointResidual, Residuals
from codec.torch.fsdp.passes import Pass
from codec.torch.group.communicator import Communicator, start
from codec.torch.group.work import Work
from codec.torch.reduction import arguments, execution
from codec.torch.reduction.arguments import check_sizes, plain_spec
from codec.torch.reduction.execution import Planned
from codec.torch.reduction.host import Reduction, Values
from codec.torch.reduction.table import GATHER, REDUCE_SCATTER, check_request
from codec.torch.transport.counters import Counters
from codec.torch.transport.gloo import check_timeout

_STREAM = 1 << 32  # distance between the random streams of two collectives; more than a collective has frames


@dataclass
class CommStats(Counters):
    """Totals of a :class:`ReduceScatter`, :class:`AllGather` or :class:`AllReduce`, over all modules that use it.

    It has the attributes of :class:`Counters`, and these. Collectives of dtypes without a codec count as
    `raw_collectives`; their bytes and seconds are not measured.

    Attributes
    ----------
    uncompressed_nbytes : int
        Bytes that this rank would have sent in the same collectives without compression.
    residual_norm : float
        Euclidean norm of this rank's residuals; 0.0 without error feedback.

    Examples
    --------
    >>> codec.torch.AllGather().stats().sent_nbytes
    0
    """

    uncompressed_nbytes: int = 0
    residual_norm: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes sent divided by those without compression; nan before the first collective."""
        return self.sent_nbytes / self.uncompressed_nbytes if self.uncompressed_nbytes else math.nan


class _Comm:
    """Common base of the three collectives: codec, timeout, random streams, statistics."""

    def __init__(self, spec: Spec | str, options: CallOptions | None) -> None:
        self._spec, self._settings = plain_spec(spec), settings_of(options)
        check_timeout(self._settings.timeout)
        self._calls = 0  # collectives so far; equal on all ranks of a group
        self._stats = CommStats()
        self._counting = threading.Lock()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for an input or output; FSDP2 calls this."""
        return torch.empty(*size, dtype=dtype, device=device)

    def stats(self) -> CommStats:
        """Return the totals so far, on this rank.

        Returns
        -------
        CommStats
            A copy, which later collectives do not change.
        """
        with self._counting:
            return CommStats(**vars(self._stats))

    def _count(self, counters: Counters, uncompressed_nbytes: int = 0) -> None:
        with self._counting:
            for name, value in vars(counters).items():
                setattr(self._stats, name, getattr(self._stats, name) + value)
            self._stats.uncompressed_nbytes += uncompressed_nbytes

    def _run(
        self,
        name: str,
        group: Any,
        tensor: torch.Tensor,
        copies: Callable[[int], float],
        work: Callable[[Communicator, int], Any],
        output: torch.Tensor,
        async_op: bool,
    ) -> Work | None:
        """Run work(comm, stream) in the thread of a group's collectives, and count it.

        Without compression this rank would send the bytes of `tensor` times copies(number of ranks).
        """
        if tensor.device.type not in ("cpu", "cuda"):  # of GPUs the worker keeps the order of streams
            torch.accelerator.current_stream(tensor.device).synchronize()
        self._calls += 1
        stream = self._calls * _STREAM

        def counted(comm: Communicator) -> list[torch.Tensor]:
            before = comm.channel.counters.copy()
            work(comm, stream)
            self._count(comm.channel.counters - before, round(tensor.nbytes * copies(comm.channel.size)))
            return [output]

        started = start(name, group, self._settings.timeout, async_op, counted)
        return started if isinstance(started, Work) else None

    def _count_plain(self) -> None:
        """Count a collective of torch.distributed, for a dtype without a codec."""
        self._count(Counters(raw_collectives=1))


class _Reducing(_Comm):
    """Common base of the collectives that reduce gradients, with or without error feedback."""

    def __init__(self, spec: Spec | str, feedback: bool, options: CallOptions | None) -> None:
        super().__init__(spec, options)
        if feedback:
            check_contraction(self._spec)
        self._residuals = Residuals() if feedback else None
        self._names: list[str] = []  # names of the registered modules

    def stats(self) -> CommStats:
        """Return the totals so far, on this rank.

        Returns
        -------
        CommStats
            A copy, which later collectives do not change.
        """
        stats = super().stats()
        stats.residual_norm = 0.0 if self._residuals is None else self._residuals.norm()
        return stats

    def _feed(self, r: Reduction, now: Pass, name: str | None) -> JointResidual | None:
        """Make the reduction of a module's gradients use the module's residual, if error feedback is on."""
        now.check()
        if self._residuals is None:
            return None
        if name is None:
            raise ArgumentError("feedback=True keeps a residual for each module: use register(model), which names them")
        return JointResidual(r, now.begin(self._residuals, name, r))

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the state with which a resumed run gets the same bits: residuals, and the number of calls.

        Parameters
        ----------
        gather : bool
            True: return the state of all ranks, on all ranks, for one file; every rank must call this.

        Returns
        -------
        dict
            ``version``, ``world_size``, and ``"rank <r>"`` for this rank or for each rank: a dict with ``calls``, and
            with ``residuals``, a dict from module names to float32 tensors, from the last successful backward pass.
        """
        kept = {} if self._residuals is None else self._residuals.tensors()
        mine = {f"rank {dist.get_rank()}": {"calls": self._calls, "residuals": kept}}
        found: list[dict[str, Any]] = [mine] * dist.get_world_size()
        if gather:
            dist.all_gather_object(found, mine)
        return functools.reduce(dict.__or__, found, {"version": VERSION, "world_size": len(found)})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`. Call :meth:`register` before.

        Parameters
        ----------
        state_dict : mapping
            State of this rank, or of all ranks by ``gather=True``.

        Raises
        ------
        StateError
            The mapping is no such state, or belongs to another rank, number of ranks, version or model. Nothing has
            changed then.
        """
        state, rank, size = opened(state_dict), dist.get_rank(), dist.get_world_size()
        if (saved := plain(state, "world_size", int)) != size:
            raise StateError(
                f"the state is of {saved} ranks, and this job has {size}: residuals of shards cannot be resharded; "
                "go on without this state"
            )
        mine = state.get(f"rank {rank}")
        if not isinstance(mine, Mapping):
            raise StateError(
                f"the state has the entries {sorted(map(str, state))}, but none of rank {rank}: "
                "save one file for each rank, or one of state_dict(gather=True)"
            )
        calls = plain(mine, "calls", int)
        if not 0 <= calls < _STREAM:
            raise StateError(f"the state counts {calls} calls, which is impossible: it is damaged")
        residuals = mine.get("residuals")
        if self._residuals is not None:
            self._residuals.load(residuals, self._names)
        elif residuals:
            raise StateError("the state has residuals, but error feedback is off: pass feedback=True")
        self._calls = calls


class ReduceScatter(_Reducing):
    """Reduce-scatter of FSDP2's gradients: sums in the order of ranks, with frames on the wire.

    Parameters
    ----------
    spec : Spec or str
        Codec, or name of a preset, of the gradients. Default: lossless.
    feedback : bool
        Error feedback: the errors of a rank's frames are added to its next gradients. It takes 8 bytes for each value
        that the rank reduces, which is 8 bytes for each parameter of the whole model. A gradient must have the same
        number of values in each pass: if some parameters get no gradient, call
        ``set_reduce_scatter_unused_params(True)``.
    options : CallOptions, optional
        ``codec.options(timeout=, engine=, threads=)``, as for :func:`all_reduce`, and those of the ``with`` blocks in
        which this object is made.

    Raises
    ------
    ArgumentError, SpecError
        An argument has a wrong type or value, or `feedback` does not go with `spec`.

    Notes
    -----
    An error on one rank is an error on all ranks, and residuals are as before that backward pass. Gradients of dtypes
    without a codec go through torch.distributed.

    Examples
    --------
    >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(100, 100))
    >>> gradients = codec.torch.ReduceScatter(codec.Quantize(4), feedback=True).register(model)
    >>> model(torch.ones(8, 100)).sum().backward()  # FSDP2 of one rank needs no collectives
    >>> gradients.stats().frame_collectives
    0
    """

    def __init__(
        self,
        spec: Spec | str = Lossless(),  # noqa: B008 - immutable
        *,
        feedback: bool = False,
        options: CallOptions | None = None,
    ) -> None:
        super().__init__(spec, feedback, options)

    def register(self, model: torch.nn.Module) -> "ReduceScatter":
        """Make all FSDP2 modules in `model` reduce their gradients by this object, and return it."""
        modules = _modules_of(model)
        for name, module in modules.items():
            module.set_custom_reduce_scatter(_ModuleReduceScatter(self, name))
        self._names = list(modules)
        return self

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Do what ``dist.reduce_scatter_single`` does; FSDP2 calls this."""
        return self.reduce_scatter(None, output_tensor, input_tensor, group, op, async_op)

    def reduce_scatter(
        self, name: str | None, output: torch.Tensor, tensor: torch.Tensor, group: Any, op: Any, async_op: bool
    ) -> dist.Work | None:
        """Reduce the gradients of the module `name`."""
        if tensor.dtype not in arguments.NAMES:
            self._count_plain()
            return _compat.reduce_scatter_single(output, tensor, op, group, async_op)
        if getattr(op, "op", op) == dist.ReduceOp.PREMUL_SUM:
            _, factor = op.__getstate__()  # torch 2.9 has no other access to the factor
            tensor, op = tensor * factor, dist.ReduceOp.SUM
        now = Pass.current()

        def work(comm: Communicator, stream: int) -> None:
            def prepare() -> Reduction:
                check_sizes(tensor, comm.channel.size, output)
                r = arguments.reduction_of(tensor, self._spec, op, stream, settings=self._settings)
                arguments.check_output(output, output.dtype, output.numel())
                self._feed(r, now, name)
                return r

            execution.run(comm, REDUCE_SCATTER, prepare, lambda result, r: arguments.publish(result, r, output))

        run = functools.partial(
            self._run, "reduce_scatter", group, tensor, lambda size: (size - 1) / size, work, output
        )
        if not async_op:
            now.run(lambda: run(False), output)
            return None
        handle = run(True)
        if handle is not None and self._residuals is not None:  # the residual is part of the pass
            now.run(handle.wait, output)
        return handle


class _ModuleReduceScatter:
    """The reduce-scatter of one module."""

    def __init__(self, comm: ReduceScatter, name: str) -> None:
        self.allocate = comm.allocate
        self._comm, self._name = comm, name

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return self._comm.reduce_scatter(self._name, output_tensor, input_tensor, group, op, async_op)


class AllReduce(_Reducing):
    """All-reduce of FSDP2's gradients between replicas (HSDP), over the slow link, with frames on the wire.

    Give ``fully_shard`` a mesh with the sharding dimension only. After each reduce-scatter FSDP2 calls this object,
    which all-reduces the shard over `group`, the ranks that hold the same shard. As in HSDP, all replicas must begin
    with the same parameters.

    Parameters
    ----------
    spec : Spec or str
        Codec, or name of a preset, of the gradients. Default: lossless.
    group : ProcessGroup
        Replicas, ``mesh.get_group("replicate")``.
    op : {"mean", "avg", "sum"} or ReduceOp
        Reduction over the replicas. FSDP2 averages gradients, so the default is "mean"; use "sum" together with FSDP2's
        ``set_gradient_divide_factor``.
    feedback : bool
        Error feedback: the errors of a rank's frames are added to its next gradients. It takes 8 bytes for each value
        of this rank's shards. As for :class:`ReduceScatter`, a gradient must have the same number of values in each
        pass.
    options : CallOptions, optional
        ``codec.options(algorithm=, timeout=, engine=, threads=)``, as for :func:`all_reduce`, and those of the ``with``
        blocks in which this object is made.

    Raises
    ------
    ArgumentError, SpecError
        An argument has a wrong type or value, or `spec`, `op`, `feedback` and the algorithm do not go together.

    Notes
    -----
    ``set_requires_all_reduce(False)`` is for FSDP2's own all-reduce; to accumulate gradients without this one, use
    ``set_requires_gradient_sync(False)``.

    Examples
    --------
    >>> mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(100, 100), mesh=mesh["shard"])
    >>> replicas = mesh.get_group("replicate")
    >>> between = codec.torch.AllReduce(codec.Float8(group_size=100), group=replicas).register(model)
    >>> model(torch.ones(8, 100)).sum().backward()
    >>> between.stats().frame_collectives
    1
    """

    def __init__(
        self,
        spec: Spec | str = Lossless(),  # noqa: B008 - immutable
        *,
        group: Any,
        op: Any = dist.ReduceOp.AVG,
        feedback: bool = False,
        options: CallOptions | None = None,
    ) -> None:
        super().__init__(spec, feedback, options)
        op = arguments.op_of(op)
        if op == "max":
            raise ArgumentError("op must be a sum or a mean of gradients, got a maximum")
        self._algorithm = execution.algorithm_of(self._settings)
        check_request(self._algorithm, self._spec, op, feedback=feedback)
        self._group, self._op = group, op

    def register(self, model: torch.nn.Module) -> "AllReduce":
        """Make all FSDP2 modules in `model` all-reduce their gradients by this object, and return it.

        Raises
        ------
        ArgumentError
            The model has no FSDP2 module, or the mesh of FSDP2 has the dimension of the replicas, too.
        """
        from torch.distributed.tensor import DTensor

        modules = _modules_of(model)
        mine = set(dist.get_process_group_ranks(self._group))
        for p in model.parameters():
            groups = p.device_mesh.get_all_groups() if isinstance(p, DTensor) else []
            if len(mine) > 1 and any(set(dist.get_process_group_ranks(g)) == mine for g in groups):
                raise ArgumentError(
                    'the mesh of fully_shard has the replicas, too: use fully_shard(mesh=mesh["shard"])'
                )
        for name, module in modules.items():
            module.set_all_reduce_hook(functools.partial(self.all_reduce, name))
        self._names = list(modules)
        return self

    def __call__(self, tensor: torch.Tensor) -> None:
        """Reduce a shard of gradients in place; for ``set_all_reduce_hook``."""
        self.all_reduce(None, tensor)

    def all_reduce(self, name: str | None, tensor: torch.Tensor) -> None:
        """Reduce the gradients of the module `name` in place."""
        if tensor.dtype not in arguments.NAMES:
            self._count_plain()
            dist.all_reduce(tensor, dist.ReduceOp.AVG if self._op == "mean" else dist.ReduceOp.SUM, self._group)
            return
        now = Pass.current()

        def work(comm: Communicator, stream: int) -> None:
            feedback: JointResidual | None = None

            def prepare() -> Planned:
                nonlocal feedback
                r = arguments.reduction_of(tensor, self._spec, self._op, stream, settings=self._settings)
                arguments.check_output(tensor, tensor.dtype, tensor.numel(), "the tensor")
                feedback = self._feed(r, now, name)
                return r, execution.choose(self._algorithm, r, comm.channel)

            def store(result: Values, r: Reduction) -> None:
                arguments.publish(result, r, tensor)
                if feedback is not None:
                    feedback.add_sum_errors(comm.channel.size)

            execution.run_all_reduce(comm, self._algorithm, prepare, store)

        run = functools.partial(
            self._run, "all_reduce", self._group, tensor, lambda size: 2 * (size - 1) / size, work, tensor
        )
        now.run(lambda: run(False), tensor)


class AllGather(_Comm):
    """All-gather of FSDP2's parameters, with frames on the wire.

    Parameters
    ----------
    spec : Spec or str
        Codec, or name of a preset, of the parameters. Default: lossless. A lossy codec changes the parameters of the
        forward and backward pass, equally on all ranks; the optimizer's shards stay exact.
    options : CallOptions, optional
        As for :class:`ReduceScatter`.

    Examples
    --------
    >>> model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(100, 100))
    >>> parameters = codec.torch.AllGather().register(model)
    >>> y = model(torch.ones(8, 100))  # FSDP2 of one rank needs no collectives
    >>> parameters.stats().frame_collectives
    0
    """

    def __init__(self, spec: Spec | str = Lossless(), *, options: CallOptions | None = None) -> None:  # noqa: B008
        super().__init__(spec, options)

    def register(self, model: torch.nn.Module) -> "AllGather":
        """Make all FSDP2 modules in `model` gather their parameters by this object, and return it."""
        for module in _modules_of(model).values():
            module.set_custom_all_gather(self)
        return self

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Do what ``dist.all_gather_single`` does; FSDP2 calls this."""
        if input_tensor.dtype not in arguments.NAMES:
            self._count_plain()
            return _compat.all_gather_single(output_tensor, input_tensor, group, async_op)

        def work(comm: Communicator, stream: int) -> None:
            def prepare() -> Reduction:
                check_sizes(output_tensor, comm.channel.size, input_tensor)
                arguments.check_output(output_tensor, output_tensor.dtype, output_tensor.numel())
                return arguments.reduction_of(input_tensor, self._spec, "sum", stream, settings=self._settings)

            execution.run(comm, GATHER, prepare, lambda result, r: arguments.publish(result, r, output_tensor))

        return self._run("all_gather", group, input_tensor, lambda size: size - 1, work, output_tensor, async_op)


def _modules_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the FSDP2 modules in a model by name, without the prefixes that torch.compile adds."""
    from torch.distributed.fsdp import FSDPModule  # an import of one second, which users of DDP do not need

    named = model.named_modules()
    found = {name.replace("_orig_mod.", ""): m for name, m in named if isinstance(m, FSDPModule)}
    if not found:
        raise ArgumentError("the model has no FSDP2 module: call torch.distributed.fsdp.fully_shard(model) before")
    return found
