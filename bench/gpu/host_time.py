"""Microseconds of Python per call of the CUDA engine on the host, and the call's launches. Needs no GPU.

    python bench/gpu/host_time.py                  # 2^20 values; --values 12 for fewer, --json for programs

The fake device launches nothing and copies only frame headers. So a time includes only the host's work on arguments,
plans and the kernels' structs, without the driver and CuPy. It is the time of the fastest call in 0.4 s. The numbers
after the time count the operations that the call submits: kernels, uploads, memory clears, copies and downloads.
"""

import argparse
import ctypes
import functools
import json
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import codec
from codec.engines.cuda import devices
from codec.engines.cuda.decoding import FOUND_NBYTES, NOTHING_FOUND
from codec.tensors.view import TensorView, view

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from measure import best, tensor

_MEMORY = 1 << 20  # fake address of all device memory, which is never accessed; real arrays are above 1 << 32


class DeviceArray:
    """Array in host memory that libraries treat as an array on a device."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    @functools.cached_property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        at = self.array.__array_interface__
        return {"version": 3, "stream": 7} | {k: at[k] for k in ("shape", "typestr", "data")}

    def __getitem__(self, items: Any) -> "DeviceArray":
        return DeviceArray(self.array[items])

    def view(self, dtype: str) -> "DeviceArray":
        """Return this array with its bits reinterpreted as another dtype."""
        return DeviceArray(self.array.view(dtype))


class Idle:
    """Device that launches nothing: implements ``codec.engines.cuda.devices.Device`` and ``Backend``."""

    name = "cuda:0"
    processors = 132

    def __init__(self) -> None:
        self.found = b""  # bytes of the struct codec_found for the next frame
        self.work: Counter[str] = Counter()  # number of submitted operations, by kind

    def why_not(self) -> str | None:
        return None

    def find(self, v: TensorView) -> "Idle":
        return self

    def current(self) -> "Idle":
        return self

    def on(self, stream: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def capturing(self) -> bool:
        return False

    def stream(self) -> int:
        return 0

    def wait_for(self, stream: int) -> None: ...

    def delay(self, stream: int) -> None: ...

    def allocate(self, nbytes: int, like: Any) -> tuple[int, object]:
        return _MEMORY, None

    def upload(self, to: int, data: Any) -> object:
        self.work["upload"] += 1
        return data

    def download(self, at: int, nbytes: int) -> bytearray:
        self.work["download"] += 1
        if at >= 1 << 32:
            return bytearray(ctypes.string_at(at, nbytes))
        return bytearray(self.found if nbytes == FOUND_NBYTES else nbytes)

    def read_back(self, at: int, nbytes: int, into: Any = None) -> Any:
        return self.download(at, nbytes) if into is None else into

    def wait(self) -> None: ...

    def copy(self, to: int, at: int, nbytes: int) -> None:
        self.work["copy"] += 1

    def clear(self, at: int, nbytes: int) -> None:
        self.work["clear"] += 1

    def prepare(self, wanted: Iterable[str]) -> None: ...

    def constant(self, kernel: str, name: str, count: int) -> tuple[int, ...]:
        return (4096,) * count

    def launch(self, kernel: str, grid: tuple[int, int], *args: Any) -> None:
        self.work["kernel"] += 1

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> tuple[Any, TensorView]:
        array = DeviceArray(np.empty(shape, dtype))
        return array, view(array)

    def new_bytes(self, nbytes: int, like: Any) -> tuple[Any, int]:
        array = np.empty(nbytes, np.uint8)
        return DeviceArray(array), array.ctypes.data

    def bytes_of(self, v: TensorView, nbytes: int) -> Any:
        owner: Any = v.owner
        return owner.view("uint8")[:nbytes]


def checksum_of(device: Idle, frame: DeviceArray) -> int:
    """Return the sum of the checksums of a frame's blocks, in place of the kernel that would compute it."""
    device.found = NOTHING_FOUND
    try:
        codec.decode(frame)
    except codec.ChecksumError as e:
        return (e.found - e.expected) % 2**64
    return 0


def cases(device: Idle, n: int) -> Iterable[tuple[str, str, Callable[[], Any]]]:
    """Yield the name of a codec, the name of a call, and the call."""
    x = tensor("float32", n)
    there, more = DeviceArray(x), [DeviceArray(x) for _ in range(50)]
    residual = DeviceArray(np.zeros_like(x))
    for spec in (codec.Lossless(), codec.Float8(), codec.Sign(), codec.Truncate(1)):
        name = type(spec).__name__
        frame = codec.encode(x, spec)
        out = DeviceArray(np.empty(codec.bound(x.shape, x.dtype, spec), np.uint8))
        ours, back = DeviceArray(np.frombuffer(frame, np.uint8)), DeviceArray(np.empty_like(x))
        checksum = checksum_of(device, ours)
        device.found = NOTHING_FOUND[:8] + struct.pack("<Q", checksum) + NOTHING_FOUND[16:]
        yield name, "encode_async", lambda spec=spec, out=out: codec.encode_async(there, spec, out=out)
        if not isinstance(spec, codec.Lossless):
            how = {"residual": residual, "feedback": True}
            yield name, "encode_async, feedback", lambda s=spec, o=out: codec.encode_async(there, s, out=o, **how)
        yield name, "encode_many of 50", lambda spec=spec: codec.encode_many(more, spec)
        yield name, "decode", lambda ours=ours: codec.decode(ours)
        yield name, "decode, out=", lambda ours=ours, back=back: codec.decode(ours, out=back)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=20, help="log2 of the number of values (20)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    devices.backend = device = Idle()
    for name, call, run in cases(device, 1 << args.values):
        run()
        device.work.clear()
        run()
        work = dict(sorted(device.work.items(), reverse=True))
        seconds, _ = best(run)
        if args.json:
            print(json.dumps({"codec": name, "call": call, "seconds": seconds, "work": work}), flush=True)
        else:
            done = ", ".join(f"{count} {what}" for what, count in work.items())
            print(f"{name:12}{call:26}{1e6 * seconds:8.1f} us  {done}", flush=True)


if __name__ == "__main__":
    main()
