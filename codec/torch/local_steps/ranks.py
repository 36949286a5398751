"""Collectives of local steps: means over the ranks of a group, and the causes of their errors on all ranks."""

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

_MOST_SHOWN = 400  # characters of another rank's message


class SkippedStep(Exception):
    """A rank has skipped its optimizer's step, so that all ranks skip it."""


@dataclass(frozen=True)
class Problem:
    """Reason why this rank cannot take part in a collective."""

    text: str
    code: Status | None = None
    skipped: bool = False  # the optimizer has taken no step, which is no error


@dataclass
class Flight:
    """Mean in flight."""

    work: Work
    problem: Problem | None
    before: Counters


class Ranks:
    """Ranks of a group, and counters of their traffic.

    Parameters
    ----------
    group : ProcessGroup or None
        Ranks; None: all.
    options : CallOptions
        Settings of the collectives. Without an algorithm, one is set that no measurement of time changes.

    Raises
    ------
    ArgumentError
        There is no such group, or this rank is not in it.
    """

    def __init__(self, group: Any, options: CallOptions) -> None:
        self.group = group_of(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.options = options.over(CallOptions(algorithm="all_gather" if self.size == 2 else "two_shot"))
        self.traffic = Counters()  # traffic of all averages

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
            Reason why this rank cannot take part: then all ranks raise, and nothing is sent.
        feedback : Feedback, optional
            Residuals.
        stream : int
            Number of the random stream.

        Raises
        ------
        ArgumentError
            `problem`.
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
        """Begin to store the mean of `x` over all ranks in `out`, in the background; as :meth:`mean`."""
        before, x = self.counters(), None if problem else x
        work = all_reduce(x, spec, out=out, async_op=True, **self._arguments(feedback, stream))
        assert work is not None
        return Flight(work, problem, before)

    def wait(self, flight: Flight) -> None:
        """Wait for the end of a mean; all ranks must call this. Errors are those of :meth:`mean`."""
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
        """Return the error of a mean that has failed on all ranks, with the cause that its rank has reported.

        The ranks exchange the causes. If that fails, too, the connections are closed, and `error` says why.
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
        """Return the message of each rank: dicts that JSON can hold.

        Raises
        ------
        PeerError
            A rank is lost, or has sent something else.
        """
        data = json.dumps(message).encode()
        return [_parsed(rank, each) for rank, each in enumerate(self.exchange_bytes([data] * self.size))]

    def exchange_bytes(self, data: Sequence[Any]) -> list[bytes]:
        """Send bytes to each rank, and return those of each rank."""
        return exchange(data, group=self.group, options=self.options)

    def counters(self) -> Counters:
        """Return the totals of the group."""
        return group_stats(self.group)

    def _count(self, before: Counters) -> None:
        """Add what the group has sent since `before` to the traffic."""
        self.traffic.add(self.counters() - before)


def group_of(group: Any) -> dist.ProcessGroup:
    """Return a process group, that of all ranks for None.

    Raises
    ------
    ArgumentError
        `group` is something else, this rank is not in it, or torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError("torch.distributed is not initialized: call init_process_group first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("this rank is not in the group: only ranks of the group make a LocalSteps for it")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentError(f"group must be a ProcessGroup or None, got {shown(group)}")
    return found


def _parsed(rank: int, data: bytes) -> dict[str, Any]:
    """Return the message of a rank."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PeerError(
            f"rank {rank} has sent no message of LocalSteps: all ranks must make it, and call its methods, in the same "
            "order"
        )
    return cast(dict[str, Any], found)


def _line(text: Any) -> str:
    """Return another rank's text as one line of limited length."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:_MOST_SHOWN])


def _status(code: Any) -> Status | None:
    return Status(code) if type(code) is int and code in set(Status) else None
