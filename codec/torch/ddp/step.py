"""State of a hook's current step, and state that changes only if a step succeeds on all ranks."""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from codec import ArgumentError, PeerError, Status
from codec.stateful import CodebookRefresher
from codec.stateful.checkpoint import ROLES
from codec.torch.ddp import checkpoint
from codec.torch.ddp.buckets import Bucket, BucketBuffers, BucketPart, n_values, needs_optimizer, shape_of
from codec.torch.ddp.codebook_sync import CodebookSync
from codec.torch.ddp.joined import BucketRun, Joiner
from codec.torch.ddp.policy import ParameterPlan
from codec.torch.ddp.residuals import HookResiduals
from codec.torch.ddp.stats import HookStats
from codec.torch.feedback.checkpoint import ResidualOwner, of_tensors
from codec.torch.group.autotune import RawFallback, Timing, Tuner
from codec.torch.group.shares import LinkShares
from codec.torch.network.version import hash64
from codec.torch.network.waits import Wait
from codec.torch.reduction.algorithms_device import gather_within
from codec.torch.reduction.execution import settle
from codec.torch.transport.channel import Channel
from codec.torch.transport.collective import Collective
from codec.torch.transport.counters import Counters
from codec.torch.transport.messages import Cause

_changing = threading.Lock()  # guards the residuals and the current step of all hooks


FAILED_ELSEWHERE = "the step has failed on a rank that holds other shards of the model: nothing was changed"
_NO_BUCKET = 1 << 30  # larger than the index of any bucket


@dataclass
class Outcome:
    """Outcome of a step on this rank."""

    in_flight: bool = False  # True from the start of the step until it has ended, or its error was raised
    ended: bool = False  # True: this rank's program knows the outcome, or is about to receive the step's error
    error: BaseException | None = None  # error of run `failed`
    failed: int = _NO_BUCKET  # smallest index of a run of buckets that failed
    cause: Cause | None = None  # first error of the step, as reported to the other ranks
    confirmed: bool = False  # True if ranks of other groups were informed of the outcome

    @property
    def succeeded(self) -> bool:
        """True if no bucket has failed."""
        return self.failed == _NO_BUCKET

    def fail(self, bucket: int, error: BaseException, cause: Cause, rank: int) -> None:
        """Record an error of a bucket, which this rank has reported as `cause`.

        The error of the bucket with the smallest index is kept. Peers abort their other buckets after an error of this
        rank; the resulting PeerError does not replace that error.
        """
        self.cause = self.cause or cause
        echoed = self.error is not None and isinstance(error, PeerError) and cause.rank == rank
        if bucket < self.failed and not echoed:
            self.failed, self.error = bucket, error


def _wait_for_last_bucket() -> Wait:
    wait = Wait()
    wait.of_program = True
    return wait


@dataclass
class Step:
    """State of the step of one backward pass."""

    number: int = 0  # steps that succeeded before this one
    scale: float = 1.0  # factor by which a GradScaler has multiplied all gradients
    outcome: Outcome = field(default_factory=Outcome)
    joiner: Joiner = field(default_factory=Joiner)  # joins small buckets
    runs: list[BucketRun] = field(default_factory=list[BucketRun])  # buckets that were begun
    zeros: dict[str, bool] = field(default_factory=dict[str, bool])  # by parameter: True if its gradient is mostly zero
    before: Counters = field(default_factory=Counters)  # totals of the group at the start of the step
    timing: Timing | None = None  # way and times; None: ranks have not agreed on the hook's state yet
    begun: Wait = field(default_factory=Wait)  # completes when ranks agree on the hook's state and specs are chosen
    over: Wait = field(default_factory=_wait_for_last_bucket)  # completes at the end of the step

    def report(self, timing: Timing, round_trips: float) -> list[int]:
        """Return the measurements of the step that this rank reports to all ranks."""
        sent = sum(run.counters.sent_nbytes for run in self.runs)
        # A bucket that frames do not support has no reductions.
        raw = sum(sum(r.x.nbytes for r in run.reductions) or run.counters.raw_nbytes for run in self.runs)
        on_device = any(r.on_device for run in self.runs for r in run.reductions)
        return timing.report(sent, raw, round_trips, on_device=on_device)

    def total(self, now: Counters, round_trips: float) -> Counters:
        """Return the traffic of the step, given the totals `now` of the group."""
        total, waited = Counters(), now - self.before
        for run in self.runs:
            total.add(run.counters)
        total.wire_s, total.waited_s, total.cpu_s = waited.wire_s, waited.waited_s, waited.cpu_s
        total.round_trips = round_trips
        return total


@dataclass(frozen=True)
class OtherGroups:
    """Functions that agree with the ranks that reduce other shards of the model, in other groups.

    A step succeeds in all groups or in none.
    """

    # Given True if the step has succeeded in this group, returns True if it has in all groups. Each rank must call this
    # at the end of a step.
    confirm: Callable[[bool], bool]
    # Makes the ranks that wait in `confirm` fail, because this rank cannot end the step.
    cancel: Callable[[], None]


class StepState:
    """State of a hook between its steps. Only a step that succeeds on all ranks changes it.

    Parameters
    ----------
    plan : ParameterPlan
        Specs of the parameters. This object sets its `zeros`.
    refresher : CodebookRefresher or None
        Codebooks that all ranks agree on.
    """

    def __init__(self, plan: ParameterPlan, refresher: CodebookRefresher | None) -> None:
        self.count = 0  # steps that have succeeded, including those before a checkpoint
        self.owner = ResidualOwner()  # rank, number of ranks, and ranks of a machine, to which the residuals belong
        self.buckets: list[list[str]] = []  # names of the parameters in each bucket of the last step
        self.loaded_buckets: list[list[str]] = []  # `buckets` of a checkpoint or an earlier model; [] after a step
        self.shapes: checkpoint.Shapes = {}  # shapes of the parameters
        self.residuals: HookResiduals | None = None
        self.codebooks = None if refresher is None else CodebookSync(refresher)
        self.stats = HookStats()
        self.current = Step()
        self.buffers = BucketBuffers()  # memory for concatenated gradients of the current step
        self.fallback = RawFallback("gradients")  # chooses between frames and uncompressed values
        self.shares = LinkShares()  # sizes of the ranks' slices and of joined buckets
        self._plan = plan
        self.other_groups: OtherGroups | None = None
        self.names_nonfinite = True  # name the parameter in errors about NaN and Inf
        self._in_sync = False  # True if step count, plan.zeros and loaded buckets are known to be equal on all ranks
        self.begin_feedback()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and copy, without the step in flight."""
        return self.__dict__ | {
            "buffers": BucketBuffers(),
            "current": Step(),
            "other_groups": None,
            "fallback": RawFallback("gradients"),
            "shares": LinkShares(),
            "_in_sync": False,
        }

    def begin(self, scale: float) -> Step:
        """Begin a step whose gradients a GradScaler has multiplied by `scale`.

        Raises
        ------
        PeerError
            The previous step is in flight: other ranks may wait for its remaining buckets.
        """
        if (former := self.current.outcome).in_flight:
            raise PeerError(
                "the previous backward pass did not end, and other ranks may wait for its buckets: make a new group"
            ) from former.error
        joiner = Joiner(self.shares.limit if self._in_sync else None)  # other ranks may be new, and have no limit
        self.current = Step(self.count, scale, Outcome(in_flight=True), joiner)
        return self.current

    async def synchronize(self, collective: Collective, step: Step) -> None:
        """Agree with all ranks on the step count, on the loaded buckets, and on which gradients are mostly zero."""
        if self.codebooks is not None:
            await self.codebooks.begin_step(collective)
        if not self._in_sync:
            auto = self._plan.auto
            known = hash64(sorted(self._plan.zeros.items()), self.loaded_buckets, *([auto.key] if auto else []))
            extra = {} if auto is None else {"auto": auto.description}
            part = collective.part(hash64("hook", *extra.values()), {"collective": "step of a DDP hook"} | extra)
            states = await part.gather([self.count, known])
            self.count = max(steps for steps, _ in states)
            equal = len({theirs for _, theirs in states}) == 1
            if not equal:  # a rank has joined: measure again
                self._plan.zeros, self.loaded_buckets = {}, []
            if auto is not None:
                auto.synchronize(equal=equal)
            self._in_sync, self.fallback = True, RawFallback("gradients")
            self.shares.reset()
        step.number = self.count

    def begin_timing(self, algorithm: str, channel: Channel) -> Timing:
        """Return the way and the timer of a step with the argument ``algorithm=`` of the hook."""
        auto: Tuner | None = self._plan.auto
        tuner = Tuner() if channel.size == 1 else auto or (self.fallback if algorithm == "auto" else Tuner())
        timing = tuner.begin(channel)
        # NCCL's slots all have the size of the largest slice, and its connections have no statistics.
        timing.shares = self.shares if algorithm == "auto" and not channel.device.connected else None
        return timing

    def sample(self, bucket: Bucket) -> None:
        """Sample the gradients of a bucket, if the automatic choice measures gradients in this step."""
        auto = self._plan.auto
        if auto is None or not auto.is_due:
            return
        ratios = {} if self.residuals is None else self.residuals.ratios
        begin = 0
        for p in bucket.parameters:
            end, name = begin + n_values(p), self._plan.names.get(p, "")
            auto.measurements.sample(name, bucket.buffer[begin:end], shape_of(p), ratios.get(name, 0.0))
            begin = end

    @contextmanager
    def changed_by(self, step: Step) -> Generator[None, None, None]:
        """Return a context manager that locks the states of all hooks, so that `step` stays the current step.

        Raises
        ------
        PeerError
            Another step has begun, or the step was cancelled.
        """
        with _changing:
            if step is not self.current:
                raise PeerError("the step was cancelled: make a new group")
            yield

    def fail(self, step: Step, bucket: int, error: BaseException, collective: Collective) -> None:
        """Record an error of a bucket, and report it to the other ranks. The next step compares the ranks' states."""
        step.outcome.fail(bucket, error, collective.fail(error), collective.rank)
        self._in_sync = False
        if self.codebooks is not None:
            self.codebooks.require_sync()

    def fail_run(self, collective: Collective, run: BucketRun, step: Step, error: BaseException) -> None:
        """Record an error as :meth:`fail` does, and name the parameter in errors about NaN and Inf."""
        self.fail(step, run.number, error, collective)
        if isinstance(error, ArgumentError) and error.code == Status.NONFINITE and self.names_nonfinite:
            any(bucket.explain_nonfinite(error, self._plan.names) for bucket in run.members)

    async def settle(self, collective: Collective, step: Step) -> None:
        """Wait until GPUs have reduced all buckets, and record the errors that their kernels report."""
        if not step.outcome.succeeded:
            return
        launched = [(run, r) for run in step.runs for r in run.reductions]
        for _, r in launched:
            r.request_verdicts()
        for run, r in launched:
            try:
                await settle(collective, r)
            except BaseException as e:
                self.fail_run(collective, run, step, e)
        if step.outcome.succeeded:
            try:
                await gather_within(collective, [each for run in step.runs for each in run.gathers])
            except BaseException as e:
                self.fail(step, step.runs[-1].number, e, collective)

    def may_wait(self, parts: Sequence[BucketPart]) -> bool:
        """Return True if preparing `parts` of a bucket may make the host wait for the GPU.

        The caller must then first call :meth:`DeviceTransfer.settle`, which waits for the messages of earlier buckets
        with a timeout. Otherwise a lost rank could block the host forever: the GPU would wait for a message from it.
        """
        feeds = self.residuals is not None and self.residuals.may_wait(parts)
        samples = self._plan.auto is not None and self._plan.auto.is_due
        return feeds or samples or any(needs_optimizer(part.spec) for part in parts)

    def confirm(self, step: Step) -> bool:
        """Agree once with ranks of other groups on the outcome of a step; return True if it succeeded in all groups.

        If the step has failed in another group, it fails on all ranks of this one, so their connections stay open.

        Raises
        ------
        PeerError
            The step has succeeded in this group, but a rank of another group is lost.
        """
        outcome = step.outcome
        if self.other_groups is not None and not outcome.confirmed:
            outcome.confirmed = True
            if not self.other_groups.confirm(outcome.succeeded) and outcome.succeeded:
                outcome.failed, outcome.error = 0, PeerError(FAILED_ELSEWHERE)
        return outcome.succeeded

    def commit(self, step: Step) -> None:
        """Commit the state of a step that has succeeded on all ranks."""
        self.stats.steps += 1
        self.count += 1
        buckets = [run.names for run in step.runs if run.names]
        if not self.loaded_buckets or len(buckets) > 1:
            self.buckets = buckets
        if self.loaded_buckets:
            self.loaded_buckets = []
            self.buffers = (
                BucketBuffers()
            )  # free the old buffers: the single bucket of the first step held all gradients
        self.stats.contents = self._plan.contents
        self._plan.note(step.zeros)
        if self.owner.rank == 0:
            self._plan.report(step.number)
        if self.residuals is not None:
            self.residuals.commit()

    def rollback(self) -> None:
        """Drop the new residuals of a step that has failed."""
        if self.residuals is not None:
            self.residuals.rollback()

    def end(self) -> BaseException | None:
        """End the current step; return the error of the first bucket that failed, or None."""
        outcome = self.current.outcome
        error, outcome.error, outcome.in_flight = outcome.error, None, False
        self.stats.failed_steps += error is not None
        return error

    def cancel(self) -> None:
        """Cancel the current step, also in other groups. Its background work no longer changes the state."""
        if self.other_groups is not None:
            self.other_groups.cancel()
        with _changing:
            cancelled, self.current = self.current, Step()
            self.rollback()
            # Background work may still write to the old residuals, and send from the old buffers.
            self.buffers = BucketBuffers()
            self.residuals = self.residuals and self.residuals.copied()
        cancelled.over.complete()
        cancelled.joiner.cancel()

    def begin_feedback(self) -> None:
        """Create residuals, or set their decay, if the plan has error feedback."""
        if self._plan.feedback and self.residuals is None:
            self.residuals = HookResiduals(self._plan.spec, self._plan.decay)
        elif self.residuals is not None:
            self.residuals.set_decay(self._plan.decay)

    def check_owner(self, names: Mapping[torch.nn.Parameter, str], here: ResidualOwner) -> None:
        """Raise StateError if residuals belong to other parameters, or loaded residuals belong to another rank."""
        if self.residuals is None or not (ranges := self.residuals.ranges()):
            return
        if not self._plan.names:
            checkpoint.check_rank(self.owner, here)
        checkpoint.check_ranges(ranges, self.shapes, names)

    def serve(self, names: Mapping[torch.nn.Parameter, str], here: ResidualOwner) -> None:
        """Set the parameters and the rank. Other ranks may be new, so the next step compares all ranks' states."""
        if self.residuals is not None:
            self.residuals.move(self.owner, here)
        if self.codebooks is not None:
            self.codebooks.wait()
            self.codebooks.require_sync()
        self._in_sync, self.loaded_buckets, self.owner = False, self.buckets, here
        self.shapes = checkpoint.shapes_of(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; see :meth:`codec.torch.Hook.state_dict`."""
        if self.codebooks is not None:
            self.codebooks.wait()
        state = checkpoint.entries_of(self.owner, self.count, self._plan.zeros, self.buckets, self.shapes)
        if self.residuals is not None:
            state |= self.residuals.state_dict()
        if self.codebooks is not None:
            state["refresher"] = of_tensors(self.codebooks.refresher.state_dict())
        if self._plan.auto is not None:
            state["auto"] = self._plan.auto.state_dict()
        return checkpoint.HOOK.save(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state of this rank; see :meth:`codec.torch.Hook.load_state_dict`."""
        saved = checkpoint.HookState(state, *self.owner[:2])
        of_auto, auto = saved.parts.pop("auto", None), self._plan.auto
        chosen = None if auto is None or of_auto is None else auto.parsed(of_auto)
        expected = ROLES if self.residuals is not None else ()
        saved.check_parts([*expected, *(["refresher"] if self.codebooks is not None else ())])
        names, residuals = self._plan.names, None
        if self.residuals is not None:
            checkpoint.check_rank(saved.place, self.owner)
            residuals = HookResiduals(self._plan.spec, self._plan.decay)
            residuals.load_state_dict(saved.parts)
            if names:
                checkpoint.check_ranges(residuals.ranges(), saved.shapes, names)
                residuals.move(saved.place, self.owner)
        if self.codebooks is not None:
            self.codebooks.load(saved.parts["refresher"])
        if auto is not None:
            auto.load(chosen)
        self.residuals, self.count, self._in_sync = residuals, saved.steps, False
        self._plan.zeros, self.buckets, self.loaded_buckets = saved.zeros, saved.buckets, saved.buckets
        if not names:
            self.owner, self.shapes = saved.place, saved.shapes


def fail_after(collective: Collective, step: Step) -> None:
    """Abort the collective of a bucket after another bucket has failed, and report the first error to all ranks."""
    collective.fail(PeerError("another bucket of this step has failed: nothing was changed"), step.outcome.cause)
