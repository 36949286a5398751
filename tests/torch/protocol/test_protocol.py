"""Messages between ranks of codec.torch, compared with docs/spec/protocol.md and docs/spec/protocol/collectives.md.

The tests record every message that real ranks send. `Expected` computes the same messages from the formulas of the
specification: it calls `codec.encode`, `codec.decode` and `codec.reduce`, but nothing of `codec.torch`.

`PYTHONPATH=tests python tests/torch/protocol/test_protocol.py` prints the generated blocks of the specification.
"""

import json
import re
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import codec
import codec.torch
from codec.torch.network.stripe import Stripe
from support import flatcall
from support.ddp_training import separate_buckets
from support.expected_messages import (
    ABORT,
    DATA,
    DIFFERS,
    EXAMPLE,
    FAILED,
    FIELDS,
    HEADER,
    NONFINITE,
    VERDICT,
    VERSION,
    Call,
    Expected,
    blobs,
    digest,
    header,
    integers,
    signed,
    text_of,
    values,
)
from support.handshakes import handshake_block
from support.ranks import RankPool, run_ranks

SPECIFICATION = Path(__file__).parents[3] / "docs/spec"
PAGES = ("protocol.md", "protocol/collectives.md")


def perform(call: Call, rank: int, size: int) -> Any:
    x = values(call, rank)
    if call.kind == "exchange":
        return codec.torch.all_to_all_bytes(blobs(rank, size))
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
    """Bytes of a message, with its header, and the rank that receives it."""

    to: int
    data: bytes

    @property
    def kind(self) -> int:
        return HEADER.unpack_from(self.data)[1]

    @property
    def number(self) -> int:
        return HEADER.unpack_from(self.data)[2]

    @property
    def part(self) -> int:
        return HEADER.unpack_from(self.data)[3]

    @property
    def body(self) -> bytes:
        return self.data[HEADER.size :]


def recording(call: Any) -> tuple[list[Message], Any]:
    """Return the messages that this rank sends during `call`, and its result."""
    sent: list[Message] = []
    put = Stripe.put

    def recorded(stripe: Stripe, send: Any, *, direct: bool) -> None:
        sent.append(Message(stripe.peer, b"".join(send.begin())))
        put(stripe, send, direct=direct)

    Stripe.put = recorded
    try:
        result = call()
    finally:
        Stripe.put = put
    return sent, result


def record(rank: int, size: int, calls: list[Call]) -> list[tuple[list[Message], Any]]:
    """Return this rank's messages and the result of each call. The first call also connects the ranks."""
    return [recording(lambda call=call: perform(call, rank, size)) for call in calls]


def record_failures(rank: int, size: int) -> list[list[Message]]:
    """Return the messages of four calls: rank 1 has an invalid argument, a NaN, another op than rank 0, no error."""
    x = torch.ones(2048)

    def refused() -> None:
        with pytest.raises(codec.ArgumentError if rank else codec.PeerError):
            codec.torch.all_reduce(x, codec.Float8(), op="median" if rank else "mean")

    def not_finite() -> None:
        y = x.clone()
        y[0] = torch.nan if rank else 1
        with pytest.raises(codec.ArgumentError if rank else codec.PeerError, match="NaN or Inf"):
            codec.torch.all_reduce(y, codec.Float8(), op="mean", options=codec.options(algorithm="two_shot"))

    def other_op() -> None:
        here, there = ("sum", "mean") if rank else ("mean", "sum")
        with pytest.raises(codec.PeerError, match=f"op is {there} there and {here} here"):
            codec.torch.all_reduce(x, op=here, options=codec.options(algorithm="two_shot"))

    perform(EXAMPLE, rank, size)
    calls = [refused, not_finite, other_op, lambda: perform(EXAMPLE, rank, size)]
    return [recording(call)[0] for call in calls]


def checksums_of(message: Message) -> bytes:
    """Return the last fields that the header of a message must have: checksum of the body, and CRC-32."""
    _, kind, number, part, index, signature, *_ = HEADER.unpack_from(message.data)
    return header(kind, number, part, index, signature, message.body)[FIELDS.stop :]


def check_sent(expected: dict[int, list[bytes]], found: list[Message]) -> None:
    """Compare the messages to each rank, in order. A report's body is not compared, because it contains times."""
    queues: dict[int, list[bytes]] = defaultdict(list)
    for message in found:
        last = HEADER.unpack_from(message.data)[5] == VERDICT
        assert message.data[: HEADER.size][FIELDS.stop :] == checksums_of(message)
        queues[message.to].append(message.data[FIELDS] if last else message.data)
    assert queues.keys() == expected.keys()
    for to, messages in expected.items():
        assert len(queues[to]) == len(messages), to
        for want, got in zip(messages, queues[to], strict=True):
            assert want == got, to


SEGMENTS = [(0, (900, 100)), (90_000, (7,)), (90_100, (3, 66_000)), (300_000, (500, 1000)), (800_000, ())]
N = 900_000  # number of values; with float32 and three ranks, each slice has two chunks
CALLS = [
    Call(spec=codec.Quantize(4), n=N, op="mean", segments=SEGMENTS, stream=3),
    Call(n=5000, dtype=torch.bfloat16),
    Call(spec=codec.Float8(), n=N, algorithm="ring", op="mean", dtype=torch.float16, stream=1),
    Call(spec=codec.Quantize(2), n=3 * N, algorithm="ring"),
    Call(spec=codec.Sign(), n=N, algorithm="all_gather", op="mean", segments=SEGMENTS),
    Call(n=3 * N, algorithm="raw", op="mean", segments=SEGMENTS),  # five chunks per slice
    Call(n=5000, algorithm="raw", dtype=torch.bfloat16),
    Call(spec=codec.Ternary("base3"), n=40_000, algorithm="shared_scale", op="mean", stream=5),
    # Cut points 0 366 366 1100: slice 1 is empty, so ranks send no messages for it
    *[Call(n=1100, algorithm=name, segments=[(0, (190, 2))]) for name in ("two_shot", "ring", "raw")],
    Call(spec=codec.Ternary("base3"), n=1100, algorithm="shared_scale", stream=5),  # only slice 2 has values
    # All slices are empty; ranks send messages for them, so that they compare their arguments
    *[Call(n=0, algorithm=name) for name in ("two_shot", "ring", "raw")],
    Call("reduce_scatter", codec.Quantize(4), n=N, op="mean", stream=2),
    Call("all_gather", codec.Quantize(3), n=7000, stream=4),
    Call("all_to_all", codec.Ternary(), n=N),
    *[Call(spec=codec.Sign(), n=6000, algorithm=name) for name in ("two_shot", "all_gather", "ring", "raw")],
    Call(spec=codec.Ternary(), n=6000, algorithm="shared_scale"),
    *[Call(kind, codec.Sign(), n=6000) for kind in ("reduce_scatter", "all_gather", "all_to_all")],
    Call("exchange"),
]


@pytest.fixture(scope="module")
def recorded() -> list[list[tuple[list[Message], Any]]]:
    """Return the messages and results of each of three ranks: of a collective that connects them, then of CALLS."""
    return run_ranks(3, record, [EXAMPLE, *CALLS])


@pytest.mark.parametrize(
    "i",
    range(len(CALLS)),
    ids=lambda i: (
        f"{CALLS[i].kind}-{CALLS[i].algorithm}-{i}" if CALLS[i].kind == "all_reduce" else f"{CALLS[i].kind}-{i}"
    ),
)
def test_messages_are_those_of_the_specification(recorded: Any, i: int) -> None:
    expected = Expected(CALLS[i], 3).messages(1 + i)
    for rank in range(3):
        check_sent(expected[rank], recorded[rank][1 + i][0])


def test_two_ranks_report_to_each_other() -> None:
    found = run_ranks(2, record, [EXAMPLE, Call(spec=codec.Sign(), n=6000, algorithm="all_gather", op="mean")])
    for number, call in enumerate([EXAMPLE, Call(spec=codec.Sign(), n=6000, algorithm="all_gather", op="mean")]):
        expected = Expected(call, 2).messages(number)
        for rank in range(2):
            check_sent(expected[rank], found[rank][number][0])


def test_specification_names_existing_tests() -> None:
    interoperability = (Path(__file__).parent / "test_gloo_interoperability.py").read_text()
    names = re.findall(r"`(test_\w+)`", (SPECIFICATION / "protocol/cpp.md").read_text())
    assert len(names) >= 5
    assert [name for name in names if f"def {name}(" not in interoperability] == []


def test_results_are_the_same_bits_on_all_ranks(recorded: Any) -> None:
    for i, call in enumerate(CALLS):
        if call.kind == "all_reduce":
            first, *others = (recorded[rank][1 + i][1].view(torch.uint8) for rank in range(3))
            assert all(torch.equal(first, other) for other in others), call


def address_of(rank: int, size: int) -> bytes:
    perform(EXAMPLE, rank, size)
    return PrefixStore("codec/point-to-point", dist.group.WORLD.get_group_store().clone()).get(str(rank))


def test_address_of_a_rank_has_the_version_of_the_protocol() -> None:
    for address in run_ranks(2, address_of):
        assert address[:8] == integers(digest(repr(VERSION)))


def aborts_of(messages: list[Message]) -> list[tuple[int, int, int, str]]:
    """Check the header of each abort message, and return its collective's number, status, rank and text."""
    found = []
    for m in messages:
        if m.kind == ABORT:
            assert m.data[: HEADER.size] == header(ABORT, m.number, 0, 0, 0, m.body)
            found.append((m.number, *struct.unpack_from("<qq", m.body), m.body[16:].decode()))
    return found


def test_errors_are_sent_as_aborts() -> None:
    zero, one = run_ranks(2, record_failures)
    (refused,), (not_finite,), (differs,) = (aborts_of(messages) for messages in one[:3])
    assert refused[:3] == (1, FAILED, 1)
    assert refused[3].startswith("ArgumentError: ")
    assert len(one[0]) == 1  # rank 1 sends the abort and nothing else
    assert not_finite[:3] == (2, NONFINITE, 1)
    for abort, messages in ((refused, zero[0]), (not_finite, zero[1])):
        assert aborts_of(messages) == [abort]  # rank 0 sends the abort it received to other ranks
        assert not [m for m in messages if m.kind == DATA and m.part == 1]  # rank 0 sends no report
    for (found,), rank, op in ((aborts_of(zero[2]), 1, "mean"), ([differs], 0, "sum")):
        items = signed("two_shot, requested as two_shot", codec.Lossless(), 2048, op)
        assert found == (3, DIFFERS, rank, json.dumps(items))
    assert [m.number for m in zero[3]] == [4] * 2  # term and report: the connections are still open


def record_steps(rank: int, size: int, joins: bool) -> list[list[Message]]:
    """Return the messages of two training steps with two buckets."""
    if not joins:
        separate_buckets()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(40, 40, bias=False) for _ in range(2)])
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    hook = codec.torch.ddp_hook(options=codec.options(algorithm="all_gather"))
    hook.register(ddp)

    def step() -> None:
        ddp(torch.ones(1, 40)).sum().backward()

    step()  # DistributedDataParallel rebuilds its buckets after the first step
    hook.load_state_dict(hook.state_dict())
    return [recording(step)[0] for _ in range(2)]


@pytest.mark.parametrize(("size", "joins"), [(2, False), (3, False), (3, True)])
def test_steps_have_a_collective_for_each_run_of_buckets_and_one_agreement(size: int, joins: bool) -> None:
    n, segments = (3200, [(0, (40, 40)), (1600, (40, 40))]) if joins else (1600, [(0, (40, 40))])
    items = signed("all_gather, requested as all_gather", codec.Lossless(), n, "mean", segments=segments)
    hook, bucket = digest(repr(("hook",))), digest(text_of(items))
    for rank, steps in enumerate(run_ranks(size, record_steps, joins)):
        for i, messages in enumerate(steps):
            to = 1 - min(rank, 1)  # rank 0's messages to rank 1; other ranks' messages to rank 0
            sent = sorted((m for m in messages if m.to == to), key=lambda m: (m.number, m.part))
            found = [HEADER.unpack_from(m.data) for m in sent]
            first = found[0][2]
            state = [(first, 0, hook)] if i == 0 else []
            data = [(first, len(state), bucket), *([] if joins else [(first + 1, 0, bucket)])]
            last, part, _ = data[-1]
            expected = [*state, *data, (last, part + 1, VERDICT)]
            assert [(number, part, signature) for _, _, number, part, _, signature, *_ in found] == expected
            if i == 0:
                assert sent[0].body[:8] == integers(1)  # number of steps so far


# Blocks of text in the specification that this module generates


SPECS = [
    codec.Lossless(),
    codec.Sign(),
    codec.Ternary(),
    codec.Float8(),
    codec.Float4(),
    codec.Quantize(4),
    codec.TopK(),
    codec.Truncate(),
]


def signatures_block() -> str:
    """Return examples of signature texts, and their hashes."""
    segments = [(0, (64, 100)), (6400, (64,))]
    shown: list[tuple[str, str]] = [(text, text) for text in (repr(VERSION), repr(("exchange",)), repr(("hook",)))]
    for spec in SPECS:
        optimizer = "bound" if isinstance(spec, codec.Truncate) else "none"
        items = signed("two_shot, requested as auto", spec, 1000, "mean", optimizer=optimizer)
        shown.append((text_of(items) if spec is SPECS[0] else repr(("spec", repr(spec))), text_of(items)))
    others = text_of(signed("gather", codec.Sign(), 6464, "sum", segments=segments)), repr((segments,))
    lines = [f"{text}\n    {digest(hashed)}" for text, hashed in [*shown, *((text, text) for text in others)]]
    lines.insert(4, "the same with other specs, and ('optimizer', 'bound') with Truncate:")
    return "\n".join(lines)


def partitions_block() -> str:
    """Return the cut points at which collectives divide example tensors."""
    lines = []
    for call, size in ((CALLS[0], 3), (CALLS[0]._replace(algorithm="raw", n=3 * N), 3), (Call(n=5000), 4)):
        slices = Expected(call, size).slices()
        starts = [piece.begin for pieces in slices for piece in pieces]
        segments = "" if call.segments is None else f", segments {call.segments}"
        spec = "raw" if call.algorithm == "raw" else call.spec
        lines.append(f"n = {call.n}, N = {size}, float32, {spec}{segments}")
        lines.append(f"    C = {len(slices[0])}, cut points {[*starts, call.n]}")
    return "\n".join(lines)


def fields_of(message: Message, what: str) -> list[tuple[int, str]]:
    """Return the size in bytes and the meaning of each field of a message of the example."""
    head = [(4, "magic"), (4, "kind: data"), (8, "number of the collective"), (4, "part"), (4, "index")]
    head += [(8, "signature"), (8, "bytes of the body"), (4, "checksum of the body"), (4, "CRC-32 of the header")]
    if what == "report":
        return [*head, (8, "wall time"), (8, "load"), (8, "waiting time")]
    values = len(message.body) - 56
    return [
        *head,
        (48, "header of the frame"),
        (8, "shape of the frame"),
        *([(values, "values of the frame")] * (values > 0)),
    ]


def dumped(rank: int, message: Message, what: str) -> list[str]:
    lines = [f"rank {rank} -> rank {message.to}, {len(message.data)} bytes: {what}"]
    offset = 0
    for nbytes, meaning in fields_of(message, what):
        for begin in range(offset, offset + nbytes, 16):
            field = message.data[begin : min(begin + 16, offset + nbytes)]
            varies = what == "report" and begin >= FIELDS.stop
            text = " ".join(".." if varies else f"{byte:02x}" for byte in field)
            lines.append(f"  {begin:4}  {text:<47}  {meaning if begin == offset else ''}".rstrip())
        offset += nbytes
    assert offset == len(message.data)
    return lines


def example_block(ranks: RankPool) -> str:
    """Return a hex dump of messages of EXAMPLE between two ranks: a term, a sum and a report."""
    sent = [iter(rank[0][0]) for rank in ranks.run(record, [EXAMPLE])]
    lines: list[str] = []
    for what, rank in (("term", 0), ("sum", 1), ("report", 0), ("report", 1)):
        message = next(sent[rank])
        if (what, rank) != ("report", 1):
            lines += [*dumped(rank, message, what), ""]
    assert all(next(rest, None) is None for rest in sent)
    return "\n".join(lines).rstrip()


def blocks(ranks: RankPool) -> list[str]:
    return [handshake_block(), signatures_block(), partitions_block(), example_block(ranks)]


def test_specification_has_the_generated_blocks() -> None:
    with RankPool(2) as ranks:
        ranks.new_group()
        expected = blocks(ranks)
    text = "".join((SPECIFICATION / page).read_text() for page in PAGES)
    for block in expected:
        assert f"```\n{block}\n```\n" in text, f"{' or '.join(PAGES)} in docs/spec must have this block:\n{block}"


if __name__ == "__main__":
    with RankPool(2) as two:
        two.new_group()
        print(*blocks(two), sep="\n\n")
