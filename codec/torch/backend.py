"""A backend of torch.distributed, `codec`: Gloo, but large tensors of floats travel as frames.

>>> import codec.torch
>>> torch.distributed.init_process_group("codec")  # doctest: +SKIP
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from codec import PeerError
from codec._c.spec_structs import spec_struct
from codec.arguments import whole
from codec.specs import Lossless, Spec
from codec.torch import arguments, coalesced, collectives, renamed
from codec.torch.communicator import close_communicator, group_stats
from codec.torch.counters import Counters
from codec.torch.execution import Algorithm, check_algorithm
from codec.torch.work import Work
from codec.torch.worker import Worker

_STREAM = 1 << 32  # draws of one collective: more than it has frames
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


@dataclass(frozen=True)
class Options:
    """How a group's tensors travel, for `pg_options` of ``init_process_group`` and ``new_group``.

    Parameters
    ----------
    spec : Spec
        How tensors are encoded that are summed or averaged: gradients, most of all. Lossless if left out: all ranks get
        the sum in the order of ranks. Maxima are always exact.
    gather : Spec
        How tensors are encoded that are gathered: parameters, for instance.
    algorithm : {"auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"}
        Of sums and means, as for :func:`all_reduce`.
    small : int
        Tensors of fewer bytes go over Gloo as they are.
    """

    spec: Spec = Lossless()  # noqa: RUF009 - it cannot change
    gather: Spec = Lossless()  # noqa: RUF009
    algorithm: Algorithm = "auto"
    small: int = 1 << 14

    def __post_init__(self) -> None:
        for spec in (self.spec, self.gather):
            spec_struct(spec)  # or it is not one
        check_algorithm(self.algorithm)
        whole("small", self.small, 0)

    @property
    def _timeout(self) -> None:
        """None: torch's default, which ``init_device_mesh(backend_override=)`` reads from a backend's options."""
        return None


_Base: Any = dist.ProcessGroup  # whose methods have overloads that differ by how many tensors they take


class ProcessGroup(_Base):
    """Ranks that reduce and gather large tensors of floats as frames, and do all else over Gloo.

    Frames carry all-reduces, reduce-scatters and all-gathers of float32, bfloat16 and float16 on the CPU: sums, means
    and maxima. Anything else is Gloo's: small tensors, integers, broadcasts, point-to-point, objects, barriers.

    Parameters
    ----------
    store : Store
        By which the ranks find each other. No one else may have used it, so give it a prefix.
    rank, size : int
        This rank, and how many there are.
    timeout : timedelta
        How long a rank may keep others waiting.
    options : Options
        How tensors travel.

    Notes
    -----
    torch.distributed makes these for the backend `codec`. For the Manager of torchft, which makes a new group whenever
    a replica comes or goes, ``docs/frameworks.md`` has a class of a few lines.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = dist.distributed_c10d.default_pg_timeout,
        options: Options | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._options = options or Options()
        self._plain = dist.ProcessGroup(store, rank, size)
        gloo, kind = (
            dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout),
            dist.ProcessGroup.BackendType,
        )
        gloo._set_sequence_number_for_group()
        for group in (self, self._plain):
            group._set_default_backend(kind.GLOO)
            group._register_backend(torch.device("cpu"), kind.GLOO, gloo)
        self._calls = 0  # equal on all ranks
        self._waiting: Worker | None = None  # waits for Gloo's reduce-scatters
        self._over = False

    def getBackendName(self) -> str:
        """`codec`."""
        return "codec"

    def get_group_store(self) -> Store:
        """By which its ranks find each other; so do those of the channel that its frames go through."""
        return self._store

    def stats(self) -> Counters:
        """Return what this rank has sent and received as frames or uncompressed, and how long that took.

        What goes over Gloo, such as small tensors, is not counted. Subtract an earlier result to get the difference.
        """
        return group_stats(self)

    def _travels(self, tensors: Sequence[torch.Tensor], op: Any = dist.ReduceOp.SUM) -> bool:
        """Whether these go as frames: decided from what is the same on all ranks."""
        dtype = tensors[0].dtype if tensors else None
        return (
            dtype in arguments.NAMES
            and op in (*_SUMS, dist.ReduceOp.MAX)
            and all(t.dtype == dtype and t.device.type == "cpu" and t.layout == torch.strided for t in tensors)
            and sum(t.nbytes for t in tensors) >= self._options.small
        )

    def _how(self, spec: Spec) -> dict[str, Any]:
        """Arguments of a collective, each of which draws anew."""
        if self._over:
            raise PeerError("the group was shut down: make a new one")
        self._calls += 1
        return {"spec": spec, "group": self, "stream": self._calls * _STREAM}

    def _spec_for(self, op: Any) -> Spec:
        return self._options.spec if op in _SUMS else Lossless()

    def _all_reduce(self, tensors: Sequence[torch.Tensor], op: Any) -> Work:
        algorithm: Algorithm = self._options.algorithm if op in _SUMS else "auto"
        how = self._how(self._spec_for(op)) | {"op": op, "algorithm": algorithm}
        if len(tensors) == 1:
            return _begin(collectives.all_reduce, tensors[0], **how)
        return coalesced.all_reduce(tensors, **how)

    def _reduce_scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any) -> Work:
        how = self._how(self._spec_for(op)) | {"op": op}
        if len(outputs) == 1 == len(inputs):
            return _begin(collectives.reduce_scatter, outputs[0], inputs[0], **how)
        return coalesced.reduce_scatter(outputs, inputs, **how)

    def _all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        how = self._how(self._options.gather)
        if len(outputs) == 1 == len(inputs):
            return _begin(collectives.all_gather, outputs[0], inputs[0], **how)
        return coalesced.all_gather(outputs, inputs, **how)

    def _with_future(self, work: Any, outputs: Sequence[torch.Tensor]) -> Work:
        """Return a work of Gloo's with get_future(), which its reduce-scatters lack."""
        if self._waiting is None:
            self._waiting = Worker("codec, Gloo's reduce-scatters")
            weakref.finalize(self, self._waiting.stop)

        def wait() -> list[torch.Tensor]:
            work.wait()
            return list(outputs)

        return self._waiting.submit(wait)

    # Each of these is as torch.distributed's. What does not travel is for the plain group: methods of the class above
    # that Python may override hold the interpreter's lock while they wait for one of Gloo's, whose holder may want it.

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM, *rest: Any) -> Any:
        """Reduce a tensor over all ranks."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if len(listed) != 1 or not self._travels(listed, _op_of(opts)):
            return self._plain.allreduce(tensors, opts, *rest)
        return self._all_reduce(listed, _op_of(opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Reduce tensors over all ranks: all of them, or none."""
        if not self._travels(tensors, _op_of(opts)):
            return self._plain.allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, _op_of(opts))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any, *rest: Any) -> Any:
        """Reduce a list of tensors, of which each rank gets one."""
        to, parts = ([outputs], [inputs]) if isinstance(outputs, torch.Tensor) else (outputs, inputs)
        if len(to) != 1 or not _in_sync([to[0], *parts[0]]) or not self._travels(parts[0], _op_of(opts)):
            return self._with_future(self._plain.reduce_scatter(outputs, inputs, opts, *rest), to)
        return self._reduce_scatter(to, [torch.stack(parts[0])], _op_of(opts))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        """Reduce a tensor, of which each rank gets its part."""
        if not self._travels([tensor], _op_of(opts)):
            return self._with_future(renamed.group_reduce_scatter_single(self._plain, output, tensor, opts), [output])
        return self._reduce_scatter([output], [tensor], _op_of(opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """The same for many."""
        if not self._travels(inputs, _op_of(opts)):
            return self._with_future(
                renamed.group_reduce_scatter_single_coalesced(self._plain, outputs, inputs, opts), outputs
            )
        return self._reduce_scatter(outputs, inputs, _op_of(opts))

    def allgather(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        """Give all ranks the tensors of all, as a list."""
        to, tensors = ([outputs], [inputs]) if isinstance(inputs, torch.Tensor) else (outputs, inputs)
        if len(to) != 1 or not _in_sync([*tensors, *to[0]]) or not self._travels(tensors):
            return self._plain.allgather(outputs, inputs, *rest)
        how = self._how(self._options.gather)
        return coalesced.all_gather_list(to[0], tensors[0], **how)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> Any:
        """Give all ranks the tensors of all."""
        if not self._travels([tensor]):
            return renamed.group_all_gather_single(self._plain, output, tensor, *rest)
        return self._all_gather([output], [tensor])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
        """The same for many."""
        if not self._travels(inputs):
            return renamed.group_all_gather_single_coalesced(self._plain, outputs, inputs, *rest)
        return self._all_gather(outputs, inputs)

    # Names of older releases of torch, which torchft and others call. Those of the class above bypass this one.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, *args: Any, **how: Any) -> Any:
        """Give all ranks what one has."""
        return self._plain.broadcast(*args, **how)

    def all_to_all_single(self, *args: Any, **how: Any) -> Any:
        """Give each rank a part of what each has."""
        return self._plain.all_to_all_single(*args, **how)

    def send(self, *args: Any, **how: Any) -> Any:
        """Send a tensor to one rank."""
        return self._plain.send(*args, **how)

    def recv(self, *args: Any, **how: Any) -> Any:
        """Receive one."""
        return self._plain.recv(*args, **how)

    def barrier(self, *args: Any, **how: Any) -> Any:
        """Wait for all ranks."""
        return self._plain.barrier(*args, **how)

    def abort(self) -> None:
        """Begin nothing more; what is under way fails, and changes no tensor any more."""
        self._over = True
        close_communicator(self, cancel=True)
        self._plain.abort()

    def shutdown(self) -> None:
        """Begin nothing more, and wait for what is under way: torch.distributed calls this to destroy a group."""
        self._over = True
        close_communicator(self, cancel=False)
        self._plain.shutdown()


def _op_of(opts: Any) -> Any:
    """The operation in a call's options, or that is given in their place."""
    op = getattr(opts, "reduceOp", opts)
    return getattr(op, "op", op)


def _in_sync(tensors: Sequence[torch.Tensor]) -> bool:
    return all(t.shape == tensors[0].shape for t in tensors)


def _begin(collective: Callable[..., Work | None], *tensors: torch.Tensor, **how: Any) -> Work:
    return cast(Work, collective(*tensors, async_op=True, **how))


def register_backend(
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    gather: Spec = Lossless(),  # noqa: B008
    algorithm: Algorithm = "auto",
    small: int = Options.small,
) -> None:
    """Say how tensors travel in groups of the backend `codec` that are made without options of their own.

    Importing :mod:`codec.torch` registers the backend; lossless, until this is called. All ranks must call it alike.

    Parameters
    ----------
    spec, gather, algorithm, small
        As in :class:`Options`.

    Examples
    --------
    >>> codec.torch.register_backend(codec.Float8())  # doctest: +SKIP
    >>> torch.distributed.init_process_group("codec")  # doctest: +SKIP
    """
    usual = Options(spec, gather, algorithm, small)

    def create(how: Any, options: Options | None) -> ProcessGroup:
        return ProcessGroup(how.store, how.group_rank, how.group_size, how.timeout, options or usual)

    dist.Backend.register_backend("codec", create, extended_api=True, devices=["cpu"])
