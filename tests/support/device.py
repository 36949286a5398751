"""CUDA kernels compiled by g++ for the CPU (`native/tests/cuda_on_cpu/`); arrays and devices that stand for a GPU."""

import ctypes
import fcntl
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from codec._c.library import ITEMSIZE
from codec.engines.cuda import devices, sources
from codec.engines.cuda.cupy_backend import Gpu
from codec.engines.cuda.kernels import FILES, KERNELS
from codec.tensors.view import TensorView, is_torch, view
from support import cpu_time
from support.nvrtc import compile_cuda

ROOT = Path(__file__).parents[2]
ON_CPU = "native/tests/cuda_on_cpu"
INCLUDED = [f"-I{ROOT / folder}" for folder in ("native/include", "native/src", "native/cuda", ON_CPU)]
FLAGS = [
    "-std=c++20",
    "-O1",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fPIC",
    "-fno-gnu-unique",  # libraries do not share static variables of templates
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
]


class LaunchError(Exception):
    """A launch had undefined behaviour; the message names the thread and the source line."""


def compiled(command, folders, library, content=b""):
    """Return the path of the library that `command` compiles.

    The command runs only if it, `content` or a file in `folders` has changed since the last compilation.
    Processes that need the same library wait for the one that compiles it.
    """
    digest = hashlib.sha256(" ".join(command).encode() + content)
    for folder in folders:
        for path in sorted(path for path in (ROOT / folder).rglob("*") if path.is_file()):
            digest.update(path.read_bytes())
    out = ROOT / "build" / f"{library}-{digest.hexdigest()[:32]}.so"
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{out}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            with cpu_time.compilation(), tempfile.TemporaryDirectory(dir=out.parent) as folder:
                subprocess.run([*command, "-o", f"{folder}/library.so"], check=True)
                Path(folder, "library.so").replace(out)
    return out


def build(source=ROOT / ON_CPU / "kernels.cc", options=()):
    """Compile the kernels of a source file for the CPU, and load the library."""
    folders = "native/include/codec", "native/src/exact", "native/cuda", ON_CPU
    command = ["g++", *FLAGS, *options, *INCLUDED, str(source)]
    return ctypes.CDLL(str(compiled(command, folders, "cuda_on_cpu/kernels", Path(source).read_bytes())))


def launch(library, kernel, grid, threads, *args):
    """Launch a kernel; `args` are ctypes values and buffers, passed by address."""
    call = getattr(library, f"{kernel.replace('<', '_').rstrip('>')}_launch")
    call.restype, call.argtypes = ctypes.c_char_p, [ctypes.c_void_p, *[ctypes.c_uint32] * 3, ctypes.c_size_t]
    pointers = (ctypes.c_void_p * len(args))(*[ctypes.addressof(a) for a in args])
    if said := call(pointers, *grid, threads, 0):
        raise LaunchError(said.decode())


def compile_kernels(file, arch):
    """Compile a file of kernels for an architecture by NVRTC."""
    options = [*sources.OPTIONS, f"-arch={arch}", "-Xptxas=-v", *INCLUDED]
    return compile_cuda(f'#include "{file}.cu"\n', sources.HEADERS, options, FILES[file])


class DeviceArray:
    """Array on the emulated GPU. Libraries recognize it by its ``__cuda_array_interface__`` only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "stream": 7,
            **{k: self.array.__array_interface__[k] for k in ("shape", "typestr", "data", "strides")},
        }

    def __getitem__(self, items: Any) -> "DeviceArray":
        return DeviceArray(self.array[items])

    def reshape(self, *shape: int) -> "DeviceArray":
        return DeviceArray(self.array.reshape(*shape))

    def view(self, dtype: str) -> "DeviceArray":
        return DeviceArray(self.array.view(dtype))

    def get(self) -> Any:
        """Return a copy on the host."""
        return self.array.copy()


class Emulated:
    """Emulated GPU of the CUDA engine, which runs kernels on the CPU, and the engine's backend for this device."""

    name = "cuda:0"
    read_nbytes = 0  # total bytes copied to the host, of all devices

    def __init__(self, library: Any, processors: int = 1) -> None:
        self.library, self.processors, self.launched, self.uploaded = library, processors, [], []
        self._later: list[tuple[Any, int, int]] = []  # pending copies to host memory

    def put(self, array: Any) -> DeviceArray:
        """Return a copy of an array on the device."""
        return DeviceArray(np.array(array))

    def why_not(self) -> str | None:
        return None

    def find(self, v: TensorView) -> "Emulated":
        return self

    def current(self) -> "Emulated":
        return self

    def on(self, stream: int) -> Any:
        return nullcontext()

    def capturing(self) -> bool:
        return False

    def stream(self) -> int:
        return 0

    def wait_for(self, stream: int) -> None:
        pass

    delay = wait_for

    def allocate(self, nbytes: int, like: Any) -> tuple[int, object]:
        memory = np.empty(nbytes, np.uint8)  # a separate allocation, so that AddressSanitizer finds accesses outside
        assert memory.ctypes.data % 16 == 0
        memory.fill(0xE5)
        return memory.ctypes.data, memory

    def upload(self, to: int, data: Any) -> object:
        ctypes.memmove(to, bytes(data), len(data))
        self.uploaded.append(len(data))
        return None

    def download(self, at: int, nbytes: int) -> bytearray:
        self.wait()
        Emulated.read_nbytes += nbytes
        return bytearray(ctypes.string_at(at, nbytes))

    def read_back(self, at: int, nbytes: int, into: Any = None) -> Any:
        """Record a copy to host memory, which is done when the host waits."""
        Emulated.read_nbytes += nbytes
        into = np.zeros(nbytes, np.uint8) if into is None else into
        self._later.append((into, at, nbytes))
        return into

    def wait(self) -> None:
        for into, at, nbytes in self._later:
            memoryview(into)[:nbytes] = ctypes.string_at(at, nbytes)
        self._later.clear()

    def copy(self, to: int, at: int, nbytes: int) -> None:
        ctypes.memmove(to, at, nbytes)

    def clear(self, at: int, nbytes: int) -> None:
        ctypes.memset(at, 0, nbytes)

    def prepare(self, kernels: Iterable[str]) -> None:
        assert set(kernels) <= KERNELS.keys()

    def constant(self, kernel: str, name: str, count: int) -> tuple[int, ...]:
        return tuple((ctypes.c_uint64 * count).in_dll(self.library, name))

    def launch(self, kernel: str, grid: tuple[int, int], *args: Any) -> None:
        self.launched.append(kernel)
        launch(self.library, kernel, grid, KERNELS[kernel].threads, *args)

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> tuple[Any, TensorView]:
        if is_torch(like):
            torch = sys.modules["torch"]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.name)
            return tensor, view(tensor)
        array = DeviceArray(np.empty(shape, f"u{ITEMSIZE[dtype]}"))
        return array, view(array)._replace(dtype=dtype)

    def new_bytes(self, nbytes: int, like: Any) -> tuple[Any, int]:
        array, v = self.empty("uint8", (nbytes,), like)
        return array, v.address

    def bytes_of(self, v: TensorView, nbytes: int) -> Any:
        if is_torch(v.owner):
            return v.owner.reshape(-1).view(sys.modules["torch"].uint8)[:nbytes]
        memory = (ctypes.c_uint8 * nbytes).from_address(v.address)
        memory.owner = v.owner  # keeps the viewed memory alive
        return DeviceArray(np.frombuffer(memory, np.uint8))


class Unlaunched(Emulated):
    """Device without memory that moves and launches nothing."""

    def allocate(self, nbytes: int, like: Any) -> tuple[int, object]:
        return 1 << 20, None

    def upload(self, to: int, data: Any) -> object:
        return None

    def download(self, at: int, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def clear(self, at: int, nbytes: int) -> None:
        pass

    def copy(self, to: int, at: int, nbytes: int) -> None:
        pass

    def launch(self, kernel: str, grid: tuple[int, int], *args: Any) -> None:
        pass


class Real:
    """Real GPU that records the names of launched kernels."""

    def __init__(self, monkeypatch: Any) -> None:
        self.launched: list[str] = []
        begin = Gpu.launch

        def launch(gpu: Gpu, kernel: str, grid: tuple[int, int], *args: Any) -> None:
            self.launched.append(kernel)
            begin(gpu, kernel, grid, *args)

        monkeypatch.setattr(Gpu, "launch", launch)

    def put(self, array: Any) -> Any:
        """Return a copy of an array on the device."""
        import cupy

        return cupy.array(array)


def use(monkeypatch: Any, device: Emulated) -> None:
    """Make engine="cuda" use the given device until the test ends."""
    monkeypatch.setattr(devices, "backend", device)
