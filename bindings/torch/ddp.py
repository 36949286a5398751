"""A communication hook for DistributedDataParallel."""

# no `from __future__ import annotations`: torch looks at the hook's annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

import codec
from codec import PeerError, SpecError, Status, metrics
from codec.segmenting import Records, pack
from codec.spec_structs import spec_struct
from codec.specs import Lossless, Sign, Spec, Ternary, Truncate
from codec.stateful import CodebookRefresher, ErrorFeedback
from codec.stateful.ranges import NOBODY
from codec.torch import arguments, collectives, slices, ternary
from codec.torch.channel import Array, Timeout
from codec.torch.collectives import Algorithm, Line
from codec.torch.reduction import Reduction
from codec.torch.refreshing import Refreshing
from codec.torch.worker import Pending, let_go

Policy = Callable[[str, torch.nn.Parameter], Spec | None]

_SMALL = 4096  # values
_BETWEEN = 1 / 32  # of a bucket: so few values of others are encoded, too, rather than all of it taken apart
_changing = threading.Lock()  # what hooks remember


def default_policy(name: str, parameter: torch.nn.Parameter) -> Spec | None:
    """Norms, biases and small tensors lossless, all others as the hook has it."""
    del name
    return Lossless() if parameter.dim() < 2 or parameter.numel() < _SMALL else None


@dataclass
class Stats:
    """What a hook has done so far, on this rank."""

    steps: int = 0  # that went well
    buckets: int = 0
    raw_nbytes: int = 0  # of the gradients
    sent_nbytes: int = 0  # to all other ranks together
    refused: int = 0  # steps that failed


@dataclass
class _Part:
    """Parameters of a bucket that are encoded alike.

    Where these are nearly all of the bucket it is not taken apart: `whole`. Frames then hold what little lies between
    them, too, whose values come from another part in the end, and whose errors are nobody's.
    """

    spec: Spec
    names: list[str]
    parameters: list[torch.nn.Parameter]
    offsets: list[int]  # in the bucket
    whole: bool  # all of the bucket, in its order
    new: bool = True  # it was not reduced yet
    out: torch.Tensor | None = None  # what comes out, if it is all of the bucket: the model takes it from there

    @property
    def layout(self) -> list[tuple[str, int]]:
        return [(name, p.numel()) for name, p in zip(self.names, self.parameters, strict=True)]

    @functools.cached_property
    def segments(self) -> Records:
        return pack(codec.segments([tuple(p.permute(_order(p)).shape) for p in self.parameters]))

    @property
    def n(self) -> int:
        return sum(p.numel() for p in self.parameters)


@dataclass
class _Step:
    """A backward pass."""

    scale: float = 1.0  # what its gradients are multiplied by
    under_way: bool = False  # begun, and what went wrong with it was not raised
    error: BaseException | None = None  # of a bucket
    moved: list[_Part] = field(default_factory=list[_Part])  # that were never reduced before


class _End:
    """Called when the backward pass of a bucket ends; if it is not, an exception ended that pass: the step is given up.

    Ctrl-C in the midst of it arrives when Python is called the next time: before the hook's first line. Reentrant
    checkpoints run passes inside of the pass, so that a step may have several: it is over with that of the last bucket.
    """

    def __init__(self, hook: "Hook", step: _Step, last: bool) -> None:
        self._hook, self._step, self._last, self._called = hook, step, last, False

    def __call__(self) -> None:
        self._called = True
        if self._last:
            self._hook._raise()

    def __del__(self) -> None:
        if not self._called:
            self._hook._give_up(self._step)


class Hook:
    """What :func:`ddp_hook` returns."""

    def __init__(
        self,
        spec: Spec,
        optimizer: torch.optim.Optimizer | None,
        feedback: bool,
        policy: Policy,
        algorithm: Algorithm,
        refresher: CodebookRefresher | None,
        grad_scaler: Any,
        group: Any,
        timeout: Timeout | None,
    ) -> None:
        self.spec, self.optimizer, self.policy = spec, optimizer, policy
        self._algorithm: Algorithm = algorithm
        self._scaler = grad_scaler
        self._asked_group, self._group, self._timeout = group, group, timeout
        self._names: dict[torch.nn.Parameter, str] = {}
        self._parts: dict[tuple[str, ...], list[_Part]] = {}  # of a bucket, by the names of its parameters
        self._rooms: dict[Any, torch.Tensor] = {}  # for what is put together of a bucket's
        self._step = _Step()
        self._stats = Stats()
        self.worker_feedback = ErrorFeedback(spec, role="worker") if feedback else None
        self.server_feedback = ErrorFeedback(spec, role="server") if feedback else None
        self.refresher = refresher
        self._books = None if refresher is None else Refreshing(refresher)

    def register(self, model: torch.nn.parallel.DistributedDataParallel) -> "Hook":
        """Have a model's gradients go through this hook; itself."""
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SpecError(f"a hook is for a DistributedDataParallel, not for {type(model).__name__}")
        for name, p in model.module.named_parameters():
            spec_struct(self.policy(name, p) or self.spec)  # or the policy gives what is none
        if self._step.under_way:
            self._give_up(self._step)
        if self._books is not None:
            self._books.settle()
            self._books.doubt()
        self._names = {p: name for name, p in model.module.named_parameters()}
        self._parts.clear()
        self._group = self._asked_group or model.process_group  # a new one, perhaps, after a rank was lost
        model.register_comm_hook(None, self._hook)
        return self

    def stats(self) -> Stats:
        """What was done so far."""
        return replace(self._stats)

    def state_dict(self) -> dict[str, Any]:
        """What must be saved with a checkpoint, by each rank its own: errors still to be sent, and agreed codebooks.

        Tensors, integers and strings, which ``torch.load`` takes as it is.
        """
        if self._books is not None:
            self._books.settle()
        return {name: _of_tensors(part.state_dict()) for name, part in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; after an error all is as it was."""
        before, parts = self.state_dict(), self._stateful()
        if not isinstance(state, Mapping) or set(state) != set(parts):  # pyright: ignore[reportUnnecessaryIsInstance]
            given = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise codec.StateError(f"a state of {given} was given, this hook has {sorted(parts)}")
        try:
            for name, part in parts.items():
                part.load_state_dict(state[name])
        except BaseException:
            for name, part in parts.items():
                part.load_state_dict(before[name])
            raise
        if self._books is not None:
            self._books.restart()
        self._parts.clear()

    def _stateful(self) -> dict[str, Any]:
        parts = {"worker": self.worker_feedback, "server": self.server_feedback, "refresher": self.refresher}
        return {name: part for name, part in parts.items() if part is not None}

    def __getstate__(self) -> dict[str, Any]:
        """Without the process group, which belongs to this process."""
        nothing = {"_names": {}, "_parts": {}, "_rooms": {}, "_step": _Step()}
        return self.__dict__ | {"_asked_group": None, "_group": None} | nothing

    def _hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """What torch calls with each bucket, in the same order on all ranks."""
        try:
            pending = self._begin(bucket)
            if bucket.is_last():
                pending.wait()  # the model would wait, too, but would not hear Ctrl-C meanwhile
        except BaseException:
            self._give_up(self._step)
            raise
        if bucket.is_last() and not _in_backward():  # but in join(), which sends zeros for ranks that are through
            self._raise()
        return pending.get_future()

    def _begin(self, bucket: Any) -> Pending:
        """Reduce a bucket in the background."""
        buffer, first, last = bucket.buffer(), bucket.index() == 0, bucket.is_last()
        parts = self._parts_of(cast(list[torch.nn.Parameter], bucket.parameters()))
        if first:
            if self._step.under_way:  # other ranks may wait for its other buckets
                raise PeerError("the backward pass before this one did not end: make a new group") from self._step.error
            self._step = _Step(1.0 if self._scaler is None else self._scaler.get_scale(), under_way=True)
        step = self._step
        if _in_backward():
            _when_backward_ends(_End(self, step, last))
        line = collectives.line_of(self._group, self._timeout)

        def work() -> torch.Tensor:
            reduced = buffer
            try:
                if first and self._books is not None:
                    self._books.begin_step(line.channel)
                reduced = self._reduce(line, buffer, parts, step, first)
                if last and step.error is None:
                    with collectives.in_step(line.channel), self._under_way(step):
                        self._commit(step)
            except BaseException as e:
                let_go(e)
                step.error = step.error or e
                if self._books is not None:
                    self._books.doubt()
                if self._is_overflow(e):
                    with suppress(PeerError), self._under_way(step):
                        buffer.fill_(torch.nan)  # on all ranks: their scalers skip the step
            if last and step.error is not None:  # later buckets than that of the error have changed something, too
                with suppress(PeerError), self._under_way(step):
                    self._rollback()
            return reduced

        reduced = line.worker.submit(work)
        if last and self._books is not None:
            self._books.submit(line)
        return reduced

    @contextmanager
    def _under_way(self, step: _Step) -> Iterator[None]:
        """While what is remembered is changed: an error if another step has begun, or this one was given up."""
        with _changing:
            if step is not self._step:
                raise PeerError("the step was given up")
            yield

    def _give_up(self, step: _Step) -> None:
        """End a step in its midst: peers are told, and what goes on in the background changes nothing any more."""
        if step is not self._step:
            return
        collectives.hang_up(self._group, now=True)
        with _changing:
            self._step = _Step()
            self._rollback()
            # what goes on may still write to buffers of the old ones, and send what lies in rooms
            self._rooms = {}
            self.worker_feedback = _copied(self.worker_feedback)
            self.server_feedback = _copied(self.server_feedback)

    def _raise(self) -> None:
        """What went wrong with a bucket. Not by its future: after that the model could not be used any more."""
        error, self._step.error = self._step.error, None
        self._step.under_way = False
        if error is not None:
            self._stats.refused += 1
            if not self._is_overflow(error):
                raise error

    def _is_overflow(self, error: BaseException) -> bool:
        """Whether a gradient was scaled too much, which is for the scaler to notice."""
        return self._scaler is not None and getattr(error, "code", None) == Status.NONFINITE

    def _parts_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[_Part]:
        names = [self._names[p] for p in parameters]
        parts = self._parts.get(tuple(names))
        if parts is None:
            parts = self._parts[tuple(names)] = self._cut(names, parameters)
        return parts

    def _cut(self, names: list[str], parameters: Sequence[torch.nn.Parameter]) -> list[_Part]:
        """Parameters of a bucket by what the policy says of each; first of all what goes as a whole."""
        specs = [self.policy(name, p) or self.spec for name, p in zip(names, parameters, strict=True)]
        offsets = [0, *itertools.accumulate(p.numel() for p in parameters)]
        parts: list[_Part] = []
        for spec in dict.fromkeys(specs):
            mine = [i for i, its in enumerate(specs) if its == spec]
            parts.append(
                _Part(spec, [names[i] for i in mine], [parameters[i] for i in mine], [offsets[i] for i in mine], False)
            )
        largest = max(parts, key=lambda part: part.n)
        others = offsets[-1] - largest.n
        if not others:
            largest.whole = True
        elif others <= offsets[-1] * _BETWEEN and not _by_state(largest.spec):
            mine = set(largest.names)
            whole = _Part(largest.spec, [n if n in mine else NOBODY for n in names], [*parameters], offsets[:-1], True)
            parts = [whole, *(part for part in parts if part is not largest)]
        return parts

    def _reduce(self, line: Line, buffer: torch.Tensor, parts: list[_Part], step: _Step, first: bool) -> torch.Tensor:
        """In the worker's thread: the mean of a bucket over all ranks, in its buffer or beside it."""
        before = line.channel.sent_nbytes

        def prepare() -> list[Reduction]:
            with self._under_way(step):
                if first:
                    self._rollback()  # of a step that was never ended
                    self._rescale(step.scale)
                return [self._prepare(line, buffer, i, p, step) for i, p in enumerate(parts)]

        results = collectives.run_all(line, prepare, self._algorithm)
        out = buffer if parts[0].out is None else parts[0].out
        with collectives.in_step(line.channel), line.channel.writing():
            for part, (result, r) in zip(parts, results, strict=True):
                if part.out is None:
                    _scatter(result, r, part, out)
        self._stats.buckets += 1
        self._stats.raw_nbytes += buffer.numel() * buffer.element_size()
        self._stats.sent_nbytes += line.channel.sent_nbytes - before
        return out

    def _prepare(self, line: Line, buffer: torch.Tensor, number: int, part: _Part, step: _Step) -> Reduction:
        channel = line.channel
        x = buffer
        if not part.whole:
            places = zip(part.offsets, part.parameters, strict=True)
            x = self._joined((number, "grad"), [buffer[o : o + p.numel()] for o, p in places])
        metric, state = self._metric(number, part, step.scale)
        r = arguments.reduction_of(x, part.spec, "mean", part.segments, metric, state, channel.calls << 32)
        if part.whole and buffer.device.type == "cpu":
            part.out = torch.empty_like(buffer) if part.out is None else part.out
            r.out = arguments.as_array(part.out)
        self._feed(r, part, channel.rank, channel.size, step)
        if self._books is not None:
            self._books.prepare(r)
        return r

    def _feed(self, r: Reduction, part: _Part, rank: int, size: int, step: _Step) -> None:
        """Have frames add what earlier ones have lost: lossy ones always, lossless ones once."""
        if self.worker_feedback is None or self.server_feedback is None:
            return
        if isinstance(part.spec, Lossless):
            if part.new:  # it was not lossless before, perhaps
                step.moved.append(part)
                owed = self.server_feedback.settle(part.layout) * np.float32(size)
                owed += self.worker_feedback.settle(part.layout)
                r.add(owed)
            return
        begin = end = 0
        if collectives.choose_algorithm(self._algorithm, r, size) in ("two_shot", "raw"):
            mine = slices.cut(r.x.size, size, r.x.itemsize, r.segments)[rank]
            begin, end = mine[0].begin, mine[-1].end
        if part.new:  # others own other ranges of its parameters' sums now
            step.moved.append(part)
            elsewhere = _ranges(part, 0, begin) + _ranges(part, end, part.n)
            self.server_feedback.pass_on(elsewhere, self.worker_feedback, size)
        r.residual = self.worker_feedback.begin(part.layout)
        if begin == end:
            return
        sums = self.server_feedback.begin(_ranges(part, begin, end))
        r.sums_residual = lambda a, b: sums[a - begin : b - begin]

    def _joined(self, which: tuple[int, str], tensors: list[torch.Tensor]) -> torch.Tensor:
        """Tensors, one after the other, in memory that is the next bucket's again: new memory takes longer than copies.

        `which` of those that are put together of one bucket: the number of its part, and a name.
        """
        n, device = sum(t.numel() for t in tensors), tensors[0].device
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        room = self._rooms.get(key := (*which, dtype, device))
        if room is None or room.numel() < n:
            room = self._rooms[key] = torch.empty(n, dtype=dtype, device=device)
        return torch.cat(tensors, out=room[:n])

    def _metric(self, number: int, part: _Part, scale: float) -> tuple[Any, dict[str, torch.Tensor] | None]:
        """What Truncate goes by: the optimizer's metrics, by group, and its state, in the order of the part."""
        if not _by_state(part.spec):
            return None, None
        if self.optimizer is None:
            raise SpecError(f"{part.spec} needs ddp_hook(optimizer=)")
        group_of = {p: i for i, g in enumerate(self.optimizer.param_groups) for p in g["params"]}
        if lacking := [name for name, p in zip(part.names, part.parameters, strict=True) if p not in group_of]:
            raise SpecError(f"optimizer= does not have {', '.join(lacking)}: give another spec for it by policy=")
        of_group = {
            i: replace(metrics.from_optimizer(self.optimizer, i), grad_scale=scale)
            for i in {group_of[p] for p in part.parameters}
        }
        groups: list[tuple[int, Any]] = []
        offset = 0
        for p in part.parameters:
            metric = of_group[group_of[p]]
            if not groups or groups[-1][1] != metric:
                groups.append((offset, metric))
            offset += p.numel()
        states = [(_order(p), metrics.state_of(self.optimizer, p)) for p in part.parameters]
        common = [name for name in ("theta", "m", "v") if all(name in s for _, s in states)]
        return groups, {
            name: self._joined((number, name), [s[name].detach().permute(order).reshape(-1) for order, s in states])
            for name in common
        }

    def _commit(self, step: _Step) -> None:
        self._stats.steps += 1
        for part in step.moved:
            part.new = False
        for fb in (self.worker_feedback, self.server_feedback):
            if fb is not None:
                fb.commit()

    def _rollback(self) -> None:
        for fb in (self.worker_feedback, self.server_feedback):
            if fb is not None:
                fb.rollback()

    def _rescale(self, scale: float) -> None:
        for fb in (self.worker_feedback, self.server_feedback):
            if fb is not None:
                fb.rescale(scale)


def _by_state(spec: Spec) -> bool:
    """Whether it goes by the optimizer's state, which lies in each parameter's own tensors."""
    return isinstance(spec, Truncate) and spec.fixed_level is None


def _of_tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in state.items()}


def _copied(feedback: ErrorFeedback | None) -> ErrorFeedback | None:
    """The same with memory of its own."""
    if feedback is None:
        return None
    again = ErrorFeedback(feedback.spec, role=feedback.role)
    again.load_state_dict(feedback.state_dict())
    return again


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _when_backward_ends(call: Callable[[], None]) -> None:
    """Call it at the end of this backward, after DistributedDataParallel has stored its gradients."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
    # callbacks run in order, also those that are queued by one; the model's own is queued after its last bucket
    engine.queue_callback(lambda: engine.queue_callback(call))


def _order(p: torch.Tensor) -> list[int]:
    """A parameter's dimensions in the order in which a bucket has its values: that of memory, if they leave no gaps."""
    dims = list(range(p.dim()))
    in_memory = sorted(dims, key=p.stride, reverse=True)
    return in_memory if not p.is_contiguous() and p.permute(in_memory).is_contiguous() else dims


def _ranges(part: _Part, begin: int, end: int) -> list[tuple[str, int, int]]:
    """What of the parameters lies in values [begin, end) of a part."""
    found: list[tuple[str, int, int]] = []
    offset = 0
    for name, n in part.layout:
        a, b = max(begin, offset), min(end, offset + n)
        if a < b:
            found.append((name, a - offset, b - offset))
        offset += n
    return found


def _scatter(result: Array, r: Reduction, part: _Part, buffer: torch.Tensor) -> None:
    """What comes out for a part, into the bucket."""
    if part.whole:
        arguments.publish(result, r, buffer)
        return
    begin = 0
    for offset, p in zip(part.offsets, part.parameters, strict=True):
        arguments.publish(result[begin : begin + p.numel()], r, buffer[offset : offset + p.numel()])
        begin += p.numel()


def ddp_hook(
    spec: Spec = Lossless(),  # noqa: B008 - it cannot change
    *,
    optimizer: torch.optim.Optimizer | None = None,
    feedback: bool | None = None,
    policy: Policy = default_policy,
    algorithm: Algorithm = "auto",
    refresher: CodebookRefresher | None = None,
    grad_scaler: Any = None,
    group: Any = None,
    timeout: Timeout | None = None,
) -> Hook:
    """A communication hook that sends DistributedDataParallel's gradients as frames.

    Buckets are reduced one after the other by a thread of their own, over connections of their own, while backward goes
    on. All ranks get the same bits. After an error on any rank all of them raise, and what error feedback remembers is
    as it was before the step.

    Parameters
    ----------
    spec : Spec
        How gradients are encoded; lossless if left out.
    optimizer : torch.optim.Optimizer, optional
        What :class:`codec.Truncate` goes by: its step tells how many bits of a gradient matter
        (:func:`codec.metrics.from_optimizer`).
    feedback : bool, optional
        Error feedback: what frames lose is added to the next step's gradients, on each rank and once more where sums
        are encoded. Left out: for :class:`codec.Sign` and :class:`codec.Ternary`, which do not converge well without,
        and :class:`codec.Truncate` with the guard that is meant for it.
    policy : callable
        policy(name, parameter) gives the spec of a parameter, None for `spec`. Left out: norms, biases and tensors of
        fewer than 4,096 values are sent lossless.
    algorithm : str
        As for :func:`all_reduce`.
    refresher : CodebookRefresher, optional
        For :class:`codec.Lossless` and :class:`codec.Truncate`, of the same spec: frames name codebooks that all ranks
        make of what all of them send, instead of bringing their own along. Counts are summed behind the buckets of a
        step in which it is due; it is part of the state. Ranks that know other codebooks, since one has joined, begin
        anew together. Left out: gradients of different layers are smaller with codebooks of their own, and a refresher
        then only finds that none pays.
    grad_scaler : torch.amp.GradScaler, optional
        If gradients are scaled. NaN and Inf are no error then: all ranks get NaN, all scalers skip the step, and what
        is owed stays as it was. Truncate takes the scale from it.
    group : ProcessGroup, optional
        Whose ranks; left out: the model's.
    timeout : float or timedelta, optional
        Seconds that a rank may keep others waiting; left out: the group's.

    Returns
    -------
    Hook
        With ``register(model)``, ``state_dict()``, ``load_state_dict()`` and ``stats()``.

    Raises
    ------
    SpecError
        The arguments do not go together.

    Examples
    --------
    >>> model = DistributedDataParallel(net)  # doctest: +SKIP
    >>> hook = codec.torch.ddp_hook(codec.Truncate(), optimizer=optimizer).register(model)  # doctest: +SKIP
    """
    spec_struct(spec)  # or it is not one
    collectives.check_algorithm(algorithm)
    if isinstance(spec, Truncate) and spec.fixed_level is None and optimizer is None:
        raise SpecError(f"{spec} goes by the optimizer's step: pass optimizer=")
    if feedback is None:
        feedback = isinstance(spec, Sign | Ternary) or (isinstance(spec, Truncate) and spec.guard == "feedback")
    if feedback and isinstance(spec, Lossless):
        raise SpecError("Lossless loses nothing that could be fed back")
    if algorithm == "shared_scale":
        ternary.check(spec, "mean")
    if feedback and algorithm == "ring":
        raise SpecError("a ring has no error feedback: its frames hold sums of other ranks' values")
    if refresher is not None and refresher.spec != spec:
        raise SpecError(f"a refresher of {refresher.spec} does not go with {spec}")
    if isinstance(spec, Sign) and type(optimizer).__name__.startswith("Adam"):
        warnings.warn(
            "signs of gradients, even with error feedback, distort the second moments that Adam divides by: "
            "1-bit Adam compresses the momentum instead",
            stacklevel=2,
        )
    return Hook(spec, optimizer, feedback, policy, algorithm, refresher, grad_scaler, group, timeout)
