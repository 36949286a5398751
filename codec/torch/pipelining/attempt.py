"""Training steps of a pipeline that succeed on all ranks or on none."""

import json
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from codec import ArgumentError, PeerError, StateError
from codec.arguments import shown, whole
from codec.torch.collectives.bytes import exchange
from codec.torch.network.version import PROTOCOL_VERSION
from codec.torch.pipelining.notes import Notes, Report, report_of
from codec.torch.pipelining.snapshot import Snapshot
from codec.torch.pipelining.stage import CompressedStage

logger = logging.getLogger("codec.torch")


def attempts(*stages: CompressedStage, limit: int = 3) -> "Iterator[Attempt]":
    """Return attempts of a training step, until one has succeeded on all ranks of the pipeline.

    All ranks use the same loop, with one run of the schedule, or several for gradient accumulation, in each attempt::

        optimizer.zero_grad()
        for attempt in codec.torch.pipelining.attempts(stage):
            with attempt:
                schedule.step(x, target=y, sample_ids=ids)
        optimizer.step()

    At the end of an attempt ranks exchange reports. If all have succeeded, the new activations become those that
    deltas refer to. Otherwise gradients, buffers of the modules, random generators of torch and the state of deltas
    become as before the attempt on all ranks. If the error may go away, such as a damaged message or a stage that lost
    its state, there is another attempt; samples whose state is missing are sent raw in it. Dropout draws the same bits.

    Parameters
    ----------
    *stages : CompressedStage
        All stages of this rank.
    limit : int
        Largest number of attempts, equal on all ranks.

    Returns
    -------
    iterator of Attempt
        Context managers.

    Raises
    ------
    ArgumentError
        Stages were made with different arguments on different ranks; or sample ids are missing or differ; or a gradient
        has NaN or Inf, which has the code ``Status.NONFINITE``. On ranks without an error of their own it is PeerError,
        with the same code. The pipeline can be used further.
    FrameError, StateError, PeerError
        All attempts have failed. The pipeline can be used further.
    PeerError
        A rank is lost or does not answer in time, or an exception has left an attempt. Connections of the group are
        closed: make a new group and new stages. Parameters and the state of deltas are as before the step.

    Examples
    --------
    See :class:`CompressedStage`.
    """
    _check_stages(stages)
    return _attempts(stages, whole("limit", limit, 1))


def _attempts(stages: Sequence[CompressedStage], limit: int) -> "Iterator[Attempt]":
    for number in range(1, limit + 1):
        attempt = Attempt(stages, number, limit)
        yield attempt
        if not attempt.ended:
            raise StateError("an attempt was not used: write `with attempt:` around schedule.step()")
        if not attempt.refused:
            return


class Attempt:
    """One attempt of a training step, a context manager from :func:`attempts`."""

    def __init__(self, stages: Sequence[CompressedStage], number: int, limit: int) -> None:
        self.ended = self.refused = False
        self._stages, self._again, self._last = stages, number > 1, number == limit
        self._traffic = [s.traffic for s in stages]
        self._notes = Notes()
        self._snapshot: Snapshot | None = None

    def __enter__(self) -> "Attempt":
        if self._snapshot is not None:
            raise StateError("an attempt can be entered once")
        for t in self._traffic:
            t.check_usable()
        if not all(t.agreed for t in self._traffic):
            self._agree()
        self._snapshot = Snapshot((s.submod for s in self._stages), (s.device for s in self._stages))
        for t in self._traffic:
            t.begin_attempt(self._notes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended = True
        try:
            if error is not None:
                self._abandon()
                return
            try:
                for t in self._traffic:
                    t.wait_for_sends()
                auto = self._traffic[0].auto
                sent = None if auto is None else auto.report([s for t in self._traffic for s in t.sent()])
                mine = self._notes.report(last=self._last, samples=self._again, auto=sent)
                reports = [report_of(data, rank) for rank, data in enumerate(self._exchange(mine))]
            except BaseException:
                self._abandon()
                raise
            if any(r.failed for r in reports):
                self._refuse(reports)
            else:
                for t in self._traffic:
                    t.commit()
                    t.adapt(reports)
        finally:
            for t in self._traffic:
                t.notes = None

    def _agree(self) -> None:
        """Raise ArgumentError unless all ranks have stages of the same pipeline."""
        mine = json.dumps([str(PROTOCOL_VERSION), *self._traffic[0].signature]).encode()
        for rank, other in enumerate(self._exchange(mine)):
            if other != mine:
                raise ArgumentError(
                    f"rank {rank} has stages of {other[:500].decode(errors='replace')}, this rank of {mine.decode()}: "
                    'versions, numbers of stages, kinds of activations, first, budget, dtype and "auto" must be equal'
                )
        for t in self._traffic:
            t.agreed = True

    def _exchange(self, mine: bytes) -> list[bytes]:
        first = self._traffic[0]
        return exchange([mine] * dist.get_world_size(first.group), group=first.group, options=first.options)

    def _undo(self) -> None:
        for t in self._traffic:
            t.rollback()
        if self._snapshot is not None:
            self._snapshot.restore()

    def _abandon(self) -> None:
        """End an attempt from which no rank can go on."""
        for t in self._traffic:
            t.abandon()
        self._undo()

    def _refuse(self, reports: list[Report]) -> None:
        """End an attempt in which a rank has an error: return if all ranks are to repeat it, else raise."""
        self._undo()
        for t in self._traffic:
            t.refused_steps += 1
            t.forget(reports)
        rank, report = next(((i, r) for i, r in enumerate(reports) if r.error), (0, reports[0]))
        if all(r.repeatable and not r.last for r in reports):
            self.refused = True
            logger.warning("a training step is repeated: rank %d: %s", rank, report.error)
        elif self._notes.error is not None:
            raise self._notes.error
        else:
            raise PeerError(f"rank {rank} of the pipeline has failed: {report.error}", report.code)


def _check_stages(stages: Sequence[Any]) -> None:
    if not stages or not all(isinstance(s, CompressedStage) for s in stages):
        raise ArgumentError(f"attempts() takes the stages of this rank, got {shown(stages)}")
    if len({id(s.group) for s in stages}) > 1 or len({s.stage_index for s in stages}) < len(stages):
        raise ArgumentError("attempts() takes different stages of one group")
