"""Mean of several tensors over the ranks of a group, in one collective: on all ranks or on none."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import torch

from codec import ArgumentError, CallOptions, Status
from codec.specs import Spec
from codec.torch.feedback.feedback import Feedback
from codec.torch.feedback.turn import Turn, named
from codec.torch.group.communicator import Communicator, start
from codec.torch.group.work import Work
from codec.torch.reduction.arguments import check_output, publish, reduction_of, unwrapped
from codec.torch.reduction.execution import Planned, algorithm_of, choose, run_several, settle
from codec.torch.reduction.table import SENDERS, check_request
from codec.torch.transport.collective import Collective


@dataclass(frozen=True)
class Term:
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


@dataclass(frozen=True)
class Problem:
    """Reason why this rank cannot take part in a collective."""

    text: str
    code: Status | None = None
    skipped: bool = False  # True if the optimizer has skipped its step, which is not an error


def begin(terms: Sequence[Term], problem: Problem | None, item: str, *, group: Any, options: CallOptions) -> Work:
    """Start to replace the values of all terms by their means, in the background.

    Parameters
    ----------
    terms : sequence of Term
        Values; equal specs and numbers of values on all ranks. They are unchanged after an error on any rank.
    problem : Problem or None
        Reason why this rank cannot take part: the collective fails on all ranks.
    item : str
        Text that must be equal on all ranks.
    group : ProcessGroup
        The ranks.
    options : CallOptions
        Timeout, engine, threads and algorithm.
    """
    requested = algorithm_of(options)

    async def work(comm: Communicator, collective: Collective) -> list[torch.Tensor]:
        if problem is not None:
            raise ArgumentError(problem.text, problem.code)
        async with AsyncExitStack() as stack:
            turns = [await stack.enter_async_context(Turn(term.feedback, comm.channel)) for term in terms]
            planned: list[Planned] = []
            for term, turn in zip(terms, turns, strict=True):
                values, segments = unwrapped(term.values)
                check_output(values, torch.float32, values.numel(), "the tensor")
                r = reduction_of(values, term.spec, "mean", term.stream, segments=segments, settings=options)
                check_request(requested, r.spec, r.op, feedback=term.feedback is not None)
                algorithm = SENDERS if term.algorithm == "senders" else choose(requested, r, comm.channel)
                if term.feedback is not None:
                    turn.begin(r, named(term.values, r), algorithm)
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

    started = start("LocalSteps", group, options.timeout, True, work)
    assert isinstance(started, Work)
    return started
