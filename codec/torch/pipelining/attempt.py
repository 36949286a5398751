"""Run training steps of a pipeline so that each succeeds on all ranks or on none."""

import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from codec import ArgumentError, PeerError, StateError
from codec.arguments import shown, whole
from codec.torch.collectives.agreed import agreed
from codec.torch.group.exchange import all_to_all_bytes
from codec.torch.pipelining.notes import Notes, Report, report_of
from codec.torch.pipelining.snapshot import Snapshot
from codec.torch.pipelining.stage import CompressedStage

logger = logging.getLogger("codec.torch")


def attempts(*stages: CompressedStage, limit: int = 3) -> "Iterator[Attempt]":
    """Iterate over attempts of a training step, until one has succeeded on all ranks of the pipeline.

    Provisional: may change in any version.

    All ranks run the same loop. An attempt runs the schedule once, or several times for gradient accumulation::

        optimizer.zero_grad()
        for attempt in codec.torch.pipelining.attempts(stage):
            with attempt:
                schedule.step(x, target=y, sample_ids=ids)
        optimizer.step()

    At the end of an attempt, ranks exchange reports. If all have succeeded, the state of deltas is committed.
    Otherwise all ranks restore the state before the attempt: gradients, buffers of the modules, torch's random
    generators and the state of deltas. If the error is transient, such as a damaged message or a stage that lost its
    state, there is another attempt, in which samples with missing state are sent raw. Dropout uses the same random bits
    again.

    Parameters
    ----------
    *stages : CompressedStage
        All stages of this rank.
    limit : int
        Maximum number of attempts, equal on all ranks.

    Returns
    -------
    iterator of Attempt
        Attempts, which are context managers.

    Raises
    ------
    ArgumentError
        Sample ids are missing or differ; or a gradient contains NaN or Inf (code ``Status.NONFINITE``). Ranks that have
        no error raise PeerError with the same code. The pipeline remains usable.
    FrameError, StateError, PeerError
        All attempts have failed; or (PeerError) stages on different ranks were created with different arguments, which
        the message names. The pipeline remains usable.
    PeerError
        A rank is lost or did not answer in time, or an exception was raised inside an attempt. Connections of the group
        are closed: make a new group and new stages. Parameters and the state of deltas are those before the step.

    Examples
    --------
    See :class:`CompressedStage`.
    """
    _check_stages(stages)
    return _attempts(stages, whole("limit", limit, 1))


def _attempts(stages: Sequence[CompressedStage], limit: int) -> "Iterator[Attempt]":
    try:
        for number in range(1, limit + 1):
            attempt = Attempt(stages, number, limit)
            yield attempt
            if not attempt.ended:
                raise StateError("the attempt was not entered: write `with attempt:` around schedule.step()")
            if not attempt.refused:
                return
    except (GeneratorExit, StateError):  # the program has left the loop, or has not run the schedule
        raise
    except BaseException:  # the other ranks may have the step, and this rank does not take it
        for stage in stages:
            stage.traffic.abandon()
        raise


class Attempt:
    """One attempt of a training step; a context manager that :func:`attempts` yields."""

    def __init__(self, stages: Sequence[CompressedStage], number: int, limit: int) -> None:
        self.ended = self.refused = False
        self._stages, self._again, self._last = stages, number > 1, number == limit
        self._traffic = [s.traffic for s in stages]
        self._notes = Notes()
        self._snapshot: Snapshot | None = None

    def __enter__(self) -> "Attempt":
        if self._snapshot is not None:
            raise StateError("an attempt can be entered only once: take the next one from attempts()")
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
            failed = None
            if error is None:
                failed = self._end()
                self._drop_notes()
            else:
                self._abandon()
            if failed is None:
                return
        except BaseException:  # also behind the exchange: the other ranks may have the step, and this rank does not
            self._abandon()
            raise
        raise failed

    def _drop_notes(self) -> None:
        for t in self._traffic:
            t.notes = None

    def _end(self) -> Exception | None:
        """Commit the step, or restore the state, on all ranks; return the error of a step that is not repeated."""
        for t in self._traffic:
            t.wait_for_sends()
        auto = self._traffic[0].auto
        sent = None if auto is None else auto.report([s for t in self._traffic for s in t.sent()])
        mine = self._notes.report(last=self._last, samples=self._again, auto=sent)
        reports = [report_of(data, rank) for rank, data in enumerate(self._exchange(mine))]
        if any(r.failed for r in reports):
            return self._refuse(reports)
        for t in self._traffic:
            t.commit()
            t.adapt(reports)
        return None

    def _agree(self) -> None:
        """Compare the settings of the stages of all ranks; raise PeerError if they differ."""
        first = self._traffic[0]
        agreed("stages of a pipeline", first.settings, group=first.group, options=first.options)
        for t in self._traffic:
            t.agreed = True

    def _exchange(self, mine: bytes) -> list[bytes]:
        first = self._traffic[0]
        return all_to_all_bytes([mine] * dist.get_world_size(first.group), group=first.group, options=first.options)

    def _undo(self) -> None:
        for t in self._traffic:
            t.rollback()
        if self._snapshot is not None:
            self._snapshot.restore()

    def _abandon(self) -> None:
        """Close all connections and restore the state, after an error that makes the pipeline unusable."""
        for t in self._traffic:
            t.abandon()
        self._undo()
        self._drop_notes()

    def _refuse(self, reports: list[Report]) -> Exception | None:
        """Restore the state after an attempt that failed on a rank. Return an error unless the step is repeated."""
        self._undo()
        for t in self._traffic:
            t.refused_steps += 1
            t.forget(reports)
        rank, report = next(((i, r) for i, r in enumerate(reports) if r.error), (0, reports[0]))
        if all(r.repeatable and not r.last for r in reports):
            self.refused = True
            logger.warning("a training step is repeated, because rank %d has failed: %s", rank, report.error)
            return None
        if self._notes.error is not None:
            return self._notes.error
        return PeerError(f"rank {rank} of the pipeline has failed: {report.error}", report.code)


def _check_stages(stages: Sequence[Any]) -> None:
    if not stages or not all(isinstance(s, CompressedStage) for s in stages):
        raise ArgumentError(f"attempts() takes one or more CompressedStage of this rank, got {shown(stages)}")
    if len({id(s.group) for s in stages}) > 1 or len({s.stage_index for s in stages}) < len(stages):
        raise ArgumentError("the stages of attempts() must be different ones with the same process group")
