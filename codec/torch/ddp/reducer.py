"""Reduction of the buckets of a model's backward passes: a step succeeds or fails as a whole."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from codec import ArgumentError, CallOptions, PeerError, Status
from codec.arguments import shown
from codec.stateful import CodebookRefresher
from codec.torch.ddp import uncompressed
from codec.torch.ddp.buckets import Buffers, Part, cut, cut_as, gradients_in, n_values, scatter
from codec.torch.ddp.codebook_sync import CodebookSync
from codec.torch.ddp.optimizer import bind_to_part
from codec.torch.ddp.policy import Plan, note_zeros
from codec.torch.ddp.residuals import Residuals
from codec.torch.ddp.stats import Stats
from codec.torch.feedback.pair import owned_values
from codec.torch.group.communicator import (
    Communicator,
    close_communicator,
    close_on_error,
    communicator_of,
    exchange_requests,
    hash64,
)
from codec.torch.group.work import Work, clear_frames
from codec.torch.reduction import arguments, execution
from codec.torch.reduction.execution import Planned
from codec.torch.transport.channel import Channel
from codec.torch.transport.gloo import check_timeout

Transform = Callable[[torch.Tensor, list[tuple[torch.nn.Parameter, torch.Tensor]]], None]

_changing = threading.Lock()  # guards residuals and current steps of all reducers


@dataclass
class Bucket:
    """Gradients of some parameters, which are reduced together."""

    buffer: torch.Tensor  # flat, or sparse
    parameters: list[torch.nn.Parameter]
    number: int  # place in the step
    last: bool  # the last one of the step


@dataclass
class Step:
    """State of a backward pass."""

    number: int = 0  # steps that have succeeded before
    scale: float = 1.0  # factor of the GradScaler in all gradients
    exact: bool = False  # all gradients are sent lossless
    in_flight: bool = False  # begun, and neither ended nor its error raised
    error: BaseException | None = None  # first error of a bucket
    sparse: set[str] = field(default_factory=set[str])  # parameters whose mean gradients are mostly zero
    buckets: list[list[str]] = field(default_factory=list[list[str]])  # names of the parameters in each bucket


class _BackwardEnd:
    """Callback for the end of a backward pass. If it is deleted uncalled, an exception has ended the pass and the step.

    Ctrl-C during a backward pass is raised when Python is called the next time, before the first line of the hook.
    Reentrant checkpoints run passes within the pass, so that a step may have several; the pass of the last bucket ends
    the step.
    """

    def __init__(self, reducer: "Reducer", step: Step, last: bool) -> None:
        self._reducer, self._step, self._last, self._called = reducer, step, last, False

    def __call__(self) -> None:
        self._called = True
        if self._last:
            self._reducer.end_step()

    def __del__(self) -> None:
        if not self._called:
            self._reducer.cancel_step(self._step)


class Reducer:
    """Reduces the buckets of a model's backward passes in the thread of its group.

    Parameters
    ----------
    plan : Plan
        Spec and error feedback of each parameter.
    optimizer : torch.optim.Optimizer or None
        Optimizer of the model.
    refresher : CodebookRefresher or None
        Codebooks that all ranks agree on.
    grad_scaler : torch.amp.GradScaler or None
        Scaler of the gradients.
    transform : callable or None
        Changes the gradients of a bucket before they are reduced, as for :func:`codec.torch.ddp_hook`.
    settings : CallOptions
        Algorithm, timeout, engine and threads.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: torch.optim.Optimizer | None,
        refresher: CodebookRefresher | None,
        grad_scaler: Any,
        transform: Transform | None,
        settings: CallOptions,
    ) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self.refresher = refresher
        self._settings = settings
        self._algorithm = execution.algorithm_of(settings)
        self._scaler = grad_scaler
        self._transform = transform
        check_timeout(settings.timeout)
        self._group: Any = None  # ranks of the model that the hook serves
        self._steps = 0  # steps that have succeeded, those before a checkpoint included
        self._buckets: list[list[str]] = []  # names of the parameters in each bucket of the last step
        self._loaded_buckets: list[list[str]] = []  # those of a loaded state, until the first step has succeeded
        self._in_sync = False  # all ranks are known to have the same step count, sparse parameters and loaded buckets
        self._parts: dict[tuple[str, ...], tuple[int, list[Part]]] = {}  # values and parts of each bucket, by its names
        self._buffers = Buffers()
        self._step = Step()
        self._stats = Stats()
        self._residuals = Residuals(plan.spec) if plan.feedback else None
        self._codebooks = None if refresher is None else CodebookSync(refresher)

    # The steps of a backward pass

    def begin_bucket(self, bucket: Any) -> Work:
        """Begin to reduce a bucket in the background.

        Parameters
        ----------
        bucket : torch.distributed.GradBucket
            Bucket of DistributedDataParallel. Bucket 0 begins a step.

        Returns
        -------
        Work
            Handle whose result is the tensor with the mean. It does not fail: errors are raised by :meth:`end_step`.
        """
        parameters = cast(list[torch.nn.Parameter], bucket.parameters())
        b = Bucket(bucket.buffer(), parameters, bucket.index(), bucket.is_last())
        if b.number == 0:
            if self._step.in_flight:  # other ranks may wait for its other buckets
                raise PeerError("the backward pass before this one did not end: make a new group") from self._step.error
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._step = Step(self._steps, scale, in_flight=True)
        step = self._step
        if in_backward():
            _call_after_backward(_BackwardEnd(self, step, b.last))
        comm = communicator_of(self._group, self._settings.timeout)
        work = comm.worker.submit(lambda: self._run_bucket(comm, b, step))
        if b.last and self._codebooks is not None:
            self._codebooks.submit(comm)
        return work

    def end_step(self) -> None:
        """End the step and raise the error of its first bucket that failed.

        If the future of a bucket raised the error, DistributedDataParallel could not be used again.
        """
        error, self._step.error = self._step.error, None
        self._step.in_flight = False
        if error is not None:
            self._stats.failed_steps += 1
            if not self._is_overflow(error):
                raise error

    def cancel_step(self, step: Step) -> None:
        """Cancel a step that cannot be completed: peers fail, and its work in the background changes nothing more."""
        if step is not self._step:
            return
        if self._group is not None:
            close_communicator(self._group, cancel=True)
        with _changing:
            self._step = Step()
            self._rollback()
            # work in the background may still write to the old residuals, and send from the old buffers
            self._buffers = Buffers()
            self._residuals = self._residuals and self._residuals.copied()

    def _run_bucket(self, comm: Communicator, bucket: Bucket, step: Step) -> torch.Tensor:
        """Reduce a bucket, in the worker's thread; return its mean, or the buffer after an error."""
        reduced = bucket.buffer
        try:
            if bucket.number == 0:
                self._synchronize(comm.channel, step)
            reduced = self._reduce(comm, bucket, step)
            if bucket.last and step.error is None:
                with close_on_error(comm.channel), self._current(step):
                    self._commit(step)
        except BaseException as e:
            clear_frames(e)
            step.error = step.error or e
            self._require_sync()
            if self._is_overflow(e):
                with suppress(PeerError), self._current(step):
                    bucket.buffer.fill_(torch.nan)  # on all ranks: their scalers skip the step
        if bucket.last and step.error is not None:  # buckets after the one that failed have changed residuals, too
            with suppress(PeerError), self._current(step):
                self._rollback()
        return reduced

    def _synchronize(self, channel: Channel, step: Step) -> None:
        """Agree with all ranks on the number of the step, on sparse parameters and on loaded buckets."""
        if self._codebooks is not None:
            self._codebooks.begin_step(channel)
        if not self._in_sync:
            signature = hash64("hook")
            known = hash64(self.plan.sparse is None, sorted(self.plan.sparse or ()), self._loaded_buckets)
            _, requests = exchange_requests(channel, lambda: (None, [signature, self._steps, known]))
            self._steps = max(steps for _, steps, _ in requests)
            if len({theirs for _, _, theirs in requests}) > 1:  # a rank is new: measure again
                self.plan.sparse, self._loaded_buckets = None, []
            self._in_sync = True
        step.number = self._steps

    def _require_sync(self) -> None:
        """Note that ranks may have different states: one is new, or a step has failed."""
        self._in_sync = False
        if self._codebooks is not None:
            self._codebooks.require_sync()

    @contextmanager
    def _current(self, step: Step) -> Iterator[None]:
        """Return a context manager in which `step` stays the current step.

        Raises
        ------
        PeerError
            Another step has begun, or the step was cancelled.
        """
        with _changing:
            if step is not self._step:
                raise PeerError("the step was cancelled: make a new group")
            yield

    def _is_overflow(self, error: BaseException) -> bool:
        """Return True if gradients overflowed by their scale, which the GradScaler will notice."""
        return self._scaler is not None and getattr(error, "code", None) == Status.NONFINITE

    # One bucket

    def _reduce(self, comm: Communicator, bucket: Bucket, step: Step) -> torch.Tensor:
        """Return the mean of a bucket over all ranks, in its own or in another buffer."""
        before = comm.channel.counters.copy()
        parts: list[Part] = []
        if uncompressed.is_other(bucket.buffer):
            out = uncompressed.mean(comm, bucket.buffer, lambda: self._prepare_bucket(step, bucket))
        else:
            out = self._reduce_parts(comm, bucket, step, parts)
        self._stats.add_bucket(comm.channel.counters - before)
        if step.exact:
            note_zeros(out, parts, step.sparse)
        return out

    def _prepare_bucket(self, step: Step, bucket: Bucket) -> None:
        """Transform a bucket; with the first one, roll a step back that was never ended, and choose specs."""
        with self._current(step):
            if bucket.number == 0:
                if self._residuals is not None:
                    self._residuals.begin_step(step.number, step.scale)
                step.exact = self.plan.is_exact(step.number)
                if self.plan.choose(step.number):
                    self._parts.clear()
        if self._transform is not None:
            gradients = gradients_in(bucket.buffer, bucket.parameters)
            with torch.no_grad():
                returned: Any = self._transform(bucket.buffer, list(zip(bucket.parameters, gradients, strict=True)))
            if returned is not None:
                raise ArgumentError(
                    f"transform= must change the buffer in place and return None; it returned {shown(returned)}"
                )

    def _reduce_parts(self, comm: Communicator, bucket: Bucket, step: Step, parts: list[Part]) -> torch.Tensor:
        """Return the mean of a bucket that frames can carry; add its parts to `parts`."""
        buffer = bucket.buffer

        def prepare() -> list[Planned]:
            self._prepare_bucket(step, bucket)
            with self._current(step):
                parts.extend(self._parts_of(bucket.parameters, buffer.numel(), bucket.number, step))
                return [self._prepare(comm, buffer, i, part, step) for i, part in enumerate(parts)]

        results = execution.all_reduce_several(comm, self._algorithm, prepare)
        out = buffer if parts[0].out is None else parts[0].out
        with close_on_error(comm.channel), comm.channel.writing():
            for part, (result, r) in zip(parts, results, strict=True):
                if part.out is None:
                    scatter(result, r, part, out)
        return out

    def _parts_of(self, parameters: Sequence[torch.nn.Parameter], n: int, number: int, step: Step) -> list[Part]:
        """Return the parts of bucket `number`, which has `n` values."""
        try:
            names = tuple(self.plan.names[p] for p in parameters)
        except KeyError as e:
            shape = tuple(cast(torch.Tensor, e.args[0]).shape)
            raise ArgumentError(
                f"a bucket has a parameter of shape {shape} that the hook does not know: it was registered to another "
                "model since"
            ) from None
        step.buckets.append([*names])
        if names not in self._parts:
            chosen, loaded = [self.plan.chosen[p] for p in parameters], self._loaded_buckets
            if sorted(names) == sorted(name for bucket in loaded for name in bucket):
                parts = cut_as(loaded, names, parameters, chosen)
            else:
                parts = cut(names, parameters, chosen, number)
            self._parts[names] = sum(n_values(p) for p in parameters), parts
        known, parts = self._parts[names]
        if known != n:
            raise ArgumentError(f"a bucket has {n} values, but its parameters have {known}: they cannot be separated")
        return parts

    def _prepare(self, comm: Communicator, buffer: torch.Tensor, i: int, part: Part, step: Step) -> Planned:
        """Return the reduction of part `i` of a bucket, and its algorithm."""
        channel = comm.channel
        x = buffer
        if not part.whole:
            places = zip(part.offsets, part.layout, strict=True)
            x = self._buffers.joined((i, "grad"), [buffer[o : o + n] for o, (_, _, n) in places])
        spec = bind_to_part(self.optimizer, part, step.scale, self._buffers, i)
        stream = (step.number << 20) + part.number
        r = arguments.reduction_of(x, spec, "mean", stream, segments=part.segments, settings=self._settings)
        if part.whole and (r.on_device or buffer.device.type == "cpu"):
            part.out = torch.empty_like(buffer) if part.out is None else part.out
            r.out = arguments.values_of(part.out, self._settings)
        algorithm = execution.choose(self._algorithm, r, channel)
        if self._residuals is not None:
            self._residuals.feed_part(r, part, owned_values(r, algorithm, channel.rank, channel.size), channel.size)
        if self._codebooks is not None:
            self._codebooks.prepare(r)
        return r, algorithm

    def _commit(self, step: Step) -> None:
        """Keep what a step has computed that has succeeded on all ranks."""
        self._stats.steps += 1
        self._steps += 1
        if not self._loaded_buckets or len(step.buckets) > 1:
            self._buckets = step.buckets
        if self._loaded_buckets:
            self._loaded_buckets = []
            self._parts.clear()
            self._buffers = Buffers()  # the old ones hold all gradients at once
        if step.exact:
            self.plan.sparse = frozenset(step.sparse)
        if self._residuals is not None:
            self._residuals.commit()

    def _rollback(self) -> None:
        if self._residuals is not None:
            self._residuals.rollback()


def in_backward() -> bool:
    """Return True if autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def _call_after_backward(call: Callable[[], None]) -> None:
    """Have autograd call a function at the end of this pass, after DistributedDataParallel has stored its gradients."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
    # Callbacks run in order, also those that a callback queues; DistributedDataParallel queues its own after its last
    # bucket.
    engine.queue_callback(lambda: engine.queue_callback(call))
