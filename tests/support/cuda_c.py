"""Calls of libcodec_cuda with numpy arrays, on a GPU or on a fake CUDA driver that runs kernels on the CPU."""

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
ALIGNMENT = 256  # alignment of a workspace, in bytes


def compiled(name: str, command: Sequence[str]) -> Path:
    """Return the path of the library that `command` compiles; compile only if a source or the command has changed."""
    folders = (
        "native/cuda_api",
        "native/tests/cuda_api",
        "native/include/codec",
        "native/src/exact",
        "native/src/job",
        "native/cuda",
    )
    return device.compiled(command, folders, f"cuda_api/{name}")


def kernels(options: Sequence[str] = ()) -> Path:
    """Compile the kernels of native/cuda_api for the CPU, and return the path of the library."""
    unused = "-Wno-unused-function"  # each source uses only some functions of the headers in native/cuda
    return compiled("kernels", ["g++", *device.FLAGS, unused, *options, *INCLUDED, str(TESTS / "kernels.cc")])


def driver(*libraries: str) -> ctypes.CDLL:
    """Load the fake driver and the libraries that contain the kernels; from then on dlopen(DRIVER) finds it."""
    command = ["g++", "-std=c++20", "-O1", "-g1", "-fPIC", "-shared", *WARNINGS, "-Wno-missing-field-initializers"]
    path = compiled("driver", [*command, f"-Wl,-soname,{DRIVER}", str(TESTS / "libcuda.cc")])
    fake = ctypes.CDLL(str(path))
    fake.fake_cuda_log.restype = ctypes.c_char_p
    for library in libraries:
        fake.fake_cuda_kernels(library.encode())
    return fake


def library_command(images: Path) -> list[str]:
    """Return the command that compiles libcodec_cuda with the kernel images in `images`, without the output option."""
    folder, name = Path(native._path).resolve().parent, Path(native._path).name
    sources = map(str, sorted((API / "src").glob("*.c")))
    links = [f"-L{folder}", f"-l:{name}", f"-Wl,-rpath,{folder}", "-Wl,--no-undefined", "-ldl", "-pthread"]
    return [*C, f'-DCODEC_CUDA_DRIVER="{DRIVER}"', *INCLUDED, *sources, str(images), *links]


def library() -> Path:
    """Return the path of a libcodec_cuda whose kernel images are for the fake driver."""
    return compiled("codec_cuda", library_command(TESTS / "images.c"))


def decisions() -> Path:
    """Return the path of a libcodec_cuda that exports its host decisions (native/tests/cuda_api/layout_encode.c)."""
    sources = [part for part in library_command(TESTS / "images.c") if Path(part).name != "encode.c"]
    return compiled("codec_cuda_decisions", [*sources, str(TESTS / "layout_encode.c")])


def installed() -> Path:
    """Return the path of the libcodec_cuda that the package ships, with kernels for GPUs."""
    path = PACKAGE / "lib/libcodec_cuda.so"
    assert path.exists(), "the package has no libcodec_cuda: install it with `CODEC_CUDA=1 pip install .`"
    return path


class EncodeItem(ctypes.Structure):
    """The C struct codec_cuda_encode_item."""

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
    """The C struct codec_cuda_decode_item."""

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
    """The C struct codec_cuda_result."""

    nbytes: int
    status: int
    block: int


class Gpu:
    """The real CUDA driver, with the interface of the fake one. Memory is managed: host and GPU share addresses."""

    def __init__(self) -> None:
        self._cuda: Any = importlib.import_module("cupy").cuda

    def allocate(self, nbytes: int) -> np.ndarray:
        """Allocate managed memory, which host and GPU can access."""
        memory = self._cuda.malloc_managed(nbytes)
        array = (ctypes.c_uint8 * nbytes).from_address(memory.ptr)
        array.memory = memory  # frees the memory when the array is freed
        return np.frombuffer(array, np.uint8)

    def capture(self, submit: Callable[[ctypes.c_void_p], None]) -> Callable[[], None]:
        """Capture the work that `submit` adds to a stream as a CUDA graph; return a function that launches it."""
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
        """Wait for all work on the GPU; raise the driver's error if any work has failed."""
        self._cuda.runtime.deviceSynchronize()
        return b""


class Memory:
    """Device memory filled with a pattern, between two guard areas that show out-of-bounds writes."""

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
        """Return True if both guard areas are unchanged."""
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
    """An open device of libcodec_cuda. Each call copies its numpy arrays to newly allocated device memory."""

    def __init__(self, fake: Any, path: Path) -> None:
        self.fake, self.lib = fake, ctypes.CDLL(str(path))
        self.lib.codec_cuda_bound.restype = ctypes.c_uint64
        self.lib.codec_cuda_strerror.restype = ctypes.c_char_p
        device = ctypes.c_void_p()
        _check(self.lib.codec_cuda_open(0, ctypes.byref(device)))
        self.device, self._plans = device, dict[Any, ctypes.c_void_p]()

    def plan(self, spec: Spec, dtype: str, shape: tuple[int, ...], segments: bytes | None = None) -> ctypes.c_void_p:
        """Return the plan of these arguments, cached from the first call on. ``segments``: packed codec_segments."""
        key = spec, dtype, shape, segments
        if key not in self._plans:
            self._plans[key] = self.new_plan(*key)
        return self._plans[key]

    def new_plan(self, spec: Spec, dtype: str, shape: tuple[int, ...], segments: bytes | None) -> ctypes.c_void_p:
        """Create a plan, which is not cached."""
        like, plan, size = _call.new_tensor(DTYPES[dtype], shape), ctypes.c_void_p(), ffi.sizeof("codec_segment")
        count = len(segments or b"") // size
        args = self.device, ctypes.c_void_p(_address(spec_struct(spec))), ctypes.c_void_p(_address(like)), segments
        _check(self.lib.codec_cuda_plan_open(*args, ctypes.c_uint64(count), ctypes.byref(plan)))
        return plan

    def run(self, what: str, items: Sequence[Any], *flags: int) -> None:
        """Encode or decode items in a workspace of exactly the size that the library requires."""
        workspace = self.workspace(what, items)
        status = self.submit(what, items, *flags, workspace=workspace)
        said = self.fake.fake_cuda_log().decode()
        assert "error" not in said, said
        assert workspace.intact()
        _check(status)

    def workspace(self, what: str, items: Sequence[Any]) -> Memory:
        """Allocate the workspace for encoding or decoding items."""
        kind: Any = type(items[0])
        size, nbytes = getattr(self.lib, f"codec_cuda_{what}_workspace"), ctypes.c_uint64()
        _check(size((kind * len(items))(*items), ctypes.c_size_t(len(items)), ctypes.byref(nbytes)))
        return Memory(nbytes.value)

    def submit(self, what: str, items: Sequence[Any], *flags: int, workspace: Memory, stream: Any = None) -> int:
        """Submit the encoding or decoding of items to a stream; return the status of the call."""
        kind: Any = type(items[0])
        args = ctypes.c_void_p(workspace.address), ctypes.c_uint64(len(workspace.bytes)), stream
        call, array = getattr(self.lib, f"codec_cuda_{what}"), (kind * len(items))(*items)
        return int(call(array, ctypes.c_size_t(len(items)), *[ctypes.c_uint32(flag) for flag in flags], *args))

    def encode(self, *asked: "Encode") -> list[tuple[Result, bytes]]:
        """Encode tensors in one call; return each tensor's result and frame."""
        self.run("encode", [a.item(self) for a in asked])
        return [a.finish() for a in asked]

    def decode(self, *asked: "Decode", flags: int = 0) -> list[tuple[Result, bytes]]:
        """Decode frames in one call; return each frame's result and the bytes of its tensor."""
        self.run("decode", [a.item(self) for a in asked], flags)
        return [a.finish() for a in asked]


def _result(memory: Memory) -> Result:
    assert memory.intact()
    nbytes, rest = np.frombuffer(memory.bytes, "<u8")
    return Result(int(nbytes), int(rest) & 0xFFFFFFFF, int(rest) >> 32)


class Encode:
    """A tensor to encode, with its memory on the device.

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
        Size of the frame's buffer in bytes; by default the upper bound of the frame's size.
    base : array, optional
        Base tensor of the Delta codec.
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
        """Return the result and the frame; copy the new residual to the caller's array."""
        result = _result(self.result)
        assert self.frame.intact()
        assert self.tensor.intact()
        if self.left is not None and self.residual is not None:
            assert self.left.intact()
            self.residual.reshape(-1).view(np.uint8)[:] = self.left.bytes
        return result, self.frame.bytes[: result.nbytes].tobytes()


class Decode:
    """A frame to decode, with its memory on the device.

    Parameters
    ----------
    frame : bytes
    spec, dtype, shape
        Arguments of the plan.
    before : array, optional
        Contents of the destination before the call.
    into, weight, divide : optional
        Fields of codec_cuda_decode_item.
    base : array, optional
        Base tensor of a Delta frame; by default the destination is the base.
    sized : bool, optional
        The device reads the frame's size from memory; the frame's buffer is then 64 bytes larger than the frame.
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
        # Without a base, Delta updates the tensor in place
        base = self.tensor.address if self.base is None else self.base.address
        return DecodeItem(ctypes.sizeof(DecodeItem), self.into, cuda.plan(*self.key), *frame, *outputs, *self.how, base)

    def finish(self) -> tuple[Result, bytes]:
        """Return the result and the bytes of the tensor."""
        assert self.tensor.intact()
        assert self.frame.intact()
        return _result(self.result), self.tensor.bytes.tobytes()
