"""The two hosts of the CUDA kernels, codec/engines/cuda (Python) and native/cuda_api (C), make the same decisions.

Emulated GPUs with 2 and 132 multiprocessors log launches without running them. docs/internals/gpu.md names the files.
"""

import ctypes
import functools
import itertools
import re
from math import prod
from typing import NamedTuple

import numpy as np
import pytest

import codec
from codec._c.library import ITEMSIZE, lib
from codec.decoding import decode_request
from codec.encoding import encode_request
from codec.engines.cuda import decoding, encoding, job, preprocess, scratch, workspace
from codec.engines.cuda.batch_decode import open_frames
from codec.engines.cuda.kernels import FILE_OF, warps_of
from codec.engines.cuda.upload import aligned
from codec.engines.cuda.workspace import Work
from codec.tensors.view import view
from support import cuda_c
from support.device import DeviceArray, Emulated, build, use
from support.specs import SPECS
from support.tensors import random_bits
from support.tiers import every

USABLE = {"delta": codec.Delta()}
USABLE |= {name: spec for name, spec in SPECS.items() if getattr(spec, "level_coding", "") != "shared"}
SHAPES = [(0,), (100,), (4096,), (70, 1000), (300, 4096)]
LARGE = [((1 << 31) + 5,), (1 << 17, 1 << 15)]  # more than 2^31 values, never allocated
PROCESSORS = 2, 132
STREAM, MADE = 7, 1 << 20  # number of the random stream; fake address of arrays that kernels would fill


class Dry(Emulated):
    """Device that records grids and launches nothing."""

    def __init__(self, library, processors):
        super().__init__(library, processors)
        self.name = f"cuda:{processors}"  # the key under which plans cache grids
        self.grids = []

    def allocate(self, nbytes, like):
        return 1 << 20, None

    def upload(self, to, data):
        return None

    def download(self, at, nbytes):
        return bytearray(nbytes)

    def clear(self, at, nbytes):
        pass

    def copy(self, to, at, nbytes):
        pass

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


class Decoded(NamedTuple):
    """Host decisions for decoding a frame, in the order of native/tests/cuda_api/layout_decode.c."""

    unit_nbytes: int
    units: int


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
    work = Work(device, 0)
    made = encoding.Encoding(work, r).job
    device.grids.clear()
    job.begin(work, [made])
    plan, layout, n = made.plan, made.layout, prod(shape)
    units = scratch.Scratch(work, [(plan.kernel, layout.grid, layout.scratch)])
    found = Encoded(
        plan.bound,
        plan.nparts,
        warps_of(plan.kernel) * layout.grid,
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
    return found, launches(cuda, "encode", item), bytes(image)


def launches(cuda, what, item):
    """Return the launches of a C call with one item, as grids by kernel, for kernels that both hosts launch."""
    flags = [] if what == "encode" else [ctypes.c_uint32(0)]
    cuda.fake.fake_cuda_log()
    args = ctypes.byref(item), ctypes.c_size_t(1), *flags, ctypes.c_void_p(1 << 41), ctypes.c_uint64(1 << 40), None
    assert getattr(cuda.lib, f"codec_cuda_{what}")(*args) == 0
    lines = [line.split() for line in cuda.fake.fake_cuda_log().decode().splitlines()]
    return [(kernel, int(x), int(y)) for kernel, x, y in lines if kernel in FILE_OF]


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


@pytest.mark.parametrize("name", every(2, USABLE))
def test_both_hosts_decode_by_the_same_kernels_and_grids(hosts, name, monkeypatch):
    """Both hosts decode by the same kernels and grids. The C host, which has not read the frame, allocates scratch
    memory for any frame of the shape.
    """
    device, cuda = hosts
    use(monkeypatch, device)
    spec = USABLE[name]
    for dtype in dtypes_of(name):
        for shape in SHAPES:
            frame = make_frame(spec, dtype, shape)
            x = codec.view(Nowhere(shape, f"<u{ITEMSIZE[dtype]}"), dtype)
            there, how = DeviceArray(np.frombuffer(frame, np.uint8)), codec.options(engine="cuda")
            base = x.tensor if name == "delta" else None
            r = decode_request((view(there),), None, how, x, base=base)
            work = Work(device, 0)
            [opened] = open_frames([(work, r._replace(head=view(np.frombuffer(frame, np.uint8))), r.frames[0])])
            opened.open(view(x.tensor)._replace(dtype=dtype), lib.CODEC_INTO_STORE)
            units = scratch.Scratch(work, [(opened.kernel, opened.grid, opened.scratch)])
            size, at = ctypes.sizeof(cuda_c.DecodeItem), 1 << 20
            plan = cuda.plan(spec, dtype, shape)
            item = cuda_c.DecodeItem(size, 0, plan, at, len(frame), None, at, at, 1, 0, at)
            numbers = (ctypes.c_uint64 * len(Decoded._fields))()
            assert cuda.lib.codec_cuda_decode_decisions(ctypes.byref(item), numbers) == 0
            theirs, grids = Decoded(*numbers), {kernel: x for kernel, x, _ in launches(cuda, "decode", item)}
            assert grids[opened.kernel] == opened.grid, (dtype, shape)
            assert units._each in (0, theirs.unit_nbytes), (dtype, shape)
            assert units._count <= theirs.units, (dtype, shape)


@functools.cache
def make_frame(spec, dtype, shape):
    """Encode random values by the native engine, and return the frame."""
    x = random_bits(dtype, prod(shape), "normal").reshape(shape)
    if isinstance(spec, codec.Truncate) and spec.fixed_level is None:
        spec = spec.bind(levels=np.zeros(prod(shape), np.uint8))
    base = codec.view(x, dtype) if isinstance(spec, codec.Delta) else None
    changed = x ^ (np.arange(x.size).reshape(shape) % 97 == 0).astype(x.dtype) if base is not None else x
    return bytes(codec.encode(codec.view(changed, dtype), spec, base=base, options=codec.options(engine="native")))


# Python's declarations of the structs that hosts write and kernels read. The C host declares them in layout.h.
STRUCTS = {
    "units": scratch._UNITS,
    "encoding": job._ENCODING,
    "preprocessing": preprocess._PREPROCESSING,
    "decoding": decoding._DECODING,
    "found": decoding._FOUND,
}
OF_KERNELS = {  # structs that only kernels and the Python host use, and the files that declare them
    "codec_written": (encoding._WRITTEN, "frame/encode.cuh"),
    "codec_units": (scratch._UNITS, "common/scratch.cuh"),
    "codec_preprocessing": (preprocess._PREPROCESSING, "frame/preprocess.cu"),
    "codec_group": (preprocess._GROUP, "frame/preprocess.cu"),
    "codec_lists": (decoding._LISTS, "frame/decode.cuh"),
    "codec_piece": (workspace._PIECE, "frame/gather.cu"),
}
LETTERS = {"uint64_t": "Q", "unsigned long long": "Q", "uint32_t": "I", "float": "f"}


def fields_of(text, name):
    """Return the fields of a C or CUDA struct as format characters of Python's struct module; a pointer is Q."""
    body = re.search(rf"^struct {name} \{{(.*?)^\}};", re.sub(r"/\*.*?\*/", "", text, flags=re.S), re.M | re.S)[1]
    found = ""
    for declaration in body.split(";")[:-1]:
        kind, first, *rest = re.match(
            r"\s*(?:const )?(struct \w+|unsigned long long|\w+) (.*)", declaration, re.S
        ).groups()
        for field in (first, *rest)[0].split(","):
            if kind.startswith("struct"):
                found += fields_of(text, kind.removeprefix("struct "))
            else:
                found += "Q" if "*" in field else LETTERS[kind]
    return found


def letters_of(packed):
    """Return the fields of a Python struct as format characters; 4 bytes of padding are I, codec_units is expanded."""
    expanded = packed.format.replace(f"{scratch.UNITS_NBYTES}s", "3Q2I").replace("4x", "I").translate({32: "", 60: ""})
    return re.sub(r"(\d+)(\w)", lambda m: int(m[1]) * m[2], expanded)


def test_structs_of_both_hosts_and_of_kernels_have_the_same_fields():
    layout = (cuda_c.API / "src/layout.h").read_text()
    for name, packed in STRUCTS.items():
        assert letters_of(packed) == fields_of(layout, name), name
    for name, (packed, file) in OF_KERNELS.items():
        assert letters_of(packed) == fields_of((cuda_c.ROOT / "native/cuda" / file).read_text(), name), name
    written = int(re.search(r"define WRITTEN_NBYTES (\d+)", layout)[1])
    assert written == job.WRITTEN_NBYTES == encoding._WRITTEN.size
