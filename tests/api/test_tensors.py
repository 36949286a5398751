"""Tensors of every library are encoded without a copy and decoded to their own type."""

import array
import json
import subprocess
import sys
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from codec.__main__ import main
from codec.tensors.dlpack import DLTensor
from codec.tensors.view import view
from support import flatcall
from support.tiers import HANG_SECONDS

PYTHON = (sys.executable, "-P", "-W", "ignore", "-c")  # -P: ignore the working directory


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int8, torch.int64, torch.uint8, torch.bool,
    ],
)  # fmt: skip
def test_torch_tensors_round_trip(dtype):
    t = (torch.randn(40, 50) * 3).to(dtype)
    frame = codec.encode(t)
    y = codec.decode(frame, like=t)
    assert y.dtype == dtype
    assert torch.equal(y.view(torch.uint8), t.view(torch.uint8))
    out = torch.empty_like(t)
    assert codec.decode(frame, out=out) is out
    assert torch.equal(out.view(torch.uint8), t.view(torch.uint8))
    assert view(t).address == t.data_ptr()


def test_torch_scalars_empty_and_noncontiguous_tensors():
    t = torch.randn(30, 40, requires_grad=True)
    assert torch.equal(codec.decode(codec.encode(t), like=t), t.detach())
    assert torch.equal(codec.decode(codec.encode(t.t()), like=t), t.t().detach())
    assert codec.decode(codec.encode(torch.tensor(3.5)), like=t).item() == 3.5
    with pytest.raises(codec.ArgumentError, match="layout"):
        codec.encode(torch.eye(3).to_sparse())
    with pytest.raises(codec.ArgumentError):
        codec.encode(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(codec.EngineError, match="meta"):
        codec.encode(torch.zeros(3, device="meta"))
    frame = torch.frombuffer(bytearray(codec.encode(t)), dtype=torch.uint8)
    assert torch.equal(codec.decode(frame, like=t), t.detach())
    out = torch.zeros(10000, dtype=torch.uint8)
    part = codec.encode(t, out=out)
    assert bytes(part) == codec.encode(t)


def test_buffers_round_trip():
    for x in (array.array("f", range(1000)), memoryview(np.arange(1000.0)), bytearray(1000), b"x" * 1000):
        y = codec.decode(codec.encode(x))
        assert y.tobytes() == memoryview(x).tobytes()


def test_numpy_scalars_empty_and_noncontiguous_arrays():
    x = np.random.default_rng(0).standard_normal((30, 40))
    for y in (x[::2, ::-3], x.T, np.asfortranarray(x), x.astype(">f8"), x[5, 5], np.float32(3)):
        assert (codec.decode(codec.encode(y)) == y).all()
    x.flags.writeable = False
    assert (codec.decode(codec.encode(x)) == x).all()
    b = np.arange(100, dtype=np.uint16)
    frame = codec.encode(codec.view(b, "bfloat16"))
    assert codec.inspect(frame).dtype == "bfloat16"
    assert (codec.decode(frame, like=b) == b).all()
    assert codec.decode(frame).dtype == ml_dtypes.bfloat16


class DLPackOnly:
    """Tensor that supports only the DLPack protocol."""

    def __init__(self, t):
        self.t = t

    def __dlpack__(self, **kw):
        return self.t.__dlpack__()

    def __dlpack_device__(self):
        return self.t.__dlpack_device__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16])
def test_dlpack_tensors_round_trip(dtype):
    t = (torch.randn(40, 50) * 3).to(dtype)
    for x in (t, t[:, ::2], t[3], t[:0], t.t()):
        frame = codec.encode(DLPackOnly(x))
        assert torch.equal(codec.decode(frame, like=t).view(torch.uint8), x.contiguous().view(torch.uint8))
    assert view(DLPackOnly(t)).address == t.data_ptr()


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
    """Two sides with different codebooks under one id cannot exist, so they never decode different tensors."""
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


def test_masked_values_are_rejected():
    """A masked array without masked values is encoded like any array."""
    x = np.ma.array(np.arange(6.0), mask=[0, 0, 1, 0, 0, 0])
    with pytest.raises(codec.ArgumentError, match=r"masked.*filled"):
        codec.encode(x)
    frame = codec.encode(np.ma.array(np.arange(6.0)))
    assert (codec.decode(frame) == np.arange(6.0)).all()
    assert frame == codec.encode(np.ma.array(np.arange(6.0), mask=False)) == codec.encode(np.arange(6.0))
    with pytest.raises(codec.ArgumentError, match=r"masked.*filled"):
        codec.decode(frame, out=x)


class Capsule:
    """DLPack tensor of float32 or bfloat16 whose address is NULL."""

    def __init__(self, code, bits, n):
        import ctypes

        self.shape = (ctypes.c_int64 * 1)(n)
        self.t = DLTensor(0, 1, 0, 1, code, bits, 1, self.shape, None, 0)
        self.memory = (ctypes.c_byte * 128)()  # DLManagedTensor with a NULL context and deleter
        ctypes.memmove(self.memory, ctypes.addressof(self.t), ctypes.sizeof(self.t))
        self.new = ctypes.pythonapi.PyCapsule_New
        self.new.restype = ctypes.py_object
        self.new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self.name = b"dltensor"

    def __dlpack__(self, **kw):
        import ctypes

        return self.new(ctypes.addressof(self.memory), self.name, None)

    def __dlpack_device__(self):
        return (1, 0)


class OnGPUByDLPack(Capsule):
    """Array on a GPU of another library; without max_version if ``old``."""

    def __init__(self, old):
        super().__init__(2, 32, 1000)
        t = DLTensor.from_buffer(self.memory)
        t.data, t.device_type, self.old, self.asked = 1 << 20, 2, old, []

    def __dlpack__(self, **how):
        self.asked.append(how)
        if self.old and "max_version" in how:
            raise TypeError
        return super().__dlpack__()

    def __dlpack_device__(self):
        return (2, 0)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack_producers_on_a_gpu_are_asked_for_the_default_stream(old):
    x = OnGPUByDLPack(old)
    assert view(x).stream == 1
    assert x.asked == [{"stream": 1, "max_version": (1, 0)}, {"stream": 1}][: 1 + old]


@pytest.mark.parametrize(("code", "bits"), [(2, 32), (4, 16)])
def test_dlpack_tensors_with_a_null_address_are_rejected(code, bits):
    """An empty tensor may have a NULL address."""
    with pytest.raises(codec.ArgumentError, match="null pointer"):
        codec.encode(Capsule(code, bits, 1000))
    assert codec.decode(codec.encode(Capsule(code, bits, 0)), like=torch.empty(0)).shape == (0,)


def test_torch_tensors_without_storage_are_rejected():
    """Meta, fake and resized tensors are rejected before they are read."""
    frame = codec.encode(np.zeros(10, np.float32))
    short = torch.zeros(10)
    short.untyped_storage().resize_(16)
    late = torch.zeros(40)[::4]
    late.untyped_storage().resize_(100)
    for t in (short, late):
        with pytest.raises(codec.ArgumentError, match="its storage has"):
            codec.encode(t)
    with pytest.raises(codec.ArgumentError, match="its storage has"):
        codec.decode(frame, out=short)

    def inside(t):
        with pytest.raises(codec.ArgumentError, match="vmap and grad"):
            codec.encode(t)
        with pytest.raises(codec.ArgumentError, match="vmap and grad"):
            codec.decode(frame, out=t)
        return t.sum()

    torch.vmap(inside)(torch.zeros(3, 10))
    torch.func.grad(inside)(torch.zeros(10))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inside(torch.zeros(10))
    for layout in (torch.strided, torch.jagged):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=layout)
        with pytest.raises(codec.ArgumentError, match="encode its parts"):
            codec.encode(nested)
    with pytest.raises(codec.ArgumentError):
        codec.encode(torch._efficientzerotensor(10))
    for t in (torch.zeros(0), torch.zeros(5).expand(3, 5), torch.zeros(4, 0)[:, :0], torch.zeros(())):
        assert torch.equal(codec.decode(codec.encode(t), like=t), t)


def test_torch_wrapper_subclasses_are_rejected():
    """A subclass whose values lie in inner tensors, such as DTensor, has no address to read or write."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return args[0] if function in (torch.ops.aten.detach.default,) else NotImplemented

    x, frame = torch.randn(9_000), codec.encode(torch.randn(9_000))
    w = Wrapper(x)
    sgd = codec.optimizers.SGD(0.1)
    for call in (
        lambda: codec.encode(w),
        lambda: codec.encode(x, codec.Sign(), residual=w),
        lambda: codec.encode(x, codec.Truncate().bind(sgd, theta=w)),
        lambda: codec.decode(frame, out=w),
        lambda: codec.accumulate(frame, w),
        lambda: codec.advise([w], "1gbit"),
    ):
        with pytest.raises(codec.ArgumentError, match="a Wrapper has no memory of its own"):
            call()
    assert codec.decode(codec.encode(Wrapper(torch.zeros(0)))).shape == (0,)


def test_result_has_the_device_of_like():
    """A device that decode() cannot write to is an error; torch's default device is ignored."""
    frame = codec.encode(np.zeros(10, np.float32))
    for like in (torch.zeros(1, device="meta"), OnGPU()):
        with pytest.raises(codec.EngineError, match="like="):
            codec.decode(frame, like=like)
        with pytest.raises(codec.EngineError, match="like="):
            codec.reduce([frame], like=like)
    like = torch.zeros(1)
    with torch.device("meta"):
        assert codec.decode(frame, like=like).device == like.device


class OnGPU:
    def __dlpack_device__(self):
        return (2, 0)


def test_writes_increment_the_version_of_torch_tensors():
    """Autograd detects that a saved tensor was changed in place."""
    x = torch.randn(1000)
    frame, shared = codec.encode(x), torch.zeros(1000)
    for call in (
        lambda t: codec.decode(frame, out=t),
        lambda t: codec.accumulate(frame, t),
        lambda t: codec.reduce([frame], out=t),
        lambda t: codec.encode(x, codec.Sign(), residual=t),
        lambda t: codec.encode(torch.ones(7), out=t.view(torch.uint8)),
    ):
        weight = torch.ones(1000, requires_grad=True)
        y = (weight * shared).sum()
        call(shared)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with torch.inference_mode():
        codec.decode(frame, out=torch.zeros(1000))


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
    """Length, items, slices, comparison, joining, files, sockets and decoding; both are read-only."""
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
    """The default is 1 GiB, or 256 times the frame's size if that is more; `out` has no limit."""
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
    """Frames store that values were clipped, but not the threshold, and no seed."""
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
    """A single tensor has no segments."""
    model = torch.nn.Linear(30, 40)
    expected = [(0, (40, 30)), (1200, (40,))]
    for given in (model, model.parameters(), dict(model.named_parameters()), [(40, 30), [40]]):
        assert codec.segments(given) == expected
    for bad in (model.weight, np.zeros((3, 4)), np.float32(1), None, 5, [5], ["ab"]):
        with pytest.raises(codec.ArgumentError, match=r"segment|dimension"):
            codec.segments(bad)


def test_inspect_and_verify_commands(tmp_path, capsys):
    """Both print text or JSON."""
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
