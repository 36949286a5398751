"""Messages between ranks of codec.torch, compared with docs/protocol.md.

The tests record every message that real ranks send. `Expected` computes the same messages from the formulas of the
specification: it calls `codec.encode`, `codec.decode` and `codec.reduce`, but nothing of `codec.torch`.

`PYTHONPATH=tests python tests/torch/protocol/test_protocol.py` prints the generated blocks of the specification.
"""

import hashlib
import itertools
import re
import struct
from collections import defaultdict
from math import floor, log, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import codec
import codec.torch
from codec.torch.transport.connections import Connections
from support import flatcall
from support.ranks import RankPool, run_ranks

SPECIFICATION = Path(__file__).parents[3] / "docs/protocol.md"
HANDSHAKE = ("codec.torch", 1)  # its text is hashed; 1: version of the protocol
FRAMES, NUMBERS = range(2)  # tags
ANY = object()  # a number that differs from run to run: a duration
MIB = 1 << 20
STREAM_STRIDE = 0x9E3779B97F4A7C15


class Call(NamedTuple):
    """A collective, without its values."""

    kind: str = "all_reduce"
    spec: codec.Spec = codec.Lossless()
    n: int = 4
    algorithm: str = "two_shot"
    op: str = "sum"
    dtype: torch.dtype = torch.float32
    segments: Any = None
    stream: int = 0


EXAMPLE = Call()


# Collectives, as the ranks call them


def values(call: Call, rank: int) -> torch.Tensor:
    if call.n == EXAMPLE.n:
        return torch.arange(1.0, 1 + call.n) * 10**rank
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(call.n, generator=generator).to(call.dtype)


def blobs(rank: int, size: int) -> list[bytes]:
    """Return what a rank passes to `exchange`: nothing, a short and a long array of bytes."""
    return [bytes([rank]) * n for n in itertools.islice(itertools.cycle([0, 5, (4 << 20) + 3]), rank, rank + size)]


def perform(call: Call, rank: int, size: int) -> Any:
    x = values(call, rank)
    if call.kind == "exchange":
        return codec.torch.exchange(blobs(rank, size))
    if call.kind == "all_reduce":
        how: Any = {"algorithm": call.algorithm, "op": call.op, "segments": call.segments, "stream": call.stream}
        flatcall.all_reduce(x, call.spec, **how)
        return x
    if call.kind == "reduce_scatter":
        out = torch.empty(call.n // size, dtype=call.dtype)
        codec.torch.reduce_scatter(out, x, call.spec, op=call.op, stream=call.stream)
        return out
    out = torch.empty(call.n * (size if call.kind == "all_gather" else 1), dtype=call.dtype)
    getattr(codec.torch, call.kind)(out, x, call.spec, stream=call.stream)
    return out


class Message(NamedTuple):
    to: int
    tag: int
    data: bytes


def recording(call: Any) -> tuple[list[Message], Any]:
    """Return the messages that this rank sends during `call`, and its result."""
    sent: list[Message] = []
    begin = Connections._post

    def recorded(connections: Connections, what: str, message: Any, to: int, tag: int) -> Any:
        if what == "send":
            sent.append(Message(to, tag, message.tobytes()))
        return begin(connections, what, message, to, tag)

    Connections._post = recorded
    try:
        return sent, call()
    finally:
        Connections._post = begin


def record(rank: int, size: int, calls: list[Call]) -> list[tuple[list[Message], Any]]:
    """Return the messages that this rank sends, and the result, of each call. The first call also connects."""
    return [recording(lambda call=call: perform(call, rank, size)) for call in calls]


def record_failures(rank: int, size: int) -> list[list[Message]]:
    """Return the messages of three calls: rank 1 has a wrong argument, then NaN, and then none of these."""
    x = torch.ones(2048)

    def refused() -> None:
        with pytest.raises(codec.ArgumentError if rank else codec.PeerError):
            codec.torch.all_reduce(x, codec.Float8(), op="median" if rank else "mean")

    def not_finite() -> None:
        y = x.clone()
        y[0] = torch.nan if rank else 1
        with pytest.raises(codec.ArgumentError if rank else codec.PeerError, match="NaN or Inf"):
            codec.torch.all_reduce(y, codec.Float8(), op="mean", options=codec.options(algorithm="two_shot"))

    perform(EXAMPLE, rank, size)
    calls = [refused, not_finite, lambda: perform(EXAMPLE, rank, size)]
    return [recording(call)[0] for call in calls]


# Messages computed by the formulas of the specification


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def numbers(*words: Any) -> list[Any]:
    """Return the 8 words of a message of numbers."""
    return [len(words), *words, *[0] * (7 - len(words))]


def framed(frame: bytes) -> bytes:
    return struct.pack("<Q", len(frame)) + frame


class Piece(NamedTuple):
    begin: int
    end: int
    segments: Any


def chunk_count(nbytes: float, chunk_nbytes: int) -> int:
    return min(16, max(2 if nbytes > MIB else 1, round(nbytes / chunk_nbytes)))


def cut_point(at: int, n: int, segments: Any) -> int:
    if at >= n:
        return n
    for offset, shape in segments or ():
        row = prod(shape[1:])
        if shape and offset <= at < offset + prod(shape) and row > 1:
            return at - (at - offset) % row if row <= 65_536 else at
    return at - at % 1024


def inside(segments: Any, begin: int, end: int) -> Any:
    """Return the segments of a piece: whole ones, and the whole rows of those that a cut divides."""
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
    """The messages of one collective: `sent[rank][to, tag]` is a list of bytes, or of words for numbers."""

    def __init__(self, call: Call, size: int) -> None:
        self.call, self.size = call, size
        self.x = [values(call, rank) for rank in range(size)]
        self.sent: list[dict[tuple[int, int], list[Any]]] = [defaultdict(list) for _ in range(size)]
        self.itemsize = self.x[0].element_size()
        frame_nbytes = codec.bound(MIB // self.itemsize, self.dtype, call.spec)
        self.chunk_nbytes = max(MIB, min(4 * MIB, MIB * (MIB // 2) // frame_nbytes))

    @property
    def dtype(self) -> str:
        return str(self.call.dtype).removeprefix("torch.")

    def others(self, rank: int) -> list[int]:
        return [(rank + i) % self.size for i in range(1, self.size)]

    def to_all(self, rank: int, message: Any, tag: int = FRAMES) -> None:
        for o in self.others(rank):
            self.sent[rank][o, tag].append(message)

    def frame(self, x: Any, piece: Piece, number: int) -> bytes:
        stream = (self.call.stream * STREAM_STRIDE + number) % (1 << 64)
        return bytes(codec.encode(codec.view(x, segments=piece.segments), self.call.spec, stream=stream))

    def reduced(self, frames: list[bytes], op: str) -> torch.Tensor:
        return torch.from_numpy(codec.reduce(frames, op=op)).to(self.call.dtype)

    def request(self) -> None:
        call = self.call
        if call.kind == "exchange":
            signature = 0
        else:
            book, metric_is_none = None, True
            names = {"all_gather": "gather"}
            name = call.algorithm if call.kind == "all_reduce" else names.get(call.kind, call.kind)
            inside = digest(repr((call.segments,))) if call.segments else None
            op = call.op if call.kind in ("all_reduce", "reduce_scatter") else "sum"
            signature = digest(repr((call.spec, self.dtype, call.n, op, name, inside, metric_is_none, book)))
            if call.kind == "all_reduce":
                signature = digest(repr((call.algorithm, [signature])))
        for rank in range(self.size):
            self.to_all(rank, numbers(signature, 0, 0, 0), NUMBERS)

    def verdict(self) -> None:
        report = [ANY] * 3 if self.call.kind == "all_reduce" else []
        for rank in range(1, self.size):
            self.sent[rank][0, NUMBERS].append(numbers(0, rank, *report))
            self.sent[0][rank, NUMBERS].append(numbers(0, 0, *report))

    def collective(self) -> None:
        name = self.call.kind if self.call.kind != "all_reduce" else self.call.algorithm
        self.request()
        getattr(self, f"_{self.call.kind}_{name}" if self.call.kind == "all_reduce" else f"_{name}")()
        self.verdict()

    def slices(self) -> list[list[Piece]]:
        chunk_nbytes = 3 * MIB // 4 if self.call.algorithm == "raw" else self.chunk_nbytes
        return partition(self.call.n, self.size, self.itemsize, self.call.segments, chunk_nbytes)

    def terms(self, slices: list[list[Piece]]) -> dict[tuple[int, int, int], bytes]:
        """Return the frame of chunk c of slice o of each rank, and add those that travel to `sent`."""
        chunks = len(slices[0])
        found = {}
        for rank, o, c in itertools.product(range(self.size), range(self.size), range(chunks)):
            piece = slices[o][c]
            number = (rank * self.size + o) * chunks + c
            found[rank, o, c] = self.frame(self.x[rank][piece.begin : piece.end], piece, number)
            if o != rank:
                self.sent[rank][o, FRAMES].append(framed(found[rank, o, c]))
        return found

    def _all_reduce_two_shot(self) -> None:
        slices = self.slices()
        terms, chunks = self.terms(slices), len(slices[0])
        for rank, c in itertools.product(range(self.size), range(chunks)):
            total = self.reduced([terms[k, rank, c] for k in range(self.size)], self.call.op)
            number = (self.size**2 + rank) * chunks + c
            self.to_all(rank, framed(self.frame(total, slices[rank][c], number)))

    def _all_reduce_all_gather(self) -> None:
        (pieces,) = partition(self.call.n, 1, self.itemsize, self.call.segments, self.chunk_nbytes)
        for rank, (c, piece) in itertools.product(range(self.size), enumerate(pieces)):
            x = self.x[rank][piece.begin : piece.end]
            self.to_all(rank, framed(self.frame(x, piece, rank * len(pieces) + c)))

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
        for o, c in itertools.product(range(size), range(chunks)):  # slice o starts at rank o
            piece = slices[o][c]
            total: Any = None
            for step in range(size):
                rank = (o + step) % size
                own = self.x[rank][piece.begin : piece.end].float()
                total = own if total is None else own + total  # decoded values, float32
                last = step == size - 1
                if last and self.call.op == "mean":
                    total = total / size
                number = ((size if last else step) * size + rank) * chunks + c
                frame = self.frame(total.to(self.call.dtype), piece, number)
                total = torch.as_tensor(codec.decode(frame)).float() if piece.end > piece.begin else total
                if last:
                    final[o, c] = frame
                else:
                    self.sent[rank][(rank + 1) % size, FRAMES].append((step, c, framed(frame)))
        for rank in range(size):
            queue = self.sent[rank][(rank + 1) % size, FRAMES]
            queue[:] = [message for _, _, message in sorted(queue, key=lambda m: m[:2])]
            for step, c in itertools.product(range(size - 1), range(chunks)):
                queue.append(framed(final[(rank + 1 - step) % size, c]))

    def _all_reduce_raw(self) -> None:
        slices = self.slices()
        chunks = len(slices[0])

        def raw(x: Any) -> bytes:
            return x.view(torch.uint8).numpy().tobytes() if x.numel() else b""

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
                self.sent[rank][o, FRAMES] += [raw(x) for x in order]

    def _all_reduce_shared_scale(self) -> None:
        """Without segments: one scale of all values."""
        call, size = self.call, self.size
        scales = [torch.stack([x.float().abs().max()]) for x in self.x]
        for rank in range(size):
            self.to_all(rank, framed(bytes(codec.encode(scales[rank], codec.Lossless()))))
        scale = torch.stack(scales).max()
        spec = codec.Ternary(call.spec.packing, scale=1.0, seed=call.spec.seed)  # pyright: ignore
        base = 2 * size + 1
        digits = floor(log(256, base))
        bound = max(codec.bound(call.n, "float32", spec), codec.bound(-(-call.n // digits), "uint8"))
        assert bound < MIB  # one chunk
        slices = partition(call.n, size, self.itemsize, None, self.chunk_nbytes)
        assert len(slices[0]) == 1
        signs = Expected(call._replace(spec=spec), size)
        signs.x = [(x.float() / scale).clamp(-1, 1) for x in self.x]
        terms = signs.terms(slices)
        for rank in range(size):
            for o in self.others(rank):
                self.sent[rank][o, FRAMES] += signs.sent[rank][o, FRAMES]
            total = codec.reduce([terms[k, rank, 0] for k in range(size)], op="sum")
            padded = np.zeros(-(-total.size // digits) * digits, np.uint8)
            padded[: total.size] = total + size
            packed = np.zeros(padded.size // digits, np.uint8)
            for column in padded.reshape(-1, digits).T:
                packed = packed * np.uint8(base) + column
            self.to_all(rank, framed(bytes(codec.encode(packed, codec.Lossless()))))

    def _exchange(self) -> None:
        for rank in range(self.size):
            for o in self.others(rank):
                data = blobs(rank, self.size)[o]
                self.sent[rank][o, NUMBERS].append(numbers(len(data)))
                for begin in range(0, len(data), 4 * MIB):
                    chunk = data[begin : begin + 4 * MIB]
                    self.sent[rank][o, FRAMES].append(chunk + struct.pack("<Q", ~len(chunk) % (1 << 64)))


def check_sent(expected: dict[tuple[int, int], list[Any]], found: list[Message]) -> None:
    """Compare the messages to each rank under each tag, whose order the specification fixes."""
    queues: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    for message in found:
        queues[message.to, message.tag].append(message.data)
    assert queues.keys() == expected.keys()
    for key, messages in expected.items():
        assert len(queues[key]) == len(messages), key
        for want, got in zip(messages, queues[key], strict=True):
            if key[1] == NUMBERS:
                words = struct.unpack("<8q", got)
                assert all(w is ANY or w == g for w, g in zip(want, words, strict=True)), (want, words)
            else:
                assert want == got, key


SEGMENTS = [(0, (900, 100)), (90_000, (7,)), (90_100, (3, 66_000)), (300_000, (500, 1000)), (800_000, ())]
N = 900_000  # float32 values: two chunks in a slice of three ranks
CALLS = [
    Call(spec=codec.Quantize(4), n=N, op="mean", segments=SEGMENTS, stream=3),
    Call(n=5000, dtype=torch.bfloat16),
    Call(spec=codec.Float8(), n=N, algorithm="ring", op="mean", dtype=torch.float16, stream=1),
    Call(spec=codec.Quantize(2), n=3 * N, algorithm="ring"),
    Call(spec=codec.Sign(), n=N, algorithm="all_gather", op="mean", segments=SEGMENTS),
    Call(n=3 * N, algorithm="raw", op="mean", segments=SEGMENTS),  # five chunks in a slice
    Call(n=5000, algorithm="raw", dtype=torch.bfloat16),
    Call(spec=codec.Ternary("base3"), n=40_000, algorithm="shared_scale", op="mean", stream=5),
    *[Call(n=1100, algorithm=name, segments=[(0, (190, 2))]) for name in ("two_shot", "ring", "raw")],  # 0 366 366 1100
    Call("reduce_scatter", codec.Quantize(4), n=N, op="mean", stream=2),
    Call("all_gather", codec.Quantize(3), n=7000, stream=4),
    Call("all_to_all", codec.Ternary(), n=N),
]
SIZED = [  # of the specification's table of sizes
    *[Call(spec=codec.Sign(), n=6000, algorithm=name) for name in ("two_shot", "all_gather", "ring", "raw")],
    Call(spec=codec.Ternary(), n=6000, algorithm="shared_scale"),
    *[Call(kind, codec.Sign(), n=6000) for kind in ("reduce_scatter", "all_gather", "all_to_all")],
    Call("exchange"),
]
ALL = [*CALLS, *SIZED]


@pytest.fixture(scope="module")
def recorded() -> list[list[tuple[list[Message], Any]]]:
    """Return what each of three ranks sends in ALL, after a collective that connects them."""
    return run_ranks(3, record, [EXAMPLE, *ALL])


@pytest.mark.parametrize(
    "i",
    range(len(ALL)),
    ids=lambda i: f"{ALL[i].kind}-{ALL[i].algorithm}-{i}" if ALL[i].kind == "all_reduce" else f"{ALL[i].kind}-{i}",
)
def test_messages_are_those_of_the_specification(recorded: Any, i: int) -> None:
    expected = Expected(ALL[i], 3)
    expected.collective()
    for rank in range(3):
        check_sent(expected.sent[rank], recorded[rank][1 + i][0])


def test_specification_names_existing_tests() -> None:
    interoperability = (Path(__file__).parent / "test_gloo_interoperability.py").read_text()
    names = re.findall(r"`(test_\w+)`", SPECIFICATION.read_text())
    assert len(names) >= 5
    assert [name for name in names if f"def {name}(" not in interoperability] == []


def test_results_are_the_same_bits_on_all_ranks(recorded: Any) -> None:
    for i, call in enumerate(ALL):
        if call.kind == "all_reduce":
            first, *others = (recorded[rank][1 + i][1].view(torch.uint8) for rank in range(3))
            assert all(torch.equal(first, other) for other in others), call


def test_handshake_compares_versions_of_the_protocol(recorded: Any) -> None:
    for rank in range(3):
        messages = recorded[rank][0][0]
        for o in {0, 1, 2} - {rank}:
            first = next(m for m in messages if m.to == o)
            assert first.tag == NUMBERS
            assert struct.unpack("<8q", first.data) == tuple(numbers(digest(repr(HANDSHAKE))))


def words_of(messages: list[Message]) -> list[tuple[int, ...]]:
    return [struct.unpack("<8q", m.data) for m in messages if m.tag == NUMBERS]


def test_refused_argument_ends_a_collective_with_the_request() -> None:
    zero, one = run_ranks(2, record_failures)
    assert words_of(zero[0])[0][2:] == (0, 0, 0, 0, 0, 0)
    assert words_of(one[0]) == [tuple(numbers(0, 0, 0, 1))]
    assert len(zero[0]) == len(one[0]) == 1
    # NaN on rank 1: all messages travel, without frames, and the verdict names status 3 of rank 1
    no_frame = bytes(8)
    assert [m.data for m in one[1] if m.tag == FRAMES] == [no_frame, no_frame]
    assert [len(m.data) > 8 for m in zero[1] if m.tag == FRAMES] == [True, False]
    assert words_of(one[1])[1][:3] == (5, 3, 1)
    assert words_of(zero[1])[1][:3] == (5, 3, 1)
    assert words_of(zero[2])[1][:3] == (5, 0, 0)  # the connections are still there


# The generated blocks of the specification


SPECS = [
    codec.Lossless(),
    codec.Sign(),
    codec.Ternary(),
    codec.Float8(),
    codec.Float4(),
    codec.Quantize(4),
    codec.Truncate(),
]


def requests_block() -> str:
    """Return examples of the strings that are hashed, and their hashes."""
    reductions = [
        repr((spec, "float32", 1000, "mean", "two_shot", None, not isinstance(spec, codec.Truncate), None))
        for spec in SPECS
    ]
    others = repr(("two_shot", [digest(reductions[0])])), repr(([(0, (64, 100)), (6400, (64,))],))
    return "\n".join(f"{text}\n    {digest(text)}" for text in [repr(HANDSHAKE), *reductions, *others])


def partitions_block() -> str:
    """Return the cut points of some tensors."""
    lines = []
    for call, size in ((CALLS[0], 3), (CALLS[0]._replace(algorithm="raw", n=3 * N), 3), (Call(n=5000), 4)):
        slices = Expected(call, size).slices()
        starts = [piece.begin for pieces in slices for piece in pieces]
        segments = "" if call.segments is None else f", segments {call.segments}"
        spec = "raw" if call.algorithm == "raw" else call.spec
        lines.append(f"n = {call.n}, N = {size}, float32, {spec}{segments}")
        lines.append(f"    C = {len(slices[0])}, cut points {[*starts, call.n]}")
    return "\n".join(lines)


def sizes_block(recorded: Any) -> str:
    """Return tags and sizes of the messages from rank 0 to each other rank."""
    lines = []
    for call, (messages, _) in zip(SIZED, recorded[0][1 + len(CALLS) :], strict=True):
        lines.append(f"all_reduce, {call.algorithm}" if call.kind == "all_reduce" else call.kind)
        for o in (1, 2):
            sizes = [f"{len(m.data)}{'n' if m.tag == NUMBERS else ''}" for m in messages if m.to == o]
            lines.append(f"    to rank {o}: {' '.join(sizes)}")
    return "\n".join(lines)


def fields_of(message: bytes, tag: int, what: str) -> list[tuple[int, str]]:
    """Return the sizes in bytes and the meanings of the fields of a message of the example."""
    if tag == FRAMES:
        values = [(len(message) - 64, "values of the frame")] if len(message) > 64 else []
        return [(8, "length of the frame"), (48, "header of the frame"), (8, "shape of the frame"), *values]
    words = {
        "handshake": ["hash of the protocol's version"],
        "request": ["signature", "0", "0", "0: the rank can take part"],
        "verdict": ["status", "rank", "wall time", "load", "waiting time"],
    }[what]
    return [(8, "count"), *[(8, word) for word in words], (8 * (7 - len(words)), "zeros")]


def dumped(rank: int, message: Message, what: str) -> list[str]:
    kind = "verdict" if "verdict" in what else what
    lines = [f"rank {rank} -> rank {message.to}, tag {message.tag}, {len(message.data)} bytes: {what}"]
    offset = 0
    for nbytes, meaning in fields_of(message.data, message.tag, kind):
        for begin in range(offset, offset + nbytes, 16):
            field = message.data[begin : min(begin + 16, offset + nbytes)]
            varies = kind == "verdict" and 24 <= begin < 48
            text = " ".join(".." if varies else f"{byte:02x}" for byte in field)
            lines.append(f"  {begin:4}  {text:<47}  {meaning if begin == offset else ''}".rstrip())
        offset += nbytes
    assert offset == len(message.data)
    return lines


def example_block(ranks: RankPool) -> str:
    """Return all messages of EXAMPLE between two ranks."""
    sent = [iter(rank[0][0]) for rank in ranks.run(record, [EXAMPLE])]
    order = [(rank, what) for what in ("handshake", "request", "term", "sum") for rank in (0, 1)]
    lines: list[str] = []
    for rank, what in [*order, (1, "report for the verdict"), (0, "verdict")]:
        lines += [*dumped(rank, next(sent[rank]), what), ""]
    assert all(next(rest, None) is None for rest in sent)
    return "\n".join(lines).rstrip()


def blocks(ranks: RankPool, recorded: Any) -> list[str]:
    return [requests_block(), partitions_block(), sizes_block(recorded), example_block(ranks)]


def test_specification_has_the_generated_blocks(recorded: Any) -> None:
    with RankPool(2) as ranks:
        ranks.new_group()
        expected = blocks(ranks, recorded)
    page = SPECIFICATION.read_text()
    for block in expected:
        assert f"```\n{block}\n```\n" in page, f"docs/protocol.md must have this block:\n{block}"


if __name__ == "__main__":
    with RankPool(2) as two:
        two.new_group()
        print(*blocks(two, run_ranks(3, record, [EXAMPLE, *ALL])), sep="\n\n")
