"""The CUDA engine works on the emulated CuPy (tests/support/cupy_on_cpu.py), whose interface equals CuPy's."""

import contextlib
import importlib
import inspect
import re
import types
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from codec import optimizers
from codec.engines.cuda import cupy_backend
from support import cupy_on_cpu
from support.cupy_on_cpu import Stream, cupy
from support.device import build

F32 = np.float32
X = np.random.default_rng(0).standard_normal(20_000, F32)


@pytest.fixture
def machine(monkeypatch):
    return cupy_on_cpu.install(monkeypatch, build())


def parameters(call):
    """Return a callable's parameter names, for Cython functions as read from the docstring's first line."""
    try:
        names = list(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        names = ["args"]
    if "args" in names:
        written = re.search(r"\(([^)]*)\)", call.__doc__)[1]
        names = [part.split("=")[0].split()[-1].strip("*") for part in written.split(",") if part]
    return [name for name in names if name not in ("self", "cls")]


def same(ours, real, path):
    """Return the differences between the emulation and CuPy: missing names and different signatures."""
    if inspect.ismodule(ours):
        for name in vars(ours).keys() - vars(types.ModuleType("")).keys() - {"__version__"}:
            same(getattr(ours, name), getattr(real, name), f"{path}.{name}")
    elif isinstance(ours, type):
        assert isinstance(real, type), path
        # An instance, if there is one, because some attributes exist on instances only
        one = getattr(real, "null", real)
        for name, member in vars(ours).items():
            if isinstance(member, property):
                assert not callable(getattr(real, name)), f"{path}.{name}"
            elif inspect.isroutine(getattr(ours, name)) and name[0] != "_":
                same(getattr(ours, name), getattr(real, name), f"{path}.{name}")
        assert all(hasattr(one, name) for name in inspect.get_annotations(ours) if name[0] != "_"), path
        assert all(hasattr(real, name) for name in vars(ours) if name in ("__add__", "__enter__", "__dlpack_device__"))
        if "__init__" in vars(ours):
            called_alike(ours, real, path)
    elif inspect.isroutine(ours):
        assert not isinstance(real, type), path
        called_alike(ours, real, path)
    else:
        assert type(ours) is type(real), path
        assert type(ours) is not int or ours == real, path


def called_alike(ours, real, path):
    expected = parameters(ours)
    assert parameters(real)[: len(expected)] == expected, path


def test_emulation_has_the_interface_of_cupy():
    real = importlib.import_module("cupy")
    same(cupy, real, "cupy")
    assert real.cuda.driver.moduleGetGlobal.__doc__.endswith("-> intptr_t")  # the emulation relies on this return value
    assert hasattr(real.cuda.runtime.PointerAttributes, "device")
    assert issubclass(real.cuda.runtime.CUDARuntimeError, RuntimeError)


class ArrayOnStream:
    """Array of another library that is ready on a given stream."""

    def __init__(self, array, stream):
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.data.ptr, False),
            "version": 3,
            "stream": stream.ptr,
        }


def test_streams_wait_for_each_other(machine):
    """The engine's work waits for producers on other streams, and later work on those streams waits for the engine."""
    a, b = Stream(), Stream()
    spec, metric, theta = codec.Truncate(), optimizers.SGD(0.1), np.sqrt(np.abs(X))
    with a:
        x = ArrayOnStream(cupy.array(X), a)
    with b:
        state = {"theta": ArrayOnStream(cupy.array(theta), b)}
    frame = codec.encode(X, spec.bind(metric, theta=theta))
    out = cupy.empty(codec.bound(X.shape, "float32", spec), np.uint8)
    assert bytes(codec.encode(x, spec.bind(metric, **state)).get()) == frame
    pending = codec.encode_async(x, spec.bind(metric, **state), out=out)
    with b:
        state["theta"].array.set(-theta)
    b.synchronize()
    assert bytes(pending.wait().get()) == frame


def test_current_stream_is_unchanged(machine):
    """Calls leave the current stream unchanged, whether set by `with` or by `use`, and also after an error."""
    a, b, other = Stream(), Stream(), Stream()
    x = cupy.array(X)
    Stream.null.synchronize()
    for work in (lambda: codec.encode(ArrayOnStream(x, other)), lambda: codec.decode(codec.encode(X)[:-1], like=x)):
        with a:
            for now in (a, b):
                now.use()
                with contextlib.suppress(codec.FrameError):
                    work()
                assert cupy.cuda.get_current_stream() is now
        assert cupy.cuda.get_current_stream() is Stream.null


def test_old_gpus_are_rejected_by_name(monkeypatch):
    """A GPU that is too old is rejected by name; other GPUs of the machine are accepted."""
    for capabilities, said in (
        ((), "there is no GPU"),
        (("75",), r"cuda:0 has compute capability 7\.5, but at least 8\.0"),
        (("75", "70"), r"cuda:1 has compute capability 7\.0"),
    ):
        cupy_on_cpu.install(monkeypatch, build(), capabilities)
        assert re.match(said, codec.engines()["cuda"])
        with pytest.raises(codec.EngineError, match=said):
            codec.encode(X, options=codec.options(engine="cuda"))
    for capabilities in (("80",), ("121", "75"), ("75", "90")):
        cupy_on_cpu.install(monkeypatch, build(), capabilities)
        assert codec.engines()["cuda"] is None
    with pytest.raises(codec.EngineError, match="cuda:0 has"):
        codec.encode(X, options=codec.options(engine="cuda"))


@pytest.mark.parametrize("mode", [cupy_on_cpu.GLOBAL, cupy_on_cpu.RELAXED])
def test_graph_capture(machine, mode):
    """Calls captured by torch's or CuPy's capture mode, which forbids allocations, run on new values at replay."""
    spec, s = codec.Float8(entropy=True), Stream()
    left, out = (cupy.empty(n, dtype) for n, dtype in ((X.shape, F32), (codec.bound(X.shape, "float32", spec), "u1")))
    x = cupy.array(X)
    codec.encode_async(x, spec, out=out, residual=left)  # the first call runs on another stream than the capture
    with s:
        s.begin_capture(mode)
        pending = codec.encode_async(x, spec, out=out, residual=left)
        graph = s.end_capture()
        assert machine.mode == cupy_on_cpu.GLOBAL
        for y in (X[::-1], X * F32(3)):
            x.set(y)
            graph.launch()
            # Would overwrite memory of the graph that was freed by mistake
            codec.encode(cupy.array(np.ones(30_000, F32)))
            kept = np.empty_like(X)
            assert bytes(pending.wait().get()) == codec.encode(y, spec, residual=kept)
            assert left.get().tobytes() == kept.tobytes()


def test_graph_capture_of_a_synchronizing_call_is_an_error(machine):
    """A synchronizing call in a capture is an error that does not end the capture; later calls succeed."""
    s, x = Stream(), cupy.array(X)
    frame, out = codec.encode(x).get(), cupy.empty(codec.bound(X.shape, "float32"), "u1")
    there = cupy.array(frame)
    codec.encode_async(x, out=out)
    with s:
        s.begin_capture()
        for call in (
            lambda: codec.encode(x),
            lambda: codec.encode_many([x, x]),
            lambda: codec.decode(there, out=x),
            lambda: codec.decode_many([there]),
            lambda: codec.reduce([there, there], out=x),
            lambda: codec.accumulate(there, x),
        ):
            with pytest.raises(codec.EngineError, match="a call that waits for the GPU cannot be captured"):
                call()
        pending = codec.encode_async(x, out=out)
        s.end_capture().launch()
        assert machine.mode == cupy_on_cpu.GLOBAL
        assert pending.wait().get().tobytes() == codec.encode(x).get().tobytes() == frame.tobytes()


def test_default_stream_during_a_global_capture_is_an_error(machine):
    """Using or querying the default stream during a global capture is an error that does not end the capture."""
    s, x = Stream(), cupy.array(X)
    out = cupy.empty(codec.bound(X.shape, "float32"), "u1")
    codec.encode(x)
    with s:
        s.begin_capture(cupy_on_cpu.GLOBAL)
    with pytest.raises(codec.EngineError, match="default stream cannot be used while another stream is captured"):
        codec.encode_async(x, out=out)
    assert cupy.cuda.get_current_stream() is Stream.null
    with s:
        pending = codec.encode_async(x, out=out)
        s.end_capture().launch()
        assert bytes(pending.wait().get()) == codec.encode(X)


@pytest.mark.parametrize("nbytes", [100, 100_000])
def test_host_buffers_live_until_their_copy_completes(machine, nbytes):
    """A host buffer, pinned or not, is released when its copy completes, or at once if the copy never began."""
    device, there = cupy_backend._gpu(0), cupy.empty(nbytes, np.uint8)
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    expected, alive = data.tobytes(), weakref.ref(data)
    with device.on(0):
        device.upload(there.data.ptr, data)
        del data
        # Small buffers are copied to pinned memory, so that the source may be freed
        assert (alive() is None) == (nbytes == 100)
        assert there.get().tobytes() == expected
        first, second = (getattr(device.upload(there.data.ptr, bytes(nbytes)), "ptr", 0) for _ in range(2))
        assert alive() is None
        assert first != second or nbytes > 100
        Stream.null.synchronize()
        assert getattr(device.upload(there.data.ptr, bytes(nbytes)), "ptr", 0) in (first, second)
        Stream.null.synchronize()
        with pytest.MonkeyPatch.context() as m:
            m.setattr(cupy.cuda.runtime, "memcpyAsync", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                device.upload(there.data.ptr, bytes(nbytes))
        assert not device._sent


def test_sources_of_copies_are_dropped_in_order(machine):
    """Sources of completed copies are released in order, up to the first copy still in flight."""
    device, there = cupy_backend._gpu(0), cupy.empty(100, np.uint8)
    streams = [Stream(), Stream(), Stream()]
    for s in streams:
        with device.on(s.ptr):
            device.upload(there.data.ptr, bytes(100))
    streams[1].synchronize()
    device._drop_sent()
    assert len(device._sent) == 3
    streams[0].synchronize()
    device._drop_sent()
    assert len(device._sent) == 1


def test_memory_beside_torch_tensors_comes_from_torch(machine, monkeypatch):
    made = []

    def empty(nbytes, **how):
        made.append((nbytes, how))
        return torch.zeros(nbytes, dtype=how["dtype"])

    x = torch.zeros(3)
    monkeypatch.setattr(torch, "empty", empty)
    address, owner = cupy_backend._gpu(0).allocate(1000, x)
    assert made == [(1000, {"dtype": torch.uint8, "device": "cuda:0"})]
    assert owner.data_ptr() == address
    cupy_backend._gpu(0).allocate(1000, cupy.array(X))
    assert len(made) == 1


def test_frames_on_the_device_take_memory_of_their_own_size(machine):
    """A frame is copied to memory of its own size, unless it nearly fills the memory of its bound."""
    for spec, x, own in (
        (codec.Lossless(), np.zeros(20_000, np.uint8), True),
        (codec.Sign(), X, False),
        (codec.Lossless(), np.random.default_rng(1).integers(0, 256, 20_000, np.uint8), False),
    ):
        frame, expected = codec.encode(cupy.array(x), spec), codec.encode(x, spec)
        assert frame.get().tobytes() == expected
        n = len(expected) if own else codec.bound(x.shape, x.dtype, spec, segments=())
        # If not `own`, the frame is a part of the memory allocated for its bound
        assert len(frame.data._mem._memory) == -(-n // 512) * 512


def test_dtypes_that_cupy_lacks(machine):
    x = X.astype(ml_dtypes.float8_e4m3fn)
    frame = cupy.array(np.frombuffer(codec.encode(x), np.uint8))
    with pytest.raises(codec.EngineError, match="CuPy has no float8_e4m3fn"):
        codec.decode(frame, like=cupy.empty(0, F32))
    assert codec.decode(frame).get().tobytes() == x.tobytes()
    y = X.astype(ml_dtypes.bfloat16)
    decoded = codec.decode(cupy.array(np.frombuffer(codec.encode(y), np.uint8)))
    assert (decoded.dtype, decoded.get().tobytes()) == (y.dtype, y.tobytes())
