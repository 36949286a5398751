"""Compressed all-reduces with torchft, whose replicas leave and join a training between two steps.

Provisional: may change in any version.

torchft forms quorums, heals replicas and commits steps. The classes of this module send its all-reduces as frames.
"""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import codec.torch
from codec import CallOptions, view
from codec._options import settings_of
from codec.errors import ArgumentError, SpecError
from codec.integrations.attach import host
from codec.integrations.torchft_work import Shape, TorchftWork, hook_of_buckets, in_names, taken
from codec.specs import Lossless, Preset, Spec, check_contraction, require_feedback
from codec.torch.ddp.buckets import needs_optimizer
from codec.torch.ddp.lifetime import check_feedback
from codec.torch.ddp.policy import feeds_back
from codec.torch.reduction.arguments import NAMES, plain_spec
from codec.torch.transport.counters import Counters

__all__ = ["DiLoCo", "DistributedDataParallel", "Manager", "ProcessGroupCodec"]

_torchft: Any = host("torchft")
_groups: Any = host("torchft.process_group")
_local_sgd: Any = host("torchft.local_sgd")

_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class ProcessGroupCodec(_groups.ProcessGroupWrapper):
    """Process group for torchft's Manager, which sends all-reduces as frames over codec's own connections.

    Sums and means of float32, bfloat16 and float16 tensors are compressed. Maxima, reduce-scatters and all-gathers are
    sent as lossless frames; all other collectives, and tensors of few bytes, go over Gloo. If a replica is lost,
    collectives raise PeerError, the step is not committed, and the next quorum calls :meth:`configure`.

    Parameters
    ----------
    spec : Spec or str
        Codec of sums and means, or the name of a preset. Default: lossless, with values added in the order of replicas.
    feedback : bool or float, optional
        Error feedback or its decay, as for :func:`codec.torch.ddp_hook`. It needs a :class:`Manager` of this module.
        Default: True for :class:`codec.Sign` and :class:`codec.TopK`, else False.
    timeout : timedelta
        Longest time that a replica may keep others waiting.
    small : int
        Size in bytes below which tensors in host memory are sent uncompressed over Gloo.
    options : CallOptions, optional
        ``codec.options(algorithm=, engine=, threads=)``, as for :func:`codec.torch.all_reduce`.

    Raises
    ------
    ArgumentError, SpecError
        An argument has an invalid type or value, or the codec cannot be used without the state of an optimizer.

    Notes
    -----
    Residuals belong to names of values (:meth:`named`). They change only if the step is committed. If the number of
    replicas changes from N to M, residuals are multiplied by M / N, so that they count as much in the new mean as in
    the old one. Residuals of lost replicas are lost. A replica that receives its state from another one, and one that
    does not take part in a step, begins with residuals of zero.

    Examples
    --------
    >>> group = codec.integrations.torchft.ProcessGroupCodec(codec.Quantize(4))
    >>> store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    >>> group.configure(f"localhost:{store.port}/first", "replica_0", rank=0, world_size=1)
    >>> x = torch.ones(10_000)
    >>> group.allreduce([x], torch.distributed.ReduceOp.SUM).wait()
    True
    >>> group.stats().raw_nbytes
    40000
    >>> group.shutdown()
    """

    def __init__(
        self,
        spec: Spec | Preset = Lossless(),  # noqa: B008 - immutable
        *,
        feedback: bool | float | None = None,
        timeout: timedelta = timedelta(seconds=60),
        small: int = 1 << 14,
        options: CallOptions | None = None,
    ) -> None:
        base: Any = super()
        base.__init__(timeout)
        self.spec, self._settings = plain_spec(spec), settings_of(options)
        self._backend = codec.torch.BackendOptions(small=small)
        if needs_optimizer(self.spec):
            raise SpecError(f"{self.spec} needs the state of the optimizer, which torchft does not pass to all-reduces")
        check_feedback(feedback)
        self.feedback = feeds_back(self.spec) if feedback is None else bool(feedback)
        self._decay = float(feedback or 1)
        if self.feedback:
            check_contraction(self.spec)
        elif feedback is None:
            require_feedback(self.spec, "pass feedback=False to send without error feedback")
        self._names: deque[tuple[str, Shape]] | None = None  # of the values in the block of named()
        self._residuals: dict[tuple[str, ...], codec.torch.Feedback] = {}  # by names of the values
        self._changed: dict[tuple[str, ...], codec.torch.Feedback] = {}  # after the all-reduces of the current step
        self._size = 0  # number of replicas; 0: not configured yet
        self._calls = 0  # number of all-reduces since configure(); equal on all replicas
        self._works: list[Any] = []  # all-reduces since configure() that may fail
        self._counters = Counters()  # totals of former groups

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *quorum: Any, **more: Any
    ) -> None:
        """Connect the replicas of a new quorum, and adapt the residuals to their number; torchft calls this."""
        base: Any = super()
        base.configure(store_addr, replica_id, rank, world_size, *quorum, **more)
        self._works, self._calls = [], 0
        factor = world_size / (self._size or world_size)  # the Manager divides sums by the number of replicas
        self._residuals = {
            names: feedback.forked((rank, world_size), worker=factor, server=factor)
            for names, feedback in self._residuals.items()
        }
        self._size = world_size

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return codec.torch.ProcessGroup(store, rank, world_size, self._timeout, self._backend)

    def getBackendName(self) -> str:
        """Return the name of the backend, `torchft-codec`."""
        return "torchft-codec"

    def abort(self, errored: bool = True) -> None:
        """Close the group at once. Collectives in flight fail and change no tensor."""
        base: Any = super()
        group = self._pg
        base.abort(errored)
        if group is not None:
            self._counters.add(codec.torch.group_stats(group))

    def shutdown(self) -> None:
        """Close the group once the collectives in flight are complete."""
        if self._pg is not None:
            self._pg.shutdown()
            self.abort(errored=False)

    def errored(self) -> Exception | None:
        """Return the error of an all-reduce since the last :meth:`configure`, or None."""
        failed = [work for work in self._works if not (work.is_completed() and work.is_success())]
        self._works = failed
        return next((work.exception() for work in failed if work.is_completed()), None)

    def stats(self) -> Counters:
        """Return the totals of the collectives of all quorums so far that were sent as frames, on this replica."""
        return self._counters + (Counters() if self._pg is None else codec.torch.group_stats(self._pg))

    @contextmanager
    def named(self, parameters: Iterable[tuple[str, Sequence[int]]]) -> Generator[None]:
        """Name the values of the all-reduces in a block, which have residuals and scales by name and row.

        Parameters
        ----------
        parameters : iterable of (str, shape)
            Name and shape of consecutive values, in the order of the all-reduces. An all-reduce takes as many of them
            as its tensor has values for; the rest of the tensor is padding.

        Examples
        --------
        >>> group = codec.integrations.torchft.ProcessGroupCodec("small")
        >>> net = torch.nn.Linear(100, 100)
        >>> with group.named((name, p.shape) for name, p in net.named_parameters()):
        ...     pass  # manager.allreduce(bucket)
        """
        self._names = deque((name, tuple(shape)) for name, shape in parameters)
        try:
            yield
        finally:
            self._names = None

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce a tensor over all replicas. If the replicas cannot be reached, it is unchanged."""
        listed: list[torch.Tensor] = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = getattr(opts, "reduceOp", opts)
        op = getattr(op, "op", op)
        self.check_named(listed, op)
        names, segments = ((), None) if self._names is None else taken(self._names, listed)
        if not self._travels(listed, op):
            base: Any = super()
            return base.allreduce(tensors, opts)
        self._calls += 1
        work: Any = codec.torch.all_reduce(
            listed[0] if segments is None else view(listed[0], segments=segments),
            self.spec,
            op=op,
            group=self.parent,
            async_op=True,
            feedback=self._feedback_of(names) if self.feedback else False,
            stream=((self._quorum_id or 0) << 32) + (self._calls << 20),
            options=self._settings,
        )
        self._works.append(work)
        return TorchftWork(work, listed)

    def check_named(self, tensors: Sequence[torch.Tensor], op: Any) -> None:
        """Raise ArgumentError if the values of an all-reduce need names, for error feedback, and have none."""
        if self.feedback and self._names is None and self._travels(tensors, op):
            raise ArgumentError(
                "error feedback needs names of values: use DistributedDataParallel or DiLoCo of "
                "codec.integrations.torchft, call this in a block of manager.group.named(), or pass feedback=False"
            )

    def _travels(self, tensors: Sequence[torch.Tensor], op: Any) -> bool:
        """Return True if an all-reduce is sent as frames of the codec. The result is the same on all replicas."""
        x = tensors[0]
        sums = len(tensors) == 1 and op in _SUMS and x.dtype in NAMES
        return sums and (x.device.type != "cpu" or x.nbytes >= self._backend.small)

    def _feedback_of(self, names: tuple[str, ...]) -> codec.torch.Feedback:
        """Return the error feedback for values that the current step changes."""
        if names in self._changed:
            raise ArgumentError(
                f"the values {', '.join(names)} are reduced twice in a step: give them different names, and use the "
                "Manager of codec.integrations.torchft, which ends steps"
            )
        before = self._residuals.get(names)
        fresh = codec.torch.Feedback(self.spec, decay=self._decay)
        self._changed[names] = fresh if before is None else before.forked()
        return self._changed[names]

    def settle(self, *, committed: bool) -> None:
        """End a step: keep the residuals that it has changed, or those from before it. The Manager calls this."""
        if committed:
            self._residuals |= self._changed
        self._changed = {}

    def forget(self, state: object = None) -> None:
        """Set the residuals of earlier steps to zero. The Manager calls this when the replica is healed."""
        self._residuals = {}


class Manager(_torchft.Manager):
    """Manager of torchft that compresses all-reduces, and keeps the residuals of error feedback with the steps.

    Arguments and methods are those of ``torchft.Manager``. All replicas must use this class.

    Parameters
    ----------
    pg : ProcessGroupCodec
        Process group of this module.
    *arguments, **more
        Other arguments of ``torchft.Manager``.

    Attributes
    ----------
    group : ProcessGroupCodec
        The process group.

    Raises
    ------
    ArgumentError
        `pg` is another process group.

    Examples
    --------
    >>> lighthouse = torchft.coordination.LighthouseServer(bind="[::]:0", min_replicas=1)
    >>> store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    >>> net = torch.nn.Linear(100, 100)
    >>> manager = codec.integrations.torchft.Manager(
    ...     codec.integrations.torchft.ProcessGroupCodec("small"),
    ...     load_state_dict=net.load_state_dict,
    ...     state_dict=net.state_dict,
    ...     min_replica_size=1,
    ...     lighthouse_addr=lighthouse.address(),
    ...     hostname="localhost",
    ...     store_addr="localhost",
    ...     store_port=store.port,
    ...     rank=0,
    ...     world_size=1,
    ... )
    >>> model = codec.integrations.torchft.DistributedDataParallel(manager, net)
    >>> manager.start_quorum()
    >>> model(torch.ones(8, 100)).sum().backward()
    >>> manager.should_commit()
    True
    >>> manager.shutdown(wait=False)
    >>> lighthouse.shutdown()
    """

    def __init__(self, pg: ProcessGroupCodec, *arguments: Any, **more: Any) -> None:
        if not isinstance(pg, ProcessGroupCodec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"pg must be a codec.integrations.torchft.ProcessGroupCodec, got {type(pg).__name__}")
        base: Any = super()
        self.group = pg
        base.__init__(pg, *arguments, **more)
        self.register_state_dict_fn("codec", pg.forget, dict)

    def start_quorum(self, *arguments: Any, **more: Any) -> None:
        """Begin a step. If the last step was not committed, its residuals are dropped."""
        base: Any = super()
        self.group.settle(committed=False)
        base.start_quorum(*arguments, **more)

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = dist.ReduceOp.AVG) -> Any:
        """Reduce a tensor over the replicas, by the codec of the group, whatever `should_quantize` is.

        Raises
        ------
        ArgumentError
            The group has error feedback, but the values have no names: see :meth:`ProcessGroupCodec.named`.
        """
        self.group.check_named([tensor], getattr(reduce_op, "op", reduce_op))
        if not self.errored():
            self.wait_quorum()
            if not self.is_participating():
                self.group.forget()
        base: Any = super()
        return base.allreduce(tensor, False, reduce_op)

    def should_commit(self, *arguments: Any, **more: Any) -> bool:
        """Return True if the replica must take the step; keep the new residuals in this case only."""
        base: Any = super()
        committed: bool = base.should_commit(*arguments, **more)
        self.group.settle(committed=committed)
        return committed


class DistributedDataParallel(_torchft.DistributedDataParallel):
    """DistributedDataParallel of torchft whose buckets are reduced together, with rows and residuals by parameter.

    Parameters
    ----------
    manager : Manager
        Manager of this module.
    module : torch.nn.Module
        Module of this replica.
    **more
        Other arguments of ``torchft.DistributedDataParallel``, but ``static_graph=True``.

    Raises
    ------
    ArgumentError
        The graph is static: buckets would then change after the first step, which a replica that joins does not know.

    Notes
    -----
    The class of torchft 0.2 ends the backward pass with an AttributeError if an all-reduce fails. This class ends it
    normally, and torchft does not commit the step.
    """

    def __init__(self, manager: Manager, module: torch.nn.Module, **more: Any) -> None:
        if more.get("static_graph"):
            raise ArgumentError("static_graph=True is not supported, since buckets would change after the first step")
        self.__dict__["_comm_hook"] = hook_of_buckets(module)  # registered by the constructor of the base class
        base: Any = super()
        base.__init__(manager, module, **more)


class DiLoCo(_local_sgd.DiLoCo):
    """DiLoCo of torchft, whose fragments have rows and residuals by parameter.

    Parameters
    ----------
    manager : Manager
        Manager of this module, with ``use_async_quorum=False``.
    model_fragments : list of torch.nn.Module
        Fragments of the model.
    *arguments, **more
        Other arguments of ``torchft.local_sgd.DiLoCo``. `should_quantize` has no effect.
    """

    def __init__(self, manager: Manager, model_fragments: list[torch.nn.Module], *arguments: Any, **more: Any) -> None:
        base: Any = super()
        base.__init__(manager, model_fragments, *arguments, **more)
        for i, (fragment, module) in enumerate(zip(self._fragments, model_fragments, strict=True)):
            fragment.prepare_sync = in_names(fragment.prepare_sync, manager.group, f"{i}.", module)
