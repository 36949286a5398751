"""Reduce the buckets of a model's backward passes. A step succeeds for all its buckets or for none."""

import weakref
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, cast

import torch

from codec import ArgumentError, CallOptions, PeerError, Status
from codec.arguments import check_timeout
from codec.stateful import CodebookRefresher
from codec.torch._compat import BackwardEnd, backward_pass, call_after_backward, finalizes_manually
from codec.torch.collectives import uncompressed
from codec.torch.ddp import checkpoint
from codec.torch.ddp.buckets import Bucket, BucketPart, Optimizers, check_join, cut, cut_as, n_values, names_in, scatter
from codec.torch.ddp.joined import BucketRun, Transform, transformed
from codec.torch.ddp.policy import ParameterPlan
from codec.torch.ddp.step import Step, StepState, fail_after
from codec.torch.feedback.pair import owned_values
from codec.torch.group.communicator import Communicator, close_communicator, communicator_of
from codec.torch.group.work import Work
from codec.torch.reduction import arguments, execution
from codec.torch.reduction.execution import Planned, in_way
from codec.torch.reduction.host import Reduction
from codec.torch.transport.collective import Collective


class Reducer:
    """Reduces the buckets of a model's backward passes, in the background thread of the process group.

    Parameters
    ----------
    plan : ParameterPlan
        Spec and error feedback of each parameter.
    optimizers : Optimizers
        Optimizers of the model.
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
        plan: ParameterPlan,
        *,
        optimizers: Optimizers,
        refresher: CodebookRefresher | None,
        grad_scaler: Any,
        transform: Transform | None,
        settings: CallOptions,
    ) -> None:
        check_timeout(settings.timeout)
        self.plan, self.optimizers = plan, optimizers
        self.refresher, self.transform = refresher, transform
        self.settings, self.algorithm = settings, execution.algorithm_of(settings)
        self.group: Any = None  # process group over which gradients are averaged; None: no model yet
        self.state = StepState(plan, refresher)
        self._scaler, self.state.names_nonfinite = grad_scaler, grad_scaler is None
        self._module: weakref.ref[torch.nn.Module] | None = None  # argument `module` of the last call of serve()
        self._parts: dict[tuple[str, ...], tuple[int, list[BucketPart]]] = {}  # number of values and parts, by names

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and copy, without the process group and the module of this process."""
        return self.__dict__ | {"state": copy(self.state), "group": None, "_module": None, "_parts": {}}

    # Model

    def check(self, names: Mapping[torch.nn.Parameter, str], group: Any) -> None:
        """Check that the gradients of parameters can be reduced over the ranks of a group.

        Raises
        ------
        SpecError
            The spec of a parameter needs an optimizer, and there is none.
        StateError
            Residuals belong to other parameters or to another rank.
        """
        for p, name in names.items():
            self.optimizers.check_has(self.plan.spec_of(name, p), name)
        self.state.check_owner(names, checkpoint.place_of(group))

    def serve(self, names: Mapping[torch.nn.Parameter, str], group: Any, module: torch.nn.Module) -> None:
        """Set the parameters whose gradients are reduced, which :meth:`check` has accepted.

        Parameters
        ----------
        names : mapping
            Name of each parameter.
        group : ProcessGroup or LeveledGroup
            Ranks; it may be a new group, after a rank was lost.
        module : torch.nn.Module
            Module whose layers the policy searches for embeddings and output heads; an empty module if the layers are
            unknown.
        """
        if self.state.current.outcome.in_flight:
            self.cancel()
        self.state.serve(names, checkpoint.place_of(group))
        self.plan.serve(module, names)
        self._parts.clear()
        self.group, self._module = group, weakref.ref(module)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state by one that :meth:`StepState.state_dict` returned."""
        self.state.load_state_dict(state)
        self._parts.clear()

    # Steps

    def reduce(self, bucket: Bucket) -> Work:
        """Begin to reduce a bucket in the background. Bucket 0 begins a step.

        For the last bucket of a step, this waits until all buckets are reduced. The step ends with the backward pass;
        outside of one, this method ends it.

        Parameters
        ----------
        bucket : Bucket
            Gradients. All ranks must reduce the buckets of a step in the same order.

        Returns
        -------
        Work
            Handle whose result is the tensor with the mean. It never fails: :meth:`end_step` raises the errors.
        """
        try:
            work = self._begin(bucket)
            if bucket.last:
                work.wait()  # DistributedDataParallel would wait, too, but Ctrl-C could not interrupt its wait
                communicator_of(self.group).worker.wait_for_callbacks()  # callbacks of all buckets, which run in order
        except BaseException:
            self.cancel()
            raise
        if bucket.last and backward_pass() is None:  # join() reduces buckets on a rank that has no inputs left
            self._end_of(self.state.current, last=True)()
        return work

    def _begin(self, bucket: Bucket) -> Work:
        """Begin to reduce a bucket; see :meth:`reduce`."""
        if bucket.number == 0:
            self.state.begin(1.0 if self._scaler is None else self._scaler.get_scale())
        step = self.state.current
        if backward_pass() is not None:
            call_after_backward(self._end_of(step, last=bucket.last))
        comm = communicator_of(self.group, self.settings.timeout, self.settings.security)
        work, runs = step.joiner.add(bucket, comm.channel.size, comm.worker.before_wait)
        for run, joined in runs:
            step.runs.append(run)
            comm.submit(partial(self._run_buckets, comm, run, step), joined)
        if bucket.last and self.state.codebooks is not None:
            self.state.codebooks.submit(comm, step.over)
        return work

    def _end_of(self, step: Step, *, last: bool) -> BackwardEnd:
        """Return a callback for the end of a pass. If interrupted, it cancels the step, which other ranks may have."""
        return BackwardEnd(self.end_step if last else None, lambda: self.cancel(step))

    def end_step(self) -> None:
        """End the step, and raise the error of the first bucket that failed.

        The futures of buckets must not raise it: DistributedDataParallel could not be used again after that.
        """
        step, error = self.state.current, self.state.end()
        if error is None or self._is_overflow(error):
            return
        step.outcome.ended = True
        model = cast(Any, None if self._module is None else self._module())
        if finalizes_manually(model):  # the caller does not, because this error ends its backward pass
            model.finalize_backward()
        raise error

    def cancel(self, step: Step | None = None) -> None:
        """Cancel a step that cannot be completed: other ranks fail, and background work no longer changes the state.

        Parameters
        ----------
        step : Step, optional
            Step to cancel, by default the current step. A step that is over, or has failed on all ranks, is left alone.
        """
        if step is not None and (step is not self.state.current or step.outcome.ended):
            return
        if self.group is not None:
            close_communicator(self.group, cancel=True)
        self.state.cancel()

    async def _run_buckets(
        self, comm: Communicator, run: BucketRun, step: Step, collective: Collective
    ) -> list[torch.Tensor]:
        """Reduce buckets, and wait for the end of the step; return the means, or the given buffers after an error."""
        outcome, reduced = step.outcome, run.buffers
        run.counters = collective.counters
        try:
            if run.number == 0:
                await self._begin_step(comm, collective, step)
            else:
                await step.begun
            if outcome.succeeded:
                reduced = await self._reduce(comm, collective, run, step)
            else:
                fail_after(collective, step)
        except BaseException as e:
            self.state.fail_run(collective, run, step, e)
        finally:
            step.begun.complete()
            run.arrive(collective)
        if run.last:
            try:
                await self._agree(comm, collective, run.number, step)
            finally:
                step.over.complete()
            for other in step.runs[:-1]:
                await other.returned
        else:
            run.returned.complete(await step.over)  # one statement: if not reached, the last bucket would hang
        return reduced if outcome.succeeded else run.buffers

    async def _begin_step(self, comm: Communicator, collective: Collective, step: Step) -> None:
        """Agree with all ranks on the hook's state if ranks may differ, and choose between frames and raw."""
        step.before = comm.channel.totals()
        await self.state.synchronize(collective, step)
        step.timing = self.state.begin_timing(self.algorithm, comm.channel)
        await step.timing.wait()

    async def _agree(self, comm: Communicator, collective: Collective, number: int, step: Step) -> None:
        """Agree on the outcome of a step, in the collective of its last run `number`: all ranks commit, or none."""
        for run in step.runs:
            await run.arrived
        await self.state.settle(collective, step)
        trips = max(run.counters.round_trips for run in step.runs)
        before = collective.counters.round_trips
        outcome, timing = step.outcome, step.timing
        try:
            if not outcome.succeeded or timing is None:
                fail_after(collective, step)
            else:
                report = await collective.agree(step.report(timing, trips))
                if self.state.confirm(step):
                    with self.state.changed_by(step), collective.storing():
                        for run in step.runs:
                            if run.store is not None:
                                run.store()
                        self._commit(step)
                timing.learn(report)
        except BaseException as e:
            self.state.fail(step, number, e, collective)
        trips += collective.counters.round_trips - before
        self.state.stats.add_step(step.total(comm.channel.totals(), trips), sum(len(run.members) for run in step.runs))
        if timing is not None:
            timing.end()
        if outcome.error is not None:
            self.state.confirm(step)
            with suppress(PeerError), self.state.changed_by(step):
                self._undo(step, outcome.error)

    def _undo(self, step: Step, error: BaseException) -> None:
        """Roll a failed step back; after an overflow, fill gradients with NaN, so that all scalers skip the step."""
        if self._is_overflow(error):
            for buffer in (buffer for run in step.runs for buffer in run.buffers):
                buffer.fill_(torch.nan)
        self.state.rollback()

    def _commit(self, step: Step) -> None:
        """Commit a step that has succeeded on all ranks."""
        if self.state.loaded_buckets:
            self._parts.clear()  # this step was cut into the checkpoint's buckets; later steps have other buckets
        self.state.commit(step)

    def _is_overflow(self, error: BaseException) -> bool:
        """Return True for the error of NaN or Inf in scaled gradients, after which the GradScaler skips the step."""
        scales = self._scaler is not None and self._scaler.is_enabled()
        return scales and getattr(error, "code", None) == Status.NONFINITE

    async def _reduce(
        self, comm: Communicator, collective: Collective, run: BucketRun, step: Step
    ) -> list[torch.Tensor]:
        """Compute the means of buckets over all ranks; return the tensors that hold them after the end of the step."""
        has_frames, counters = run.members[0].has_frames, collective.counters
        if self.transform is not None or not has_frames:
            collective.device.settle()  # transforms and copies to the host may wait for a GPU: see StepState.may_wait()
        item = self._prepare_run(step, run)
        step.begun.complete()
        if has_frames:
            return run.results(await self._reduce_parts(comm, collective, run, step, item))
        buffer = run.bucket.buffer
        mean = await uncompressed.mean(collective, buffer, item, self.settings)
        counters.raw_collectives += 1
        counters.raw_nbytes += 0 if buffer.is_sparse else buffer.nbytes
        if buffer.is_sparse:
            return [mean]
        run.store = lambda: buffer.copy_(mean)
        return [buffer]

    def _prepare_run(self, step: Step, run: BucketRun) -> int | str | None:
        """Apply ``transform=`` to buckets, and join them; return the result, which all ranks must agree on.

        The first run of a step also chooses the specs of the step, and rolls residuals of an unfinished step back.
        """
        with self.state.changed_by(step):
            if run.number == 0:
                check_join(self._module and self._module())
                if self.state.residuals is not None:
                    self.state.residuals.begin_step(step.number, step.scale)
                if self.plan.choose(step.number) | self.state.shares.moved():
                    self._parts.clear()
            buffers = self.state.buffers
        item = transformed(run.members, self.transform)
        run.join(buffers)
        return item

    async def _reduce_parts(
        self, comm: Communicator, collective: Collective, run: BucketRun, step: Step, item: int | str | None
    ) -> torch.Tensor:
        """Compute the mean of a bucket whose dtype frames support; return the tensor that holds it after the step."""
        bucket, buffer = run.bucket, run.bucket.buffer
        with self.state.changed_by(step):
            parts = self._parts_of(run)
            if self.state.may_wait(parts):
                collective.device.settle()
            self.state.sample(bucket)
            whole = [self._prepare(bucket, i, part, step) for i, part in enumerate(parts)]
            if self.state.residuals is not None:
                self.state.residuals.flush_moved(whole, parts, collective.levels)
        within = execution.within_of(collective, whole, item, run.gathers)
        windows = await within.scatter()
        run.pass_turn(collective)
        with self.state.changed_by(step):
            each = zip(windows, parts, map(within.window, whole), strict=True)
            planned = [self._plan(comm, r, part, window, step) for r, part, window in each]
        results = await within.gather(await execution.run_several(collective, self.algorithm, planned, item))
        run.reductions = [r for r, _ in planned]
        out = buffer if parts[0].out is None else parts[0].out
        is_raw = any(algorithm.uncompressed for _, algorithm in planned)
        collective.counters.raw_nbytes += sum(r.x.nbytes for r in whole)
        collective.counters.raw_collectives += is_raw
        collective.counters.frame_collectives += not is_raw

        def store() -> None:
            for part, result, r in zip(parts, results, whole, strict=True):
                if part.out is None:
                    scatter(result, r, part, out)
            self.plan.measure(out, parts, step.zeros)

        run.store = store
        return out

    def _parts_of(self, run: BucketRun) -> list[BucketPart]:
        """Return the parts of a bucket, and set the names of its parameters."""
        parameters, n = run.bucket.parameters, run.bucket.buffer.numel()
        names = names_in(parameters, self.plan.names)
        run.names = [*names]
        if names not in self._parts:
            chosen, loaded = [self.plan.chosen[p] for p in parameters], self.state.loaded_buckets
            if sorted(names) == sorted(name for bucket in loaded for name in bucket):
                parts = cut_as(loaded, names, parameters, chosen)
            else:
                parts = cut(names, parameters, chosen, run.bucket.number)
            self._parts[names] = sum(n_values(p) for p in parameters), parts
        known, parts = self._parts[names]
        if known != n:
            raise ArgumentError(
                f"a bucket has {n} values, but its parameters have {known} together, so that it cannot be split into "
                "parameters"
            )
        return parts

    def _prepare(self, bucket: Bucket, i: int, part: BucketPart, step: Step) -> Reduction:
        """Return the reduction of part `i` of a bucket, without residuals."""
        buffer = bucket.buffer
        x, which = buffer, (bucket.number << 20) + i
        if not part.whole:
            places = zip(part.offsets, part.layout, strict=True)
            x = self.state.buffers.joined((which, "grad"), [buffer[o : o + n] for o, (_, _, n) in places])
        spec = self.optimizers.bind(part, step.scale, self.state.buffers, which)
        stream = (step.number << 20) + part.number
        r = arguments.reduction_of(x, spec, "mean", stream, segments=part.segments, settings=self.settings)
        if part.whole and (r.on_device or buffer.device.type == "cpu"):
            part.out = torch.empty_like(buffer) if part.out is None else part.out
            r.out = arguments.values_of(part.out, self.settings)
        return r

    def _plan(self, comm: Communicator, r: Reduction, part: BucketPart, window: tuple[int, int], step: Step) -> Planned:
        """Set residuals and codebook of the reduction that sends frames of a part's `window`; choose its algorithm."""
        algorithm = execution.choose(self.algorithm, r, comm.channel)
        r.weights = self.state.shares.weights if algorithm.encodes_sums else None
        state, way = self.state, "frames" if step.timing is None else step.timing.way
        if state.residuals is not None:
            peers = comm.channel.levels.between
            owned = owned_values(r, algorithm, peers.rank, peers.size)
            state.residuals.feed_part(r, part, window, owned, peers.size)
        if state.codebooks is not None:
            state.codebooks.prepare(r)
        return r, in_way(way, r, algorithm, comm.channel) if algorithm.raw_fallback else algorithm
