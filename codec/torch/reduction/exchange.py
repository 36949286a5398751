"""Exchange frames of tensors on GPUs: with NCCL from GPU to GPU, or through host memory and the mesh."""

import itertools
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from codec import FrameError, PeerError
from codec._c.library import lib
from codec.torch.network.inbox import Receive
from codec.torch.reduction import heads
from codec.torch.reduction.device import DeviceReduction, DeviceTerm
from codec.torch.reduction.heads import Announced
from codec.torch.reduction.partition import Piece, sent
from codec.torch.transport.collective import CollectivePart, NoFrameError
from codec.torch.transport.joint import Copied, Found
from codec.torch.transport.messages import Array

FRAME_LENGTH = struct.Struct("<Q")  # size of the frame in bytes, which precedes the frame in a slot

_ALIGN = 16  # alignment of slots in bytes
_BEFORE = FRAME_LENGTH.size  # bytes of a slot before the frame
_LEAST = _BEFORE + lib.CODEC_HEADER_NBYTES  # minimum size of a slot in bytes: the length and the header of a frame

Pieces = Sequence[Sequence[Piece]]  # pieces by rank and chunk
Row = list[Found | None]  # frames of one chunk by rank; None: this rank's own values


class PhaseFrames(Protocol):
    """Frames of a phase from all ranks."""

    async def chunk(self, c: int) -> Row:
        """Return the frames of a chunk by rank, when they have arrived."""
        ...


class Exchange(Protocol):
    """Phases of a collective."""

    async def scatter(self) -> PhaseFrames:
        """Send this rank's terms of slice i to rank i; return the terms of this rank's slice."""
        ...

    async def gather(self, terms: Sequence[DeviceTerm], pieces: Pieces) -> PhaseFrames:
        """Send this rank's `terms`, by chunk, to all ranks; return the terms of all ranks, which `pieces` describes."""
        ...


def exchange(part: CollectivePart, r: DeviceReduction, pieces: Pieces, *, gathers: bool = False) -> Exchange:
    """Return an object that exchanges the frames of a collective: Slots with NCCL, otherwise Messages.

    Parameters
    ----------
    part : CollectivePart
        Part of the collective.
    r : DeviceReduction
        Values of this rank.
    pieces : sequence of sequences of Piece
        All pieces of the collective, in rows that have the same number of chunks.
    gathers : bool
        True: a gather of all `pieces` follows the scatter.
    """
    r.joint.join(part)
    return Slots(part, r, pieces) if part.device.connected else Messages(part, r, pieces, gathers=gathers)


class _Arrived(NamedTuple):
    """Frames that have been received, by rank and chunk."""

    frames: list[list[Found]]

    async def chunk(self, c: int) -> Row:
        """Return the frames of a chunk by rank."""
        return [row[c] for row in self.frames]


class _Outgoing(NamedTuple):
    """Slots that a reduction sends: one row to each rank, or, with `gathers`, the same row to all ranks."""

    part: CollectivePart
    slots: torch.Tensor
    sizes: torch.Tensor  # size of each frame in bytes
    nbytes: int  # bytes of each slot that are sent
    gathers: bool


def _send(items: Sequence[_Outgoing]) -> list[torch.Tensor]:
    """Send the rows of concurrent reductions; return, for each reduction, the received rows of all ranks."""
    part = items[0].part
    part.counters.round_trips += 1
    received: dict[int, torch.Tensor] = {}
    with part.device.phase():
        for gathers in (False, True):
            own = [i for i, item in enumerate(items) if item.gathers == gathers]
            if own:
                received |= zip(own, _send_alike([items[i] for i in own]), strict=True)
    return [received[i] for i in range(len(items))]


def _send_alike(items: Sequence[_Outgoing]) -> list[torch.Tensor]:
    """Send the rows of several reductions in one NCCL collective, concatenated."""
    part = items[0].part
    rows: list[torch.Tensor] = []
    for _, slots, sizes, nbytes, _ in items:
        slots.view(torch.int64)[:, :, 0] = sizes.view(len(slots), -1)
        rows.append(slots[:, :, :nbytes])

    def send(rows: torch.Tensor) -> torch.Tensor:
        if items[0].gathers:
            return part.device.all_gather(rows[0], part.counters)
        return part.device.all_to_all(rows, part.counters)

    if len(rows) == 1:
        return [send(rows[0].contiguous())]
    received = send(torch.cat([row.flatten(1) for row in rows], 1))
    ends = [*itertools.accumulate(row[0].numel() for row in rows)]
    return [
        received[:, end - row[0].numel() : end].unflatten(1, row.shape[1:]) for end, row in zip(ends, rows, strict=True)
    ]


class Slots:
    """Exchange in GPU memory: a row of slots per rank, a slot per chunk (docs/spec/protocol/collectives.md, section 7).

    A slot contains the length of a frame, then the frame. In each phase, NCCL sends all frames for a rank in one
    message. Their heads are sent first, from host to host, so that the host need not wait for the frames.
    """

    def __init__(self, part: CollectivePart, r: DeviceReduction, pieces: Pieces) -> None:
        self._part, self._r, self._pieces = part, r, pieces
        self._most = max(r.frame_bound(piece) for row in pieces for piece in row)

    async def scatter(self) -> PhaseFrames:
        """Send the frames of row i of this rank's pieces to rank i; there is one row per rank."""
        part = self._part
        terms = scattered_terms(part, self._r, self._pieces)
        pieces = [self._pieces[part.rank]] * part.size
        return await self._exchange(terms, pieces, gathers=False)

    async def gather(self, terms: Sequence[DeviceTerm], pieces: Pieces) -> PhaseFrames:
        """Send a row of frames to all ranks."""
        return await self._exchange(terms, pieces, gathers=True)

    async def _exchange(self, terms: Sequence[DeviceTerm], pieces: Pieces, *, gathers: bool) -> PhaseFrames:
        """Encode rows of terms, send row i to rank i, or the only row to all ranks, and return the frames of `pieces`.

        NCCL's messages cannot be cancelled if a rank has failed. So all ranks first exchange the heads of their frames.

        Raises
        ------
        FrameError
            A head does not match the agreed spec and shape.
        PeerError
            A rank announces a frame that is larger than possible.
        """
        r, part, chunks = self._r, self._part, len(self._pieces[0])
        slots = r.empty_bytes((len(terms) // chunks, chunks, _slot_nbytes(self._most)))
        sizes, mine = await self._encode(terms, slots)
        rows = [mine[i : i + chunks] for i in range(0, len(mine), chunks)]
        announced, largest = await self._swap(rows * part.size if gathers else rows, pieces)
        row = _Outgoing(part, slots, sizes, _slot_nbytes(largest), gathers)
        return self._arriving(await r.meet(row, _send), pieces, announced)

    async def _encode(self, terms: Sequence[DeviceTerm], slots: torch.Tensor) -> tuple[torch.Tensor, list[Announced]]:
        """Encode this rank's frames. Return their sizes, on the GPU, and the sizes and heads to send in advance.

        If the heads depend on values, the host waits until the frames are encoded.
        """
        r, pieces = self._r, [term.piece for term in terms]
        out = [slot[_BEFORE:] for row in slots for slot in row]
        known = [(r.frame_bound(piece), heads.constant(r, piece)) for piece in pieces]
        found = [Announced(nbytes, head, complete=False) for nbytes, head in known if head is not None]
        if len(found) == len(terms):
            return (await r.encode_all(terms, out)).sizes, found
        usual, copies = heads.usual_nbytes(r, pieces), list[Array]()
        encoded = await r.encode_all(terms, out, lambda: copies.append(self._read(slots, usual)))
        read = self._heads_of(slots, copies[0], usual)
        for piece, head in zip(pieces, read, strict=True):
            heads.note(r, piece, head)
        return encoded.sizes, [Announced(n, head, complete=True) for n, head in zip(encoded.lengths, read, strict=True)]

    def _heads_of(self, slots: torch.Tensor, read: Array, usual: int) -> list[Array]:
        """Return the heads of this rank's frames, whose first `usual` bytes are in `read`; read longer heads again."""
        frames = [slot[_BEFORE:] for row in read for slot in row]
        sizes = [heads.head_nbytes(frame) for frame in frames]
        if max(sizes) <= usual:
            return [frame[:n] for frame, n in zip(frames, sizes, strict=True)]
        read = self._read(slots, max(sizes))
        self._r.settle(self._part.device)
        return self._heads_of(slots, read, max(sizes))

    async def _swap(self, rows: Sequence[Sequence[Announced]], pieces: Pieces) -> tuple[list[list[Announced]], int]:
        """Announce row i to rank i; return the rows that ranks announce for `pieces`, and the largest frame's size."""
        r, part = self._r, self._part
        mine = max(each.nbytes for row in rows for each in row)
        bounds = [[r.frame_bound(piece) for piece in row] for row in pieces]
        bodies = await part.swap([heads.pack(mine, row) for row in rows], [heads.most_nbytes(row) for row in bounds])
        found, largest = {part.rank: [*rows[part.rank]]}, mine
        with part.device.phase():  # from here on, other ranks may start NCCL messages to this rank
            for o, body in bodies.items():
                theirs, found[o] = heads.unpack(body, len(bounds[o]), o)
                largest = max(largest, theirs)
            if largest > self._most:
                raise PeerError(f"a rank reports a frame of {largest} bytes; the maximum is {self._most}")
        return [found[rank] for rank in range(part.size)], largest

    def _arriving(self, slots: torch.Tensor, pieces: Pieces, announced: Sequence[Sequence[Announced]]) -> _Arrived:
        """Return the frames in the received slots, which are valid in stream order.

        Raises
        ------
        FrameError
            A head does not match the agreed spec and shape. For frames announced without a checksum,
            :meth:`DeviceReduction.settle` raises the error.
        """
        most = slots.shape[2] - _BEFORE
        for rank, row in enumerate(announced):
            for each, piece in zip(row, pieces[rank], strict=True):
                self._check(rank, each, piece, most)
        first: Array | None = None
        if not all(each.complete for row in announced for each in row):
            longest = max(len(each.head) for row in announced for each in row)
            first = found = self._read(slots, longest)
            self._r.check_later(lambda: _check_arrived(found, announced))

        def frame(rank: int, c: int, each: Announced) -> Found:
            begin, there = first, slots[rank, c, _BEFORE : _BEFORE + each.nbytes]
            if each.complete or begin is None:
                return Found(there, each.head)
            return Found(there, each.head, begin[rank, c, _BEFORE : _BEFORE + len(each.head)])

        return _Arrived([[frame(rank, c, each) for c, each in enumerate(row)] for rank, row in enumerate(announced)])

    def _check(self, rank: int, each: Announced, piece: Piece, most: int) -> None:
        """Check the size and the head that a rank has announced for a frame of a piece."""
        if each.nbytes > most:
            raise FrameError(f"rank {rank} sends a frame of {each.nbytes} bytes; the maximum is {most}")
        self._r.check_frame(each.head, piece)
        if heads.head_nbytes(each.head) != len(each.head):
            raise FrameError(
                f"rank {rank} sends a head of {len(each.head)} bytes, but its header needs "
                f"{heads.head_nbytes(each.head)}"
            )

    def _read(self, slots: torch.Tensor, nbytes: int) -> Array:
        """Request copies of the first `nbytes` bytes of each frame; return an array that is valid after `settle`."""
        found = self._r.read_back(slots[:, :, : min(_BEFORE + nbytes, slots.shape[2])].contiguous())
        return found.reshape(*slots.shape[:2], -1)


def _check_arrived(first: Array, announced: Sequence[Sequence[Announced]]) -> None:
    """Check the first bytes of slots whose frames were announced without a checksum.

    Raises
    ------
    FrameError
        A length or a head is not as announced.
    NoFrameError
        A rank had no frame to send.
    """
    for rank, row in enumerate(announced):
        for c, each in enumerate(row):
            if each.complete:
                continue
            (nbytes,) = FRAME_LENGTH.unpack_from(first[rank, c])
            if not nbytes:
                raise NoFrameError(rank)
            if nbytes != each.nbytes or not heads.is_like(first[rank, c, _BEFORE:], each.head):
                raise FrameError(
                    f"rank {rank} sends a frame whose size or header differs from those that it has announced"
                )


def _slot_nbytes(nbytes: int) -> int:
    """Return the size in bytes of a slot for a frame of at most `nbytes` bytes."""
    return -(-max(_LEAST, _BEFORE + nbytes) // _ALIGN) * _ALIGN


class Messages:
    """Exchange through host memory, as for tensors on the CPU (docs/spec/protocol/collectives.md, section 3).

    All frames of a phase are encoded together. Received frames are processed as they arrive.
    """

    def __init__(self, part: CollectivePart, r: DeviceReduction, pieces: Pieces, *, gathers: bool = False) -> None:
        self._part, self._r, self._pieces, self._gathers = part, r, pieces, gathers
        self._bounds = [[r.frame_bound(piece) for piece in row] for row in pieces]
        self._sent = sent(pieces)
        self._gathered: list[list[tuple[int, Receive]]] | None = None

    async def scatter(self) -> PhaseFrames:
        """Send this rank's terms, ordered by chunk; return the terms of this rank's slice."""
        part, r = self._part, self._r
        here, mine = self._sent[part.rank], self._bounds[part.rank]
        all_bounds = [b for row in self._bounds for b in row]
        nbytes = part.arena.nbytes_of(all_bounds * (2 if self._gathers else 1) + mine * (part.size - 1))
        part.arena.reserve(nbytes, pinned=True)
        incoming = [[(o, part.receive(b, o)) for o in part.others if c in here] for c, b in enumerate(mine)]
        if self._gathers:
            theirs = [[o for o in part.others if c in self._sent[o]] for c in range(len(mine))]
            self._gathered = [[(o, part.receive(self._bounds[o][c], o)) for o in row] for c, row in enumerate(theirs)]
        terms = scattered_terms(part, r, self._pieces)
        chunks = len(mine)
        own: list[Found | None] = [None] * chunks
        order = [(c, o) for c in range(chunks) for o in [*part.others, part.rank] if c in self._sent[o]]
        if r.own_term_is_exact:
            order = [(c, o) for c, o in order if o != part.rank]
        frames = await self._encoded([terms[o * chunks + c] for c, o in order], [self._bounds[o][c] for c, o in order])
        for (c, o), frame in zip(order, frames, strict=True):
            if o == part.rank:
                own[c] = frame.found
            else:
                part.send_frame(frame.here, o)
        await part.breathe()
        part.counters.round_trips += 0.5
        return _Arriving(part, r, own, incoming)

    async def gather(self, terms: Sequence[DeviceTerm], pieces: Pieces) -> PhaseFrames:
        """Send terms to all ranks."""
        part, mine = self._part, self._part.rank if self._gathers else 0
        bounds = self._bounds[mine]
        if self._gathered is None:
            part.arena.reserve(part.arena.nbytes_of(bounds * part.size), pinned=True)
            self._gathered = [[(o, part.receive(b, o)) for o in part.others] for b in bounds]
        own = await self._encoded(terms, bounds)
        for c in self._sent[mine]:
            for o in part.others:
                part.send_frame(own[c].here, o)
        await part.breathe()
        part.counters.round_trips += 0.5
        exact = self._r.own_term_is_exact and not self._gathers
        return _Arriving(part, self._r, [None if exact else frame.found for frame in own], self._gathered)

    async def _encoded(self, terms: Sequence[DeviceTerm], bounds: Sequence[int]) -> list[Copied]:
        """Encode terms on the GPU, and return their frames in host memory."""
        block = self._part.arena.allocate(self._part.arena.nbytes_of(bounds))
        return await self._r.encode_to_host(terms, bounds, block)


class _Arriving(NamedTuple):
    """Frames of a phase that arrive in host memory; `incoming` has, for each chunk, the requests by rank."""

    part: CollectivePart
    r: DeviceReduction
    own: Sequence[Found | None]
    incoming: Sequence[Sequence[tuple[int, Receive]]]

    async def chunk(self, c: int) -> Row:
        """Return the frames of a chunk by rank, when they have arrived; None for a rank that sends none."""
        found: dict[int, Found | None] = {self.part.rank: self.own[c]}
        for o, receive in self.incoming[c]:
            if not receive.done:
                self.r.joint.launch_large()
            found[o] = Found(await self.part.frame(receive), None)
        return [found.get(rank) for rank in range(self.part.size)]


def scattered_terms(part: CollectivePart, r: DeviceReduction, pieces: Pieces) -> list[DeviceTerm]:
    """Return this rank's terms of all slices, by rank and chunk."""
    chunks = len(pieces[0])
    return [
        r.term(piece, (part.rank * part.size + o) * chunks + c)
        for o, row in enumerate(pieces)
        for c, piece in enumerate(row)
    ]
