"""Collectives of LocalSteps: means over the ranks of a group. If one fails, all ranks learn the cause."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from codec import ArgumentError, CallOptions, CodecError, PeerError, Status
from codec.arguments import shown
from codec.specs import Spec
from codec.torch.collectives.bytes import exchange
from codec.torch.collectives.calls import all_reduce
from codec.torch.feedback.feedback import Feedback
from codec.torch.group.communicator import group_stats
from codec.torch.group.work import Work
from codec.torch.transport.counters import Counters

_MOST_SHOWN = 400  # maximum number of characters of another rank's error message that are shown


class SkippedStep(Exception):
    """Raised on all ranks if a rank has skipped its optimizer's step, so that all ranks skip the step."""


@dataclass(frozen=True)
class Problem:
    """Reason why this rank cannot take part in a collective."""

    text: str
    code: Status | None = None
    skipped: bool = False  # True if the optimizer has skipped its step, which is not an error


@dataclass
class Flight:
    """Collective that computes a mean over ranks in the background."""

    work: Work
    problem: Problem | None  # reason why this rank does not take part; None: it takes part
    before: Counters  # totals of the group's traffic when the collective started


class Ranks:
    """Ranks of a group, and counters of their traffic.

    Parameters
    ----------
    group : ProcessGroup or None
        The ranks; None: all ranks.
    options : CallOptions
        Settings of the collectives. The default algorithm depends only on the number of ranks, not on measured times.

    Raises
    ------
    ArgumentError
        `group` is no process group, or this rank is not in it.
    """

    def __init__(self, group: Any, options: CallOptions) -> None:
        self.group = group_of(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.options = options.over(CallOptions(algorithm="all_gather" if self.size == 2 else "two_shot"))
        self.traffic = Counters()  # traffic of all means so far

    def mean(
        self, x: Any, spec: Spec, problem: Problem | None, feedback: Feedback | None = None, stream: int = 0
    ) -> None:
        """Replace the values of `x`, a tensor or view, by their means over all ranks.

        Parameters
        ----------
        x : torch.Tensor or View
            Values.
        spec : Spec
            Codec.
        problem : Problem or None
            Reason why this rank cannot take part. If it is not None, all ranks raise an error, and no values are sent.
        feedback : Feedback, optional
            Error feedback.
        stream : int
            Number of the random stream that the codec rounds with.

        Raises
        ------
        ArgumentError
            `problem` is not None.
        SkippedStep
            A rank has skipped its step, and no rank has an error.
        CodecError
            Another rank has a problem, which the message names, or the collective has failed. `x` is unchanged.
        """
        before = self.counters()
        try:
            all_reduce(None if problem else x, spec, **self._arguments(feedback, stream))
        except CodecError as e:
            raise self._explained(e, problem) from e
        finally:
            self._count(before)

    def begin(
        self, x: Any, spec: Spec, problem: Problem | None, feedback: Feedback | None, stream: int, out: torch.Tensor
    ) -> Flight:
        """Start to store the mean of `x` over all ranks in `out`, in the background; see :meth:`mean`."""
        before, x = self.counters(), None if problem else x
        work = all_reduce(x, spec, out=out, async_op=True, **self._arguments(feedback, stream))
        assert work is not None
        return Flight(work, problem, before)

    def wait(self, flight: Flight) -> None:
        """Wait for a mean that :meth:`begin` has started, on all ranks; raise the errors of :meth:`mean`."""
        try:
            flight.work.wait()
        except CodecError as e:
            raise self._explained(e, flight.problem) from e
        finally:
            self._count(flight.before)

    def _arguments(self, feedback: Feedback | None, stream: int) -> dict[str, Any]:
        how = {"feedback": feedback, "stream": stream, "options": self.options}
        return {"op": "mean", "group": self.group, **how}

    def _explained(self, error: CodecError, problem: Problem | None) -> Exception:
        """Return the error to raise for a mean that has failed on all ranks, with the cause that a rank has reported.

        The ranks exchange their causes. If this exchange fails, too, return `error`.
        """
        if problem is None and not isinstance(error, PeerError):
            problem = Problem(str(error), error.code)
        note = {} if problem is None else {"text": problem.text, "code": problem.code, "skipped": problem.skipped}
        try:
            notes = self.exchange(note)
        except CodecError:
            return error
        found = [(rank, theirs) for rank, theirs in enumerate(notes) if theirs.get("text")]
        errors = [(rank, theirs) for rank, theirs in found if not theirs.get("skipped")]
        if problem is not None and not problem.skipped:
            return error if str(error) == problem.text else ArgumentError(problem.text, problem.code)
        for rank, theirs in errors:
            return PeerError(f"rank {rank}: {_line(theirs['text'])}", _status(theirs.get("code")))
        return SkippedStep() if found else error

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a dict, in types that JSON supports, to all ranks; return the dict of each rank.

        Raises
        ------
        PeerError
            A rank is lost, or its message is no dict in JSON.
        """
        data = json.dumps(message).encode()
        return [_parsed(rank, each) for rank, each in enumerate(self.exchange_bytes([data] * self.size))]

    def exchange_bytes(self, data: Sequence[Any]) -> list[bytes]:
        """Send ``data[i]`` to rank i, and return the bytes that each rank has sent to this rank."""
        return exchange(data, group=self.group, options=self.options)

    def counters(self) -> Counters:
        """Return the traffic of the group so far."""
        return group_stats(self.group)

    def _count(self, before: Counters) -> None:
        """Add the traffic of the group since `before` to :attr:`traffic`."""
        self.traffic.add(self.counters() - before)


def group_of(group: Any) -> dist.ProcessGroup:
    """Return a process group; None stands for the group of all ranks.

    Raises
    ------
    ArgumentError
        `group` is no process group, this rank is not in it, or torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError("torch.distributed is not initialized: call init_process_group first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("this rank is not in group=: create LocalSteps only on ranks of the group")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentError(f"group must be a ProcessGroup or None, got {shown(group)}")
    return found


def _parsed(rank: int, data: bytes) -> dict[str, Any]:
    """Parse a rank's message, which must be a dict in JSON; otherwise raise PeerError."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PeerError(
            f"rank {rank} has sent something else than a message of LocalSteps: all ranks must create LocalSteps, and "
            "call its methods, in the same order"
        )
    return cast(dict[str, Any], found)


def _line(text: Any) -> str:
    """Return another rank's text as one printable line of limited length."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:_MOST_SHOWN])


def _status(code: Any) -> Status | None:
    return Status(code) if type(code) is int and code in set(Status) else None
