"""The two hosts of the CUDA kernels, codec/engines/cuda (Python) and native/cuda_api (C), launch and allocate alike.

Emulated GPUs with 2 and 132 multiprocessors log launches without running them. libcodec chooses the kernels of both.
"""

import ctypes
import itertools
from math import prod
from typing import NamedTuple

import pytest

import codec
from codec._c.library import ITEMSIZE, lib
from codec.encoding import encode_request
from codec.engines.cuda import encoding, job, scratch
from codec.engines.cuda.kernels import KERNELS
from codec.engines.cuda.upload import aligned
from codec.engines.cuda.workspace import CallMemory
from support import cuda_c
from support.device import Unlaunched, build, use
from support.specs import SPECS
from support.tiers import every

USABLE = {"delta": codec.Delta()}
USABLE |= {name: spec for name, spec in SPECS.items() if getattr(spec, "level_coding", "") != "shared"}
SHAPES = [(0,), (100,), (4096,), (70, 1000), (300, 4096)]
LARGE = [((1 << 31) + 5,), (1 << 17, 1 << 15)]  # more than 2^31 values, never allocated
PROCESSORS = 2, 132
STREAM, MADE = 7, 1 << 20  # number of the random stream; fake address of arrays that kernels would fill


class Dry(Unlaunched):
    """Device that records grids and launches nothing."""

    def __init__(self, library, processors):
        super().__init__(library, processors)
        self.name = f"cuda:{processors}"  # the key under which plans cache grids
        self.grids = []

    def launch(self, kernel, grid, *args):
        self.grids.append((kernel, *grid))


class Nowhere:
    """Array on the device whose memory is never accessed."""

    addresses = itertools.count(1 << 42, 1 << 40)

    def __init__(self, shape, typestr):
        data = (next(self.addresses), False)
        self.__cuda_array_interface__ = {"version": 3, "shape": shape, "typestr": typestr, "data": data, "stream": 7}


class Encoded(NamedTuple):
    """Host decisions for encoding a tensor, in the order of native/tests/cuda_api/layout_encode.c."""

    bound: int
    parts: int
    warps: int
    unit_nbytes: int
    units: int
    frame_units: int
    taken_nbytes: int
    zeroed_nbytes: int
    made_nbytes: int
    upload_nbytes: int
    sums_nbytes: int


@pytest.fixture(scope="module", params=PROCESSORS)
def hosts(request):
    """The Python host's device and the C host's library, for a GPU of 2 or 132 multiprocessors."""
    emulated = build()
    fake = cuda_c.driver(emulated._name, str(cuda_c.kernels()))
    fake.fake_cuda_processors(request.param)
    try:
        yield Dry(emulated, request.param), cuda_c.Cuda(fake, cuda_c.decisions())
    finally:
        fake.fake_cuda_processors(1)


def tensor(spec, dtype, shape):
    """Return a tensor on the device, its spec, bound to levels if the spec needs them, and a base."""
    x = codec.view(Nowhere(shape, f"<u{ITEMSIZE[dtype]}"), dtype)
    if isinstance(spec, codec.Truncate) and spec.fixed_level is None:
        spec = spec.bind(levels=Nowhere((prod(shape),), "<u1"))
    return x, spec, x if isinstance(spec, codec.Delta) else None


def by_python(device, spec, dtype, shape, *, feedback):
    """Return the Python host's decisions, launches and upload for a tensor."""
    x, bound, base = tensor(spec, dtype, shape)
    residual = Nowhere(shape, "<f4") if feedback else None
    out = Nowhere((codec.bound(shape, dtype, spec),), "<u1")
    how = codec.options(engine="cuda", verify_first=False)  # libcodec_cuda never reads the tensor in advance
    r = encode_request(x, bound, how, out, residual, feedback, stream=STREAM, base=base)
    work = CallMemory(device, 0)
    made = encoding.FrameEncoding(work, r).job
    device.grids.clear()
    job.begin(work, [made])
    plan, layout, n = made.plan, made.layout, prod(shape)
    units = scratch.WarpScratch(work, [(plan.kernel, layout.grid, layout.scratch)])
    found = Encoded(
        plan.bound,
        plan.nparts,
        plan.kernel.warps * layout.grid,
        units._each,
        units._count,
        units._count if layout.scratch.nbytes else 0,
        units.taken_nbytes,
        aligned(job.WRITTEN_NBYTES) + layout.zeros_nbytes,
        plan.made_nbytes,
        plan.nbytes,
        aligned(4 * n) + aligned(n * ITEMSIZE[dtype]) if feedback else 0,
    )
    return found, [*device.grids], bytes(plan.upload(MADE, STREAM))


def by_c(cuda, spec, dtype, shape, *, feedback):
    """Return the decisions, launches and upload of libcodec_cuda for a tensor."""
    plan, at = cuda.plan(spec, dtype, shape), 1 << 20
    flags, residual = (lib.CODEC_FEEDBACK, at) if feedback else (0, None)
    size = ctypes.sizeof(cuda_c.EncodeItem)
    item = cuda_c.EncodeItem(size, flags, plan, 2 * at, at, 1 << 40, at, residual, at, STREAM, at)
    numbers = (ctypes.c_uint64 * len(Encoded._fields))()
    assert cuda.lib.codec_cuda_encode_decisions(ctypes.byref(item), numbers) == 0
    found = Encoded(*numbers)
    image = (ctypes.c_uint8 * found.upload_nbytes)()
    cuda.lib.codec_cuda_encode_upload(plan, ctypes.c_uint64(MADE), ctypes.c_uint64(STREAM), image)
    return found, launches(cuda, item), bytes(image)


def launches(cuda, item):
    """Return the launches of a C call that encodes one item, as grids by kernel, for kernels that both hosts launch."""
    cuda.fake.fake_cuda_log()
    args = ctypes.byref(item), ctypes.c_size_t(1), ctypes.c_void_p(1 << 41), ctypes.c_uint64(1 << 40), None
    assert cuda.lib.codec_cuda_encode(*args) == 0
    lines = [line.split() for line in cuda.fake.fake_cuda_log().decode().splitlines()]
    return [(kernel, int(x), int(y)) for kernel, x, y in lines if kernel in KERNELS]


def dtypes_of(name):
    if name.startswith("lossless") or name == "delta":
        return ("float32", "bfloat16", "float64", "uint8")
    return ("float32", "bfloat16")


@pytest.mark.parametrize("name", every(2, USABLE))
def test_both_hosts_encode_by_the_same_jobs_launches_and_memory(hosts, name, monkeypatch):
    device, cuda = hosts
    use(monkeypatch, device)
    spec = USABLE[name]
    for dtype in dtypes_of(name):
        for shape in SHAPES + LARGE:
            for feedback in (False,) if isinstance(spec, codec.Lossless | codec.Delta) else (False, True):
                ours = by_python(device, spec, dtype, shape, feedback=feedback)
                theirs = by_c(cuda, spec, dtype, shape, feedback=feedback)
                assert ours[0] == theirs[0], (dtype, shape, feedback)
                assert ours[1] == theirs[1], (dtype, shape, feedback)
                assert ours[2] == theirs[2], (dtype, shape, feedback)
