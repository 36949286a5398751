"""Collectives of the ranks that train replicas of a model: means, agreements and bytes."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from codec import ArgumentError, CallOptions, CodecError
from codec.specs import Spec
from codec.stateful.ranges import layout_of_view
from codec.torch.collectives.agreed import agreed
from codec.torch.feedback.feedback import Feedback
from codec.torch.feedback.turn import FeedbackTurn
from codec.torch.group.communicator import Communicator, communicator_of, group_stats, start
from codec.torch.group.exchange import all_to_all_bytes
from codec.torch.group.levels import LeveledGroup
from codec.torch.group.work import Work
from codec.torch.reduction.arguments import check_output, publish, reduction_of, unwrapped
from codec.torch.reduction.execution import Planned, algorithm_of, choose, run_several, settle
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.raw import Within
from codec.torch.reduction.table import SENDERS, check_request
from codec.torch.replicas.windows import Region, Windows
from codec.torch.transport.collective import Collective
from codec.torch.transport.counters import Counters
from codec.torch.transport.levels import Levels


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
    regions : sequence of Region or None
        Regions that cover the values, each of which is equal on some ranks of a site. The mean is that over the sites.
        None: the ranks of a site average their values first.
    """

    values: Any
    spec: Spec
    feedback: Feedback | None = None
    stream: int = 0
    algorithm: str = ""
    regions: Sequence[Region] | None = None


@dataclass
class Flight:
    """Collective that computes means over ranks in the background."""

    work: Work
    before: Counters  # totals of the group's traffic when the collective started


class Ranks:
    """Ranks of a group, and counters of their traffic.

    Parameters
    ----------
    group : ProcessGroup or LeveledGroup
        The ranks, as :func:`codec.torch.replicas.holders.sites_group` returns them.
    options : CallOptions
        Settings of the collectives.
        The default algorithm depends only on the number of sites, not on measured times.

    Attributes
    ----------
    levels : Levels
        Sites, and the ranks of each of them. Without levels, each rank is a site.
    sites : int
        Number of sites, over which means are computed.
    call : str
        Call of the program in which this rank is, for the errors of ranks that are in another call.

    Raises
    ------
    ArgumentError
        `group` is no process group, or this rank is not in it.
    """

    def __init__(self, group: Any, options: CallOptions) -> None:
        self.group = group
        if self.group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ArgumentError("this rank is not in group=: create LocalSteps only on ranks of the group")
        self.rank: int = self.group.rank()
        self.size: int = self.group.size()
        self.levels = group.levels if isinstance(group, LeveledGroup) else Levels(self.size, self.rank)
        self.sites = self.levels.between.size
        self.options = options.over(CallOptions(algorithm="all_gather" if self.sites == 2 else "two_shot"))
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
        sites = Levels(self.size, self.rank, self.levels.between.ranks)  # residuals are those of windows only

        async def work(comm: Communicator, collective: Collective) -> list[torch.Tensor]:
            if error is not None:
                raise error
            async with AsyncExitStack() as stack:
                feedback = [FeedbackTurn(term.feedback, comm.channel, sites) for term in terms]
                turns = [await stack.enter_async_context(turn) for turn in feedback]
                prepared = [_prepared(term, requested, options) for term in terms]
                whole = [r for r, term in zip(prepared, terms, strict=True) if term.regions is None]
                within = Within(collective, whole) if whole else None
                averaged = iter(await within.scatter() if within else [])
                windows = [
                    None if term.regions is None else Windows(collective, r, term.regions)
                    for r, term in zip(prepared, terms, strict=True)
                ]
                planned: list[Planned] = []
                for term, turn, part in zip(terms, turns, windows, strict=True):
                    r = next(averaged) if part is None else part.narrowed()
                    algorithm = SENDERS if term.algorithm == "senders" else choose(requested, r, comm.channel)
                    if term.feedback is not None and part is not None:
                        layout = part.layout(layout_of_view(term.values))
                        turn.begin(r, layout)
                        turn.feed(r, layout, (0, r.n), algorithm)
                    planned.append((r, algorithm))
                results = await run_several(collective, requested, planned, item)
                for r, _ in planned:
                    await settle(collective, r)
                found = list(zip(windows, results, strict=True))
                averaged = iter(
                    await within.gather([result for part, result in found if part is None]) if within else []
                )
                results = [next(averaged) if part is None else await part.gather(result) for part, result in found]
                await collective.agree()
                collective.counters.raw_nbytes += sum(r.x.nbytes for r in prepared)
                collective.counters.frame_collectives += 1
                with collective.storing():
                    for term, turn, result, r in zip(terms, turns, results, prepared, strict=True):
                        publish(result, r, unwrapped(term.values)[0])
                        turn.commit()
            return []

        before = group_stats(self.group)
        return Flight(start("LocalSteps", self.group, options, True, work), before)

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

    def send(self, data: bytes, sources: Mapping[int, int]) -> bytes:
        """Send bytes to the ranks whose item of `sources` is this rank; return those from this rank's source, or b"".

        `sources` is equal on all ranks, and has an item for each rank that receives.
        """
        bodies = [data if sources.get(rank) == self.rank else b"" for rank in range(self.size)]
        received = all_to_all_bytes(bodies, group=self.group, options=self.options)
        return received[sources[self.rank]] if self.rank in sources else b""

    def exchange(self, data: bytes) -> list[bytes]:
        """Send bytes to all ranks of this site, and return those of each of them."""
        site = self.levels.within.ranks
        bodies = [data if rank in site else b"" for rank in range(self.size)]
        received = all_to_all_bytes(bodies, group=self.group, options=self.options)
        return [received[rank] for rank in site]

    @property
    def connected(self) -> bool:
        """True unless a rank was lost, or a wait has exceeded the timeout."""
        return not communicator_of(self.group).channel.closed


def _prepared(term: MeanTerm, requested: str, options: CallOptions) -> Reduction:
    """Check the values of a term; return their reduction, without residuals."""
    values, segments = unwrapped(term.values)
    check_output(values, torch.float32, values.numel(), "the tensor")
    r = reduction_of(values, term.spec, "mean", term.stream, segments=segments, settings=options)
    check_request(requested, r.spec, r.op, feedback=term.feedback is not None)
    return r
