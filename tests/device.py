"""The CUDA kernels as g++ compiles them, launched as the driver would: `tests/cuda/`."""

import ctypes
import struct
import subprocess
from pathlib import Path

import numpy as np
import oracle
import test_exact

import codec
from codec.core import DTYPE_NAMES, DTYPES, ITEMSIZE, check, ffi, lib
from codec.engines.steps import tensor_like
from codec.errors import CodecError, Status
from codec.frame import read_header
from codec.metrics.asked import asked
from codec.spec_structs import spec_struct
from codec.structs import Call, new_tensor
from codec.view import view_bytes

ROOT = Path(__file__).parents[1]
INCLUDED = [f"-I{ROOT / folder}" for folder in ("native/include", "native/src", "native/cuda", "tests/cuda")]
FLAGS = [
    "-std=c++20",
    "-O1",
    "-g1",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
]
FAMILIES = {2: "sign", 3: "ternary", 4: "float8", 5: "float4", 6: "quantize", 7: "truncate"}
STORE, ADD, MAXIMUM, FLOAT32 = 0, 1, 2, 3
WARPS = 4  # of a block
PLANE, WORDS = (1 << 14) + 128, 4 * ((1 << 12) + 64)  # bytes of a warp's memory for a plane, for a coded one's words
NONE = 2**64 - 1


class LaunchError(Exception):
    """What a GPU leaves undefined, in words."""


class Fault(Exception):
    """A frame that is refused: status and, but for what concerns all of it, the first block at fault."""

    def __init__(self, status, block=None):
        super().__init__(Status(status).name, block)
        self.status, self.block = status, block


def build(folder, source=ROOT / "tests/cuda/kernels.cc", options=()):
    """Kernels as a shared library."""
    out = Path(folder) / f"{Path(source).stem}.so"
    subprocess.run(["g++", *FLAGS, *options, *INCLUDED, str(source), "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def compile_kernels(arch):
    """By NVRTC, for a GPU that need not be there: what its assembler says, and the PTX."""
    stubs = {"stdint.h": '#pragma once\n#include "exact/bits.h"\n', "stddef.h": "#pragma once\n"}
    options = [f"-arch={arch}", "-fmad=false", "-default-device", "-Xptxas=-v", *INCLUDED]
    return test_exact.compiled('#include "decode.cu"\n#include "encode.cu"\n', stubs, options)


def launch(library, kernel, grid, threads, *args):
    """`args`: ctypes values and buffers, which are passed as they are."""
    call = getattr(library, f"{kernel}_launch")
    call.restype, call.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_size_t]
    pointers = (ctypes.c_void_p * len(args))(*[ctypes.addressof(a) for a in args])
    if said := call(pointers, grid, threads, 0):
        raise LaunchError(said.decode())


def aligned(data):
    """A copy at a multiple of 16, whose memory ends with it: AddressSanitizer guards that."""
    copy = np.frombuffer(data, np.uint8).copy()
    assert copy.ctypes.data % 16 == 0
    return copy


def pointer(x):
    return ffi.cast("void *", x.ctypes.data)


def address(x):
    """As a kernel's argument."""
    return ctypes.c_uint64(0 if x is None else x.ctypes.data)


def copied(struct):
    """A struct of cffi, likewise."""
    return (ctypes.c_char * len(ffi.buffer(struct))).from_buffer_copy(ffi.buffer(struct))


def view_of(job):
    view = ffi.new("codec_view *")
    view.struct_nbytes = ffi.sizeof("codec_view")
    check(lib.codec_job_view(pointer(job), view))
    return view


def plan(frame):
    """A job for a frame from its header and side section alone: its memory, and what is to be seen of it."""
    info = read_header(view_bytes(frame))
    context, fault = ffi.new("codec_context *"), ffi.new("codec_fault *")
    context.struct_nbytes, context.fault = ffi.sizeof("codec_context"), fault
    size, n = ffi.new("size_t[2]"), len(frame)
    check(lib.codec_job_nbytes(ffi.addressof(info.spec), tensor_like(info), size, size + 1))
    job = aligned(bytes(size[0]))
    source = ffi.from_buffer(frame)
    check(lib.codec_decode_plan(source, n, n, context, pointer(job), size[0], ffi.new("codec_plan *")), fault)

    def close(seal):
        assert context.fault == fault  # which lives as long as this function
        return lib.codec_decode_close(context, pointer(job), seal)

    return job, view_of(job), close


def check_frame(frame):
    """The directory's last entry, and what fixed planes are filled up with."""
    info = codec.inspect(frame)
    if info.nblocks:
        begin, size = info.sections["directory"]
        if 8 * int.from_bytes(frame[begin + size - 8 : begin + size - 4], "little") != len(frame):
            raise Fault(Status.BAD_DIRECTORY)
        begin, size = info.sections["planes"]
        n = int(np.prod(info.shape))
        if any(any(frame[p + n : p + -(-n // 8) * 8]) for p in range(begin, begin + size, -(-n // 8) * 8)):
            raise Fault(Status.BAD_HEADER)


def decode(
    library, frame, *, into=STORE, out=None, weight=1.0, divide=0.0, checks=True, stores=True, exponents=None, grid=2
):
    """A frame's values, their bytes; or Fault, or the CodecError of its header or side section."""
    try:
        job, view, close = plan(frame)
    except CodecError as e:
        if e.code in (Status.BAD_SIDE, Status.UNKNOWN_CODEBOOK):
            check_frame(frame)  # which comes before the side section
        raise
    if view.codec == lib.CODEC_TRUNCATE and view.variant == lib.CODEC_LEVELS_SHARED and exponents is None:
        raise Fault(Status.MISSING_STATE)
    dtype = DTYPE_NAMES[view.dtype]
    size = ITEMSIZE[dtype]
    kernel = f"decode_{FAMILIES.get(view.codec, f'lossless{size}')}"
    planes = {lib.CODEC_TRUNCATE: 2, lib.CODEC_LOSSLESS: size + 1}.get(view.codec, 1)
    scratch = np.empty(grid * WARPS * planes * PLANE, np.uint8)
    out = np.zeros(view.n * (size if into == STORE else 4), np.uint8) if out is None else out
    found = np.array([NONE, 0], np.uint64)
    sink = struct.pack("<QIffII4x", out.ctypes.data if stores else 0, into, weight, divide, 0, 0)
    source = aligned(frame)
    args = [
        copied(view),
        *map(address, (job, source, scratch)),
        (ctypes.c_char * len(sink)).from_buffer_copy(sink),
        ctypes.c_uint32(checks),
        address(found),
    ]
    if view.codec == lib.CODEC_TRUNCATE:
        args.append(address(exponents))
    launch(library, kernel, grid, 32 * WARPS, *args)
    if found[0] != NONE:
        order = int(found[0]) >> 8
        raise Fault(int(found[0]) & 255, order - 1 if order else None)
    if checks and (status := close(int(found[1]))):
        raise Fault(status)
    return out.tobytes()


def encode(library, x, spec, dtype, *, grid=2, exponents=None, metric=None, state=None):
    """The frame of bits, by a job that the host has opened; None: it is to be stored."""
    source = aligned(x.tobytes())
    t, s = new_tensor(DTYPES[dtype], x.shape, pointer(source), x.nbytes), spec_struct(spec)
    size, n = ffi.new("size_t[2]"), ffi.new("size_t *")
    check(lib.codec_job_nbytes(s, t, size, size + 1))
    job, call, plan = aligned(bytes(size[0])), Call(), ffi.new("codec_plan *")
    call.reset()
    context = call.context
    if metric is not None:
        call.set_metric(asked(metric, state, x.size))
    check(lib.codec_encode_room(s, t, n))
    frame, room = aligned(bytes(n[0])), n[0]
    check(lib.codec_encode_open(s, t, pointer(frame), room, context, pointer(job), size[0], plan))
    if plan.nscans:
        launch(library, "scan_rows", grid, 32 * WARPS, copied(view_of(job)), address(job), address(source))
        check(lib.codec_encode_start(t, pointer(frame), room, context, pointer(job), plan))
    if not plan.nblocks:
        return None
    args = [copied(view_of(job)), *map(address, (job, source, frame)), ctypes.c_uint64(room)]
    item, lossless, cut = ITEMSIZE[dtype], s.codec == lib.CODEC_LOSSLESS, s.codec == lib.CODEC_TRUNCATE
    kernel = f"encode_lossless{item}" if lossless else "encode_truncate" if cut else "encode_rows"
    planes = 2 * item + 1 if lossless else 17 if cut else 2
    scratch = np.empty(grid * WARPS * (planes * PLANE + WORDS + (0 if cut else 64)), np.uint8)
    places, written = np.zeros(plan.nblocks, np.uint64), np.zeros(3, np.uint64)
    args += map(address, (scratch, places, written, *([exponents] if cut else [])))
    launch(library, kernel, grid, 32 * WARPS, *args)
    seal, end, fault = int(written[0]), int(written[1]), int(written[2]) >> 32
    if fault:
        raise Fault(fault)
    if (lossless or cut) and end >= 48 + 8 * x.ndim + x.nbytes:
        return None
    directory = view_of(job).directory_offset
    seal += oracle.digest(frame[directory : directory + 8 * plan.nblocks].tobytes(), 0x200)
    check(lib.codec_encode_head(pointer(job), pointer(frame), plan.regions_at, n))
    check(lib.codec_encode_seal(pointer(job), end, seal % 2**64, pointer(frame), n[0]))
    return frame[:end].tobytes()
