"""Choice of the engine, and the reasons that codec.engines() and errors state for unavailable engines."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from codec.tensors.dlpack import DLTensor
from codec.tensors.view import view, view_output

X = np.linspace(-1, 1, 9_000, dtype=np.float32)
FRAME = codec.encode(X)


class CudaArray:
    """Array on a GPU that exports only ``__cuda_array_interface__``. Its address is invalid, so reading it crashes."""

    def __init__(self, shape=(9_000,), typestr="<f4", strides=None, readonly=False, **more):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "strides": strides, "data": (0x7F0000000000, readonly), "version": 3,
            **more,
        }  # fmt: skip


class DLPackTensor:
    """Tensor whose DLPack export names a given device."""

    def __init__(self, device=(2, 3), code=2, bits=32, shape=(90, 100), strides=None):
        import ctypes

        self.device = device
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        self.t = DLTensor(0x7F0000000000, *device, len(shape), code, bits, 1, self.shape, self.strides, 64)
        self.memory = (ctypes.c_byte * 128)()
        ctypes.memmove(self.memory, ctypes.addressof(self.t), ctypes.sizeof(self.t))
        self.new = ctypes.pythonapi.PyCapsule_New
        self.new.restype = ctypes.py_object
        self.new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

    def __dlpack__(self, **kw):
        import ctypes

        return self.new(ctypes.addressof(self.memory), b"dltensor", None)

    def __dlpack_device__(self):
        return self.device


def test_engines_lists_every_engine_with_the_reason_why_it_is_unavailable():
    """codec.engines() maps an available engine to None, and another one to the reason that calls with it raise."""
    engines = codec.engines()
    assert set(engines) == {"native", "numba", "cuda"}
    assert engines["native"] is None
    for name, why_not in engines.items():
        calls = (
            lambda: codec.encode(X, options=codec.options(engine=name)),  # noqa: B023
            lambda: codec.decode(FRAME, options=codec.options(engine=name)),  # noqa: B023
            lambda: codec.accumulate(FRAME, X.copy(), options=codec.options(engine=name)),  # noqa: B023
            lambda: codec.reduce([FRAME], options=codec.options(engine=name)),  # noqa: B023
            lambda: codec.encode_many([X], options=codec.options(engine=name)),  # noqa: B023
            lambda: codec.decode_many([FRAME], options=codec.options(engine=name)),  # noqa: B023
        )
        for call in calls:
            if why_not is None:
                call()
            else:
                said = re.escape(f"the {name} engine cannot be used on this machine: {why_not}")
                with pytest.raises(codec.EngineError, match=said):
                    call()
    for name in ("abacus", "request", "", 5, ["native"]):
        with pytest.raises(codec.EngineError, match="engine must be one of native, numba, cuda"):
            codec.options(engine=name)


def test_view_describes_contiguous_tensors_on_a_device():
    """A view of a tensor on a device has dtype, shape, address, device and stream, by every array protocol."""
    v = view(CudaArray((3, 3_000), stream=7))
    assert (v.dtype, v.shape, v.address, v.nbytes) == ("float32", (3, 3_000), 0x7F0000000000, 36_000)
    assert (v.device, v.stream) == ("cuda", 7)
    assert view(CudaArray((5, 2), "|u1", strides=(2, 1))).dtype == "uint8"
    assert view(CudaArray((5,), "|b1")).dtype == "bool"
    v = view(DLPackTensor())
    assert (v.dtype, v.shape, v.address, v.device) == ("float32", (90, 100), 0x7F0000000040, "cuda:3")
    assert view(DLPackTensor(code=4, bits=16)).dtype == "bfloat16"
    assert view(DLPackTensor(code=10, bits=8)).dtype == "float8_e4m3fn"
    assert view(DLPackTensor((10, 0))).device == "rocm:0"
    assert view(DLPackTensor((77, 1))).device == "device type 77:1"
    v = view(torch.zeros(3, 4, device="meta"))
    assert (v.dtype, v.shape, v.nbytes, v.device) == ("float32", (3, 4), 48, "meta")
    for x in (CudaArray((5, 2), strides=(4, 20)), DLPackTensor(strides=(1, 90))):
        with pytest.raises(codec.ArgumentError, match="copy it to contiguous memory first"):
            view(x)
    for x in (CudaArray(typestr="<c8"), CudaArray(typestr=">f4"), DLPackTensor(code=5), DLPackTensor(bits=24)):
        with pytest.raises(codec.ArgumentError, match="cannot be encoded"):
            view(x)
    with pytest.raises(codec.ArgumentError, match="read-only"):
        view_output(CudaArray(readonly=True))


@pytest.mark.parametrize("x", [CudaArray(), DLPackTensor(shape=(9_000,))])
def test_native_engine_rejects_gpu_arguments_by_name(x):
    """The native engine rejects a GPU argument by its name, reads nothing from the GPU and writes no destination."""
    left, theta, sgd, truncate = np.full(9_000, 7, np.float32), X.copy(), codec.optimizers.SGD(0.1), codec.Truncate()
    out, gpu = np.full(40_000, 7, np.uint8), CudaArray(typestr="|u1")
    calls = {
        "x": [
            lambda: codec.encode(x, codec.Sign(), residual=left, out=out),
            lambda: codec.encode(x, options=codec.options(engine="native")),
            lambda: codec.encode_many([X, x]),
        ],
        "residual=": [lambda: codec.encode(X, codec.Sign(), residual=x, out=out)],
        "out=": [
            lambda: codec.encode(X, codec.Sign(), residual=left, out=gpu),
            lambda: codec.decode(FRAME, out=x),
            lambda: codec.decode(FRAME, out=x, options=codec.options(engine="native")),
            lambda: codec.accumulate(FRAME, x),
            lambda: codec.reduce([FRAME], out=x),
            lambda: codec.decode_many([FRAME, FRAME], out=[left, x]),
        ],
        "like=": [lambda: codec.decode(FRAME, like=x), lambda: codec.reduce([FRAME], like=x)],
        "frame": [
            lambda: codec.decode(gpu, out=left),
            lambda: codec.decode(gpu),
            lambda: codec.inspect(gpu),
            lambda: codec.verify(gpu),
            lambda: codec.reduce([FRAME, gpu], out=left),
            lambda: codec.accumulate(gpu, left),
        ],
        "theta": [
            lambda: codec.encode(X, truncate.bind(sgd, theta=x), residual=left),
            lambda: codec.Codebook.from_tensors(X, spec=truncate.bind(sgd, theta=x)),
            lambda: sgd.levels(X, x),
        ],
        "g": [lambda: sgd.levels(x, theta)],
        "tensor": [lambda: codec.Codebook.from_tensors(x)],
        "data": [lambda: codec.Codebook.from_bytes(gpu)],
    }
    for name, all_of_them in calls.items():
        for call in all_of_them:
            with pytest.raises(codec.EngineError, match=rf"{name}.* is on cuda.*copy it to host memory first"):
                call()
    assert (left == 7).all()
    assert (out == 7).all()
    with pytest.raises(codec.EngineError, match="cuda engine cannot be used on this machine"):
        codec.encode(x)


def test_meta_tensors_are_rejected():
    """Meta tensors, which have no values, are rejected with a message that suggests no remedy."""
    for call in (
        lambda: codec.encode(torch.zeros(9_000, device="meta")),
        lambda: codec.decode(FRAME, like=torch.zeros(1, device="meta")),
        lambda: codec.decode(FRAME, out=torch.zeros(9_000, device="meta")),
    ):
        with pytest.raises(codec.EngineError, match="meta, where tensors have no values"):
            call()


def test_default_device_of_torch_does_not_move_results():
    torch.set_default_device("meta")
    try:
        like = torch.zeros(1, device="cpu")
        for y in (
            codec.decode(FRAME, like=like),
            codec.reduce([FRAME], like=like),
            codec.decode_many([FRAME], like=like)[0],
        ):
            assert y.device.type == "cpu"
            assert (y.numpy() == X).all()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "dtype",
    ["f4", "float32", "<f4", np.float32, np.dtype("f4"), ">f4", torch.float32, np.single],
)
def test_bound_takes_every_numpy_dtype_name(dtype):
    assert codec.bound(9_000, dtype) == codec.bound(9_000, "float32")


def test_bound_takes_dtypes_of_python_ml_dtypes_and_torch():
    for dtype, name in (
        (float, "float64"), (int, "int64"), (bool, "bool"), ("half", "float16"), (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"), (torch.bfloat16, "bfloat16"), (torch.bool, "bool"),
        (torch.float8_e4m3fn, "float8_e4m3fn"), ("bfloat16", "bfloat16"), ("u2", "uint16"),
    ):  # fmt: skip
        assert codec.bound(9_000, dtype) == codec.bound(9_000, name)
    for bad in ("complex64", complex, "M8[s]", "f4,f4", "hello", "2(", None, 5, object, [], torch.complex64, "O"):
        with pytest.raises(codec.ArgumentError, match="cannot be encoded"):
            codec.bound(3, bad)
