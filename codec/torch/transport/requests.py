"""Begin and end of a collective: the requests and the verdict of all ranks (docs/protocol.md, section 4)."""

import time
from collections.abc import Sequence

from codec import PeerError, Status
from codec.torch.transport.connections import Connections
from codec.torch.transport.messages import NUMBERS_TAG, numbers_message
from codec.torch.transport.numbers import Numbers

# Status that a rank reports, in ascending order of severity; _OTHER_RANK: an error or a missing frame of another rank.
_SUCCESS, _OTHER_RANK, _ERROR, _NONFINITE = range(4)
# last number of a request: a rank can take part, has found an error, or has found NaN or Inf
_ABLE, _UNABLE, _UNABLE_NONFINITE = range(3)


def _unable(rank: int, reason: int) -> PeerError:
    """Return the error for a rank whose request ends with `reason`, so that it cannot take part in a collective."""
    if reason == _UNABLE_NONFINITE:
        return PeerError(f"rank {rank} has NaN or Inf: nothing was changed", Status.NONFINITE)
    return PeerError(f"rank {rank} could not begin: nothing was changed")


def _status_of(error: Exception | None) -> int:
    if error is None:
        return _SUCCESS
    if isinstance(error, PeerError):
        return _OTHER_RANK
    return _NONFINITE if getattr(error, "code", None) == Status.NONFINITE else _ERROR


class Requests:
    """Agreement of all ranks to begin a collective, and on its outcome.

    An error of one rank is an error of all: nobody sends data after a request of a rank that cannot take part, and
    nobody succeeds after a verdict that names an error. These errors leave the connections open, for the next
    collective. A lost rank, or one that sends impossible numbers, closes them.

    Parameters
    ----------
    connections : Connections
        Ranks of the collective.
    numbers : Numbers
        Carries requests and verdicts.
    """

    def __init__(self, connections: Connections, numbers: Numbers) -> None:
        self._connections, self._numbers = connections, numbers
        self._mine: list[int] | None = None  # numbers sent, while those of the other ranks are not received
        self.refused = False  # a rank has reported that it cannot take part, or has other arguments
        self.calls = 0  # collectives that all ranks have begun
        self.started = 0.0, 0.0  # wall-clock and CPU time, in seconds, at the begin of the last collective
        connections.attach(self)

    def send(self, numbers: Sequence[int], error: BaseException | None = None) -> None:
        """Send all ranks the request of a collective; :meth:`await_all` receives theirs.

        Parameters
        ----------
        numbers : sequence of int
            At most 3 numbers. The first one, the signature, must be the same on all ranks.
        error : BaseException, optional
            Error in this rank's arguments: this rank cannot take part.
        """
        self.refused = False
        last = _ABLE
        if error is not None:
            last = _UNABLE_NONFINITE if getattr(error, "code", None) == Status.NONFINITE else _UNABLE
        self._mine = [*numbers, *[0] * (3 - len(numbers)), last]
        self._numbers.send_to_all(self._mine)

    def await_all(self) -> list[list[int]]:
        """Wait for the requests of all ranks; do nothing if they have been received.

        Returns
        -------
        list of list of int
            The numbers of each rank; empty if the requests had been received before.

        Raises
        ------
        PeerError
            A rank cannot take part, has another signature, or is lost.
        """
        mine, self._mine = self._mine, None
        if mine is None:
            return []
        requests = self._numbers.receive_from_all(mine)
        self.refused = any(theirs[-1] or theirs[0] != mine[0] for theirs in requests)
        for rank, theirs in enumerate(requests):
            if theirs[-1]:
                raise _unable(rank, theirs[-1])
            if theirs[0] != mine[0]:
                raise PeerError(
                    f"rank {rank} has begun another collective than rank {self._connections.rank}, or has passed other "
                    "arguments: nothing was changed"
                )
        self.calls += 1
        self.started = time.perf_counter(), time.thread_time()
        return [theirs[:-1] for theirs in requests]

    def exchange_verdict(self, error: Exception | None, report: Sequence[int] = ()) -> list[int]:
        """Tell all ranks how this rank's part went, and return only if all ranks have succeeded.

        Parameters
        ----------
        error : Exception or None
            Error of this rank.
        report : sequence of int
            At most 5 numbers, as many on all ranks.

        Returns
        -------
        list of int
            Maximum over all ranks of each number of `report`.

        Raises
        ------
        CodecError
            `error`, if it is this rank's own; else PeerError, which names the rank that caused it.
        """
        status = _status_of(error)
        self.await_all()
        worst, rank, *largest = self._verdict([status, self._connections.rank, *report])
        self._numbers.prefetch()
        if error is not None and status != _OTHER_RANK:
            raise error
        if worst == _NONFINITE:
            raise PeerError(f"rank {rank} has NaN or Inf: nothing was changed", Status.NONFINITE) from error
        if worst == _ERROR:
            raise PeerError(f"rank {rank} could not do its part: nothing was changed") from error
        if error is not None:
            raise error
        if worst:
            raise PeerError("a rank has lost another one: nothing was changed")
        return largest

    def _verdict(self, mine: list[int]) -> list[int]:
        """Return the worst status, the lowest rank that reported it, and the maximum of each number of the reports.

        Rank 0 receives all reports, and then sends the verdict to all. So, whichever other rank is lost meanwhile,
        either all ranks succeed or none does. Rank 0 may begin to wait one timeout after this rank, and wait for one
        timeout itself.
        """
        if self._connections.rank:
            self._numbers.send({0: mine})
            verdict = self._numbers.receive([0], len(mine), timeouts=2)[0]
            self._check_status(verdict)
            return verdict
        self._numbers.send({})
        reports = [mine, *self._numbers.receive(self._connections.others, len(mine)).values()]
        worst = max(reports, key=lambda report: report[0])
        for report in reports:
            self._check_status(report)
        verdict = worst[:2] + [max(column) for column in list(zip(*reports, strict=True))[2:]]
        self._connections.broadcast(numbers_message(verdict), NUMBERS_TAG)
        return verdict

    def _check_status(self, report: Sequence[int]) -> None:
        """Raise PeerError, and close the connections, unless status and rank are possible."""
        status, rank = report[:2]
        if not (_SUCCESS <= status <= _NONFINITE and 0 <= rank < self._connections.size):
            self._connections.close()
            raise PeerError(f"a rank reports the status {status} of rank {rank}, which cannot be: make a new group")

    def release(self) -> None:
        """Forget the request in flight."""
        self._mine = None
