"""Codebooks that all ranks agree on, refreshed after the last bucket of a step."""

from dataclasses import replace
from typing import Any

import numpy as np

from codec import CodecError
from codec.specs import Lossless, Truncate
from codec.stateful import CodebookRefresher
from codec.torch.group.communicator import Communicator
from codec.torch.group.work import Work
from codec.torch.network.version import hash64
from codec.torch.network.waits import Wait
from codec.torch.reduction import algorithms
from codec.torch.reduction.execution import signed
from codec.torch.reduction.host import Reduction
from codec.torch.transport.collective import Collective
from codec.torch.transport.messages import Array


def sum_of_counts(counts: Array) -> Array:
    """Return the sum over axis 0 of the ranks' symbol counts, int64 of shape (ranks, symbols), without overflow.

    Counts are clipped so that their sum cannot overflow. All ranks have the same counts, so they get the same sum.
    """
    return np.minimum(counts, np.iinfo(np.int64).max // len(counts)).sum(0)


class CodebookSync:
    """Keeps the steps and codebooks of a refresher equal on all ranks.

    After a step's last bucket, symbol counts are gathered over the same connections as the gradients, and in the same
    background thread.

    Parameters
    ----------
    refresher : CodebookRefresher
        This rank's refresher.
    """

    def __init__(self, refresher: CodebookRefresher) -> None:
        self.refresher = refresher
        self._in_sync = False  # True if all ranks are known to have the same step and codebooks
        self._refresh_work: Work | None = None
        self._step: int = refresher.state_dict()["latest"]  # number of the step, failed steps included

    def load(self, state: Any) -> None:
        """Replace the state of the refresher."""
        self.wait()
        self.refresher.load_state_dict(state)
        self._step, self._in_sync = self.refresher.state_dict()["latest"], False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and copy, without the refresh in flight."""
        return self.__dict__ | {"_in_sync": False, "_refresh_work": None}

    def require_sync(self) -> None:
        """Make the next step compare the codebooks of all ranks, because a rank is new or a step has failed."""
        self._in_sync = False

    async def begin_step(self, collective: Collective) -> None:
        """Advance the step number. If ranks have different steps or codebooks, all ranks drop their codebooks."""
        if not self._in_sync:
            signature, *mine = self._request()
            part = collective.part(signature, {"collective": "state of codebooks"})
            states = [(step, books) for step, books in await part.gather(mine)]
            if len(set(states)) > 1:
                self._reset()
            self._step = max(step for step, _ in states)
            self._in_sync = True
        self._step += 1

    def _request(self) -> list[int]:
        """Return a hash of the refresher's arguments, the step number, and a hash of the codebooks."""
        refresher = self.refresher
        how = refresher.spec, refresher.dtype, refresher.interval, refresher.delay
        books = {name: bytes(book) for name, book in refresher.state_dict().items() if name.startswith("book")}
        return [hash64("codebooks", how), self._step, hash64(books)]

    def _reset(self) -> None:
        """Replace the refresher's state by that of a new refresher, without codebooks and symbol counts."""
        refresher = self.refresher
        how = {"interval": refresher.interval, "delay": refresher.delay}
        refresher.load_state_dict(CodebookRefresher(refresher.spec, refresher.dtype, **how).state_dict())

    def prepare(self, r: Reduction) -> None:
        """Set the agreed codebook as the one that a reduction encodes with, and count symbols if a refresh is due."""
        refresher = self.refresher
        if r.spec != refresher.spec or (isinstance(r.spec, Truncate) and r.dtype != refresher.dtype):
            return  # the refresher's codebooks are for symbols of another spec or dtype
        r.codebook, r.codebooks = refresher.current(self._step), refresher.books
        if refresher.due(self._step):
            r.count_symbols = refresher.count

    def submit(self, comm: Communicator, over: Wait) -> None:
        """Start the refresh of the codebooks, which begins when `over` reports the end of the step."""
        self._refresh_work = comm.submit(lambda collective: self._refresh(collective, over))

    async def _refresh(self, collective: Collective, over: Wait) -> None:
        """Sum the symbol counts of all ranks, and propose a codebook for a later step, the same on all ranks."""
        await over
        refresher = self.refresher
        if not refresher.due(self._step):
            return
        if not self._in_sync:
            refresher.rollback(self._step)
            return
        r = Reduction(refresher.counts(), "int64", Lossless(), "sum", 0)
        refresher.rollback(self._step)  # clears the counts, so that those of a failed step are dropped
        try:
            fields = signed(r, "refresh")
            for members in (collective.levels.within, collective.levels.between):
                part = collective.part(hash64(*fields.items()), fields, members)
                counts = await algorithms.gather(part, r)
                r = replace(r, x=sum_of_counts(counts.reshape(members.size, -1)))
            await collective.agree()
        except CodecError as e:  # all ranks raise an error here, and keep the current codebook
            collective.fail(e)
            return
        refresher.propose(self._step, r.x)

    def wait(self) -> None:
        """Wait for the refresh in flight, if there is one."""
        work, self._refresh_work = self._refresh_work, None
        if work is not None:
            work.wait()
