"""libcodec_cuda on a GPU, or on a CUDA driver for tests that runs kernels on the CPU; its calls for numpy arrays."""

import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from codec import _call
from codec._c import PACKAGE
from codec._c import library as native
from codec._c.library import DTYPES, ffi, lib
from codec._c.spec_structs import spec_struct
from codec.specs import Spec
from support import device

ROOT = Path(__file__).parents[2]
API, TESTS = ROOT / "native/cuda_api", ROOT / "native/tests/cuda_api"
INCLUDED = [*device.INCLUDED, f"-I{API}", f"-I{API / 'src'}", f"-I{API / 'include'}"]
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]
C = ["gcc", "-std=c11", "-O1", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", *WARNINGS, "-Wstrict-prototypes"]
DRIVER = "libcuda_on_cpu.so.1"  # not libcuda.so.1: CuPy and NVRTC would load it, and crash
ALIGNMENT = 256  # bytes, of a workspace


def compiled(name: str, command: Sequence[str]) -> Path:
    """Return the library that a command compiles; run it if a source or the command has changed."""
    folders = "native/cuda_api", "native/tests/cuda_api", "native/include/codec", "native/src/exact", "native/cuda"
    return device.compiled(command, folders, f"cuda_api/{name}")


def kernels(options: Sequence[str] = ()) -> Path:
    """Return the kernels of native/cuda_api for the CPU."""
    unused = "-Wno-unused-function"  # of the headers of native/cuda
    return compiled("kernels", ["g++", *device.FLAGS, unused, *options, *INCLUDED, str(TESTS / "kernels.cc")])


def driver(*libraries: str) -> ctypes.CDLL:
    """Load the driver for tests, with the libraries that have the kernels. dlopen(DRIVER) finds it from now on."""
    command = ["g++", "-std=c++20", "-O1", "-g1", "-fPIC", "-shared", *WARNINGS, "-Wno-missing-field-initializers"]
    path = compiled("driver", [*command, f"-Wl,-soname,{DRIVER}", str(TESTS / "libcuda.cc")])
    fake = ctypes.CDLL(str(path))
    fake.fake_cuda_log.restype = ctypes.c_char_p
    for library in libraries:
        fake.fake_cuda_kernels(library.encode())
    return fake


def library_command(images: Path) -> list[str]:
    """Return the command that compiles libcodec_cuda with these images of kernels, without its output."""
    folder, name = Path(native._path).resolve().parent, Path(native._path).name
    sources = map(str, sorted((API / "src").glob("*.c")))
    links = [f"-L{folder}", f"-l:{name}", f"-Wl,-rpath,{folder}", "-Wl,--no-undefined", "-ldl", "-pthread"]
    return [*C, f'-DCODEC_CUDA_DRIVER="{DRIVER}"', *INCLUDED, *sources, str(images), *links]


def library() -> Path:
    """Return libcodec_cuda, with images for the driver for tests."""
    return compiled("codec_cuda", library_command(TESTS / "images.c"))


def decisions() -> Path:
    """Return libcodec_cuda with functions that return the decisions of its host (native/tests/cuda_api/layout_*.c)."""
    command, replaced = library_command(TESTS / "images.c"), {"encode.c", "decode.c"}
    sources = [argument for argument in command if Path(argument).name not in replaced]
    return compiled("codec_cuda_decisions", [*sources, str(TESTS / "layout_encode.c"), str(TESTS / "layout_decode.c")])


def installed() -> Path:
    """Return the package's libcodec_cuda, which has kernels for GPUs."""
    path = PACKAGE / "lib/libcodec_cuda.so"
    assert path.exists(), "the package has no libcodec_cuda: install it with `CODEC_CUDA=1 pip install .`"
    return path


class EncodeItem(ctypes.Structure):
    """codec_cuda_encode_item."""

    _fields_ = [
        ("struct_nbytes", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("plan", ctypes.c_void_p),
        ("tensor", ctypes.c_void_p),
        ("frame", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("result", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("stream", ctypes.c_uint64),
        ("base", ctypes.c_void_p),
    ]


class DecodeItem(ctypes.Structure):
    """codec_cuda_decode_item."""

    _fields_ = [
        ("struct_nbytes", ctypes.c_uint32),
        ("into", ctypes.c_uint32),
        ("plan", ctypes.c_void_p),
        ("frame", ctypes.c_void_p),
        ("frame_nbytes", ctypes.c_uint64),
        ("frame_nbytes_at", ctypes.c_void_p),
        ("tensor", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("weight", ctypes.c_float),
        ("divide", ctypes.c_float),
        ("base", ctypes.c_void_p),
    ]


class Result(NamedTuple):
    """codec_cuda_result."""

    nbytes: int
    status: int
    block: int


class Gpu:
    """CUDA's own driver, in place of the one for tests. Memory is managed: host and GPU use the same addresses."""

    def __init__(self) -> None:
        self._cuda: Any = importlib.import_module("cupy").cuda

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return memory of host and GPU."""
        memory = self._cuda.malloc_managed(nbytes)
        array = (ctypes.c_uint8 * nbytes).from_address(memory.ptr)
        array.memory = memory  # freed with the array
        return np.frombuffer(array, np.uint8)

    def capture(self, submit: Callable[[ctypes.c_void_p], None]) -> Callable[[], None]:
        """Capture what `submit` submits to a stream in a graph; return a function that runs the graph."""
        stream = self._cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            submit(ctypes.c_void_p(stream.ptr))
            graph = stream.end_capture()

        def run() -> None:
            graph.launch(stream)
            stream.synchronize()

        return run

    def fake_cuda_log(self) -> bytes:
        """Wait for all work; raise the driver's error if it has failed."""
        self._cuda.runtime.deviceSynchronize()
        return b""


class Memory:
    """Device memory, which is filled with a pattern, with a guard on both sides of it."""

    allocate = staticmethod(functools.partial(np.empty, dtype=np.uint8))

    def __init__(self, nbytes: int, data: bytes | None = None) -> None:
        self._all = self.allocate(nbytes + 3 * ALIGNMENT)
        self._all.fill(0xE5)
        self._at = -self._all.ctypes.data % ALIGNMENT + ALIGNMENT
        self.bytes = self._all[self._at : self._at + nbytes]
        if data is not None:
            self.bytes[: len(data)] = np.frombuffer(data, np.uint8)

    @property
    def address(self) -> int:
        """Return the address, a multiple of 256."""
        return int(self._all.ctypes.data) + self._at

    def intact(self) -> bool:
        """Return whether nothing was written around the memory."""
        end = self._at + len(self.bytes)
        return bool((self._all[: self._at] == 0xE5).all() and (self._all[end:] == 0xE5).all())


class Failed(Exception):
    """A function of libcodec_cuda returned a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def _check(status: int) -> None:
    if status:
        raise Failed(status)


def _address(cdata: Any) -> int:
    return int(ffi.cast("uintptr_t", cdata))


class Cuda:
    """Open device of libcodec_cuda, and calls for arrays of numpy, each with memory of its own."""

    def __init__(self, fake: Any, path: Path) -> None:
        self.fake, self.lib = fake, ctypes.CDLL(str(path))
        self.lib.codec_cuda_bound.restype = ctypes.c_uint64
        self.lib.codec_cuda_strerror.restype = ctypes.c_char_p
        device = ctypes.c_void_p()
        _check(self.lib.codec_cuda_open(0, ctypes.byref(device)))
        self.device, self._plans = device, dict[Any, ctypes.c_void_p]()

    def plan(self, spec: Spec, dtype: str, shape: tuple[int, ...], segments: bytes | None = None) -> ctypes.c_void_p:
        """Return a plan; plans are kept. ``segments``: packed codec_segments."""
        key = spec, dtype, shape, segments
        if key not in self._plans:
            self._plans[key] = self.new_plan(*key)
        return self._plans[key]

    def new_plan(self, spec: Spec, dtype: str, shape: tuple[int, ...], segments: bytes | None) -> ctypes.c_void_p:
        """Return a new plan."""
        like, plan, size = _call.new_tensor(DTYPES[dtype], shape), ctypes.c_void_p(), ffi.sizeof("codec_segment")
        count = len(segments or b"") // size
        args = self.device, ctypes.c_void_p(_address(spec_struct(spec))), ctypes.c_void_p(_address(like)), segments
        _check(self.lib.codec_cuda_plan_open(*args, ctypes.c_uint64(count), ctypes.byref(plan)))
        return plan

    def run(self, what: str, items: Sequence[Any], *flags: int) -> None:
        """Encode or decode items in a workspace of exactly the size that is asked for."""
        workspace = self.workspace(what, items)
        status = self.submit(what, items, *flags, workspace=workspace)
        said = self.fake.fake_cuda_log().decode()
        assert "error" not in said, said
        assert workspace.intact()
        _check(status)

    def workspace(self, what: str, items: Sequence[Any]) -> Memory:
        """Return memory for encoding or decoding items."""
        kind: Any = type(items[0])
        size, nbytes = getattr(self.lib, f"codec_cuda_{what}_workspace"), ctypes.c_uint64()
        _check(size((kind * len(items))(*items), ctypes.c_size_t(len(items)), ctypes.byref(nbytes)))
        return Memory(nbytes.value)

    def submit(self, what: str, items: Sequence[Any], *flags: int, workspace: Memory, stream: Any = None) -> int:
        """Encode or decode items on a stream; return the status."""
        kind: Any = type(items[0])
        args = ctypes.c_void_p(workspace.address), ctypes.c_uint64(len(workspace.bytes)), stream
        call, array = getattr(self.lib, f"codec_cuda_{what}"), (kind * len(items))(*items)
        return int(call(array, ctypes.c_size_t(len(items)), *[ctypes.c_uint32(flag) for flag in flags], *args))

    def encode(self, *asked: "Encode") -> list[tuple[Result, bytes]]:
        """Encode tensors in one call; return results and frames."""
        self.run("encode", [a.item(self) for a in asked])
        return [a.finish() for a in asked]

    def decode(self, *asked: "Decode", flags: int = 0) -> list[tuple[Result, bytes]]:
        """Decode frames in one call; return results and the tensors' bytes."""
        self.run("decode", [a.item(self) for a in asked], flags)
        return [a.finish() for a in asked]


def _result(memory: Memory) -> Result:
    assert memory.intact()
    nbytes, rest = np.frombuffer(memory.bytes, "<u8")
    return Result(int(nbytes), int(rest) & 0xFFFFFFFF, int(rest) >> 32)


class Encode:
    """Tensor to encode.

    Parameters
    ----------
    x : array
    spec : Spec
    dtype : str
    residual : array of float32, optional
        Receives the residual.
    feedback : bool, optional
        Add `residual` to the tensor.
    capacity : int, optional
        Bytes of the frame's memory; the bound by default.
    base : array, optional
        Base of Delta.
    """

    def __init__(
        self,
        x: np.ndarray,
        spec: Spec,
        dtype: str,
        *,
        segments: bytes | None = None,
        residual: np.ndarray | None = None,
        feedback: bool = False,
        levels: np.ndarray | None = None,
        stream: int = 0,
        capacity: int | None = None,
        base: np.ndarray | None = None,
    ) -> None:
        self.key = spec, dtype, x.shape, segments
        self.base = None if base is None else Memory(base.nbytes, base.tobytes())
        self.tensor, self.residual = Memory(x.nbytes, x.tobytes()), residual
        self.levels = None if levels is None else Memory(levels.nbytes, levels.tobytes())
        self.left = None if residual is None else Memory(residual.nbytes, residual.tobytes())
        self.result, self.feedback, self.stream, self.capacity = Memory(16), feedback, stream, capacity

    def item(self, cuda: Cuda) -> EncodeItem:
        """Return the item of the call."""
        plan = cuda.plan(*self.key)
        capacity = cuda.lib.codec_cuda_bound(plan) if self.capacity is None else self.capacity
        self.frame = Memory(capacity)
        residual, levels, base = (None if m is None else m.address for m in (self.left, self.levels, self.base))
        outputs = self.tensor.address, self.frame.address, capacity, self.result.address
        flags = lib.CODEC_FEEDBACK if self.feedback else 0
        return EncodeItem(ctypes.sizeof(EncodeItem), flags, plan, *outputs, residual, levels, self.stream, base)

    def finish(self) -> tuple[Result, bytes]:
        """Return result and frame; store the residual."""
        result = _result(self.result)
        assert self.frame.intact()
        assert self.tensor.intact()
        if self.left is not None and self.residual is not None:
            assert self.left.intact()
            self.residual.reshape(-1).view(np.uint8)[:] = self.left.bytes
        return result, self.frame.bytes[: result.nbytes].tobytes()


class Decode:
    """Frame to decode.

    Parameters
    ----------
    frame : bytes
    spec, dtype, shape
        Properties of the plan.
    before : array, optional
        Contents of the destination before the call.
    into, weight, divide : optional
        Fields of the item.
    base : array, optional
        Base of a frame of Delta; without it the destination is the base.
    sized : bool, optional
        The device reads the frame's size from memory; the frame's memory is 64 bytes larger.
    """

    def __init__(
        self,
        frame: bytes,
        spec: Spec,
        dtype: str,
        shape: tuple[int, ...],
        *,
        before: np.ndarray | None = None,
        into: int = 0,
        weight: float = 1,
        divide: float = 0,
        sized: bool = False,
        base: np.ndarray | None = None,
    ) -> None:
        self.base = None if base is None else Memory(base.nbytes, base.tobytes())
        self.key, self.how = (spec, dtype, tuple(shape)), (weight, divide)
        nbytes = int(np.prod(shape)) * (native.ITEMSIZE[dtype] if into == 0 else 4)
        self.tensor = Memory(nbytes, None if before is None else before.tobytes())
        self.nbytes, self.result = Memory(8, np.uint64(len(frame)).tobytes()), Memory(16)
        self.frame, self.into, self.sized = Memory(len(frame) + 64 * sized, frame), into, sized

    def item(self, cuda: Cuda) -> DecodeItem:
        """Return the item of the call."""
        at = self.nbytes.address if self.sized else None
        frame = self.frame.address, len(self.frame.bytes), at
        outputs = self.tensor.address, self.result.address
        base = self.tensor.address if self.base is None else self.base.address  # in place
        return DecodeItem(ctypes.sizeof(DecodeItem), self.into, cuda.plan(*self.key), *frame, *outputs, *self.how, base)

    def finish(self) -> tuple[Result, bytes]:
        """Return result and tensor."""
        assert self.tensor.intact()
        assert self.frame.intact()
        return _result(self.result), self.tensor.bytes.tobytes()
