"""An exception behind the agreement of all ranks, on one of them, makes the next call fail on all ranks.

That rank has not applied the result that the others have. If it could go on, ranks would differ for ever. Exceptions
are raised before each line that is executed between the agreement and the end of the call.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.group.work import Work
from codec.torch.transport.collective import Collective
from support import ddp_training
from support.fault_lines import at_line, raising
from support.fsdp_training import batch, module_residuals, small_model
from support.pipelines import BATCH, Pipeline
from support.rank_loss import FAULTY, digest, fault_points
from support.ranks import RankPool
from support.tiers import NIGHTLY

SPEC = codec.Quantize(4)
OPTIONS = codec.options(algorithm="two_shot", timeout=5)
# Files whose lines are executed in the program's thread and in the communication thread, after the agreement
PROGRAM = ("codec/torch/group/communicator.py", "codec/torch/group/work.py:_result", "codec/torch/_compat.py:__call__")
WORKER = (
    "reduction/execution.py",
    "reduction/arguments.py",
    "feedback/feedback.py",
    "feedback/pair.py",
    "feedback/turn.py",
)


class Reduced:
    """Tensors that are all-reduced with error feedback."""

    files = (*PROGRAM, *WORKER, "collectives/calls.py", "collectives/outputs.py", "residual_store.py")
    backend = "gloo"

    def __init__(self, rank, size):
        self.rank, self.calls = rank, 0
        self.feedback = codec.torch.Feedback(SPEC)
        self.total = torch.zeros(3000)

    def call(self):
        x = torch.randn(3000, generator=torch.Generator().manual_seed(10 * self.calls + self.rank))
        codec.torch.all_reduce(x, op="mean", feedback=self.feedback, options=OPTIONS)
        self.total += x
        self.calls += 1

    def state(self):
        return digest(self.total), self.feedback.state_dict()["digest"]


class Listed(Reduced):
    """Rows that ranks exchange."""

    files = (*PROGRAM, *WORKER, "collectives/rows.py", "collectives/lists.py", "group/exchange.py")

    def call(self):
        (found, _) = codec.torch.all_to_all_bytes([bytes([self.calls])] * 2, options=codec.options(timeout=5))
        rows = torch.randn(40, 20, generator=torch.Generator().manual_seed(10 * self.calls + self.rank))
        received = codec.torch.all_to_all_rows(rows, [20, 20], [20, 20], SPEC, options=codec.options(timeout=5))
        self.total[:800] += received.flatten()
        self.calls += 1 + len(found) - 1


class Native(Reduced):
    """Tensors that the backend `codec` reduces."""

    backend = "codec"
    files = (*PROGRAM, *WORKER, "codec/torch/backend.py", "collectives/calls.py")

    def call(self):
        x = torch.randn(9000, generator=torch.Generator().manual_seed(10 * self.calls + self.rank))
        dist.all_reduce(x)
        self.total += x[:3000]
        self.calls += 1


class Hooked(Reduced):
    """A model with a DDP hook."""

    files = (*PROGRAM, *WORKER, "ddp/reducer.py", "ddp/step.py", "ddp/hook.py", "ddp/residuals.py")
    files = (*files, "ddp/policy.py", "ddp/buckets.py", "ddp/joined.py", "residual_store.py")

    def __init__(self, rank, size):
        self.rank, self.calls = rank, 0
        self.model = ddp_training.wrapped(ddp_training.small_net())
        self.hook = codec.torch.ddp_hook(SPEC, feedback=True, options=OPTIONS).register(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def call(self):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * self.calls + self.rank))
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.calls += 1

    def state(self):
        return digest(*self.model.parameters()), self.hook.state_dict()["digest"]


class Sharded(Hooked):
    """An FSDP2 model whose gradients have error feedback."""

    files = (*PROGRAM, *WORKER, "fsdp/base.py", "fsdp/passes.py", "fsdp/reduce_scatter.py")

    def __init__(self, rank, size):
        self.rank, self.calls = rank, 0
        self.model = fully_shard(small_model())
        self.comm = codec.torch.FsdpReduceScatter(SPEC, feedback=True, options=codec.options(timeout=5))
        self.comm.register(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def call(self):
        self.optimizer.zero_grad()
        self.model(batch(10 * self.calls + self.rank)).square().mean().backward()
        self.optimizer.step()
        self.calls += 1

    def state(self):
        residuals = module_residuals(self.comm.state_dict(), self.rank)
        return digest(*(p.to_local() for p in self.model.parameters()), *residuals.values())


class Piped:
    """A pipeline of two stages."""

    files = (*PROGRAM, "pipelining/attempt.py", "pipelining/traffic.py", "pipelining/end.py", "group/exchange.py")
    files = (*files, "activation/ledger.py", "activation/delta.py")
    backend = "gloo"

    def __init__(self, rank, size):
        self.pipeline = Pipeline("GPipe", rank, size, options=codec.options(timeout=5))
        self.calls = 0

    def call(self):
        self.pipeline.step(torch.arange(BATCH))
        self.calls += 1

    def state(self):
        return self.pipeline.digest()


def _disturbed(rank, size, kind, in_worker, error, point):
    """Run a call with an exception at a line on one rank, and a second call without.

    Return the names of the errors of both calls, the state after them, the number of lines, and the place of the fault.
    """
    subject, faulty, over = kind(rank, size), rank == FAULTY, []
    subject.call()
    worker = communicator.communicator_of(None).worker
    agree, set_result = Collective.agree, Work.set_result

    async def agreed(collective, report=()):
        found = await agree(collective, report)
        over.append(None)
        return found

    def succeeded(work, result):
        over.append(None)
        set_result(work, result)

    fault = at_line(point if faulty else -1, raising(error), *kind.files, armed=lambda: bool(over))
    if in_worker:
        Collective.agree = agreed
        lines = worker.submit(fault.__enter__).result()
    else:
        Work.set_result = succeeded
        lines = fault.__enter__()
    first = second = None
    try:
        subject.call()
    except (Exception, KeyboardInterrupt) as e:
        first = type(e).__name__
    finally:
        Collective.agree, Work.set_result = agree, set_result
        if in_worker:
            worker.submit(lambda: fault.__exit__(None, None, None)).result()
        else:
            fault.__exit__(None, None, None)
    begin = time.monotonic()
    try:
        subject.call()
    except (codec.CodecError, RuntimeError) as e:
        second = type(e).__name__
    took = time.monotonic() - begin
    return first, second, None if first or second else subject.state(), lines.count, lines.place, took


@pytest.mark.parametrize(
    ("kind", "thread"),
    [
        (Reduced, "program"),
        (Reduced, "worker"),
        (Listed, "program"),
        (Listed, "worker"),
        (Native, "worker"),  # in the program's thread, an interrupted wait() can be repeated
        (Hooked, "program"),
        (Hooked, "worker"),
        (Sharded, "program"),
        (Sharded, "worker"),
        (Piped, "program"),
    ],
)
def test_exception_behind_the_agreement_is_an_error_of_the_next_call_on_all_ranks(kind, thread):
    errors = [RuntimeError] if thread == "worker" else [KeyboardInterrupt, RuntimeError]
    with RankPool(2) as ranks:

        def run(error, point):
            ranks.new_group(kind.backend)
            return ranks.run(_disturbed, kind, thread == "worker", error, point)

        want = run(errors[0], -1)
        assert [w[:2] for w in want] == [(None, None)] * 2
        n = want[FAULTY][3]
        assert n > 1
        seen = 0
        for i, point in enumerate(range(n) if NIGHTLY else sorted(set(fault_points(n, min(n, 5))))):
            found = run(errors[i % len(errors)], point)
            place = found[FAULTY][4]
            if place is None:  # the number of lines may differ by those of a wait
                continue
            seen += 1
            if found[FAULTY][0] is None:  # the library has handled the exception
                assert [f[:3] for f in found] == [w[:3] for w in want], place
                continue
            if any(f[0] is None for f in found):  # else the call, of several collectives, has failed on all ranks
                # FSDP2 starts no reduce-scatter any more on a rank whose backward pass was interrupted
                others = [f for rank, f in enumerate(found) if kind is not Sharded or rank != FAULTY]
                assert all(f[1] is not None for f in others), (place, found)
            assert all(f[5] < 20 for f in found), (place, found)
        assert seen
