"""The CUDA kernels as g++ compiles them, launched as the driver would: `tests/cuda/`."""

import ctypes
import struct
import subprocess
from pathlib import Path

import numpy as np
import test_exact

import codec
from codec.core import DTYPE_NAMES, DTYPES, ITEMSIZE, check, ffi, lib
from codec.engines.steps import tensor_like
from codec.errors import CodecError, Status
from codec.frame import read_header
from codec.metrics.asked import asked
from codec.segmenting import pack
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
SIZES, ROWS = (1, 2, 4, 8), (2, 3, 4, 5, 6)  # bytes of a value; codecs of rows
KERNELS = {  # by the file that has them
    "before": ("add_feedback", "check_levels", "metric_exponents", "value_exponents"),
    "choose_lossless": ("choose_lossless",),
    "choose_rows": ("choose_rows",),
    "choose_truncate": ("choose_truncate",),
    "encode_lossless": tuple(f"encode_lossless<{n}>" for n in SIZES),
    "encode_rows": ("encode_rows",),
    "encode_truncate": ("encode_truncate",),
    "close": ("close_frame",),
    "decode_lossless": tuple(f"decode_lossless<{n}>" for n in SIZES),
    "decode_rows": tuple(f"decode_rows<{n}>" for n in ROWS),
    "decode_truncate": ("decode_truncate",),
    "decode_stored": ("decode_stored",),
}
STORE, ADD, MAXIMUM, FLOAT32 = 0, 1, 2, 3
WARPS = 4  # of a block
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


def compile_kernels(file, arch):
    """By NVRTC, for a GPU that need not be there: what its assembler says, and the PTX."""
    stubs = {"stdint.h": '#pragma once\n#include "exact/bits.h"\n', "stddef.h": "#pragma once\n"}
    options = [f"-arch={arch}", "-fmad=false", "-default-device", "-Xptxas=-v", *INCLUDED]
    return test_exact.compiled(f'#include "{file}.cu"\n', stubs, options, KERNELS[file])


def launch(library, kernel, grid, threads, *args):
    """`args`: ctypes values and buffers, which are passed as they are."""
    call = getattr(library, f"{kernel.replace('<', '_').rstrip('>')}_launch")
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


def bytes_of(struct):
    """A struct, likewise."""
    return (ctypes.c_char * len(struct)).from_buffer_copy(struct)


def copied(struct):
    """One of cffi."""
    return bytes_of(ffi.buffer(struct))


def view_of(job):
    view = ffi.new("codec_view *")
    view.struct_nbytes = ffi.sizeof("codec_view")
    check(lib.codec_job_view(pointer(job), view))
    return view


def family_of(view, size):
    """Whose kernels do it, and which of them: by values' size or by codec."""
    if view.codec == lib.CODEC_LOSSLESS:
        return "lossless", size
    return ("truncate", 0) if view.codec == lib.CODEC_TRUNCATE else ("rows", view.codec)


def sizes_of(library, name, count):
    return (ctypes.c_uint64 * count).in_dll(library, name)


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


def decode(library, frame, *, into=STORE, out=None, weight=1.0, divide=0.0, checks=True, stores=True, grid=2, **how):
    """A frame's values, their bytes; or Fault, or the CodecError of its header or side section."""
    try:
        job, view, close = plan(frame)
    except CodecError as e:
        if e.code in (Status.BAD_SIDE, Status.UNKNOWN_CODEBOOK):
            check_frame(frame)  # which comes before the side section
        raise
    shared = view.layout and view.codec == lib.CODEC_TRUNCATE and view.variant == lib.CODEC_LEVELS_SHARED
    exponents = exponents_of(library, how, view.n) if shared else None
    if shared and exponents is None:
        raise Fault(Status.MISSING_STATE)
    dtype = DTYPE_NAMES[view.dtype]
    size = ITEMSIZE[dtype]
    family, which = family_of(view, size)
    stored = view.layout == 0
    kernel = "decode_stored" if stored else f"decode_{family}" + (f"<{which}>" if which else "")
    each = sizes_of(library, f"decode_{family}_nbytes", 4)[size.bit_length() - 1 if family == "lossless" else 0]
    scratch = np.empty(0 if stored else grid * WARPS * each, np.uint8)
    out = np.zeros(view.n * (size if into == STORE else 4), np.uint8) if out is None else out
    found = np.array([NONE, 0, 0], np.uint64)
    sink = struct.pack("<QIffII4x", out.ctypes.data if stores else 0, into, weight, divide, 0, 0)
    source = aligned(frame)
    args = [copied(view), *map(address, (source,) if stored else (job, source, scratch))]
    args += [bytes_of(sink), ctypes.c_uint32(checks), address(found)]
    if kernel == "decode_truncate":
        args.append(address(exponents))
    launch(library, kernel, grid, 32 * WARPS, *args)
    if found[0] != NONE:
        order = int(found[0]) >> 8
        raise Fault(int(found[0]) & 255, order - 1 if order else None)
    if checks and (status := close(int(found[1]))):
        raise Fault(status)
    return out.tobytes()


def call_of(how, n):
    """What is asked for of n values."""
    call = Call()
    call.reset()
    if how.get("metric") is not None:
        call.set_metric(asked(how["metric"], how.get("state"), n))
    if "segments" in how:
        call.set_segments(pack(how["segments"]))
    if "codebook" in how:
        call.set_codebooks([how["codebook"]])
    call.context.stream = how.get("stream", 0)
    return call


def exponents_of(library, how, n, grid=2):
    """Those of A, by a metric and its state; None where there is none."""
    if how.get("metric") is None or isinstance(how["metric"], np.ndarray):
        return None
    call, found, first = call_of(how, n), np.full(n, 0xEE, np.uint8), 0
    metric = call.context.metric
    while first < n:
        states = [(t.data, t.dtype) if t else (0, 0) for t in (metric.theta, metric.v, metric.m)]
        data = (int(ffi.cast("uintptr_t", at)) for at, _ in states)
        floats = (metric.theta_term, metric.theta_v_term, metric.v_term, metric.eps, metric.m_term)
        terms = struct.pack("<3Q3I5f", *data, *(dtype for _, dtype in states), *floats)
        end = min(metric.until or n, n)
        span = (ctypes.c_uint64(first), ctypes.c_uint64(end))
        launch(library, "metric_exponents", grid, 96, bytes_of(terms), *span, address(found))
        first, metric = end, metric.next
    return found


def planned(x, spec, dtype, call):
    """A job for bits from what is known without them: its memory, its view, its header."""
    t, s = new_tensor(DTYPES[dtype], x.shape, ffi.NULL, x.nbytes), spec_struct(spec)
    size, n, plan = ffi.new("size_t[2]"), ffi.new("size_t *"), ffi.new("codec_plan *")
    check(lib.codec_job_nbytes(s, t, size, size + 1))
    job, head = aligned(bytes(size[0])), aligned(bytes(112))
    check(lib.codec_encode_plan(s, t, call.context, pointer(job), size[0], plan))
    check(lib.codec_encode_head(pointer(job), pointer(head), head.nbytes, n))
    check(lib.codec_encode_room(s, t, n))
    view = aligned(bytes(ffi.buffer(view_of(job))))
    most = -(-plan.region_bound // 64) * 64
    return job, view, head, n[0], most


def encode(library, x, spec, dtype, *, grid=2, capacity=None, residual=None, feedback=False, **how):
    """The frame of bits; what it does not have to `residual`, if that is an array."""
    tensor, call = aligned(x.tobytes()), call_of(how, x.size)
    if residual is not None:
        call.context.residual = ffi.cast("float *", residual.ctypes.data)
    written, n, sums = np.zeros(6, np.uint64), ctypes.c_uint64(x.size), None
    if feedback:
        given, tensor, sums = tensor, aligned(bytes(x.nbytes)), np.empty(x.size, np.float32)
        dtype_number = ctypes.c_uint32(DTYPES[dtype])
        launch(
            library,
            "add_feedback",
            grid,
            96,
            dtype_number,
            *map(address, (given, residual)),
            n,
            *map(address, (sums, tensor)),
        )
    source = bytes_of(struct.pack("<3Q", *(0 if a is None else a.ctypes.data for a in (tensor, sums, residual))))
    job, view, head, room, region = planned(x, spec, dtype, call)
    room = ctypes.c_uint64(room if capacity is None else capacity)
    v = ffi.from_buffer("codec_view *", view)
    frame, item = aligned(bytes(room.value)), ITEMSIZE[dtype]
    sizes, nparts = sizes_of(library, "choose_nbytes", 2), v.model_parts.count
    choice, places = np.zeros(sizes[0] + max(nparts, 1) * sizes[1], np.uint8), np.zeros(max(v.nblocks, 1), np.uint64)
    family, which = family_of(v, item)
    sized = item.bit_length() - 1 if family == "lossless" else 0
    each = ctypes.c_uint64(sizes_of(library, f"encode_{family}_nbytes", 4)[sized] + region)
    scratch = np.empty(grid * WARPS * each.value, np.uint8)
    values = address(tensor) if family == "lossless" else source
    if v.nblocks:
        cut = []
        if family == "truncate":
            levels = how["metric"] if isinstance(how.get("metric"), np.ndarray) else None
            exponents = exponents_of(library, how, x.size)
            if levels is not None:
                launch(library, "check_levels", grid, 96, address(levels), n, address(written))
            cut = [bytes_of(struct.pack("<2Q", *(0 if a is None else a.ctypes.data for a in (exponents, levels))))]
        args = [address(view), address(job), values]
        if family == "rows":
            args += [address(choice), address(scratch), each, address(written)]
        else:
            args += [ctypes.c_uint32(nparts), address(choice), room, *cut, *([address(written)] if cut else [])]
        launch(library, f"choose_{family}", grid, 256, *args)
        args = [address(view), address(job), values, address(frame), room, address(scratch), each]
        kernel = f"encode_{family}" + (f"<{which}>" if family == "lossless" else "")
        launch(library, kernel, grid, 32 * WARPS, *args, address(places), address(written), *cut)
    args = [address(view), address(job), source, address(frame), room, *map(address, (choice, head, written))]
    launch(library, "close_frame", grid, 256, *args)
    if fault := int(written[5]) & 0xFFFFFFFF:
        raise Fault(fault)
    return frame[: written[3]].tobytes()
