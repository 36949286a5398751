"""The communication hook of DistributedDataParallel: buckets in, their means out."""

# no `from __future__ import annotations`: torch looks at the hook's annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from codec import ArgumentError, PeerError, SpecError, StateError, Status
from codec._c.spec_structs import spec_struct
from codec.specs import Spec, check_contraction
from codec.stateful import CodebookRefresher
from codec.torch import arguments, execution, hook_state, lifetime, ternary, uncompressed
from codec.torch.buckets import Buffers, Part, cut, cut_as, n_values, needs_optimizer, scatter
from codec.torch.byte_exchange import exchange
from codec.torch.channel import Channel
from codec.torch.codebook_sync import CodebookSync
from codec.torch.communicator import (
    Communicator,
    close_communicator,
    close_on_error,
    communicator_of,
    exchange_requests,
    hash64,
)
from codec.torch.connection import Timeout, check_timeout
from codec.torch.execution import Algorithm
from codec.torch.hook_residuals import Residuals
from codec.torch.optimizer_state import check_has, metric_of
from codec.torch.policy import Plan, Policy, feeds_back, note_zeros, plain_names
from codec.torch.reduction import Reduction
from codec.torch.stats import ParameterStats, Stats
from codec.torch.work import Work, clear_frames

_changing = threading.Lock()  # residuals and the current step of hooks


@dataclass
class _Step:
    """A backward pass."""

    number: int = 0  # of steps that succeeded before
    scale: float = 1.0  # gradients are multiplied by it
    exact: bool = False  # all gradients are sent lossless
    in_flight: bool = False  # begun, and its error was not raised yet
    error: BaseException | None = None  # of a bucket
    sparse: set[str] = field(default_factory=set[str])  # parameters whose mean gradients are mostly zero
    buckets: list[list[str]] = field(default_factory=list[list[str]])  # names of their parameters


class _End:
    """Called when the backward pass of a bucket ends; if it is not, an exception ended that pass, and the step.

    Ctrl-C during a backward pass is raised when Python is called the next time: before the hook's first line.
    Reentrant checkpoints run passes inside of the pass, so that a step may have several: the one of the last bucket
    ends the step.
    """

    def __init__(self, hook: "Hook", step: _Step, last: bool) -> None:
        self._hook, self._step, self._last, self._called = hook, step, last, False

    def __call__(self) -> None:
        self._called = True
        if self._last:
            self._hook._raise()

    def __del__(self) -> None:
        if not self._called:
            self._hook._cancel_step(self._step)


class Hook:
    """A communication hook: made by :func:`ddp_hook`, registered by :meth:`register`."""

    def __init__(
        self,
        spec: Spec,
        optimizer: torch.optim.Optimizer | None,
        feedback: bool | None,
        policy: Policy,
        algorithm: Algorithm,
        refresher: CodebookRefresher | None,
        grad_scaler: Any,
        group: Any,
        timeout: Timeout | None,
        start_step: int,
    ) -> None:
        self.plan = Plan(spec, feedback, policy, start_step)
        self.optimizer = optimizer
        self._algorithm: Algorithm = algorithm
        self._scaler = grad_scaler
        self._group_argument, self._group, self._timeout = group, group, check_timeout(timeout)
        self._steps = 0  # that have succeeded, those before a checkpoint included
        self._buckets: list[list[str]] = []  # names of the parameters in each bucket of the last step
        self._loaded_buckets: list[list[str]] = []  # the same until the first step of a new model has succeeded
        self._in_sync = False  # all ranks are known to have the same number of steps, and of mostly zero parameters
        self._model: weakref.ref[torch.nn.parallel.DistributedDataParallel] | None = None
        self._parts: dict[tuple[str, ...], tuple[int, list[Part]]] = {}  # of buckets, and how many values they have
        self._buffers = Buffers()
        self._step = _Step()
        self._stats = Stats()
        self._owner = hook_state.UNKNOWN, hook_state.UNKNOWN  # rank and world size that the residuals are of
        self._residuals = Residuals(spec) if self.plan.feedback else None
        self.refresher = refresher
        self._books = None if refresher is None else CodebookSync(refresher)
        self.called = False
        self.__name__ = self.__qualname__ = "codec.torch.Hook"  # torch asks a hook for both
        lifetime.watch(self)

    def __repr__(self) -> str:
        on = f"registered, {self._steps} steps" if self._model is not None else "not registered"
        return f"<codec.torch.Hook {self.spec}, feedback={self.plan.feedback}, {on}>"

    @property
    def spec(self) -> Spec:
        """The spec of gradients; :meth:`set_spec` changes it."""
        return self.plan.spec

    def register(self, model: Any) -> "Hook":
        """Send the gradients of a model through this hook.

        A hook serves one model. It can be registered again to a new DistributedDataParallel of the same model, such as
        after a rank was lost; only the last one may then be used.

        Parameters
        ----------
        model : torch.nn.parallel.DistributedDataParallel
            Or what ``torch.compile`` made of one.

        Returns
        -------
        Hook
            This hook.

        Raises
        ------
        ArgumentError
            The model, or what the policy returns for its parameters, cannot be used; the hook serves another model.
        StateError
            A state was loaded that belongs to another model or rank.
        """
        model = getattr(model, "_orig_mod", model)
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise ArgumentError(f"a hook is for a DistributedDataParallel, not for {type(model).__name__}")
        adopted = self._checked(model)
        model.register_comm_hook(None, self)
        self._adopt(*adopted)
        return self

    def serve(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Reduce the gradients of a model to which torch has registered this hook, or a function that calls it."""
        self._adopt(*self._checked(model))

    def _checked(self, model: torch.nn.parallel.DistributedDataParallel) -> tuple[Any, dict[torch.nn.Parameter, str]]:
        """Return a model and the names of its parameters, if this hook can serve it."""
        lifetime.check_reducer(model)
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
        names = dict(zip((p for _, p in named), plain_names(name for name, _ in named), strict=True))
        if self._model is not None and self._model() is not None and _sizes(names) != _sizes(self.plan.names):
            raise ArgumentError(
                "this hook is registered to another model: a hook serves one model, make another one by ddp_hook()"
            )
        for p, name in names.items():
            check_has(self.optimizer, self.plan.asked(name, p), name)
        group: Any = self._group_argument or model.process_group
        self._check_state(names, group.rank(), group.size())
        return model, names

    def _adopt(self, model: Any, names: dict[torch.nn.Parameter, str]) -> None:
        """Serve a model from now on."""
        if self._step.in_flight:
            self._cancel_step(self._step)
        if self._books is not None:
            self._books.settle()
            self._books.require_sync()
        self._model, self._in_sync, self._loaded_buckets = weakref.ref(model), False, self._buckets
        self.plan.serve(model, names)
        self._parts.clear()
        self._group = self._group_argument or model.process_group  # a new one, perhaps, after a rank was lost
        self._owner = self._group.rank(), self._group.size()
        lifetime.warn_of_adam(self)

    def set_spec(self, spec: Spec, *, feedback: bool | None = None) -> None:
        """Encode gradients with another spec from the next step on; all ranks must do so between the same two steps.

        Residuals that the new spec has no use for are added to the next step's gradients.

        Parameters
        ----------
        spec : Spec
            As for :func:`ddp_hook`.
        feedback : bool, optional
            As for :func:`ddp_hook`.

        Raises
        ------
        ArgumentError, SpecError
            The spec does not go with the other arguments of the hook, which goes on as before.
        """
        check(spec, self.optimizer, feedback, self._algorithm, self.refresher)
        self.plan.spec, self.plan.feedback_argument = spec, feedback
        if self.plan.feedback and self._residuals is None:
            self._residuals = Residuals(spec)
        lifetime.warn_of_adam(self)

    def stats(self, *, by_parameter: bool = False) -> Stats:
        """Return what the hook has done so far on this rank.

        Parameters
        ----------
        by_parameter : bool
            Fill in ``parameters``; that takes a copy of the residuals.
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
        """Return what must be saved with a checkpoint: residuals, agreed codebooks, and the number of steps.

        Parameters
        ----------
        gather : bool
            Return the states of all ranks, on all ranks, for one file. Every rank must call this. Left out: this
            rank's own, which each rank saves for itself.

        Returns
        -------
        dict
            Tensors, integers and strings, which ``torch.load`` takes with ``weights_only=True``.
        """
        if self._books is not None:
            self._books.settle()
        state = hook_state.head(*self._owner, self._steps, self.plan.sparse, self._buckets)
        if self._residuals is not None:
            state |= self._residuals.state_dict()
        if self.refresher is not None:
            state["refresher"] = hook_state.of_tensors(self.refresher.state_dict())
        if not gather:
            return state
        if self._model is None:
            raise StateError("register the hook before the states of all ranks are gathered")
        size = self._group.size()
        data = exchange([hook_state.packed(state)] * size, group=self._group, timeout=self._timeout)
        return {"version": hook_state.VERSION, "ranks": [hook_state.unpacked(each) for each in data]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`, which is copied.

        A state is checked against the model by :meth:`register` or this method, whichever comes last.

        Parameters
        ----------
        state : mapping
            This rank's own, or that of all ranks by ``gather=True``.

        Raises
        ------
        StateError
            It is not a state of such a hook; residuals are of another rank, another number of ranks, or of parameters
            or values that the model does not have. The hook is as before.
        """
        saved = hook_state.Saved(state, *self._owner)
        expected = hook_state.ROLES if self._residuals is not None else ()
        saved.check_parts([*expected, *(["refresher"] if self.refresher is not None else ())])
        residuals = None
        if self._residuals is not None:
            hook_state.check_rank((saved.rank, saved.world_size), self._owner)
            residuals = Residuals(self.spec)
            residuals.load_state_dict(saved.parts)
            if self.plan.names:
                hook_state.check_ranges(residuals.ranges(), _sizes(self.plan.names))
        if self._books is not None and self.refresher is not None:
            self._books.settle()
            self.refresher.load_state_dict(saved.parts["refresher"])
            self._books.restart()
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
            The states of all old ranks in their order, or the one that ``state_dict(gather=True)`` returned.
        world_size : int
            The number of new ranks.

        Returns
        -------
        list of dict
            For each new rank one, for :meth:`load_state_dict`.

        Raises
        ------
        StateError
            These are not the states of all ranks of one hook.
        """
        return hook_state.reshard(states, world_size)

    def _check_state(self, names: Mapping[torch.nn.Parameter, str], rank: int, size: int) -> None:
        """Raise StateError if the hook has residuals that belong to another rank or model."""
        if self._residuals is None or not (ranges := self._residuals.ranges()):
            return
        if self._model is None:  # they were loaded
            hook_state.check_rank(self._owner, (rank, size))
        hook_state.check_ranges(ranges, _sizes(names))

    def __getstate__(self) -> dict[str, Any]:
        """Return the hook without the process group and the model, which belong to this process."""
        nothing = {"_group_argument": None, "_group": None, "_model": None, "_parts": {}}
        return self.__dict__ | nothing | {"_buffers": Buffers(), "_step": _Step(), "_in_sync": False}

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Reduce a bucket: torch calls this in the same order on all ranks."""
        lifetime.check_bucket(bucket)
        self.called = True
        try:
            if self._model is None or self._model() is None:  # registered by torch's own register_comm_hook
                self.serve(lifetime.model_of(self))
            work = self._begin(bucket)
            if bucket.is_last():
                work.wait()  # the model would wait, too, but would not hear Ctrl-C meanwhile
        except BaseException:
            self._cancel_step(self._step)
            raise
        if bucket.is_last() and not _in_backward():  # but in join(), which sends zeros for ranks that are through
            self._raise()
        return work.get_future()

    def _begin(self, bucket: Any) -> Work:
        """Reduce a bucket in the background."""
        buffer, first, last = bucket.buffer(), bucket.index() == 0, bucket.is_last()
        parameters = cast(list[torch.nn.Parameter], bucket.parameters())
        if first:
            if self._step.in_flight:  # other ranks may wait for its other buckets
                raise PeerError("the backward pass before this one did not end: make a new group") from self._step.error
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._step = _Step(self._steps, scale, in_flight=True)
        step = self._step
        if _in_backward():
            _when_backward_ends(_End(self, step, last))
        comm = communicator_of(self._group, self._timeout)
        number = bucket.index()

        def run() -> torch.Tensor:
            reduced = buffer
            try:
                if first:
                    self._begin_step(comm.channel, step)
                reduced = self._reduce(comm, buffer, parameters, number, step)
                if last and step.error is None:
                    with close_on_error(comm.channel), self._current(step):
                        self._commit(step)
            except BaseException as e:
                clear_frames(e)
                step.error = step.error or e
                self._require_sync()
                if self._is_overflow(e):
                    with suppress(PeerError), self._current(step):
                        buffer.fill_(torch.nan)  # on all ranks: their scalers skip the step
            if last and step.error is not None:  # later buckets than that of the error have changed something, too
                with suppress(PeerError), self._current(step):
                    self._rollback()
            return reduced

        work = comm.worker.submit(run)
        if last and self._books is not None:
            self._books.submit(comm)
        return work

    def _begin_step(self, channel: Channel, step: _Step) -> None:
        """Agree with all ranks on the number of the step, and on the parameters that are mostly zero."""
        if self._books is not None:
            self._books.begin_step(channel)
        if not self._in_sync:
            same = hash64("hook")
            known = hash64(self.plan.sparse is None, sorted(self.plan.sparse or ()), self._loaded_buckets)
            _, everyones = exchange_requests(channel, lambda: (None, [same, self._steps, known]))
            self._steps = max(steps for _, steps, _ in everyones)
            if len({theirs for _, _, theirs in everyones}) > 1:  # a rank is new: look again
                self.plan.sparse, self._loaded_buckets = None, []
            self._in_sync = True
        step.number = self._steps

    def _require_sync(self) -> None:
        """Note that other ranks may have other states now: they are new, or a step has failed."""
        self._in_sync = False
        if self._books is not None:
            self._books.require_sync()

    @contextmanager
    def _current(self, step: _Step) -> Iterator[None]:
        """Raise PeerError if another step has begun, or this one was given up; until the end, neither happens."""
        with _changing:
            if step is not self._step:
                raise PeerError("the step was given up")
            yield

    def _cancel_step(self, step: _Step) -> None:
        """End a step halfway: peers are told, and its work in the background changes nothing any more."""
        if step is not self._step:
            return
        if self._group is not None:
            close_communicator(self._group, cancel=True)
        with _changing:
            self._step = _Step()
            self._rollback()
            # work in the background may still write to the old residuals, and send what lies in rooms
            self._buffers = Buffers()
            self._residuals = self._residuals and self._residuals.copied()

    def _raise(self) -> None:
        """Raise the error of a bucket, if there is one. If the future raised it, the model could not be used again."""
        error, self._step.error = self._step.error, None
        self._step.in_flight = False
        if error is not None:
            self._stats.refused += 1
            if not self._is_overflow(error):
                raise error

    def _is_overflow(self, error: BaseException) -> bool:
        """Return True if a gradient was scaled too much, which the scaler will notice."""
        return self._scaler is not None and getattr(error, "code", None) == Status.NONFINITE

    def _reduce(
        self,
        comm: Communicator,
        buffer: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        number: int,
        step: _Step,
    ) -> torch.Tensor:
        """Return the mean of a bucket over all ranks, in its buffer or beside it; in the worker's thread."""
        before = comm.channel.counters.copy()
        parts: list[Part] = []
        if uncompressed.is_other(buffer):
            out = uncompressed.mean(comm, buffer, lambda: self._prepare_step(step, number))
        else:
            out = self._reduce_parts(comm, buffer, parameters, number, step, parts)
        self._stats.add(comm.channel.counters - before)
        if step.exact:
            note_zeros(out, parts, step.sparse)
        return out

    def _prepare_step(self, step: _Step, number: int) -> None:
        """With the first bucket of a step, forget the step before if it was never ended, and choose specs."""
        with self._current(step):
            if number:
                return
            if self._residuals is not None:
                self._residuals.begin_step(step.number, step.scale)
            step.exact = self.plan.is_exact(step.number)
            if self.plan.choose(step.number):
                self._parts.clear()

    def _reduce_parts(
        self,
        comm: Communicator,
        buffer: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        number: int,
        step: _Step,
        parts: list[Part],
    ) -> torch.Tensor:
        """Return the mean of a bucket that frames can carry, and its parts in `parts`."""

        def prepare() -> list[Reduction]:
            self._prepare_step(step, number)
            with self._current(step):
                parts.extend(self._parts_of(parameters, buffer.numel(), number, step))
                return [self._prepare(comm, buffer, i, part, step) for i, part in enumerate(parts)]

        results = execution.all_reduce_several(comm, prepare, self._algorithm)
        out = buffer if parts[0].out is None else parts[0].out
        with close_on_error(comm.channel), comm.channel.writing():
            for part, (result, r) in zip(parts, results, strict=True):
                if part.out is None:
                    scatter(result, r, part, out)
        return out

    def _parts_of(self, parameters: Sequence[torch.nn.Parameter], n: int, number: int, step: _Step) -> list[Part]:
        """Return the parts of a bucket of n values, the number-th of its step."""
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
            chosen, before = [self.plan.chosen[p] for p in parameters], self._loaded_buckets
            if sorted(names) == sorted(name for bucket in before for name in bucket):
                parts = cut_as(before, names, parameters, chosen)
            else:
                parts = cut(names, parameters, chosen, number)
            self._parts[names] = sum(n_values(p) for p in parameters), parts
        known, parts = self._parts[names]
        if known != n:
            raise ArgumentError(f"a bucket has {n} values, its parameters have {known}: it cannot be taken apart")
        return parts

    def _prepare(self, comm: Communicator, buffer: torch.Tensor, i: int, part: Part, step: _Step) -> Reduction:
        """Return the reduction of part i of a bucket."""
        channel = comm.channel
        x = buffer
        if not part.whole:
            places = zip(part.offsets, part.layout, strict=True)
            x = self._buffers.joined((i, "grad"), [buffer[o : o + n] for o, (_, n) in places])
        metric, state = metric_of(self.optimizer, part, step.scale, self._buffers, i)
        r = arguments.reduction_of(
            x, part.spec, "mean", part.segments, metric, state, (step.number << 20) + part.number
        )
        if part.whole and buffer.device.type == "cpu":
            part.out = torch.empty_like(buffer) if part.out is None else part.out
            r.out = arguments.as_array(part.out)
        if self._residuals is not None:
            phases = execution.choose_algorithm(self._algorithm, r, channel.size)
            self._residuals.feed(r, part, channel.rank, channel.size, phases in ("two_shot", "raw"))
        if self._books is not None:
            self._books.prepare(r)
        return r

    def _commit(self, step: _Step) -> None:
        self._stats.steps += 1
        self._steps += 1
        if not self._loaded_buckets or len(step.buckets) > 1:
            self._buckets = step.buckets
        if self._loaded_buckets:
            self._loaded_buckets = []
            self._parts.clear()
            self._buffers = Buffers()  # which hold all of the gradients now
        if step.exact:
            self.plan.sparse = frozenset(step.sparse)
        if self._residuals is not None:
            self._residuals.commit()

    def _rollback(self) -> None:
        if self._residuals is not None:
            self._residuals.rollback()


def _sizes(names: Mapping[torch.nn.Parameter, str]) -> dict[str, int]:
    return {name: n_values(p) for p, name in names.items()}


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _when_backward_ends(call: Callable[[], None]) -> None:
    """Call it at the end of this backward, after DistributedDataParallel has stored its gradients."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
    # callbacks run in order, also those that are queued by one; the model's own is queued after its last bucket
    engine.queue_callback(lambda: engine.queue_callback(call))


def check(
    spec: Spec,
    optimizer: torch.optim.Optimizer | None,
    feedback: bool | None,
    algorithm: Algorithm,
    refresher: CodebookRefresher | None,
) -> None:
    """Raise ArgumentError unless these arguments of a hook go together."""
    spec_struct(spec)  # raises if it is none
    execution.check_algorithm(algorithm)
    if needs_optimizer(spec) and optimizer is None:
        raise SpecError(f"{spec} drops bits by the optimizer's step: pass optimizer=")
    if feedback not in (None, True, False):
        raise ArgumentError(f"feedback must be True, False or None, got {feedback!r}")
    if feedback:
        check_contraction(spec)
    if algorithm == "shared_scale":
        ternary.check(spec, "mean")
    if (feedback or (feedback is None and feeds_back(spec))) and algorithm == "ring":
        raise ArgumentError("a ring has no error feedback: its frames hold sums of other ranks' values")
    if refresher is not None and refresher.spec != spec:
        raise ArgumentError(f"a refresher of {refresher.spec} does not go with {spec}")
