"""Codebooks of what all ranks send, agreed on behind a step's buckets."""

from typing import Any

from codec import CodecError
from codec.specs import Lossless, Truncate
from codec.stateful import CodebookRefresher
from codec.torch import algorithms
from codec.torch.channel import Channel
from codec.torch.communicator import Communicator, close_on_error, exchange_requests, hash64, request
from codec.torch.execution import signature
from codec.torch.reduction import Reduction
from codec.torch.work import Work


class CodebookSync:
    """A refresher whose steps are counted alike on all ranks, and whose codebooks all of them know.

    Counts are gathered by the thread and over the connections of the gradients, after a step's last bucket.
    """

    def __init__(self, refresher: CodebookRefresher) -> None:
        self.refresher = refresher
        self._in_sync = False  # all ranks are known to have the same step and codebooks
        self._refreshing: Work | None = None
        self.restart()

    def restart(self) -> None:
        """Go on from the refresher's state."""
        self._step: int = self.refresher.state_dict()["latest"]  # failed ones count, too
        self._in_sync = False

    def __getstate__(self) -> dict[str, Any]:
        """Without what is under way."""
        return self.__dict__ | {"_in_sync": False, "_refreshing": None}

    def require_sync(self) -> None:
        """Ranks may know other codebooks now: others have come, or a step has failed."""
        self._in_sync = False

    def begin_step(self, channel: Channel) -> None:
        """Count steps as all ranks do. Where they know other codebooks, as a rank that is new does, all begin anew."""
        if not self._in_sync:
            _, known = exchange_requests(channel, lambda: (None, self._known()))
            everyones = [(step, books) for _, step, books in known]
            if len(set(everyones)) > 1:
                with close_on_error(channel):
                    self._begin_anew()
            self._step = max(step for step, _ in everyones)
            self._in_sync = True
        self._step += 1

    def _known(self) -> list[int]:
        """What must be the same on all ranks, in a number; the step; the codebooks, in a number."""
        refresher = self.refresher
        how = refresher.spec, refresher.dtype, refresher.interval, refresher.delay
        books = {name: bytes(book) for name, book in refresher.state_dict().items() if name.startswith("book")}
        return [hash64("codebooks", how), self._step, hash64(books)]

    def _begin_anew(self) -> None:
        """Forget codebooks, counts and steps."""
        refresher = self.refresher
        how = {"interval": refresher.interval, "delay": refresher.delay}
        refresher.load_state_dict(CodebookRefresher(refresher.spec, refresher.dtype, **how).state_dict())

    def prepare(self, r: Reduction) -> None:
        """Have it encode with the codebook that all ranks know, and be counted if that is to be refreshed."""
        refresher = self.refresher
        if r.spec != refresher.spec or (isinstance(r.spec, Truncate) and r.dtype != refresher.dtype):
            return  # other symbols
        r.codebook, r.codebooks = refresher.current(self._step), refresher.books
        if refresher.due(self._step):
            r.count_symbols = refresher.count

    def submit(self, comm: Communicator) -> None:
        """Refresh behind all that was submitted."""
        self._refreshing = comm.worker.submit(lambda: self._refresh(comm.channel))

    def _refresh(self, channel: Channel) -> None:
        """All ranks sum what was counted, and propose the same codebook for a later step."""
        refresher = self.refresher
        if not refresher.due(self._step):
            return

        def prepare() -> tuple[Reduction, list[int]]:
            r = Reduction(refresher.counts(), "int64", Lossless(), "sum", 0)
            refresher.rollback(self._step)  # counts of a step that fails are forgotten
            return r, [signature(r, "refresh")]

        if not self._in_sync:
            refresher.rollback(self._step)
            return
        try:
            r = request(channel, prepare)
            with close_on_error(channel):
                counts, error = algorithms.gather(channel, r)
            channel.exchange_verdict(error)
            refresher.propose(self._step, counts.reshape(channel.size, -1).sum(0))
        except CodecError:
            pass  # on all ranks: the codebook that they have will do

    def settle(self) -> None:
        """Wait until no codebook is being agreed on."""
        refreshing, self._refreshing = self._refreshing, None
        if refreshing is not None:
            refreshing.wait()
