"""One collective in flight: sends and receives its messages, and makes all ranks agree on its outcome."""

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from codec import FrameError, PeerError
from codec.torch.network.inbox import Receive, Refused
from codec.torch.network.mesh import Mesh
from codec.torch.network.waits import Wait
from codec.torch.transport.arena import Arena
from codec.torch.transport.buffers import Buffers
from codec.torch.transport.counters import Counters, Stopwatch
from codec.torch.transport.levels import Levels, Members
from codec.torch.transport.messages import (
    DIFFERS,
    OTHER_RANK,
    Array,
    Cause,
    Fields,
    difference,
    largest,
    nearest,
    numbers_nbytes,
    other_difference,
    pack_fields,
    pack_numbers,
    status_of,
    unpack_fields,
    unpack_numbers,
)
from codec.torch.transport.nccl import DeviceTransfer

_VERDICT = 0  # signature of the last part, in which ranks report their success


class NoFrameError(PeerError):
    """A rank had no frame to send; :meth:`Collective.blame` finds out why.

    Parameters
    ----------
    rank : int
        Rank that had no frame.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} sent no frame")
        self.rank = rank


class _Channel(Protocol):
    """Channel of the group: a :class:`codec.torch.transport.channel.Channel`."""

    levels: Levels
    mesh: Mesh
    buffers: Buffers
    device: DeviceTransfer

    def writing(self) -> AbstractContextManager[None]:
        """Return a context manager for writing to tensors of the caller."""
        ...


class Collective:
    """Collective of all ranks of a group.

    A collective consists of parts, which send messages and wait for those of other ranks, and ends with :meth:`agree`.
    Each message contains the number of the collective and the signature of its part, so that ranks can send data
    without comparing arguments first.

    If a rank fails, all ranks fail: it sends an abort message to all others, which ends their waits. Connections then
    stay open for other collectives. If a rank is lost or does not answer in time, all connections are closed.

    Parameters
    ----------
    channel : Channel
        Ranks and connections.
    number : int
        Number of the collective, equal on all ranks.

    Attributes
    ----------
    counters : Counters
        Bytes and seconds of this collective.
    clock : Stopwatch
        Stopwatch that adds seconds to the counters.
    arena : Arena
        Memory for messages, results and sums.
    agreed : bool
        True: all ranks have succeeded, and this rank must not fail afterwards.
    """

    def __init__(self, channel: _Channel, number: int) -> None:
        self.levels = channel.levels
        self.rank, self.size, self.others = self.levels.all.rank, self.levels.all.size, self.levels.all.others
        self.number, self.mesh, self.device = number, channel.mesh, channel.device
        self.counters = Counters()
        self.clock = Stopwatch(self.counters)
        self.arena = Arena(channel.buffers)
        self.agreed = False
        self._writing = channel.writing
        self._inbox = self.mesh.begin(number)
        self._parts = 0
        self._aborted = False  # True: this rank has sent an abort
        self._cause: Cause | None = None  # cause in another rank's abort
        self._fields: dict[int, Fields] = {}  # arguments of parts, by number of the part

    def part(self, signature: int, fields: Fields | None = None, members: Members | None = None) -> "CollectivePart":
        """Begin the next part. All ranks begin the same parts in the same order.

        Parameters
        ----------
        signature : int
            Hash of the arguments that must be equal on all ranks.
        fields : mapping, optional
            These arguments by name, for the error if they differ.
        members : Members, optional
            Ranks that exchange messages. Default: all ranks, of which those at other places of other machines are
            reached by :meth:`CollectivePart.gather` only.
        """
        if fields is not None:
            self._fields[self._parts] = fields
        self._parts += 1
        return CollectivePart(self, self._parts - 1, signature, members or self.levels.all)

    def again(self, number: int, signature: int, members: Members) -> "CollectivePart":
        """Begin a part among some ranks, with the signature and arguments of part `number`."""
        return self.part(signature, self._fields.get(number), members)

    async def agree(self, report: Sequence[int] = ()) -> list[int]:
        """Report that this rank has succeeded, and return once all ranks have succeeded.

        Two ranks report to each other. If there are more, ranks report along a tree to its root, which then notifies
        all others along the tree (:meth:`Levels.tree`). So whichever other rank is lost meanwhile, either all ranks of
        a flat group succeed or none does. A rank waits for its parent for one timeout more than the parent for others.

        Parameters
        ----------
        report : sequence of int
            Integers; all ranks pass the same number of them.

        Returns
        -------
        list of int
            For each integer of `report`, its maximum over all ranks.

        Raises
        ------
        PeerError
            Another rank has failed.
        """
        last = self.part(_VERDICT)
        self.counters.round_trips += self.levels.round_trips
        if self.size <= 2:
            verdict = largest(await last.gather(report))
        else:
            parent, children, depth = self.levels.tree()
            verdict = largest([list(report), *[await last.numbers(o, len(report)) for o in children]])
            if parent is not None:
                last.send([pack_numbers(verdict)], parent)
                verdict = await last.numbers(parent, len(report), timeouts=1 + depth)
            self.agreed = True
            for o in children:
                last.send([pack_numbers(verdict)], o)
        self.agreed = True
        await last.sent()
        return verdict

    def fail(self, error: BaseException, cause: Cause | None = None) -> Cause:
        """Abort the collective on all ranks because of an error of this rank; other ranks raise PeerError.

        After a lost connection, or if other ranks may have succeeded, close the connections instead: the other ranks
        fail at the next collective at the latest.

        Parameters
        ----------
        error : BaseException
            Error of this rank.
        cause : Cause, optional
            Cause that this method has returned for another failed collective of the same step. Default: the cause in
            another rank's abort, or `error`.

        Returns
        -------
        Cause
            Cause that is sent to the other ranks.
        """
        self.device.drain()
        self.device.pass_turn(self.number)
        cause = cause or self._cause or Cause(status_of(error), self.rank, f"{type(error).__name__}: {error}")
        if self.agreed or self.mesh.has_lost:
            self.mesh.close()
        elif not self._aborted:
            self._abort(cause)
        return cause

    def _abort(self, cause: Cause) -> None:
        self._aborted = True
        self.mesh.abort(self.number, cause.pack())

    @contextmanager
    def storing(self) -> Generator[None]:
        """Return a context manager for storing results in the caller's tensors, after all ranks have succeeded."""
        with self._writing(), self.clock.during("decode_s"):
            yield

    def end(self) -> None:
        """End the collective: drop messages that arrive later, and free its memory."""
        self.device.pass_turn(self.number)
        self.mesh.end(self.number)
        self.arena.release()

    async def blame(self, source: int) -> None:
        """Wait for the abort of a rank that had no frame to send, and raise the error in the abort."""
        await self.part(_VERDICT).numbers(source, 0)
        raise PeerError(f"rank {source} sent no frame, because of an error")

    async def explain(self, refused: Refused, part: int) -> PeerError:
        """Return the PeerError to raise here for another rank's abort, or for its message with another signature.

        `part` is the number of the part in which this rank waited.
        """
        source, seen, own = refused.source, set[int](), list(self._fields.values())
        while True:
            if refused.body is None and not self._aborted:
                self._abort(Cause(DIFFERS, source, pack_fields(self._fields.get(part, {}))))
            await self.mesh.explanation(self.number, source)
            cause = Cause.unpack(self._inbox.aborts[source])
            if not (OTHER_RANK <= cause.status <= DIFFERS and 0 <= cause.rank < self.size):
                self.mesh.close()
                return PeerError(f"rank {source} reports the unknown status {cause.status}: make a new group")
            if cause.status != DIFFERS:
                self._cause = cause
                return cause.error()
            theirs = unpack_fields(cause.text)
            mine = nearest(theirs, own)
            if not self._aborted:
                self._abort(Cause(DIFFERS, source, pack_fields(mine)))
            seen.add(source)
            equal = any(theirs == unpack_fields(pack_fields(fields)) for fields in own)
            if not equal or cause.rank in seen or cause.rank == self.rank:
                return difference(source, theirs, mine)
            if cause.rank not in self.mesh.progress:  # in two levels, not all ranks are connected
                return other_difference(cause.rank, source, theirs)
            source = cause.rank  # `source` has this rank's arguments: ask the rank that it refused


class CollectivePart:
    """Part of a collective: messages under one signature.

    Parameters
    ----------
    collective : Collective
        The collective.
    number : int
        Number of the part.
    signature : int
        Hash of the arguments that must be equal on all ranks.
    members : Members
        Ranks that exchange messages. Methods take and return indices of members.
    """

    def __init__(self, collective: Collective, number: int, signature: int, members: Members) -> None:
        self._collective, self._number, self._signature = collective, number, signature
        self.ranks, self.rank, self.size, self.others = members.ranks, members.rank, members.size, members.others
        self.arena, self.clock, self.device = collective.arena, collective.clock, collective.device
        self.counters = collective.counters
        # True: messages stay within this machine
        self._local = collective.levels.within.contains(members)
        self._sent = defaultdict[int, int](int)  # number of messages sent to each rank
        self._received = defaultdict[int, int](int)  # number of messages requested from each rank
        self._sends: list[Wait] = []

    def send(self, body: Sequence[Any], to: int, *, data: bool = False) -> None:
        """Start to send a message.

        Parameters
        ----------
        body : sequence of buffers
            Bytes of the message, which must not change before :meth:`sent` returns.
        to : int
            Receiving rank.
        data : bool
            True: count the bytes in `sent_nbytes`, for frames and values.
        """
        index = self._sent[to]
        self._sent[to] += 1
        c = self._collective
        self._sends.append(c.mesh.send(self.ranks[to], c.number, self._number, index, self._signature, body))
        if data and self._local:
            self.counters.local_nbytes += sum(b.nbytes for b in body)
        elif data:
            self.counters.sent_nbytes += sum(b.nbytes for b in body)

    def send_frame(self, frame: Array, to: int) -> None:
        """Begin to send a frame, which must not change before :meth:`sent`."""
        self.send([frame], to, data=True)

    def send_values(self, values: Array, to: int) -> None:
        """Begin to send uncompressed values, which must not change before :meth:`sent`."""
        self.send([np.ascontiguousarray(values).view(np.uint8)], to, data=True)

    async def sent(self) -> None:
        """Wait until all messages of this part are sent."""
        sends, self._sends = self._sends, []
        for send in sends:
            await self._wait(send)

    def receive(self, most: int, source: int) -> Receive:
        """Request a frame of at most `most` bytes; :meth:`frame` waits for the frame."""
        return self._receive(source, most, self.arena.allocate(most))

    def receive_values(self, buffer: Array, source: int) -> Receive:
        """Request uncompressed values that fill `buffer`; its contents are valid after :meth:`frame`."""
        return self._receive(source, buffer.nbytes, buffer.view(np.uint8), exact=True)

    def _receive(self, source: int, most: int, room: Array | None = None, *, exact: bool = False) -> Receive:
        index = self._received[source]
        self._received[source] += 1
        rank, mesh = self.ranks[source], self._collective.mesh
        receive = Receive(rank, self._number, index, self._signature, most, room, exact=exact)
        receive.last_message = lambda: mesh.progress[rank]
        mesh.post(self._collective.number, receive)
        return receive

    async def frame(self, receive: Receive) -> Array:
        """Wait for a message; raise FrameError if it is too long or damaged, PeerError if its rank fails or is late."""
        await self._wait(receive)
        if not self._local:
            self.counters.received_nbytes += receive.message.nbytes
        return receive.message

    async def numbers(self, source: int, count: int, *, timeouts: int = 1) -> list[int]:
        """Receive `count` integers from a rank, within `timeouts` times the timeout of the group."""
        receive = self._receive(source, numbers_nbytes(count), exact=True)
        receive.timeouts = timeouts
        return unpack_numbers(await self._message(receive))

    async def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Exchange integers with all members, the same number of them on each; return them by member."""
        levels = self._collective.levels
        if not levels.flat and self.ranks is levels.all.ranks:
            again = self._collective.again
            return await levels.gathered(lambda who, x: again(self._number, self._signature, who).gather(x), numbers)
        for o in self.others:
            self.send([pack_numbers(numbers)], o)
        found = {self.rank: list(numbers)} | {o: await self.numbers(o, len(numbers)) for o in self.others}
        await self.sent()
        return [found[rank] for rank in range(self.size)]

    async def scatter(self, numbers: Sequence[int]) -> list[int]:
        """Send number i of this rank to rank i; return the numbers received, by rank."""
        for o in self.others:
            self.send([pack_numbers([numbers[o]])], o)
        found = {self.rank: [numbers[self.rank]]} | {o: await self.numbers(o, 1) for o in self.others}
        await self.sent()
        return [found[rank][0] for rank in range(self.size)]

    async def swap(self, bodies: Sequence[Sequence[Array]], most: Sequence[int]) -> dict[int, Array]:
        """Send each other rank a message, `bodies` by rank; return theirs, of at most `most` bytes, by rank."""
        for o in self.others:
            self.send(bodies[o], o)
        found = {o: await self._message(self._receive(o, most[o])) for o in self.others}  # allocated as bytes arrive
        await self.sent()
        return found

    async def _message(self, receive: Receive) -> Array:
        """Wait for integers, on which ranks act at once: if they were damaged, close the connections, and raise."""
        try:
            await self._wait(receive)
        except FrameError:
            if receive.damaged:
                self._collective.mesh.close()
            raise
        return receive.message

    async def _wait(self, wait: Wait) -> None:
        try:
            await wait
        except Refused as e:
            refused = e
        else:
            return
        raise await self._collective.explain(refused, self._number)

    async def breathe(self) -> None:
        """Yield to other collectives that are ready to run."""
        await _Pause()


class _Pause:
    """Awaitable that yields to other coroutines."""

    def __await__(self) -> Any:
        wait = Wait()
        wait.complete()
        yield wait
