"""Packs: many tensors in one message, in which small tensors share frames (docs/spec/packs.md)."""

import itertools
import re
import struct
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec.packs import Pack
from reference import decoder as oracle
from support.command import run

RNG = np.random.default_rng(0)
TENSORS = {
    "w": RNG.standard_normal((100, 50)).astype(np.float32),
    "b": RNG.standard_normal(50).astype(np.float32),
    "scalar": np.float32(3),
    "empty": np.zeros((0, 5), np.float32),
    "norm": np.ones((2, 3, 4), np.float32),
    "ids": np.arange(7),
    "last": RNG.standard_normal(4095).astype(np.float32),
}


def number(value):
    """Return a number as the table of a pack stores it."""
    low = bytes([value & 127 | 128]) if value > 127 else bytes([value])
    return low + (number(value >> 7) if value > 127 else b"")


def made(entries, frames, named=False, **changed):
    """Return a pack with any entries (name, frame, shape), whose digest is right; `changed`: fields of the header."""
    table = b"".join(
        (number(len(name)) + name if named else b"") + number(frame) + number(len(shape)) + b"".join(map(number, shape))
        for name, frame, shape in entries
    )
    fields = {"magic": b"CODP", "version": 1, "flags": int(named), "zero": 0, "count": len(entries)}
    fields |= {"frames": len(frames), "nbytes": len(table), "zeros": 0}
    head = struct.pack("<4sBBHIIII", *(fields | changed).values())
    return head + struct.pack("<Q", codec.digest(head + table)) + table + b"".join(frames)


@pytest.mark.parametrize("kind", [dict, list])
def test_packs_round_trip(kind):
    """Tensors of fewer than 4,096 values share a frame of their dtype; all others have a frame of their own."""
    tensors = TENSORS if kind is dict else list(TENSORS.values())
    data = codec.encode_many(tensors, pack=True)
    got = codec.decode_many(data)
    assert type(got) is kind
    for x, y in zip(TENSORS.values(), got.values() if kind is dict else got, strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
    assert [len(m) for m in Pack(data).members] == [1, 4, 1, 1]
    assert codec.decode(bytes(Pack(data).frames[0])).tobytes() == TENSORS["w"].tobytes()
    assert codec.decode_many(memoryview(bytearray(data)), max_nbytes=Pack(data).nbytes) is not None
    assert len(codec.decode_many(np.frombuffer(data, np.uint8).repeat(2)[::2])) == len(TENSORS)
    assert codec.decode_many(codec.encode_many(kind(), pack=True)) == kind()


def test_packed_bytes_are_those_of_the_specification():
    """The writer's header and table are what `made`, which follows the specification, builds from the same frames."""
    data = codec.encode_many(TENSORS, pack=True)
    entries = [(t.name.encode(), t.frame, t.shape) for t in Pack(data).tensors]
    assert made(entries, [bytes(f) for f in Pack(data).frames], named=True) == data


def test_packs_are_smaller_than_frames():
    tensors = [RNG.standard_normal(64).astype(np.float32) for _ in range(200)]
    assert len(codec.encode_many(tensors, pack=True)) < 217 * 200 < sum(map(len, codec.encode_many(tensors))) * 0.7


@pytest.mark.parametrize("spec", ["small", codec.Sign(), codec.Float8(), codec.Truncate(1)])
def test_lossy_packs_have_the_error_of_frames(spec):
    tensors = [RNG.standard_normal((8, 64)).astype(np.float32) for _ in range(20)]
    frames, pack = codec.encode_many(tensors, spec), codec.encode_many(tensors, spec, pack=True)
    errors = [
        sum(float(np.square(x - y).sum()) for x, y in zip(tensors, codec.decode_many(some), strict=True))
        for some in (frames, pack)
    ]
    assert errors[1] <= 1.1 * errors[0] + 1e-9
    assert len(pack) < sum(map(len, frames))


def test_packs_hold_torch_tensors_deltas_views_and_bound_specs():
    x = {k: torch.from_numpy(np.array(v)) for k, v in TENSORS.items()}
    x["half"] = torch.randn(30).bfloat16()
    got = codec.decode_many(codec.encode_many(x, pack=True), like=x["w"])
    assert all(torch.equal(got[k], x[k]) for k in x)
    got["b"][:] = 0  # each result has memory of its own
    assert got["scalar"] == 3
    out = {k: torch.empty_like(v) for k, v in x.items()}
    version = out["b"]._version
    assert codec.decode_many(codec.encode_many(x, pack=True), out=out)["b"] is out["b"]
    assert all(torch.equal(out[k], x[k]) for k in x)
    assert out["b"]._version > version
    old = {k: np.zeros_like(v) for k, v in TENSORS.items()}
    delta = codec.encode_many(TENSORS, codec.Delta(), base=old, pack=True)
    assert all(v.tobytes() == TENSORS[k].tobytes() for k, v in codec.decode_many(delta, base=old).items())
    bits = codec.view(np.arange(9, dtype=np.uint16), "bfloat16", segments=[(0, (9,))])
    shared = codec.Truncate(level_coding="shared").bind(codec.optimizers.SGD(0.1), theta=np.ones(9, np.float32))
    specs = [codec.Lossless(), codec.Lossless(), shared]
    data = codec.encode_many([np.ones(3), bits, np.ones(9, np.float32)], specs, pack=True)
    assert codec.decode_many(data, [None, None, shared])[1].view(np.uint16).tolist() == list(range(9))


def test_errors_of_packs_name_the_tensor():
    bad = TENSORS | {"norm": np.full(5, np.nan, np.float32)}
    lossy = {k: v for k, v in bad.items() if k != "ids"}
    with pytest.raises(codec.ArgumentError, match=r"'norm': x holds NaN") as e:
        codec.encode_many(lossy, "small", pack=True)
    assert e.value.item == "norm"
    with pytest.raises(codec.ArgumentError, match="keys of tensors must be str"):
        codec.encode_many({1: np.ones(3)}, pack=True)
    with pytest.raises(codec.EngineError, match="host memory"):
        codec.encode_many([torch.zeros(3, device="meta")], pack=True)
    data = codec.encode_many(TENSORS, pack=True)
    with pytest.raises(codec.LimitError, match="max_nbytes"):
        codec.decode_many(data, max_nbytes=Pack(data).nbytes - 1)
    with pytest.raises(codec.EngineError, match="like="):
        codec.decode_many(data, like=torch.zeros(3, device="meta"))


@pytest.mark.parametrize("name", ["w", "b", "overlap"])
def test_outputs_are_unchanged_after_an_error(name):
    data = codec.encode_many(TENSORS, pack=True)
    out = {k: np.full_like(v, 9) for k, v in TENSORS.items()}
    out |= {"b": out["last"][:50]} if name == "overlap" else {name: np.full(7, 9, np.float32)}
    with pytest.raises(codec.ArgumentError, match="shares memory" if name == "overlap" else f"'{name}': out= must be"):
        codec.decode_many(data, out=out)
    damaged = bytearray(data)
    damaged[-1] ^= 1
    if name == "w":
        out = {k: np.full_like(v, 9) for k, v in TENSORS.items()}
        with pytest.raises(codec.ChecksumError, match=r"'(b|last|ids|empty)'"):
            codec.decode_many(bytes(damaged), out=out)
    assert all((v == 9).all() for v in out.values())


def test_hostile_packs_are_rejected():
    three, vector = codec.encode(np.ones(3)), codec.encode(np.ones((1, 3)))
    large = codec.encode(np.zeros(1 << 20))
    two = [(b"a", 0, (1,)), (b"b", 0, (2,))]
    assert codec.decode_many(made(two, [three], named=True)).keys() == {"a", "b"}
    hostile = {
        "names [(4": made([(b"", 0, (4,))], [three]),  # another shape than its frame
        "the table names": made([(b"", 0, (3,))], [vector]),
        "names [(1,), (1": made([(b"", 0, (1,)), (b"", 0, (1,))], [three]),  # too few values
        "names [(3": made([(b"", 0, (3,)), (b"", 0, (0, 1 << 59))], [three]),  # a shared tensor without values
        "names [(1,), (2": made([(b"", 0, (1,)), (b"", 0, (2,))], [vector]),  # shared, and not flat
        "other bytes": made([(b"", 0, (3,))], [three, three]),  # frame 1 has no tensor
        "entry 1": made([(b"", 0, (3,)), (b"", 1, (3,))], [three]),  # there is no frame 1
        "entry 0": made([(b"", 0, (1,) * 9)], [three]),
        "entry 2": made(two, [three], named=True, count=3),
        "same name": made([(b"a", 0, (1,)), (b"a", 0, (2,))], [three], named=True),
        "is invalid": made([(b"\xff", 0, (3,))], [three], named=True),
        "reserved": made(two, [three], zero=1),
        "a reserved": made(two, [three], flags=2),
        "version 2": made(two, [three], version=2),
        "inside its table": made(two, [three], nbytes=1 << 30),
        "inside a frame": made([(b"", 0, (3,))], [three])[:-1],
        "1 bytes follow": made([(b"", 0, (3,))], [three]) + b"\0",
        "bytes, 32": b"CODP",
    }
    for message, data in hostile.items():
        with pytest.raises(codec.FrameError, match=re.escape(message)):
            codec.decode_many(data)
    times = 1 << 8
    bomb = made([(b"", i, (1 << 20,)) for i in range(times)], [large] * times)
    with pytest.raises(codec.LimitError):  # 2 GiB of zeros
        codec.decode_many(bomb)


def need(condition):
    if not condition:
        raise ValueError


def number_in(table):
    """Return the next number of an iterator of bytes."""
    value = 0
    for k in range(9):
        byte = next(table)
        value |= (byte & 127) << 7 * k
        if byte < 128:
            return value
    raise ValueError


def expected(data):
    """Return name, dtype, shape and bytes of a pack's tensors, by docs/spec/packs.md alone; None if it is invalid."""
    try:
        magic, version, flags, zero, count, number, nbytes, zeros, check = struct.unpack_from("<4sBBHIIIIQ", data)
        need((magic, version, zero, zeros) == (b"CODP", 1, 0, 0) and flags < 2 and nbytes <= len(data) - 32)
        need(check == codec.digest(data[:24] + data[32 : 32 + nbytes]))
        frames, rest, table = [], data[32 + nbytes :], iter(data[32 : 32 + nbytes])
        for _ in range(number):
            size = struct.unpack_from("<Q", rest, 16)[0]
            frames.append(oracle.decode(rest[:size]))
            rest = rest[size:]
        need(not rest)
        found = []
        for _ in range(count):
            name = None
            if flags:
                size = number_in(table)
                need(size <= nbytes)
                name = bytes(itertools.islice(table, size)).decode()
                need(len(name.encode()) == size)
            frame, rank = number_in(table), number_in(table)
            need(frame < number and rank <= 8)
            found.append((name, frame, tuple(number_in(table) for _ in range(rank))))
        need(not [*table] and (not flags or len({name for name, _, _ in found}) == count))
        for k, (_, shape, _) in enumerate(frames):
            shapes = [own for _, frame, own in found if frame == k]
            need(shapes == [shape] or (len(shapes) > 1 and all(map(prod, shapes))))
            need(len(shapes) == 1 or shape == (sum(map(prod, shapes)),))
        values, tensors = [frame[2] for frame in frames], []
        for name, frame, shape in found:
            size = prod(shape) * len(frames[frame][2]) // max(1, prod(frames[frame][1]))
            tensors.append((name, frames[frame][0], shape, values[frame][:size]))
            values[frame] = values[frame][size:]
        return tensors
    except (ValueError, struct.error, StopIteration, RuntimeError, oracle.Bad):
        return None


FRAMES = [codec.encode(np.arange(3.0)), codec.encode(np.zeros((0, 4), np.int16)), codec.encode(np.float32(2))]
PACKS = [
    made([(b"a", 0, (1,)), (b"b", 1, (0, 4)), (b"c", 0, (2, 1)), (b"", 2, ())], FRAMES, named=True),
    made([(b"", 0, (3,)), (b"", 1, (0, 4)), (b"", 2, ())], FRAMES),
]


@given(st.sampled_from(PACKS), st.data())
def test_packs_with_any_header_and_table(pack, data):
    """Packs with right digests are read as the specification says, or rejected without a change of `out`."""
    nbytes = struct.unpack_from("<I", pack, 16)[0]
    head, table, rest = bytearray(pack[:24]), bytearray(pack[32 : 32 + nbytes]), pack[32 + nbytes :]
    for _ in range(data.draw(st.integers(1, 3))):
        at, few = data.draw(st.integers(0, len(table))), st.binary(max_size=2)
        if data.draw(st.integers(0, 3)):
            table[at : at + data.draw(st.integers(0, 2))] = data.draw(few | st.sampled_from([b"\xff" * 9, b"\x80\0"]))
        else:
            head[data.draw(st.sampled_from([5, 8, 12]))] = data.draw(st.integers(0, 5))
    struct.pack_into("<I", head, 16, len(table))
    changed = bytes(head) + struct.pack("<Q", codec.digest(bytes(head + table))) + bytes(table) + rest
    tensors = expected(changed)
    if tensors is None:
        with pytest.raises(codec.FrameError):
            codec.decode_many(changed)
        return
    got = codec.decode_many(changed)
    got = [*got.items()] if head[5] else [(None, x) for x in got]
    assert [(name, x.shape, x.tobytes()) for name, x in got] == [(name, shape, x) for name, _, shape, x in tensors]


def test_damaged_packs_are_rejected():
    """Each change of a byte is an error."""
    data = codec.encode_many({k: TENSORS[k] for k in ("b", "norm", "ids", "scalar")}, pack=True)
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 1 << i % 8
        with pytest.raises(codec.CodecError):
            codec.decode_many(damaged)
        with pytest.raises(codec.CodecError):
            codec.decode_many(data[:i])


def test_the_command_line_shows_packs(tmp_path, capsys):
    path = tmp_path / "p.pack"
    path.write_bytes(codec.encode_many(TENSORS, pack=True))
    assert run("ls", path) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()[1:-1]] == list(TENSORS)
    assert listed.count("Lossless(), in frame 1") == 4
    assert run("inspect", path) == run("verify", path) == 0
    shown = capsys.readouterr().out
    assert "frames         4" in shown
    assert "a whole pack of 7 tensors" in shown
    path.write_bytes(path.read_bytes()[:-1])
    assert run("verify", path) == 1
    assert capsys.readouterr().err.count(str(path)) == 1
