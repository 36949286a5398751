"""Collectives of LocalSteps: means over the ranks of a group. If one fails, all ranks learn the cause."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from codec import ArgumentError, CallOptions, CodecError, PeerError, Status
from codec.arguments import shown
from codec.torch.collectives.bytes import exchange
from codec.torch.group.communicator import group_stats
from codec.torch.group.work import Work
from codec.torch.replicas import mean
from codec.torch.replicas.mean import Problem, Term
from codec.torch.transport.counters import Counters

_MOST_SHOWN = 400  # maximum number of characters of another rank's text that are shown


class SkippedStep(Exception):
    """Raised on all ranks if a rank has skipped the step of an optimizer in the warm-up, so that all ranks skip it.

    Parameters
    ----------
    turn : int
        Number of the optimizer; the number of optimizers if all ranks have ended the step.
    """

    def __init__(self, turn: int) -> None:
        super().__init__(f"a rank has skipped the step of optimizer {turn}")
        self.turn = turn


@dataclass
class Flight:
    """Collective that computes means over ranks in the background."""

    work: Work
    problem: Problem | None  # reason why this rank does not take part; None: it takes part
    turn: int  # number of the optimizer whose gradients are averaged
    before: Counters  # totals of the group's traffic when the collective started


class Ranks:
    """Ranks of a group, and counters of their traffic.

    Parameters
    ----------
    group : ProcessGroup or None
        The ranks; None: all ranks.
    options : CallOptions
        Settings of the collectives.
        The default algorithm depends only on the number of ranks, not on measured times.

    Attributes
    ----------
    given_options : CallOptions
        The argument `options`.
    call : str
        Call of the program in which this rank is, for the errors of ranks that are in another call.

    Raises
    ------
    ArgumentError
        `group` is no process group, or this rank is not in it.
    """

    def __init__(self, group: Any, options: CallOptions) -> None:
        self.group = group_of(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.given_options = options
        self.options = options.over(CallOptions(algorithm="all_gather" if self.size == 2 else "two_shot"))
        self.call = "LocalSteps()"
        self.traffic = Counters()  # traffic of all means so far

    def mean(self, terms: Sequence[Term], problem: Problem | None, item: str = "", turn: int = 0) -> None:
        """Replace the values of all terms by their means over all ranks.

        Parameters
        ----------
        terms : sequence of Term
            Values.
        problem : Problem or None
            Reason why this rank cannot take part. If it is not None, all ranks raise an error, and no values are sent.
        item : str
            Text that must be equal on all ranks.
        turn : int
            Number of the optimizer whose gradients are averaged.

        Raises
        ------
        ArgumentError
            `problem` is not None.
        SkippedStep
            A rank has skipped its step, and no rank has an error.
        CodecError
            Another rank has a problem, which the message names, or the collective has failed. All values are unchanged.
        """
        self.wait(self.begin(terms, problem, item, turn))

    def begin(self, terms: Sequence[Term], problem: Problem | None, item: str = "", turn: int = 0) -> Flight:
        """Start to compute the means of all terms, in the background; see :meth:`mean`."""
        before = self.counters()
        work = mean.begin(terms, problem, item, group=self.group, options=self.options)
        return Flight(work, problem, turn, before)

    def wait(self, flight: Flight) -> None:
        """Wait for means that :meth:`begin` has started, on all ranks; raise the errors of :meth:`mean`."""
        try:
            flight.work.wait()
        except CodecError as e:
            self._count(flight.before)
            raise self._explained(e, flight.problem, flight.turn) from e
        self._count(flight.before)

    def compare(self, flags: Sequence[bool]) -> list[list[bool]]:
        """Send flags to all ranks, and return those of each rank, as many; all ranks must be in the same call.

        Raises
        ------
        PeerError
            A rank is in another call, or is lost.
        """
        try:
            notes = self.exchange({"call": self.call, "compared": list(flags)})
        except CodecError as e:
            raise self._explained(e, None, 0) from e
        if error := self._other_call(notes):
            raise error
        found = [note.get("compared") for note in notes]
        for rank, theirs in enumerate(found):
            if not isinstance(theirs, list) or [type(x) for x in cast(list[Any], theirs)] != [bool] * len(flags):
                raise PeerError(f"rank {rank} has sent something else than flags: use the same version on all ranks")
        return cast(list[list[bool]], found)

    def _other_call(self, notes: Sequence[Mapping[str, Any]]) -> PeerError | None:
        """Return the error to raise if a rank is in another call than this rank; else None."""
        for rank, theirs in enumerate(notes):
            if theirs.get("call") != self.call:
                return PeerError(
                    f"rank {rank} is in {_line(theirs.get('call', 'another call'))}, and this rank in {self.call}: all "
                    "ranks must call step() equally often, and then finish()"
                )
        return None

    def _explained(self, error: CodecError, problem: Problem | None, turn: int) -> Exception:
        """Return the error to raise for a collective that has failed on all ranks, with the cause that a rank reports.

        The ranks exchange their causes. If this exchange fails, too, return `error`.
        """
        if problem is None and not isinstance(error, PeerError):
            problem = Problem(str(error), error.code)
        note: dict[str, Any] = {"call": self.call, "turn": turn}
        if problem is not None:
            note |= {"text": problem.text, "code": problem.code, "skipped": problem.skipped}
        try:
            notes = self.exchange(note)
        except CodecError:
            return error
        if problem is not None and not problem.skipped:
            return error if str(error) == problem.text else ArgumentError(problem.text, problem.code)
        for rank, theirs in enumerate(notes):
            if theirs.get("text") and not theirs.get("skipped"):
                return PeerError(f"rank {rank}: {_line(theirs['text'])}", _status(theirs.get("code")))
        if other := self._other_call(notes):
            return other
        turns = [theirs.get("turn") for theirs in notes]
        if any(type(x) is not int for x in turns):
            return error
        skips = any(theirs.get("skipped") for theirs in notes) or len(set(turns)) > 1
        return SkippedStep(min(cast(list[int], turns))) if skips else error

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
