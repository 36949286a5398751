"""libcodec_cuda's C interface gives the frames, values and statuses of the native engine.

Its kernels run on the CPU, behind a CUDA driver for tests. ``make gpu-tests`` runs the file on a GPU, too.
"""

import ctypes
import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import codec
from codec._c.library import ITEMSIZE
from codec.engines.cuda import library
from codec.engines.cuda.kernels import FILE_OF
from codec.errors import Status
from support import cuda_c, device, flatcall, kernel_table
from support.cuda_c import Decode, Encode, Failed
from support.format_cases import HAND_MADE
from support.frame_builder import recompute_checksums
from support.golden_frames import GOLDEN, GOLDEN_FRAMES, golden_tensor
from support.sample_frames import FRAMES_TO_DAMAGE, damage
from support.specs import SPECS, TRUNCATES
from support.tensors import ALL_DTYPES, KINDS, random_bits
from support.tiers import N_DAMAGED, every

F32 = np.float32
SHARED = [name for name, spec in SPECS.items() if getattr(spec, "level_coding", "") == "shared"]
USABLE = {name: spec for name, spec in SPECS.items() if name not in SHARED}
BAD_ARGUMENT, BAD_SPEC, BAD_DTYPE, SHORT_SCRATCH = 10, 11, 12, 21
NO_DRIVER, NO_DEVICE, NO_KERNELS, DRIVER_ERROR = 70, 71, 72, 73
MISMATCH = (int(Status.SHAPE_MISMATCH), BAD_SPEC)
VERIFY, SLACK = 2, 1  # CODEC_VERIFY_FIRST, CODEC_ALLOW_SLACK


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=["cpu", GPU])
def cuda(request):
    if request.param == "gpu":
        gpu = cuda_c.Gpu()
        with pytest.MonkeyPatch.context() as m:
            m.setattr(cuda_c.Memory, "allocate", staticmethod(gpu.allocate))
            yield cuda_c.Cuda(gpu, cuda_c.installed())
        return
    flags = os.environ.get("CUDA_ON_CPU_FLAGS", "").split()
    emulated = device.build(options=flags)
    fake = cuda_c.driver(emulated._name, str(cuda_c.kernels(flags)))
    yield cuda_c.Cuda(fake, cuda_c.library())


on_cpu = pytest.mark.parametrize("cuda", ["cpu"], indirect=True)  # a test of the host part alone


def needs_levels(spec):
    return isinstance(spec, codec.Truncate) and spec.fixed_level is None


def values(shape, dtype="float32", seed=0):
    """Return values of a float dtype, as bits, within all scales of SPECS."""
    x = np.random.default_rng(seed).uniform(-0.4, 0.4, shape).astype(F32)
    if dtype == "float32":
        return x.view(np.uint32)
    return x.astype(np.float16).view(np.uint16) if dtype == "float16" else (x.view(np.uint32) >> 16).astype(np.uint16)


def level_of(x, spec):
    """Return levels for a spec that needs them."""
    return (np.arange(x.size) // 7 % 4).astype(np.uint8) if needs_levels(spec) else None


def native_frame(x, spec, dtype, **how):
    levels = level_of(x, spec)
    return bytes(flatcall.encode(x, spec, dtype=dtype, **({} if levels is None else {"optimizer": levels}), **how))


def check_round_trip(cuda, x, spec, dtype):
    frame = native_frame(x, spec, dtype)
    [(result, ours)] = cuda.encode(Encode(x, spec, dtype, levels=level_of(x, spec)))
    assert (result, ours) == ((len(frame), 0, 0), frame)
    [(result, back)] = cuda.decode(Decode(frame, spec, dtype, x.shape))
    assert result == (len(frame), 0, 0)
    assert back == np.ascontiguousarray(codec.decode(frame, like=np.empty(0, f"u{ITEMSIZE[dtype]}"))).tobytes()


@pytest.mark.parametrize("name", USABLE)
def test_frames_and_values_equal_the_native_engine(cuda, name):
    for dtype, shape in (("float32", (300, 200)), ("bfloat16", (17, 1000)), ("float16", (70_001,))):
        check_round_trip(cuda, values(shape, dtype), USABLE[name], dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_lossless_of_every_dtype(cuda, dtype):
    for kind in every(3, KINDS):
        check_round_trip(cuda, random_bits(dtype, 9000, kind).reshape(90, 100), codec.Lossless(), dtype)


@pytest.mark.parametrize("name", ["lossless", "sign_l1", "float8_entropy", "ternary_base3", "truncate_plane"])
def test_tensors_of_few_values(cuda, name):
    for n in (0, 1, 5, 511, 512, 513):
        check_round_trip(cuda, values(n), USABLE[name], "float32")
    check_round_trip(cuda, values(()), USABLE[name], "float32")


@pytest.mark.parametrize("name", ["lossless", "sign_row", "sign_l1", "quantize_4", "float8_entropy", "truncate_plane"])
def test_segments(cuda, name):
    x, spec = values(40_000), USABLE[name]
    segments = [(5, (64, 100)), (9_000, (90, 300)), (37_000, (64,))]
    frame = native_frame(x, spec, "float32", segments=segments)
    packed = codec.view(x, segments=segments).segments
    [(result, ours)] = cuda.encode(Encode(x, spec, "float32", segments=packed, levels=level_of(x, spec)))
    assert (result.status, ours) == (0, frame)
    [(result, back)] = cuda.decode(Decode(frame, spec, "float32", x.shape))  # segments are in the frame
    assert (result.status, back) == (0, codec.decode(frame, like=np.empty(0, np.uint32)).tobytes())


@pytest.mark.parametrize("name", [name for name in USABLE if not name.startswith("lossless")][::3])
@pytest.mark.parametrize("feedback", [False, True])
def test_residuals(cuda, name, feedback):
    spec, x = USABLE[name], values((50, 300), "bfloat16")
    ours, native = ((np.arange(x.size, dtype=F32) % 7 / 1000).reshape(x.shape) for _ in range(2))
    frame = native_frame(x, spec, "bfloat16", residual=native, feedback=feedback)
    levels = level_of(x, spec)
    [(_, got)] = cuda.encode(Encode(x, spec, "bfloat16", residual=ours, feedback=feedback, levels=levels))
    assert got == frame
    assert ours.tobytes() == native.tobytes()


def test_streams_of_random_bits(cuda):
    x, spec = values(3000), codec.Ternary()
    for stream in (1, 1 << 40):
        [(_, frame)] = cuda.encode(Encode(x, spec, "float32", stream=stream))
        assert frame == native_frame(x, spec, "float32", stream=stream)


def batch(count):
    """Return tensors of several codecs, dtypes and sizes, with arguments of Encode."""
    names = [*USABLE]
    for i in range(count):
        spec, dtype = USABLE[names[i % len(names)]], ("float32", "bfloat16", "float16")[i % 3]
        x = values((1 + i % 5, 100 + 997 * (i % 7)), dtype, seed=i)
        yield x, spec, dtype


def test_batches_equal_single_calls(cuda):
    some = list(batch(60))
    encoded = cuda.encode(*[Encode(x, spec, dtype, levels=level_of(x, spec)) for x, spec, dtype in some])
    frames = [native_frame(*each) for each in some]
    assert [frame for _, frame in encoded] == frames
    asked = [Decode(frame, spec, dtype, x.shape) for frame, (x, spec, dtype) in zip(frames, some, strict=True)]
    wrong = bytearray(frames[7])
    wrong[-9] ^= 1
    asked[7] = Decode(bytes(wrong), some[7][1], some[7][2], some[7][0].shape)
    for flags in (0, VERIFY):
        decoded = cuda.decode(*asked, flags=flags)
        assert [result.status for result, _ in decoded] == [40 if i == 7 else 0 for i in range(60)]
        for i, (frame, (_, back)) in enumerate(zip(frames, decoded, strict=True)):
            assert i == 7 or back == codec.decode(frame, like=np.empty(0, f"u{ITEMSIZE[some[i][2]]}")).tobytes()


@pytest.fixture
def large_gpu(cuda):
    """Library on a GPU of 132 multiprocessors, whose launches are only logged."""
    cuda.fake.fake_cuda_processors(132)
    try:
        yield cuda_c.Cuda(cuda.fake, cuda_c.library())
    finally:
        cuda.fake.fake_cuda_processors(1)


@on_cpu
@pytest.mark.parametrize("name", ["lossless", "sign_l1", "quantize_4", "float8_entropy"])
@pytest.mark.parametrize("what", ["encode", "decode"])
def test_small_tensors_beside_a_large_one_launch_few_idle_blocks(what, name, large_gpu):
    kind = cuda_c.EncodeItem if what == "encode" else cuda_c.DecodeItem
    plans = [large_gpu.plan(USABLE[name], "float32", (n,)) for n in (1 << 28, 1000)]
    items = (kind * 200)()
    for i, item in enumerate(items):
        address = 1 << 40
        item.struct_nbytes, item.plan, item.tensor, item.frame = ctypes.sizeof(kind), plans[i != 100], address, address
        item.result = address
        setattr(item, "capacity" if what == "encode" else "frame_nbytes", 1 << 32)
    call, memory = getattr(large_gpu.lib, f"codec_cuda_{what}"), ctypes.c_void_p(1 << 41)
    flags = [] if what == "encode" else [ctypes.c_uint32(0)]
    assert call(items, ctypes.c_size_t(200), *flags, memory, ctypes.c_uint64(1 << 40), None) == 0
    launches = [line.split() for line in large_gpu.fake.fake_cuda_log().decode().splitlines()]
    kernels = {}
    for kernel, x, y in launches:
        kernels.setdefault(kernel, []).append((int(x), int(y)))
    assert len(kernels) >= 4
    for kernel, grids in kernels.items():
        assert sum(x * y for x, y in grids) <= 2112 + 199 + 4096, (kernel, grids)
        assert kernel.startswith("store_bytes") or len(grids) <= 2, (kernel, grids)
    assert any(x > 300 for x, _ in itertools.chain(*kernels.values()))


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_scratch_of_a_workspace_is_limited(what, cuda):
    """Workspaces for two and three thousand tensors differ in arguments and results alone."""
    kind, size = cuda_c.EncodeItem if what == "encode" else cuda_c.DecodeItem, ctypes.c_uint64()
    item = kind(struct_nbytes=ctypes.sizeof(kind), plan=cuda.plan(codec.Lossless(), "float32", (1 << 16,)))
    found = []
    for count in (1, 2000, 3000):
        items = (kind * count)(*[item] * count)
        workspace = getattr(cuda.lib, f"codec_cuda_{what}_workspace")
        assert workspace(items, ctypes.c_size_t(count), ctypes.byref(size)) == 0
        found.append(size.value)
    one, few, more = found
    each = (more - few) / 1000
    assert each < 100_000  # scratch for the warps of a tensor would be 660,000
    assert one < few - 1999 * each < 300_100_000


@pytest.mark.parametrize("cuda", [GPU], indirect=True)
def test_graphs_encode_and_decode_new_values(cuda):
    """Calls are captured in a graph; decoding reads the frame's size on the device."""
    spec, first = codec.Lossless(), values((300, 1000))
    encode = Encode(first, spec, "float32")
    items = [encode.item(cuda)]
    decode = Decode(bytes(len(encode.frame.bytes)), spec, "float32", first.shape, sized=True)
    read = decode.item(cuda)
    read.frame, read.frame_nbytes_at = encode.frame.address, encode.result.address
    spaces = [cuda.workspace("encode", items), cuda.workspace("decode", [read])]

    def submit(stream):
        assert cuda.submit("encode", items, workspace=spaces[0], stream=stream) == 0
        assert cuda.submit("decode", [read], VERIFY, workspace=spaces[1], stream=stream) == 0

    run = cuda.fake.capture(submit)
    for seed in range(3):
        x = values(first.shape, seed=seed)
        encode.tensor.bytes[:] = x.reshape(-1).view(np.uint8)
        run()
        assert encode.finish()[1] == native_frame(x, spec, "float32")
        assert decode.finish() == ((len(native_frame(x, spec, "float32")), 0, 0), x.tobytes())


def test_statuses_of_encoding(cuda):
    x, spec = values((40, 300)), codec.Quantize(4)
    frame = native_frame(x, spec, "float32")
    [(result, ours)] = cuda.encode(Encode(x, spec, "float32", capacity=len(frame)))
    assert (result, ours) == ((len(frame), 0, 0), frame)
    [(result, _)] = cuda.encode(Encode(x, spec, "float32", capacity=len(frame) - 8))
    assert result == (0, Status.SHORT_OUTPUT, 0)
    x[7, 7] = 0x7FC00000
    [(result, _)] = cuda.encode(Encode(x, spec, "float32"))
    assert result == (0, Status.NONFINITE, 0)
    levels = np.full(x.size, 4, np.uint8)
    [(result, _)] = cuda.encode(Encode(x, TRUNCATES["truncate_plane"], "float32", levels=levels))
    assert result == (0, BAD_ARGUMENT, 0)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames(cuda, name):
    frame = GOLDEN_FRAMES[name]
    info = codec.inspect(frame)
    if info.codebook_id:
        expected = int(Status.UNKNOWN_CODEBOOK)
    elif getattr(info.spec, "level_coding", "") == "shared" and info.nblocks:
        expected = int(Status.MISSING_STATE)
    else:
        expected = 0
    spec = info.spec if expected != Status.MISSING_STATE else codec.Truncate(0)
    base = golden_tensor(name)[2].get("base")
    [(result, back)] = cuda.decode(Decode(frame, spec, info.dtype, info.shape, base=base))
    assert result.status == expected
    if not expected:
        assert back == codec.decode(frame, like=np.empty(0, f"u{ITEMSIZE[info.dtype]}"), base=base).tobytes()


def native_outcome(frame, dtype):
    """Return the native engine's values, or its status."""
    try:
        return np.ascontiguousarray(codec.decode(frame, like=np.empty(0, f"u{ITEMSIZE[dtype]}"))).tobytes()
    except codec.CodecError as e:
        return e.code


def is_like(frame, spec, dtype, shape):
    """Return whether codec, dtype and shape of a frame's header, and the use of an entropy stage, are these."""
    try:
        info = codec.inspect(frame)
    except codec.CodecError:
        return False
    entropy = [getattr(s, "entropy", getattr(s, "packing", "") == "entropy") for s in (info.spec, spec)]
    return (type(info.spec), info.dtype, info.shape) == (type(spec), dtype, shape) and entropy[0] == entropy[1]


def check_outcome(cuda, frame, spec, dtype, shape, flags=0):
    """Compare a frame's outcome with the native engine's. Returns the status."""
    before = np.full(shape, 0xA5, f"u{ITEMSIZE[dtype]}")
    [(result, back)] = cuda.decode(Decode(frame, spec, dtype, shape, before=before), flags=flags)
    if result.status in MISMATCH:  # is reported first
        assert not is_like(frame, spec, dtype, shape)
    else:
        assert native_outcome(frame, dtype) == (result.status or back)
    if result.status and flags & VERIFY:
        assert back == before.tobytes()
    return result.status


@pytest.mark.parametrize("name", FRAMES_TO_DAMAGE)
def test_hostile_frames(cuda, name):
    """Damaged frames give the values or the status of the native engine; the tensor is unchanged with VERIFY_FIRST."""
    frame = FRAMES_TO_DAMAGE[name][0]
    info = codec.inspect(frame)
    if getattr(info.spec, "level_coding", "") == "shared":
        return
    rng = np.random.default_rng(sorted(FRAMES_TO_DAMAGE).index(name))
    statuses = [
        check_outcome(cuda, damage(frame, rng), info.spec, info.dtype, info.shape, flags)
        for flags in (0, VERIFY)
        for _ in range(N_DAMAGED // 4)
    ]
    assert any(statuses)


@pytest.mark.parametrize("name", ["model", "parts", "float8_entropy", "uint8-1500-sparse", "sign_two_mean"])
def test_every_damaged_byte_of_headers_and_side_sections(cuda, name):
    """Frames with a recomputed checksum, so that the checks behind it are reached."""
    frame = FRAMES_TO_DAMAGE[name][0]
    info = codec.inspect(frame)
    rng = np.random.default_rng(0)
    for i in every(3, range(48 + 8 * len(info.shape) + int.from_bytes(frame[12:16], "little"))):
        mutant = bytearray(frame)
        mutant[i] ^= 1 << int(rng.integers(8))
        recomputed = recompute_checksums(bytes(mutant))
        check_outcome(cuda, bytes(mutant) if recomputed is None else recomputed, info.spec, info.dtype, info.shape)


@pytest.mark.parametrize("name", [*GOLDEN][::11])
def test_truncated_frames(cuda, name):
    frame = GOLDEN_FRAMES[name]
    info = codec.inspect(frame)
    for n in (0, 3, 4, 47, 48, 60, len(frame) // 2, len(frame) - 1):
        [(result, _)] = cuda.decode(Decode(frame[:n], codec.Lossless(), info.dtype, info.shape))
        assert result.status in (Status.TRUNCATED, BAD_SPEC), n  # BAD_SPEC: not the plan's codec
        assert result.nbytes == 0


@pytest.mark.parametrize("case", HAND_MADE)
def test_frames_made_by_hand(cuda, case):
    """Hand-made frames decode to the values of the native engine, or have its status."""

    def compared(frame, **how):
        if how:  # an optimizer's state
            return None
        try:
            info = codec.inspect(frame)
        except codec.CodecError:
            return dict.fromkeys((1, 4))
        status = Status.MISSING_STATE
        if getattr(info.spec, "level_coding", "") != "shared":
            status = check_outcome(cuda, frame, info.spec, info.dtype, info.shape)
        return dict.fromkeys((1, 4), None if status else native_outcome(frame, info.dtype))

    check, *arguments = HAND_MADE[case]
    if "shared" not in case and "state" not in case:
        check(compared, *arguments)


@pytest.mark.parametrize("name", ["quantize_4", "ternary_2bit", "truncate_fixed", "lossless"])
def test_decoding_into_float32(cuda, name):
    spec = USABLE[name]
    x, before = values((30, 700), "bfloat16"), values((30, 700), seed=5).view(F32)
    frame = native_frame(x, spec, "bfloat16")
    plain = codec.decode(frame, like=np.empty(0, np.uint16)).astype(np.uint32) << 16
    plain = plain.view(F32)
    for into, weight, divide, expected in (
        (1, 0.5, 0, before + F32(0.5) * plain),
        (2, 1, 0, np.maximum(before, plain)),
        (3, 1, 0, plain),
        (3, 1, 3, plain / F32(3)),
    ):
        asked = Decode(frame, spec, "bfloat16", x.shape, before=before.copy(), into=into, weight=weight, divide=divide)
        [(result, back)] = cuda.decode(asked, flags=VERIFY)
        assert result.status == 0
        assert (np.frombuffer(back, F32) == expected.reshape(-1)).all(), into


def test_size_of_the_frame_on_the_device(cuda):
    """Frames in larger buffers: their size is read on the device, or bytes behind them are allowed."""
    x, spec = values((30, 700)), codec.Lossless()
    frame = native_frame(x, spec, "float32")
    [(result, back)] = cuda.decode(Decode(frame, spec, "float32", x.shape, sized=True))
    assert (result, back) == ((len(frame), 0, 0), x.tobytes())
    longer = Decode(frame + bytes(64), spec, "float32", x.shape)
    [(result, _)] = cuda.decode(longer)
    assert result == (0, Status.TRAILING, 0)
    [(result, back)] = cuda.decode(longer, flags=SLACK)
    assert (result, back) == ((len(frame), 0, 0), x.tobytes())
    short = Decode(frame, spec, "float32", x.shape, sized=True)
    short.nbytes.bytes[:] = 255  # a size above frame_nbytes
    [(result, _)] = cuda.decode(short)
    assert result == (0, Status.TRUNCATED, 0)


def test_frames_of_other_tensors_are_rejected(cuda):
    frame = native_frame(values((30, 700)), codec.Quantize(4), "float32")
    for spec, dtype, shape, status in (
        (codec.Quantize(4), "float32", (30, 701), Status.SHAPE_MISMATCH),
        (codec.Quantize(4), "float32", (21_000,), Status.SHAPE_MISMATCH),
        (codec.Quantize(4), "float16", (30, 700), Status.SHAPE_MISMATCH),
        (codec.Float8(), "float32", (30, 700), BAD_SPEC),
        (codec.Quantize(8, 100), "float32", (30, 700), 0),  # the frame has its own parameters
    ):
        [(result, _)] = cuda.decode(Decode(frame, spec, dtype, shape))
        assert result.status == status
    frame = native_frame(values((30, 700)), codec.Float8(entropy=True), "float32")
    [(result, _)] = cuda.decode(Decode(frame, codec.Float8(), "float32", (30, 700)))
    assert result.status == BAD_SPEC


def fails_with(status, call, *args, **how):
    with pytest.raises(Failed) as caught:
        call(*args, **how)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("struct_nbytes", 8),
        ("flags", 1),
        ("flags", 32),  # CODEC_FEEDBACK without a residual
        ("plan", None),
        ("tensor", None),
        ("tensor", 4098),
        ("frame", None),
        ("frame", 4100),
        ("result", None),
        ("result", 4100),
        ("residual", 4097),
    ],
)
def test_wrong_arguments_of_encoding(cuda, field, value):
    item = Encode(values(3000), codec.Quantize(4), "float32").item(cuda)
    setattr(item, field, value)
    fails_with(BAD_ARGUMENT, cuda.run, "encode", [item])


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("struct_nbytes", 8, BAD_ARGUMENT),
        ("into", 4, BAD_ARGUMENT),
        ("plan", None, BAD_ARGUMENT),
        ("tensor", None, BAD_ARGUMENT),
        ("frame", 4100, BAD_ARGUMENT),
        ("frame_nbytes_at", 4100, BAD_ARGUMENT),
        ("result", None, BAD_ARGUMENT),
        ("divide", 2, BAD_ARGUMENT),
        ("divide", float("nan"), BAD_ARGUMENT),
        ("into", 1, BAD_DTYPE),
    ],
)
def test_wrong_arguments_of_decoding(cuda, field, value, status):
    x = np.arange(3000, dtype=np.int32)
    item = Decode(native_frame(x, codec.Lossless(), "int32"), codec.Lossless(), "int32", x.shape).item(cuda)
    setattr(item, field, value)
    fails_with(status, cuda.run, "decode", [item], 0)


def test_wrong_arguments_of_other_functions(cuda):
    x = values(3000)
    fails_with(Status.MISSING_STATE, cuda.encode, Encode(x, TRUNCATES["truncate_plane"], "float32"))
    residual = np.zeros(3000, F32)
    fails_with(Status.SHORT_OUTPUT, cuda.encode, Encode(x, codec.Sign(), "float32", residual=residual, capacity=100))
    fails_with(BAD_ARGUMENT, cuda.decode, Decode(b"", codec.Sign(), "float32", (3000,)), flags=4)
    fails_with(Status.UNSUPPORTED, cuda.plan, TRUNCATES["truncate_shared"], "float32", (3000,))
    fails_with(BAD_DTYPE, cuda.plan, codec.Sign(), "int32", (3000,))
    fails_with(14, cuda.plan, codec.Sign(), "float32", (3000,), bytes(12) + b"\1" + bytes(67))  # reserved is not 0
    item = Encode(x, codec.Sign(), "float32").item(cuda)
    array, none = (cuda_c.EncodeItem * 1)(item), ctypes.c_uint64(0)
    memory = cuda_c.Memory(1 << 20)
    call = cuda.lib.codec_cuda_encode
    assert call(array, ctypes.c_size_t(1), ctypes.c_void_p(memory.address), none, None) == SHORT_SCRATCH
    odd = ctypes.c_void_p(memory.address + 8)
    assert call(array, ctypes.c_size_t(1), odd, ctypes.c_uint64(1 << 20), None) == BAD_ARGUMENT
    assert call(None, ctypes.c_size_t(0), None, none, None) == 0
    assert cuda.fake.fake_cuda_log() == b""  # nothing was launched


FUNCTIONS = ["cuCtxPushCurrent", "cuMemsetD8Async", "cuLaunchKernel"]


@on_cpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_errors_of_the_driver_are_reported(cuda, function):
    cuda.fake.fake_cuda_fail(function.encode(), 700)
    try:
        fails_with(DRIVER_ERROR, cuda.encode, Encode(values(3000), codec.Sign(), "float32"))
    finally:
        cuda.fake.fake_cuda_fail(b"", 0)
    assert cuda.lib.codec_cuda_driver_error() == 700
    assert cuda.fake.fake_cuda_contexts() == 0


def opened(cuda, ordinal=0):
    """Open and close another device; return the status."""
    another = ctypes.c_void_p()
    status = cuda.lib.codec_cuda_open(ordinal, ctypes.byref(another))
    assert bool(another) == (status == 0)
    cuda.lib.codec_cuda_close(another)
    assert cuda.fake.fake_cuda_contexts() == 0
    return status


@on_cpu
def test_errors_of_opening_a_device(cuda):
    assert opened(cuda) == 0
    assert opened(cuda, 1) == opened(cuda, -1) == NO_DEVICE
    for function in ("cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleGetGlobal"):
        cuda.fake.fake_cuda_fail(function.encode(), 200)
        status = opened(cuda)
        cuda.fake.fake_cuda_fail(b"", 0)
        assert status == DRIVER_ERROR, function
    for arch, status in ((75, NO_KERNELS), (88, DRIVER_ERROR), (90, 0), (91, 0), (100, NO_KERNELS)):
        cuda.fake.fake_cuda_arch(arch)  # the image for 80 is not one of kernels
        try:
            assert opened(cuda) == status, arch
        finally:
            cuda.fake.fake_cuda_arch(90)


def test_every_status_has_a_sentence(cuda):
    sentences = {cuda.lib.codec_cuda_strerror(status) for status in (0, 10, 40, 70, 71, 72, 73, 74)}
    assert len(sentences) == 8


NO_DRIVER_CODE = """
import ctypes, sys
device = ctypes.c_void_p()
print(ctypes.CDLL(sys.argv[1]).codec_cuda_open(0, ctypes.byref(device)))
"""


def test_no_driver_is_a_status():
    """In a process that has not loaded the driver, the library loads and reports that there is none."""
    command = [sys.executable, "-c", NO_DRIVER_CODE, str(cuda_c.library())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(NO_DRIVER)


def test_kernel_table_is_that_of_the_engine():
    """`python -m support.kernel_table --write` writes the table from codec/engines/cuda/kernels.py."""
    assert kernel_table.PATH.read_text() == kernel_table.text()


@on_cpu
def test_code_of_the_page(cuda, tmp_path):
    """The C code of docs/guides/gpu-c.md compiles as C99 without a warning, and makes a round trip."""
    page = (cuda_c.ROOT / "docs/guides/gpu-c.md").read_text()
    source, out = tmp_path / "page.c", tmp_path / "page.so"
    source.write_text("\n".join(re.findall(r"^```c\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)))
    strict = ["-std=c99", "-fPIC", "-shared", "-Wpedantic", "-Wstrict-prototypes", *cuda_c.WARNINGS]
    subprocess.run(["cc", *strict, *cuda_c.INCLUDED, str(source), str(cuda_c.library()), "-o", str(out)], check=True)
    program, plan = ctypes.CDLL(str(out)), ctypes.c_void_p()
    assert program.plan_matrix(cuda.device, ctypes.c_uint64(40), ctypes.c_uint64(300), ctypes.byref(plan)) == 0
    bound, x = cuda.lib.codec_cuda_bound(plan), values((40, 300), "bfloat16")
    matrix, frame, result, back = (cuda_c.Memory(n) for n in (x.nbytes, bound, 16, x.nbytes))
    matrix.bytes[:] = x.view(np.uint8).reshape(-1)
    workspace = cuda_c.Memory(4 << 20)
    last = ctypes.c_void_p(workspace.address), ctypes.c_uint64(4 << 20), None
    encoded = [ctypes.c_void_p(m.address) for m in (matrix, frame, result)]
    assert program.encode_matrix(plan, *encoded, *last) == 0
    size = np.frombuffer(result.bytes, "<u8")[0]
    assert frame.bytes[:size].tobytes() == native_frame(x, codec.Lossless(), "bfloat16")
    decoded = [ctypes.c_void_p(m.address) for m in (frame, result, back, cuda_c.Memory(16))]
    assert program.decode_matrix(plan, *decoded, *last) == 0
    assert back.bytes.tobytes() == x.tobytes()
    cuda.lib.codec_cuda_plan_close(plan)
    assert all(m.intact() for m in (matrix, frame, result, back, workspace))


@on_cpu
def test_example_of_a_compressor_for_transports(cuda):
    """examples/cuda serves a transport: round trip, damaged frames, and frames that do not fit."""
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", *cuda_c.WARNINGS, *cuda_c.INCLUDED]
    source = [f"-I{cuda_c.ROOT / 'examples/cuda'}", str(cuda_c.TESTS / "transport.cc"), str(cuda_c.library())]
    program = ctypes.CDLL(str(cuda_c.compiled("transport", [*command, *source])))
    program.send_message.restype = ctypes.c_uint64
    x = values(20_000, "bfloat16")
    message, frame, received = (cuda_c.Memory(n) for n in (x.nbytes, 2 * x.nbytes, x.nbytes))
    message.bytes[:] = x.view(np.uint8)
    at = [ctypes.c_void_p(m.address) for m in (message, frame, received)]
    sent = program.send_message(at[0], ctypes.c_uint64(x.nbytes), at[1], ctypes.c_uint64(2 * x.nbytes), at[2])
    assert sent == len(native_frame(x, codec.Lossless(), "bfloat16"))
    assert received.bytes.tobytes() == x.tobytes()
    assert all(m.intact() for m in (message, frame, received))


@pytest.mark.nightly
def test_library_is_built_and_installed_with_kernels_for_a_gpu(tmp_path, monkeypatch):
    """CMake compiles the kernels by NVRTC, a program links by pkg-config, and the Python engine finds its kernels.

    This takes a minute of CPU time.
    """
    build, prefix = tmp_path / "build", tmp_path / "installed"
    options = ["-G", "Ninja", "-DCODEC_CUDA=ON", "-DCODEC_CUDA_ARCHS=90", "-DCODEC_WERROR=ON"]
    program = tmp_path / "program.c"
    program.write_text(
        "#include <codec/codec_cuda.h>\n"
        "int main(void) { return codec_cuda_abi_version() == CODEC_CUDA_ABI_VERSION ? 0 : 1; }\n"
    )
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    flags = f"-DCMAKE_INSTALL_LIBDIR=lib -DPython_EXECUTABLE={sys.executable}".split()
    for command in (
        ["cmake", "-S", str(cuda_c.ROOT / "native"), "-B", str(build), *options, *flags],
        ["cmake", "--build", str(build), "--target", "codec_cuda"],
        ["cmake", "--install", str(build), "--prefix", str(prefix)],
        [
            "sh",
            "-c",
            f"cc {program} $(pkg-config --cflags --libs codec_cuda) -Wl,-rpath,{prefix}/lib -o {tmp_path}/program",
        ],
        [str(tmp_path / "program")],
    ):
        subprocess.run(command, check=True, env=env)
    monkeypatch.setenv("CODEC_CUDA_LIBRARY", str(prefix / "lib/libcodec_cuda.so"))
    code = library.code_for.__wrapped__("sm_90")
    assert code.image.startswith(b"\x7fELF")
    assert code.names.keys() >= FILE_OF.keys()
    assert all(name.encode() in code.image for name in code.names.values())
