"""Expected messages between ranks, by the formulas of docs/spec/protocol.md and docs/spec/protocol/collectives.md."""

import hashlib
import itertools
import struct
import zlib
from collections import defaultdict
from math import floor, log, prod
from typing import Any, NamedTuple

import numpy as np
import torch

import codec
import codec.torch

VERSION = ("codec.torch", 5)  # hashed as text for the address; 5 is the protocol version
DATA, ABORT = range(2)  # message kinds
FAILED, NONFINITE, DIFFERS = range(2, 5)  # status codes in abort messages
# magic, kind, collective, part, index, signature, size and checksum of the body, CRC-32 of these fields
HEADER = struct.Struct("<4sIQIIqQII")
FIELDS = slice(40)  # bytes of the header that do not depend on the contents of the body
VERDICT = 0  # signature field of messages in a collective's last part
REPORT = object()  # stands for a body of three durations, which differ from run to run
MIB = 1 << 20
STREAM_STRIDE = 0x9E3779B97F4A7C15


class Call(NamedTuple):
    """The arguments of a collective call, without the values of its tensor."""

    kind: str = "all_reduce"
    spec: codec.Spec = codec.Lossless()
    n: int = 4
    algorithm: str = "two_shot"
    op: str = "sum"
    dtype: torch.dtype = torch.float32
    segments: Any = None
    stream: int = 0


EXAMPLE = Call()


def header(
    kind: int,
    number: int,
    part: int,
    index: int,
    signature: int,
    body: bytes,
    *,
    magic: bytes = b"CDCM",
    nbytes: int | None = None,
) -> bytes:
    """Return the header of a message. `nbytes`: size of the body in the header, if it is not that of `body`."""
    size = len(body) if nbytes is None else nbytes
    checksum = codec.digest(np.frombuffer(body, np.uint8)) >> 32
    fields = HEADER.pack(magic, kind, number, part, index, signature, size, checksum, 0)[:-4]
    return fields + struct.pack("<I", zlib.crc32(fields))


# Functions that ranks run to call the collectives


def values(call: Call, rank: int) -> torch.Tensor:
    if call.n == EXAMPLE.n:
        return torch.arange(1.0, 1 + call.n) * 10**rank
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(call.n, generator=generator).to(call.dtype)


def blobs(rank: int, size: int) -> list[bytes]:
    """Return the byte strings that a rank passes to `exchange`: an empty, a short and a long one."""
    return [bytes([rank]) * n for n in itertools.islice(itertools.cycle([0, 5, (4 << 20) + 3]), rank, rank + size)]


# Messages computed by the formulas of the specification


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def integers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def signed(collective: str, spec: Any, n: int, op: str, **how: Any) -> dict[str, str]:
    """Return the items of a signature, in the order of the specification."""
    return {
        "collective": collective,
        "spec": repr(spec),
        "dtype": how.get("dtype", "float32"),
        "number of values": str(n),
        "op": op,
        "segments": f"{digest(repr((how['segments'],))) % (1 << 64):016x}" if how.get("segments") else "none",
        "optimizer": how.get("optimizer", "none"),
        "codebook": "none",
    }


def text_of(items: dict[str, str]) -> str:
    """Return the text that is hashed to a signature."""
    return repr(tuple(items.items()))


class Piece(NamedTuple):
    begin: int
    end: int
    segments: Any


def chunk_count(nbytes: float, chunk_nbytes: int) -> int:
    return min(16, max(2 if nbytes > MIB else 1, round(nbytes / chunk_nbytes)))


def cut_point(at: int, n: int, segments: Any) -> int:
    if at >= n:
        return n
    first = 0
    for offset, shape in segments or ():
        row, end = prod(shape[1:]), offset + prod(shape)
        if not shape or offset > at or offset == end:
            continue
        if at < end and row > 1:
            return at - (at - offset) % row if row <= 65_536 else at
        first = offset if at < end else end
    return max(first, at - at % 1024)


def inside(segments: Any, begin: int, end: int) -> Any:
    """Return the segments inside the piece [begin, end). Of a segment that a cut divides, only whole rows remain."""
    found = []
    for offset, shape in segments or ():
        stop = offset + prod(shape)
        if max(offset, begin) >= min(stop, end):
            continue
        if begin <= offset and stop <= end:
            found.append((offset - begin, shape))
            continue
        row = prod(shape[1:])
        rows = [r for r in range(shape[0]) if begin <= offset + r * row and offset + (r + 1) * row <= end]
        if rows:
            found.append((offset + rows[0] * row - begin, (len(rows), *shape[1:])))
    return found


def partition(n: int, size: int, itemsize: int, segments: Any, chunk_nbytes: int) -> list[list[Piece]]:
    chunks = chunk_count(n * itemsize / size, chunk_nbytes)
    points = (cut_point(i * n // (size * chunks), n, segments) for i in range(size * chunks + 1))
    cuts = list(itertools.accumulate(points, max))
    pieces = [Piece(a, b, inside(segments, a, b) if segments else None) for a, b in itertools.pairwise(cuts)]
    return [pieces[r * chunks : (r + 1) * chunks] for r in range(size)]


def even_partition(n: int, size: int, itemsize: int, chunk_nbytes: int) -> list[list[Piece]]:
    each = n // size
    chunks = chunk_count(each * itemsize, chunk_nbytes)
    cuts = [i * each // chunks for i in range(chunks + 1)]
    return [[Piece(r * each + a, r * each + b, None) for a, b in itertools.pairwise(cuts)] for r in range(size)]


class Expected:
    """The messages of one collective. `sent[rank][to]` lists the bodies of part 0 in the order of sending."""

    def __init__(self, call: Call, size: int) -> None:
        self.call, self.size = call, size
        self.x = [values(call, rank) for rank in range(size)]
        self.sent: list[dict[int, list[Any]]] = [defaultdict(list) for _ in range(size)]
        self.itemsize = self.x[0].element_size()
        frame_nbytes = codec.bound(MIB // self.itemsize, self.dtype, call.spec)
        self.chunk_nbytes = max(MIB, min(4 * MIB, MIB * (MIB // 2) // frame_nbytes))

    @property
    def dtype(self) -> str:
        return str(self.call.dtype).removeprefix("torch.")

    def others(self, rank: int) -> list[int]:
        return [(rank + i) % self.size for i in range(1, self.size)]

    def to_all(self, rank: int, body: Any) -> None:
        for o in self.others(rank):
            self.sent[rank][o].append(body)

    def is_sent(self, piece: Piece) -> bool:
        """Return True if ranks send messages for a piece: it has values, or the tensor has none."""
        return piece.end > piece.begin or self.call.n == 0

    def frame(self, x: Any, piece: Piece, number: int) -> bytes:
        stream = (self.call.stream * STREAM_STRIDE + number) % (1 << 64)
        return bytes(codec.encode(codec.view(x, segments=piece.segments), self.call.spec, stream=stream))

    def reduced(self, frames: list[bytes], op: str) -> torch.Tensor:
        return torch.from_numpy(codec.reduce(frames, op=op)).to(self.call.dtype)

    @property
    def signature(self) -> int:
        call = self.call
        if call.kind == "exchange":
            return digest(repr(("exchange",)))
        names = {"all_gather": "gather", "all_reduce": f"{call.algorithm}, requested as {call.algorithm}"}
        op = call.op if call.kind in ("all_reduce", "reduce_scatter") else "sum"
        how = {"dtype": self.dtype, "segments": call.segments}
        return digest(text_of(signed(names.get(call.kind, call.kind), call.spec, call.n, op, **how)))

    def messages(self, number: int) -> list[dict[int, list[Any]]]:
        """Return the messages of collective `number` by sender and receiver; of reports, only the headers."""
        report = REPORT if self.call.kind == "all_reduce" else b""
        getattr(
            self, f"_{self.call.kind}_{self.call.algorithm}" if self.call.kind == "all_reduce" else f"_{self.call.kind}"
        )()
        found: list[dict[int, list[Any]]] = [defaultdict(list) for _ in range(self.size)]
        for rank in range(self.size):
            for to in self.others(rank):
                for index, body in enumerate(self.sent[rank][to]):
                    found[rank][to].append(header(DATA, number, 0, index, self.signature, body) + body)
                if self.size == 2 or 0 in (rank, to):
                    body = bytes(24 if report is REPORT else 0)
                    found[rank][to].append(header(DATA, number, 1, 0, VERDICT, body)[FIELDS])
        return found

    def slices(self) -> list[list[Piece]]:
        chunk_nbytes = 3 * MIB // 4 if self.call.algorithm == "raw" else self.chunk_nbytes
        return partition(self.call.n, self.size, self.itemsize, self.call.segments, chunk_nbytes)

    def terms(self, slices: list[list[Piece]]) -> dict[tuple[int, int, int], bytes]:
        """Return frames by rank, slice and chunk, and append the frames that are sent to `sent`."""
        chunks = len(slices[0])
        found = {}
        for rank, o, c in itertools.product(range(self.size), range(self.size), range(chunks)):
            piece = slices[o][c]
            number = (rank * self.size + o) * chunks + c
            found[rank, o, c] = self.frame(self.x[rank][piece.begin : piece.end], piece, number)
            if o != rank and self.is_sent(piece):
                self.sent[rank][o].append(found[rank, o, c])
        return found

    def _all_reduce_two_shot(self) -> None:
        slices = self.slices()
        terms, chunks = self.terms(slices), len(slices[0])
        for rank, c in itertools.product(range(self.size), range(chunks)):
            total = self.reduced([terms[k, rank, c] for k in range(self.size)], self.call.op)
            number = (self.size**2 + rank) * chunks + c
            if self.is_sent(slices[rank][c]):
                self.to_all(rank, self.frame(total, slices[rank][c], number))

    def _all_reduce_all_gather(self) -> None:
        (pieces,) = partition(self.call.n, 1, self.itemsize, self.call.segments, self.chunk_nbytes)
        for rank, (c, piece) in itertools.product(range(self.size), enumerate(pieces)):
            x = self.x[rank][piece.begin : piece.end]
            self.to_all(rank, self.frame(x, piece, rank * len(pieces) + c))

    def _all_gather(self) -> None:
        self._all_reduce_all_gather()

    def _reduce_scatter(self) -> None:
        self.terms(even_partition(self.call.n, self.size, self.itemsize, self.chunk_nbytes))

    def _all_to_all(self) -> None:
        self._reduce_scatter()

    def _all_reduce_ring(self) -> None:
        slices, size = self.slices(), self.size
        chunks = len(slices[0])
        final: dict[tuple[int, int], bytes] = {}
        for o, c in itertools.product(range(size), range(chunks)):  # in the ring, slice o starts at rank o
            piece = slices[o][c]
            if not self.is_sent(piece):
                continue
            total: Any = None
            for step in range(size):
                rank = (o + step) % size
                own = self.x[rank][piece.begin : piece.end].float()
                # Both are float32: the decoded partial sum, and this rank's values
                total = own if total is None else own + total
                last = step == size - 1
                if last and self.call.op == "mean":
                    total = total / size
                number = ((size if last else step) * size + rank) * chunks + c
                frame = self.frame(total.to(self.call.dtype), piece, number)
                total = torch.as_tensor(codec.decode(frame)).float() if piece.end > piece.begin else total
                if last:
                    final[o, c] = frame
                else:
                    self.sent[rank][(rank + 1) % size].append((step, c, frame))
        for rank in range(size):
            queue = self.sent[rank][(rank + 1) % size]
            queue[:] = [message for _, _, message in sorted(queue, key=lambda m: m[:2])]
            for step, c in itertools.product(range(size - 1), range(chunks)):
                if frame := final.get(((rank + 1 - step) % size, c)):
                    queue.append(frame)

    def _all_reduce_raw(self) -> None:
        slices = self.slices()
        chunks = len(slices[0])

        def raw(x: Any) -> list[bytes]:
            return [x.view(torch.uint8).numpy().tobytes()] if x.numel() else [b""] * (self.call.n == 0)

        for rank in range(self.size):
            sums = []
            for piece in slices[rank]:
                total = self.x[0][piece.begin : piece.end].float()
                for x in self.x[1:]:
                    total = total + x[piece.begin : piece.end].float()
                sums.append((total / self.size if self.call.op == "mean" else total).to(self.call.dtype))
            for o in self.others(rank):
                terms = [self.x[rank][piece.begin : piece.end] for piece in slices[o]]
                order = terms[:2]
                for c in range(chunks):
                    order += [sums[c], *terms[c + 2 : c + 3]]
                self.sent[rank][o] += [body for x in order for body in raw(x)]

    def _all_reduce_shared_scale(self) -> None:
        """Add the messages of a shared-scale all-reduce without segments, in which all values have one scale."""
        call, size = self.call, self.size
        scales = [torch.stack([x.float().abs().max()]) for x in self.x]
        for rank in range(size):
            self.to_all(rank, bytes(codec.encode(scales[rank], codec.Lossless())))
        scale = torch.stack(scales).max()
        spec = codec.Ternary(call.spec.packing, scale=1.0, seed=call.spec.seed)  # pyright: ignore
        base = 2 * size + 1
        digits = floor(log(256, base))
        bound = max(codec.bound(call.n, "float32", spec), codec.bound(-(-call.n // digits), "uint8"))
        assert bound < MIB  # checks that each slice is a single chunk
        slices = partition(call.n, size, self.itemsize, None, self.chunk_nbytes)
        assert len(slices[0]) == 1
        signs = Expected(call._replace(spec=spec), size)
        signs.x = [(x.float() / scale).clamp(-1, 1) for x in self.x]
        terms = signs.terms(slices)
        for rank in range(size):
            for o in self.others(rank):
                self.sent[rank][o] += signs.sent[rank][o]
            total = codec.reduce([terms[k, rank, 0] for k in range(size)], op="sum")
            padded = np.zeros(-(-total.size // digits) * digits, np.uint8)
            padded[: total.size] = total + size
            packed = np.zeros(padded.size // digits, np.uint8)
            for column in padded.reshape(-1, digits).T:
                packed = packed * np.uint8(base) + column
            if self.is_sent(slices[rank][0]):
                self.to_all(rank, bytes(codec.encode(packed, codec.Lossless())))

    def _exchange(self) -> None:
        for rank in range(self.size):
            for o in self.others(rank):
                data = blobs(rank, self.size)[o]
                self.sent[rank][o].append(integers(len(data)))
                self.sent[rank][o] += [data[begin : begin + 4 * MIB] for begin in range(0, len(data), 4 * MIB)]
