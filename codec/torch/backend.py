"""Backend `codec` for torch.distributed: sends large float tensors as frames, and everything else over Gloo.

>>> import codec.torch
>>> torch.distributed.init_process_group("codec")  # doctest: +SKIP
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from codec import PeerError, options
from codec._options import Algorithm, check_algorithm
from codec.arguments import whole
from codec.specs import Lossless, Preset, Spec, SpecLike, require_feedback
from codec.torch import _compat
from codec.torch.collectives import calls, lists
from codec.torch.group.communicator import close_communicator, close_group, group_stats
from codec.torch.group.work import Work
from codec.torch.group.worker import Worker
from codec.torch.reduction import arguments
from codec.torch.transport.counters import Counters

_STREAM = 1 << 32  # offset between the random streams of two collectives; larger than the number of frames in one
_DEVICES = ["cpu", "cuda"]  # device types whose tensors the backend supports
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


@dataclass(frozen=True)
class BackendOptions:
    """Options for groups of the backend `codec`: the `pg_options` of ``init_process_group`` and ``new_group``.

    Parameters
    ----------
    spec : Spec or str
        Codec, or name of a preset, for tensors that are summed or averaged, such as gradients. Default: lossless, with
        values added in rank order. Maxima are always lossless.
    gather : Spec or str
        Codec for tensors that are gathered, such as parameters. Default: lossless.
    algorithm : {"auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"}
        Algorithm for sums and means, as for :func:`all_reduce`.
    small : int
        Size in bytes below which tensors in host memory are sent uncompressed over Gloo. Default: 16 KiB. GPU tensors
        of any size are sent as frames, because Gloo cannot gather or scatter them.

    Raises
    ------
    ArgumentError, SpecError
        A field has an invalid type or value.

    Examples
    --------
    >>> options = codec.torch.BackendOptions(codec.Float8())
    >>> group = torch.distributed.new_group(backend="codec", pg_options=options)
    >>> x = torch.ones(10_000)
    >>> torch.distributed.all_reduce(x, group=group)
    >>> group.stats().frame_collectives
    1
    """

    spec: Spec | Preset = Lossless()  # noqa: RUF009 - immutable
    gather: Spec | Preset = Lossless()  # noqa: RUF009
    algorithm: Algorithm = "auto"
    small: int = 1 << 14

    def __post_init__(self) -> None:
        for name in ("spec", "gather"):
            object.__setattr__(self, name, arguments.plain_spec(getattr(self, name)))
            require_feedback(getattr(self, name), "the backend has none, use codec.torch.all_reduce(feedback=)")
        check_algorithm(self.algorithm)
        whole("small", self.small, 0)

    @property
    def _timeout(self) -> None:
        """None, which means torch's default timeout; ``init_device_mesh(backend_override=)`` reads this property."""
        return None


_Base: Any = dist.ProcessGroup  # Any: its methods have overloads that subclasses cannot match


class ProcessGroup(_Base):
    """Process group that sends large float tensors as frames, and everything else over Gloo.

    All-reduces, reduce-scatters and all-gathers of float32, bfloat16 and float16 tensors in host memory or on a GPU are
    sent as frames; reductions may be sums, means or maxima. Gloo carries small tensors, integers, broadcasts,
    point-to-point messages, objects and barriers.

    Parameters
    ----------
    store : Store
        Store through which the ranks exchange addresses. Use a new PrefixStore for each group.
    rank, size : int
        Rank of this process, and number of ranks.
    timeout : timedelta
        Longest time that a rank may keep others waiting.
    options : BackendOptions, optional
        Codecs and algorithm. Default: lossless.

    Raises
    ------
    PeerError
        A collective was started after :meth:`shutdown` or :meth:`abort`.

    Notes
    -----
    torch.distributed creates these groups for the backend `codec`, and :mod:`codec.integrations.torchft` whenever the
    set of replicas changes.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = dist.distributed_c10d.default_pg_timeout,
        options: BackendOptions | None = None,
    ) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportUnknownMemberType] - _Base is Any
        self._store = store
        self._options = options or BackendOptions()
        self._plain = dist.ProcessGroup(store, rank, size)
        gloo, kind = (
            dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout),
            dist.ProcessGroup.BackendType,
        )
        _compat.begin_sequence(gloo)
        for group in (self, self._plain):
            group._set_default_backend(kind.GLOO)
            for device in _DEVICES:
                group._register_backend(torch.device(device), kind.GLOO, gloo)
        self._calls = 0  # number of collectives sent as frames so far; equal on all ranks
        self._waiting: Worker | None = None  # thread that waits for reduce-scatters over Gloo
        self._closed = False

    def getBackendName(self) -> str:
        """Return the name of the backend, `codec`."""
        return "codec"

    def get_group_store(self) -> Store:
        """Return the store through which the ranks exchange addresses, including those of connections for frames."""
        return self._store

    def stats(self) -> Counters:
        """Return the totals of this group's collectives that were sent as frames, on this rank.

        Collectives over Gloo, such as those of small tensors, are not counted.

        Returns
        -------
        Counters
            Totals so far. Subtract an earlier result to get the totals of a period.
        """
        return group_stats(self)

    def _travels(self, tensors: Sequence[torch.Tensor], op: Any = dist.ReduceOp.SUM) -> bool:
        """Return True if the tensors are sent as frames. The result depends only on properties equal on all ranks."""
        dtype = tensors[0].dtype if tensors else None
        return (
            dtype in arguments.NAMES
            and op in (*_SUMS, dist.ReduceOp.MAX)
            and all(t.dtype == dtype and t.device == tensors[0].device and t.layout == torch.strided for t in tensors)
            and tensors[0].device.type in _DEVICES
            and (tensors[0].device.type != "cpu" or sum(t.nbytes for t in tensors) >= self._options.small)
        )

    def _arguments(self, spec: SpecLike) -> dict[str, Any]:
        """Return the keyword arguments of the next collective, including its random stream."""
        if self._closed:
            raise PeerError("the group was shut down: make a new group")
        self._calls += 1
        return {"spec": spec, "group": self, "stream": self._calls * _STREAM}

    def _spec_for(self, op: Any) -> SpecLike:
        return self._options.spec if op in _SUMS else Lossless()

    def _all_reduce(self, tensors: Sequence[torch.Tensor], op: Any) -> Work:
        algorithm = self._options.algorithm if op in _SUMS else "auto"
        how = self._arguments(self._spec_for(op))
        how |= {"op": op, "options": options(algorithm=algorithm)}
        if len(tensors) == 1:
            return _begin(calls.all_reduce, tensors[0], **how)
        return lists.all_reduce(tensors, **how)

    def _reduce_scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any) -> Work:
        how = self._arguments(self._spec_for(op)) | {"op": op}
        if len(outputs) == 1 == len(inputs):
            return _begin(calls.reduce_scatter, outputs[0], inputs[0], **how)
        return lists.reduce_scatter(outputs, inputs, **how)

    def _all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        how = self._arguments(self._options.gather)
        if len(outputs) == 1 == len(inputs):
            return _begin(calls.all_gather, outputs[0], inputs[0], **how)
        return lists.all_gather(outputs, inputs, **how)

    def _with_future(self, work: Any, outputs: Sequence[torch.Tensor]) -> Work:
        """Return a Work with get_future() for a reduce-scatter over Gloo; Gloo's Work does not support it."""
        if self._waiting is None:
            self._waiting = Worker("codec, Gloo's reduce-scatters")
            self._waiting.end_with(self)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return list(outputs)

        return self._waiting.submit(wait)

    # The methods below have the arguments of dist.ProcessGroup. Collectives over Gloo are called on self._plain: the
    # base class would hold the GIL while it waits for a lock of Gloo, whose holder may wait for the GIL (deadlock).

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM, *rest: Any) -> Any:
        """Reduce a tensor over all ranks."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if len(listed) != 1 or not self._travels(listed, _op_of(opts)):
            return self._plain.allreduce(tensors, opts, *rest)
        return self._all_reduce(listed, _op_of(opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Reduce several tensors over all ranks. If it fails, no tensor is changed."""
        if not self._travels(tensors, _op_of(opts)):
            return self._plain.allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, _op_of(opts))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any, *rest: Any) -> Any:
        """Reduce a list of tensors over all ranks; rank i receives the i-th result."""
        to, parts = ([outputs], [inputs]) if isinstance(outputs, torch.Tensor) else (outputs, inputs)
        if len(to) != 1 or not _in_sync([to[0], *parts[0]]) or not self._travels(parts[0], _op_of(opts)):
            return self._with_future(self._plain.reduce_scatter(outputs, inputs, opts, *rest), to)
        return self._reduce_scatter(to, [torch.stack(parts[0])], _op_of(opts))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Reduce a tensor over all ranks; rank i receives the i-th part of the result."""
        if not self._travels([tensor], _op_of(opts)):
            return self._with_future(_compat.group_reduce_scatter_single(self._plain, output, tensor, opts), [output])
        return self._reduce_scatter([output], [tensor], _op_of(opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Reduce several tensors over all ranks; rank i receives the i-th part of each result."""
        if not self._travels(inputs, _op_of(opts)):
            return self._with_future(
                _compat.group_reduce_scatter_single_coalesced(self._plain, outputs, inputs, opts), outputs
            )
        return self._reduce_scatter(outputs, inputs, _op_of(opts))

    def allgather(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        """Gather a tensor from each rank into a list of tensors."""
        to, tensors = ([outputs], [inputs]) if isinstance(inputs, torch.Tensor) else (outputs, inputs)
        if len(to) != 1 or not _in_sync([*tensors, *to[0]]) or not self._travels(tensors):
            return self._plain.allgather(outputs, inputs, *rest)
        how = self._arguments(self._options.gather)
        return lists.all_gather_list(to[0], tensors[0], **how)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> Any:
        """Gather a tensor from each rank into one concatenated tensor."""
        if not self._travels([tensor]):
            return _compat.group_all_gather_single(self._plain, output, tensor, *rest)
        return self._all_gather([output], [tensor])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        """Gather several tensors from each rank, each into one concatenated tensor."""
        if not self._travels(inputs):
            return _compat.group_all_gather_single_coalesced(self._plain, outputs, inputs, *rest)
        return self._all_gather(outputs, inputs)

    # Method names of older torch releases, which torchft and others call. Without these aliases, the methods of the
    # base class would be called and would send over Gloo.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, *args: Any, **how: Any) -> Any:
        """Broadcast tensors from one rank to all ranks, over Gloo."""
        return self._plain.broadcast(*args, **how)

    def all_to_all_single(self, *args: Any, **how: Any) -> Any:
        """Send a part of a tensor to each rank, over Gloo."""
        return self._plain.all_to_all_single(*args, **how)

    def send(self, *args: Any, **how: Any) -> Any:
        """Send a tensor to one rank, over Gloo."""
        return self._plain.send(*args, **how)

    def recv(self, *args: Any, **how: Any) -> Any:
        """Receive a tensor from one rank, over Gloo."""
        return self._plain.recv(*args, **how)

    def barrier(self, *args: Any, **how: Any) -> Any:
        """Wait for all ranks."""
        return self._plain.barrier(*args, **how)

    def abort(self) -> None:
        """Close the group at once. Collectives in flight fail and change no tensor; new collectives are refused."""
        self._closed = True
        close_group(self)
        self._plain.abort()

    def shutdown(self) -> None:
        """Close the group once the collectives in flight are complete; ``destroy_process_group`` calls this."""
        self._closed = True
        close_communicator(self, cancel=False)
        close_group(self)
        self._plain.shutdown()


def _op_of(opts: Any) -> Any:
    """Return the reduction operation of a call; `opts` is a torch options object or the operation itself."""
    op = getattr(opts, "reduceOp", opts)
    return getattr(op, "op", op)


def _in_sync(tensors: Sequence[torch.Tensor]) -> bool:
    return all(t.shape == tensors[0].shape for t in tensors)


def _begin(collective: Callable[..., Work | None], *tensors: torch.Tensor, **how: Any) -> Work:
    return cast(Work, collective(*tensors, async_op=True, **how))


def register_backend() -> None:
    """Register the backend `codec`. Importing :mod:`codec.torch` calls this, and so does torch, by an entry point."""

    def create(how: Any, options: BackendOptions | None) -> ProcessGroup:
        return ProcessGroup(how.store, how.group_rank, how.group_size, how.timeout, options or BackendOptions())

    backend: Any = dist.Backend  # torch does not annotate register_backend
    backend.register_backend("codec", create, extended_api=True, devices=_DEVICES)
