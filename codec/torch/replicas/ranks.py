"""Collectives of the ranks that train replicas of a model: means, agreements and bytes."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from codec import ArgumentError, CallOptions, CodecError
from codec.specs import Spec
from codec.torch.collectives.agreed import agreed
from codec.torch.collectives.bytes import all_to_all_bytes
from codec.torch.feedback.feedback import Feedback
from codec.torch.feedback.turn import FeedbackTurn
from codec.torch.group.communicator import Communicator, communicator_of, group_stats, start
from codec.torch.group.levels import group_of
from codec.torch.group.work import Work
from codec.torch.reduction.arguments import check_output, publish, reduction_of, unwrapped
from codec.torch.reduction.execution import Planned, algorithm_of, choose, run_several, settle
from codec.torch.reduction.table import SENDERS, check_request
from codec.torch.transport.collective import Collective
from codec.torch.transport.counters import Counters


@dataclass(frozen=True)
class MeanTerm:
    """Float32 values whose mean over all ranks replaces them.

    Attributes
    ----------
    values : torch.Tensor or View
        Contiguous values.
    spec : Spec
        Codec.
    feedback : Feedback or None
        Error feedback. A Feedback can serve only one term of a collective.
    stream : int
        Number of the random stream that the codec rounds with.
    algorithm : {"", "senders"}
        "": that of the options; "senders": divide the sum of a value by the number of ranks whose frame has a nonzero
        value there.
    """

    values: Any
    spec: Spec
    feedback: Feedback | None = None
    stream: int = 0
    algorithm: str = ""


@dataclass
class Flight:
    """Collective that computes means over ranks in the background."""

    work: Work
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
    call : str
        Call of the program in which this rank is, for the errors of ranks that are in another call.

    Raises
    ------
    ArgumentError
        `group` is no process group, or this rank is not in it.
    """

    def __init__(self, group: Any, options: CallOptions) -> None:
        self.group = group_of(group)
        if self.group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ArgumentError("this rank is not in group=: create LocalSteps only on ranks of the group")
        self.rank: int = self.group.rank()
        self.size: int = self.group.size()
        self.options = options.over(CallOptions(algorithm="all_gather" if self.size == 2 else "two_shot"))
        self.call = "LocalSteps()"
        self.traffic = Counters()  # traffic of all means so far

    def begin(self, terms: Sequence[MeanTerm], error: Exception | None, item: str) -> Flight:
        """Start to replace the values of all terms by their means over all ranks, on all ranks or on none.

        Parameters
        ----------
        terms : sequence of MeanTerm
            Values; equal specs and numbers of values on all ranks. They are unchanged after an error on any rank.
        error : Exception or None
            Reason why this rank cannot take part, which :meth:`wait` raises. Other ranks raise PeerError with its text.
        item : str
            Text that must be equal on all ranks.
        """
        options, requested = self.options, algorithm_of(self.options)

        async def work(comm: Communicator, collective: Collective) -> list[torch.Tensor]:
            if error is not None:
                raise error
            async with AsyncExitStack() as stack:
                turns = [await stack.enter_async_context(FeedbackTurn(term.feedback, comm.channel)) for term in terms]
                planned: list[Planned] = []
                for term, turn in zip(terms, turns, strict=True):
                    values, segments = unwrapped(term.values)
                    check_output(values, torch.float32, values.numel(), "the tensor")
                    r = reduction_of(values, term.spec, "mean", term.stream, segments=segments, settings=options)
                    check_request(requested, r.spec, r.op, feedback=term.feedback is not None)
                    algorithm = SENDERS if term.algorithm == "senders" else choose(requested, r, comm.channel)
                    turn.begin(r, term.values)
                    turn.feed(r, term.values, (0, r.n), algorithm)
                    planned.append((r, algorithm))
                results = await run_several(collective, requested, planned, item)
                for r, _ in planned:
                    await settle(collective, r)
                await collective.agree()
                collective.counters.raw_nbytes += sum(r.x.nbytes for r, _ in planned)
                collective.counters.frame_collectives += 1
                with collective.storing():
                    for term, turn, result, (r, _) in zip(terms, turns, results, planned, strict=True):
                        publish(result, r, unwrapped(term.values)[0])
                        turn.commit()
            return []

        before = group_stats(self.group)
        return Flight(start("LocalSteps", self.group, options.timeout, True, work), before)

    def wait(self, flight: Flight) -> None:
        """Wait for means that :meth:`begin` has started.

        Raises
        ------
        CodecError
            This or another rank has an error, which the message names, or the collective has failed.
        """
        try:
            flight.work.wait()
        finally:
            if flight.work.is_completed():
                self.traffic.add(group_stats(self.group) - flight.before)

    def agreed(
        self, name: str, fields: Mapping[str, str], numbers: Sequence[int] = (), *, error: Exception | None = None
    ) -> list[list[int]]:
        """Compare arguments, and return the numbers of each rank; see :func:`codec.torch.collectives.agreed.agreed`."""
        return agreed(f"{name} of LocalSteps", fields, numbers, group=self.group, options=self.options, error=error)

    def fail(self, error: Exception) -> None:
        """End the collective that the other ranks begin now, in which this rank cannot take part, by its error."""
        with suppress(type(error), CodecError):  # the caller raises an error in any case
            self.agreed("failure", {}, error=error)

    def send(self, data: bytes, source: int, receivers: Sequence[int]) -> bytes:
        """Send bytes from rank `source` to `receivers`; return them there, and b"" on other ranks."""
        sends = self.rank == source
        bodies = [data if sends and rank in receivers else b"" for rank in range(self.size)]
        return all_to_all_bytes(bodies, group=self.group, options=self.options)[source]

    @property
    def connected(self) -> bool:
        """True unless a rank was lost, or a wait has exceeded the timeout."""
        return not communicator_of(self.group).channel.closed
