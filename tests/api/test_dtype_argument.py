"""dtype= reinterprets the bits of a tensor as another dtype of the same item size."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
import torch

import codec

N = 600
NOISE = np.random.default_rng(0).integers(0, 256, 8 * N, dtype=np.uint8)


def array(dtype):
    """Return N values of a numpy dtype with random bits."""
    return NOISE[: N * np.dtype(dtype).itemsize].view(dtype)


def tensor(dtype):
    """Return a torch tensor of N values with random bits."""
    return torch.from_numpy(NOISE[: N * dtype.itemsize].copy()).view(dtype)


class Exporter:
    """Object that exports a torch tensor by DLPack only."""

    def __init__(self, t):
        self.t = t

    def __dlpack__(self, **how):
        return self.t.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.t.__dlpack_device__()


PAIR = np.dtype([("real", "f2"), ("imag", "f2")])
TENSORS = {
    "bfloat16_loaded_by_numpy": (array("V2"), "bfloat16"),
    "complex64": (array("c8"), "uint64"),
    "datetime64": (array("M8[s]"), "int64"),
    "structure": (array(PAIR), "uint32"),
    "text": (array("S4"), "float32"),
    "int4": (array(ml_dtypes.int4), "uint8"),
    "float4": (array(ml_dtypes.float4_e2m1fn), "uint8"),
    "memoryview_of_complex64": (memoryview(array("c8")), "float64"),
    "torch_complex64": (tensor(torch.complex64), "uint64"),
    "torch_float4": (tensor(torch.float4_e2m1fn_x2), "uint8"),
    "torch_bits16": (tensor(torch.bits16), "float16"),
    "dlpack_complex64": (Exporter(tensor(torch.complex64)), "uint64"),
    "dlpack_float4": (Exporter(tensor(torch.float4_e2m1fn_x2)), "uint8"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_dtype_takes_bits_of_any_dtype(name):
    x, dtype = TENSORS[name]
    frame = codec.encode(codec.view(x, dtype))
    info = codec.inspect(frame)
    assert (info.dtype, info.shape) == (dtype, (N,))
    bits = codec.decode(frame, like=np.empty(0, f"u{info.tensor_nbytes // N}"))
    assert bits.tobytes() == NOISE[: bits.nbytes].tobytes()
    assert codec.encode_many([codec.view(x, dtype)] * 2) == [frame, frame]
    with pytest.raises(codec.ArgumentError, match=r"cannot be encoded; these can.*codec\.view\(x, dtype\)"):
        codec.encode(x)
    other = "uint16" if bits.itemsize != 2 else "uint32"
    with pytest.raises(
        codec.ArgumentError, match=f"has {bits.itemsize} bytes for each value, and cannot be read as {other}"
    ):
        codec.encode(codec.view(x, other))


@pytest.mark.parametrize("name", [name for name, (x, _) in TENSORS.items() if not isinstance(x, memoryview | Exporter)])
def test_decode_writes_bits_to_out_of_any_dtype(name):
    x, dtype = TENSORS[name]
    frame = codec.encode(codec.view(x, dtype))
    out = np.empty_like(x) if isinstance(x, np.ndarray) else torch.empty_like(x)
    assert codec.decode(frame, out=out) is out
    assert bytes(codec.encode(codec.view(out, dtype))) == frame
    wide = codec.encode(np.ones(N, np.uint16 if "16" not in dtype else np.uint32))
    with pytest.raises(codec.ArgumentError, match="bytes for each value"):
        codec.decode(wide, out=out)


def test_decode_makes_untyped_array_like_the_one_that_was_encoded():
    x = array("V2")
    y = codec.decode(codec.encode(codec.view(x, "bfloat16")), like=x)
    assert (y.dtype, y.tobytes()) == (x.dtype, x.tobytes())


def test_dtype_of_noncontiguous_and_conjugate_tensors():
    c = tensor(torch.complex64).reshape(20, 30)
    for x in (c.t(), c[:, ::3], c.conj(), c.conj().imag, torch._neg_view(c)):
        frame = codec.encode(codec.view(x, "uint64" if x.is_complex() else "float32"))
        y = codec.decode(frame, like=c).view(x.dtype)
        assert repr(y.tolist()) == repr(x.resolve_conj().resolve_neg().tolist())  # compared by repr, since NaN != NaN
    with pytest.raises(codec.ArgumentError, match="contiguous"):
        codec.decode(codec.encode(codec.view(c, "uint64")), out=c.conj())
    big = array("c8").astype(">c8")
    assert codec.encode(codec.view(big, "uint64")) == codec.encode(codec.view(array("c8"), "uint64"))


def test_dtype_refuses_python_objects():
    for x in (np.array([object()] * 3), np.zeros(3, [("a", object)])):
        for dtype in (None, "uint64"):
            with pytest.raises(codec.ArgumentError, match="Python objects"):
                codec.encode(codec.view(x, dtype))
        with pytest.raises(codec.ArgumentError, match="Python objects"):
            codec.decode(codec.encode(np.zeros(3, np.uint64)), out=x)


class Capsule:
    """DLPack capsule of 4,096 values whose shape and strides a test sets."""

    def __init__(self, shape, strides=None, *, ndim=None, code=2, bits=32, lanes=1, offset=0):
        from codec.tensors.dlpack import DLTensor

        class Managed(ctypes.Structure):
            _fields_ = (("t", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))

        numbers = [None if each is None else (ctypes.c_int64 * max(1, len(each)))(*each) for each in (shape, strides)]
        memory = np.ones(4096, np.float32)
        m = Managed(DLTensor(memory.ctypes.data, 1, 0, len(shape) if ndim is None else ndim, code, bits, lanes))
        m.t.byte_offset = offset
        pointer = ctypes.POINTER(ctypes.c_int64)
        m.t.shape, m.t.strides = (ctypes.cast(each, pointer) if each is not None else None for each in numbers)
        self.keep = m, numbers, memory

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.keep[0]), b"dltensor", None)


IMPOSSIBLE = {
    "negative_size": Capsule((-1,)),
    "negative_sizes": Capsule((-5, -3)),
    "large_size": Capsule((1 << 62,)),
    "large_product": Capsule((1 << 32, 1 << 32)),
    "large_strides": Capsule((10, 10), (1 << 61, 1)),
    "negative_rank": Capsule((4,), ndim=-1),
    "large_rank": Capsule((4,), ndim=1 << 30),
    "rank_9": Capsule((1,) * 9),
    "no_bits": Capsule((4,), bits=0),
    "no_lanes": Capsule((4,), lanes=0),
    "many_lanes": Capsule((4,), lanes=65535),
    "unknown_code": Capsule((4,), code=77),
    "odd_bits": Capsule((4,), bits=33),
    "wide_bool": Capsule((4,), code=6, bits=64),
    "large_offset": Capsule((4,), offset=1 << 63),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_encode_refuses_impossible_dlpack_tensors(name):
    with pytest.raises(codec.ArgumentError):
        codec.encode(IMPOSSIBLE[name])


def test_encode_accepts_unusual_dlpack_tensors():
    assert codec.decode(codec.encode(Capsule((0, 1 << 40)))).shape == (0, 1 << 40)
    assert codec.decode(codec.encode(Capsule((10, 10), (0, 0)))).tolist() == [[1.0] * 10] * 10
    assert codec.decode(codec.encode(Capsule((10, 10), (-10, 1), offset=400))).shape == (10, 10)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="numpy makes capsules of DLPack 1 since 2.1")
def test_encode_reads_versioned_dlpack_capsules():
    x = np.arange(N, dtype=np.float32)
    x.flags.writeable = False  # DLPack before version 1 has no read-only flag
    assert codec.encode(Exporter(x)) == codec.encode(x)


class CudaArray:
    """Object with a given ``__cuda_array_interface__``."""

    def __init__(self, said):
        self.__cuda_array_interface__ = said


GOOD = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}
WRONG = [
    None,
    {},
    {**GOOD, "shape": (-4,)},
    {**GOOD, "shape": None},
    {**GOOD, "shape": (1 << 62,)},
    {**GOOD, "typestr": ">f4"},
    {**GOOD, "typestr": "<f"},
    {**GOOD, "typestr": 5},
    {**GOOD, "typestr": "|b8"},
    {**GOOD, "typestr": "<f0"},
    {**GOOD, "data": 5},
    {**GOOD, "data": (None, False)},
    {**GOOD, "strides": (4, 4)},
    {**GOOD, "strides": "x"},
]


@pytest.mark.parametrize("said", WRONG, ids=str)
def test_encode_refuses_wrong_cuda_array_interfaces(said):
    with pytest.raises(codec.ArgumentError):
        codec.encode(CudaArray(said))


@pytest.mark.parametrize("device", [None, 5, (1,), ("a", "b"), (1 << 70, 0)], ids=str)
def test_encode_refuses_wrong_dlpack_devices(device):
    class Wrong(Capsule):
        def __dlpack_device__(self):
            return device

        def __dlpack__(self):
            return "no capsule"

    with pytest.raises(codec.CodecError):
        codec.encode(Wrong((4,)))
    with pytest.raises(codec.CodecError):
        codec.decode(codec.encode(np.ones(4)), out=Wrong((4,)))


def test_encode_names_encode_many_for_many_tensors():
    x = np.ones(3, np.float32)
    for many in ({"a": x}, [x, x], (x,)):
        with pytest.raises(codec.ArgumentError, match=r"encode_many\(\)"):
            codec.encode(many)


def test_dtype_takes_names_and_dtypes_of_numpy_torch_and_ml_dtypes():
    x = np.arange(9_000, dtype=np.uint16)
    frames = {codec.encode(codec.view(x, d)) for d in ("bfloat16", torch.bfloat16, ml_dtypes.bfloat16)}
    assert len(frames) == 1
    assert (
        codec.encode(codec.view(x, np.float16)) == codec.encode(codec.view(x, "f2")) == codec.encode(x.view(np.float16))
    )
    counts, spec = np.arange(256), codec.Truncate(2)
    books = {codec.Codebook.from_counts(counts, spec, d) for d in ("float16", np.float16, torch.float16)}
    assert len(books) == 1
    assert codec.CodebookRefresher(dtype=torch.float16).dtype == "float16"
    for bad in ([], None, "float31", 7):
        with pytest.raises(codec.ArgumentError, match="cannot be encoded"):
            codec.Codebook.from_counts(counts, dtype=bad)
        with pytest.raises(codec.ArgumentError, match="cannot be encoded"):
            codec.CodebookRefresher(dtype=bad)
