"""Frames that ranks exchange whose values lie on GPUs: by NCCL from GPU to GPU, or by host memory and the mesh."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from codec import FrameError, PeerError
from codec._c.library import lib
from codec.frame_size import has_fixed_rate
from codec.inspection import read_header
from codec.tensors.view import view_bytes
from codec.torch.network.inbox import Receive
from codec.torch.reduction.device import DeviceReduction, Encoded, Found, Term, keep
from codec.torch.reduction.partition import Piece
from codec.torch.transport.collective import NoFrameError, Part
from codec.torch.transport.messages import Array

FRAME_LENGTH = struct.Struct("<Q")  # before each frame in a slot

_ALIGN = 16  # bytes: slots begin at multiples of this
_BEFORE = FRAME_LENGTH.size  # bytes of a slot before the frame
_LEAST = _BEFORE + lib.CODEC_HEADER_NBYTES  # bytes that hold the length and the header of a frame
_HEAD = _BEFORE + 4096  # bytes of a slot that the host reads: most side sections end within them

_CHECKSUM = slice(24, 32)  # of a header

Pieces = Sequence[Sequence[Piece]]  # by rank and chunk
Row = list[Found | None]  # a frame of each rank; None: this rank's own values


class Phase(Protocol):
    """Frames of a phase from all ranks."""

    async def chunk(self, c: int) -> Row:
        """Return the frames of a chunk by rank, when they have arrived."""
        ...


class Exchange(Protocol):
    """Phases of a collective."""

    async def scatter(self) -> Phase:
        """Send this rank's terms of slice i to rank i; return the terms of this rank's slice."""
        ...

    async def gather(self, terms: Sequence[Term], pieces: Pieces) -> Phase:
        """Send this rank's `terms`, by chunk, to all ranks; return those of all ranks, whose pieces are given."""
        ...


def exchange(part: Part, r: DeviceReduction, pieces: Pieces, *, gathers: bool = False) -> Exchange:
    """Return the way in which the frames of a collective travel.

    Parameters
    ----------
    part : Part
        Part of the collective.
    r : DeviceReduction
        Values of this rank.
    pieces : sequence of sequences of Piece
        All pieces of the collective, in rows of as many chunks each.
    gathers : bool
        A gathering of all `pieces` follows the scattering.
    """
    return Slots(part, r, pieces) if part.device.connected else Messages(part, r, pieces, gathers=gathers)


class _Arrived(NamedTuple):
    """Frames that are there, by rank and chunk."""

    frames: list[list[Found]]

    async def chunk(self, c: int) -> Row:
        """Return the frames of a chunk by rank."""
        return [row[c] for row in self.frames]


class Slots:
    """Exchange in memory of GPUs: a row of slots for each rank, a slot for each chunk (docs/protocol.md, section 18).

    A slot has a frame behind its length. All frames of a phase travel in one message for each two ranks.
    """

    def __init__(self, part: Part, r: DeviceReduction, pieces: Pieces) -> None:
        self._part, self._r, self._pieces = part, r, pieces
        self._most = max(r.frame_bound(piece) for row in pieces for piece in row)
        self._terms: Sequence[Term] = ()  # of the last phase
        self._sent = torch.empty(0, dtype=torch.uint8, device="cpu")  # their slots

    async def scatter(self) -> Phase:
        """Send frames of row i to rank i, which has as many rows as there are ranks."""
        part = self._part
        terms = scattered_terms(part, self._r, self._pieces)
        received = await self._exchange(part.size, terms, lambda slots: part.device.all_to_all(slots, part.counters))
        return await self._arrived(received, [self._pieces[part.rank]] * part.size)

    async def gather(self, terms: Sequence[Term], pieces: Pieces) -> Phase:
        """Send a row of frames to all ranks."""
        part = self._part
        received = await self._exchange(1, terms, lambda slots: part.device.all_gather(slots[0], part.counters))
        return await self._arrived(received, pieces)

    async def _exchange(
        self, rows: int, terms: Sequence[Term], send: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Encode terms, and return the slots that send(rows of slots) receives, once all ranks have encoded theirs.

        NCCL's messages could not be ended if a rank had failed. So all ranks first report the size of their largest
        frame, which the host knows without a wait if the codec has a fixed rate.
        """
        r, part = self._r, self._part
        slots = r.empty_bytes((rows, len(self._pieces[0]), _slot_nbytes(self._most)))
        self._terms = terms
        with part.clock.during("encode_s"):
            encoded = r.encode_all(terms, [slot[_BEFORE:] for row in slots for slot in row])
            if has_fixed_rate(r.spec):
                largest = max(r.frame_bound(term.piece) for term in terms)
            else:
                r.settle(part.device)
                largest = max(encoded.lengths)
        largest = max(theirs for [theirs] in await part.gather([largest]))
        if largest > self._most:
            raise PeerError(f"a rank reports a frame of {largest} bytes, but at most {self._most} are possible")
        part.counters.round_trips += 1
        with part.device.phase():
            slots = slots[:, :, : _slot_nbytes(largest)].contiguous()
            slots.view(torch.int64)[:, :, 0] = encoded.sizes.view(rows, -1)
            self._sent = slots
            return send(slots)

    async def _arrived(self, slots: torch.Tensor, pieces: Pieces) -> _Arrived:
        """Return the frames in slots of all ranks.

        The host waits for their first bytes, unless it knows what these will be, but for the checksum.

        Raises
        ------
        FrameError
            A length or a header is not as agreed; :meth:`DeviceReduction.settle` raises it if the host did not wait.
        NoFrameError
            A rank had no frame to send.
        """
        r = self._r
        expected = [[_expected_head(r, piece) for piece in row] for row in pieces]
        learns = any(_learns_head(r, term.piece) for term in self._terms)
        known = not learns and all(head is not None for row in expected for head in row)
        sent = self._read_heads(self._sent) if learns else None
        heads, most = self._read_heads(slots), slots.shape[2] - _BEFORE
        if known:
            r.check_later(lambda: self._check(heads, pieces, most, expected))
            nbytes = [[r.frame_bound(piece) for piece in row] for row in pieces]
        else:
            r.settle(self._part.device)
            nbytes = self._check(heads, pieces, most, None)
        if sent is not None:
            for term, head in zip(self._terms, sent.reshape(len(self._terms), -1), strict=True):
                _note_head(r, term.piece, head[_BEFORE:])

        def found(rank: int, c: int, n: int) -> Found:
            frame, head = slots[rank, c, _BEFORE : _BEFORE + n], heads[rank, c, _BEFORE : _BEFORE + n]
            return Found(frame, expected[rank][c], head) if known else Found(frame, head)

        return _Arrived([[found(rank, c, n) for c, n in enumerate(row)] for rank, row in enumerate(nbytes)])

    def _read_heads(self, slots: torch.Tensor) -> Array:
        """Return the first bytes of slots, which are there after :meth:`DeviceReduction.settle`."""
        found = self._r.read_back(slots[:, :, : min(_HEAD, slots.shape[2])].contiguous())
        return found.reshape(*slots.shape[:2], -1)

    def _check(
        self, heads: Array, pieces: Pieces, most: int, expected: Sequence[Sequence[Array | None]] | None
    ) -> list[list[int]]:
        """Check lengths and headers of frames, and return the lengths."""
        found: list[list[int]] = []
        for rank, row in enumerate(pieces):
            found.append([])
            for c, piece in enumerate(row):
                (nbytes,) = FRAME_LENGTH.unpack_from(heads[rank, c])
                if not nbytes:
                    raise NoFrameError(rank)
                if nbytes > most:
                    raise FrameError(f"rank {rank} sends a frame of {nbytes} bytes, but at most {most} are possible")
                head = heads[rank, c, _BEFORE : _BEFORE + nbytes]
                self._r.check_frame(head, piece)
                want = None if expected is None else expected[rank][c]
                if want is not None and (nbytes != self._r.frame_bound(piece) or not _is_like(head, want)):
                    raise FrameError(f"rank {rank} sends a frame whose header is not that of its spec and shape")
                found[rank].append(nbytes)
        return found


_heads: dict[tuple[Any, ...], Array] = {}  # bytes before the blocks, by spec, dtype, values and segments
_UNKNOWN = np.empty(0, np.uint8)  # in _heads: these bytes depend on the values


def _head_key(r: DeviceReduction, piece: Piece) -> tuple[Any, ...]:
    return r.spec, r.dtype, piece.n, piece.segments


def _expected_head(r: DeviceReduction, piece: Piece) -> Array | None:
    """Return the bytes before the blocks of a piece's frames, with any checksum; None if they are not known."""
    head = _heads.get(_head_key(r, piece), _UNKNOWN)
    return head if len(head) else None


def _learns_head(r: DeviceReduction, piece: Piece) -> bool:
    """Return True if :func:`_note_head` may help with the next frame of a piece."""
    return has_fixed_rate(r.spec) and _head_key(r, piece) not in _heads


def _note_head(r: DeviceReduction, piece: Piece, head: Array) -> None:
    """Note the head of a frame that this rank has encoded, and whether it depends on the piece's shape alone."""
    if _learns_head(r, piece):
        keep(_heads, _head_key(r, piece), head[: _constant_head_nbytes(head)].copy())


def _constant_head_nbytes(head: Array) -> int:
    """Return the bytes of a frame before its blocks if they hold no scale (docs/format.md, 8.3); 0 if they do."""
    info = read_header(view_bytes(head))
    begin = info.side_offset
    if not info.nblocks or begin + info.side_nbytes > len(head):
        return 0
    parts = int(head[begin : begin + 4].view("<u4")[0]) if info.side_nbytes else 0
    records = -(-(4 + 16 * parts) // 8) * 8 if parts else 0
    return begin + info.side_nbytes if info.side_nbytes == records else 0


def _is_like(head: Array, expected: Array) -> bool:
    """Return True if a frame begins as expected, but for its checksum."""
    same = head[: len(expected)] == expected
    same[_CHECKSUM] = True
    return bool(same.all())


def _slot_nbytes(nbytes: int) -> int:
    """Return the bytes of a slot for frames of at most `nbytes` bytes."""
    return -(-max(_LEAST, _BEFORE + nbytes) // _ALIGN) * _ALIGN


class Messages:
    """Exchange by messages in host memory, as ranks without a GPU send them (docs/protocol.md, section 8).

    All frames of a phase are encoded together. Frames that arrive are used at once.
    """

    def __init__(self, part: Part, r: DeviceReduction, pieces: Pieces, *, gathers: bool = False) -> None:
        self._part, self._r, self._pieces, self._gathers = part, r, pieces, gathers
        self._bounds = [[r.frame_bound(piece) for piece in row] for row in pieces]
        self._gathered: list[list[tuple[int, Receive]]] | None = None

    async def scatter(self) -> Phase:
        """Send terms: first chunks of all slices first."""
        part, r = self._part, self._r
        mine, all_bounds = self._bounds[part.rank], [b for row in self._bounds for b in row]
        nbytes = part.arena.nbytes_of(all_bounds * (2 if self._gathers else 1) + mine * (part.size - 1))
        part.arena.reserve(nbytes, pinned=True)
        incoming = [[(o, part.receive(b, o)) for o in part.others] for b in mine]
        if self._gathers:
            self._gathered = [[(o, part.receive(self._bounds[o][c], o)) for o in part.others] for c in range(len(mine))]
        terms = scattered_terms(part, r, self._pieces)
        chunks = len(mine)
        own: list[Found | None] = [None] * chunks
        order = [(c, o) for c in range(chunks) for o in [*part.others, part.rank]]
        if r.own_term_is_exact:
            order = [(c, o) for c, o in order if o != part.rank]
        frames = self._encoded([terms[o * chunks + c] for c, o in order], [self._bounds[o][c] for c, o in order])
        for (c, o), frame in zip(order, frames, strict=True):
            if o == part.rank:
                own[c] = frame.found
            else:
                part.send_frame(frame.here, o)
        await part.breathe()
        part.counters.round_trips += 0.5
        return _Arriving(part, own, incoming)

    async def gather(self, terms: Sequence[Term], pieces: Pieces) -> Phase:
        """Send terms to all ranks."""
        part, bounds = self._part, self._bounds[self._part.rank if self._gathers else 0]
        if self._gathered is None:
            part.arena.reserve(part.arena.nbytes_of(bounds * part.size), pinned=True)
            self._gathered = [[(o, part.receive(b, o)) for o in part.others] for b in bounds]
        own = self._encoded(terms, bounds)
        for frame in own:
            for o in part.others:
                part.send_frame(frame.here, o)
        await part.breathe()
        part.counters.round_trips += 0.5
        exact = self._r.own_term_is_exact and not self._gathers
        return _Arriving(part, [None if exact else frame.found for frame in own], self._gathered)

    def _encoded(self, terms: Sequence[Term], bounds: Sequence[int]) -> list[Encoded]:
        """Return the frames of terms."""
        rooms = [self._part.arena.allocate(b) for b in bounds]
        with self._part.clock.during("encode_s"):
            return self._r.encode_to_host(terms, rooms)


class _Arriving(NamedTuple):
    """Frames that arrive in host memory."""

    part: Part
    own: Sequence[Found | None]
    incoming: Sequence[Sequence[tuple[int, Receive]]]

    async def chunk(self, c: int) -> Row:
        """Return the frames of a chunk by rank, when they have arrived."""
        found: dict[int, Found | None] = {self.part.rank: self.own[c]}
        for o, receive in self.incoming[c]:
            found[o] = Found(await self.part.frame(receive), None)
        return [found[rank] for rank in range(self.part.size)]


def scattered_terms(part: Part, r: DeviceReduction, pieces: Pieces) -> list[Term]:
    """Return this rank's terms of all slices, by rank and chunk."""
    chunks = len(pieces[0])
    return [
        r.term(piece, (part.rank * part.size + o) * chunks + c)
        for o, row in enumerate(pieces)
        for c, piece in enumerate(row)
    ]
