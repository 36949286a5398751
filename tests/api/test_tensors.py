"""Tensors of every library are encoded without a copy and decoded to their own type."""

import array
import gc
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from codec.tensors.dlpack import DLTensor
from codec.tensors.view import view


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
    """Tensor that supports the DLPack protocol only."""

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


def test_masked_values_are_rejected():
    """A masked array with masked values is rejected; one without is encoded like any array."""
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
        self.memory = (ctypes.c_byte * 128)()  # memory of a DLManagedTensor whose context and deleter are NULL
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
    """GPU array of another library. ``old``: its __dlpack__ has no parameter max_version."""

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
    """A DLPack tensor with a NULL address is rejected unless it is empty."""
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
    """decode() returns a tensor on the device of `like`, whatever torch's default device, or raises if it cannot."""
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


@pytest.mark.parametrize(
    "x", [np.zeros((50, 40)).T, torch.zeros(50, 40).T, torch.zeros(50, 40)], ids=["numpy", "torch", "contiguous"]
)
def test_arrays_of_views_keep_the_owner_alive(x):
    """The values of a tensor that is not contiguous are in a copy, which lives as long as any array over it."""
    v = view(x)
    owner, part = weakref.ref(v.owner), v.array(np.uint32)[7:9].data
    del v, x
    gc.collect()
    assert owner() is not None
    assert part.nbytes == 8
    del part
    gc.collect()
    assert owner() is None


class Unexportable:
    """Array whose library has no DLPack type for its dtype, such as JAX for int4."""

    dtype = "int4"

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        raise RuntimeError("UNIMPLEMENTED: type S4 has no DLPack equivalent\nand a trace")


def test_dlpack_producers_that_fail_are_rejected_with_their_dtype():
    with pytest.raises(codec.ArgumentError, match=r"Unexportable of dtype int4 .* no DLPack equivalent; convert"):
        view(Unexportable())
