"""Functions that take frames: headers, codebooks, destinations, size limits, inspect and verify."""

import array
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import codec
from codec.__main__ import main
from codec.tensors.view import view
from support import flatcall
from support.tiers import HANG_SECONDS

PYTHON = (sys.executable, "-P", "-W", "ignore", "-c")  # -P: ignore the working directory


def test_inspect_reports_the_header():
    x = np.zeros((3, 1000), np.float32)
    frame = codec.encode(x, codec.Lossless(max_code_length=7))
    info = codec.inspect(frame)
    assert (info.spec, info.dtype, info.shape) == (codec.Lossless(max_code_length=7), "float32", (3, 1000))
    assert (info.nbytes, info.tensor_nbytes, info.n) == (len(frame), 12000, 3000)
    at = 0
    for offset, nbytes in info.sections.values():
        assert offset == at
        at += nbytes
    assert at == len(frame)
    assert eval(repr(info.spec), vars(codec)) == info.spec
    assert codec.inspect(frame[:64]) == codec.inspect(frame)


def test_small_frames_have_small_headers():
    for shape in ((1024,), (4, 4, 8, 8)):
        info = codec.inspect(codec.encode(np.random.default_rng(0).standard_normal(shape).astype(np.float32)))
        assert info.nblocks == 1
        assert info.sections["header"][1] + info.sections["directory"][1] <= 96


def test_codebook_is_required_and_checked_when_decoding():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(50_000).astype(np.float32) for _ in range(2))
    book = codec.Codebook.from_tensors(x)
    frame = codec.encode(y, codebook=book)
    assert codec.inspect(frame).codebook_id == book.id
    assert (codec.decode(frame, codebooks=book) == y).all()
    assert (
        codec.decode(
            frame, codebooks=[codec.Codebook.from_counts(np.arange(256)), book], options=codec.options(threads=2)
        )
        == y
    ).all()
    assert len(frame) < 1.002 * len(codec.encode(y))
    with pytest.raises(codec.StateError, match=f"{book.id:#018x}"):
        codec.decode(frame)
    assert codec.Codebook.from_tensors(x) == book
    for counts in (np.zeros(256, int), np.eye(256, dtype=int)[3], np.full(256, 2**40), np.arange(256)):
        other = codec.Codebook.from_counts(counts)
        assert (codec.decode(codec.encode(y, codebook=other), codebooks=other) == y).all()
    with pytest.raises(codec.ArgumentError, match="int32"):
        codec.Codebook.from_tensors(np.zeros(1000, np.int32))
    with pytest.raises(codec.SpecError, match="Sign"):
        codec.Codebook.from_tensors(x, spec=codec.Sign())
    with pytest.raises(codec.ArgumentError):
        codec.encode(x, codec.Sign(), codebook=book)
    for bad in (np.zeros(255, int), np.full(256, -1), np.zeros(256)):
        with pytest.raises(codec.ArgumentError):
            codec.Codebook.from_counts(bad)


def test_import_does_not_load_torch():
    code = (
        "import sys, time; import numpy, cffi; n = time.process_time(); import codec;"
        "e = time.process_time(); heavy = {'torch', 'cupy', 'numba', 'ml_dtypes', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy; print(e - n)"
    )
    times = [float(subprocess.run([*PYTHON, code], capture_output=True, check=True).stdout) for _ in range(5)]
    assert min(times) < 0.2


def test_forked_child_can_encode_after_the_parent_used_threads():
    code = (
        "import os, codec, numpy as np; x = np.arange(1 << 20, dtype=np.float32)\n"
        "three = codec.options(threads=3); f = codec.encode(x, options=three)\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if codec.encode(x, options=three) == f else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    subprocess.run([*PYTHON, code], check=True, timeout=HANG_SECONDS)


def test_codebook_id_is_a_digest_of_the_codebook():
    """An id determines its codebook, so sender and receiver cannot use different codebooks with the same id."""
    x = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    book = codec.Codebook.from_tensors(x)
    other = codec.Codebook.from_counts(np.arange(256))
    for fields in (
        (other.lengths, other.escape_length, book.id),
        (book.lengths, book.escape_length, book.id ^ 1),
        (book.lengths, book.escape_length, book.id, 1),
        (book.lengths[:-1], book.escape_length, book.id),
        (book.lengths + b"\0", book.escape_length, book.id),
        (bytes(256), 1, book.id),
        (book.lengths, 0, book.id),
        (book.lengths, 300, book.id),
        (book.lengths, book.escape_length, 1 << 64),
        (b"\1", 1, 5),
        (bytes([1]) + bytes(255), 1, 5),
        (bytes([9]) + bytes(255), 1, 5),
        (list(book.lengths), book.escape_length, book.id),
        ("a" * 256, 1, 5),
        (book.lengths, 2.0, book.id),
        (book.lengths, book.escape_length, str(book.id)),
    ):
        with pytest.raises(codec.ArgumentError):
            codec.Codebook(*fields)
    assert codec.Codebook(book.lengths, book.escape_length, book.id) == book


@pytest.mark.parametrize("size", [0, 30, 200, 5000])
def test_encode_into_out_returns_a_view_of_the_frame(size):
    """Every type of `out` works if it is large enough; otherwise the call raises ArgumentError."""
    import ctypes
    import mmap

    x = np.arange(20.0)
    frame = codec.encode(x)
    rows = 2 if size % 2 == 0 else 1
    outs = [bytearray(size), memoryview(bytearray(size)), array.array("B", bytes(size)), array.array("b", bytes(size)),
            (ctypes.c_uint8 * size)(), np.zeros(size, np.uint8), np.zeros(size, np.int8),
            np.zeros((rows, size // rows), np.uint8), np.zeros(size + 1, np.uint8)[1:].view(np.recarray),
            np.ma.zeros(size, np.uint8), torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.int8),
            torch.zeros(rows, size // rows, dtype=torch.uint8),
            torch.nn.Parameter(torch.zeros(size, dtype=torch.uint8), False)]  # fmt: skip
    if size:
        outs.append(mmap.mmap(-1, size))
    for out in outs:
        if size < len(frame):
            with pytest.raises(codec.ArgumentError, match="too few"):
                codec.encode(x, out=out)
            continue
        part = codec.encode(x, out=out)
        assert (type(part), part.format, part.ndim, part.readonly) == (memoryview, "B", 1, True)
        assert part == frame
        assert (codec.decode(part) == x).all()
        where = np.asarray(out) if not isinstance(out, mmap.mmap) else np.frombuffer(out, np.uint8)
        assert np.shares_memory(np.asarray(part), where)
        del part, where


def test_frames_behave_alike_with_and_without_out():
    """Frames with and without `out` have the same length, items, slices and comparisons, can be joined, written, sent
    and decoded, and are read-only.
    """
    import io
    import socket
    import struct

    x = np.arange(2_000.0)
    plain = codec.encode(x)
    for out in (np.zeros(20_000, np.uint8), bytearray(20_000), torch.zeros(20_000, dtype=torch.uint8)):
        placed = codec.encode(x, out=out)
        assert len(placed) == len(plain)
        assert placed == plain
        assert plain == placed
        assert placed[3] == plain[3]
        assert placed[5:99:2] == plain[5:99:2]
        assert list(placed) == list(plain)
        assert placed.hex() == plain.hex()
        assert bytes(placed) == plain
        assert b"".join([placed, placed]) == plain + plain
        assert hash(bytes(placed)) == hash(plain)
        results = []
        for frame in (plain, placed):
            with pytest.raises(TypeError):
                frame[0] = 1
            file = io.BytesIO()
            file.write(frame)
            here, there = socket.socketpair()
            with here, there:
                sent = here.send(frame)
                got = there.recv(len(frame))
            read = struct.unpack_from("<4sBB", frame)
            results.append((file.getvalue(), sent, got, read, codec.inspect(frame), codec.decode(frame).tobytes()))
        assert results[0] == results[1]


def test_max_nbytes_limits_the_decoded_size():
    """The default of max_nbytes is 1 GiB, or 256 times the frame's size if larger; with `out` there is no limit."""
    big = np.zeros((1 << 28) + 1, np.float32)
    frame = codec.encode(big)
    assert 256 * len(frame) < big.nbytes
    del big
    for call in (lambda f: codec.decode(f), lambda f: codec.reduce([f]), lambda f: codec.decode_many([f])):
        with pytest.raises(codec.LimitError, match=r"larger|max_nbytes"):
            call(frame)
    small = codec.encode(np.ones(1000, np.float32))
    out = np.zeros(1000, np.float32)
    for call in (
        lambda **how: flatcall.decode(small, **how),
        lambda **how: flatcall.reduce([small], **how),
        lambda **how: flatcall.decode_many([small], **{k: [v] if k == "out" else v for k, v in how.items()}),
    ):
        with pytest.raises(codec.LimitError):
            call(max_nbytes=3_999)
        call(max_nbytes=4_000)
        for most in (0, 3_999, None):
            call(max_nbytes=most, out=out)
    from codec.engines.request import DecodeRequest

    v = view(np.zeros(1 << 23, np.uint8))
    assert DecodeRequest((v,)).limit() == 1 << 31
    assert DecodeRequest((view(small), v)).limit() == 1 << 31
    assert DecodeRequest((view(small),)).limit() == 1 << 30


def test_inspect_omits_parameters_that_frames_do_not_store():
    """inspect() omits clipping thresholds and seeds: a frame stores only that its values were clipped."""
    x = np.random.default_rng(0).standard_normal(9_000).astype(np.float32)
    for spec, clipped in (
        (codec.Ternary(clip=2.5, seed=5), True),
        (codec.Ternary(scale=9.0, seed=5), False),
        (codec.Ternary("entropy", clip=1.0), True),
        (codec.Sign(), False),
        (codec.Lossless(), False),
    ):
        info = codec.inspect(codec.encode(x, spec))
        assert info.clipped is clipped
        if isinstance(spec, codec.Ternary):
            assert info.spec == codec.Ternary(spec.packing)


def test_segments_takes_tensors_shapes_mappings_and_modules():
    """segments() accepts lists of tensors, shapes, mappings and modules, and rejects a single tensor."""
    model = torch.nn.Linear(30, 40)
    expected = [(0, (40, 30)), (1200, (40,))]
    for given in (model, model.parameters(), dict(model.named_parameters()), [(40, 30), [40]]):
        assert codec.segments(given) == expected
    for bad in (model.weight, np.zeros((3, 4)), np.float32(1), None, 5, [5], ["ab"]):
        with pytest.raises(codec.ArgumentError, match=r"segment|dimension|item"):
            codec.segments(bad)


def test_inspect_and_verify_commands(tmp_path, capsys):
    """The commands inspect and verify print text or JSON."""
    x = np.ones((3, 1000), np.float32)
    good, bad = (str(tmp_path / name) for name in ("good", "bad"))
    Path(good).write_bytes(frame := codec.encode(x, codec.Sign(group_size=64)))
    Path(bad).write_bytes(frame[:-1])
    assert main(["inspect", good]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["spec"], lines["shape"], lines["nbytes"]) == ("Sign(group_size=64)", "(3, 1000)", str(len(frame)))
    assert main(["inspect", bad, "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert (parsed["spec"], parsed["shape"], parsed["sections"]["header"][0]) == ("Sign(group_size=64)", [3, 1000], 0)
    assert main(["verify", good, good]) == 0
    assert capsys.readouterr().out == 2 * f"{good}: a whole frame\n"
    for arguments, words in (
        (["verify", good, bad], f"{bad!r}: the frame is truncated"),
        (["verify", str(tmp_path / "none")], "none cannot be read"),
        (["inspect", __file__], "not a codec frame"),
    ):
        assert main(arguments) == 1
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"{codec.__version__}\n"
