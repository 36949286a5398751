"""libcodec_cuda's C interface gives the frames, values and statuses of the native engine.

Its kernels run on the CPU, under a fake CUDA driver. ``make gpu-tests`` also runs this file on a GPU.
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
from codec.engines.cuda.kernels import KERNELS
from codec.errors import Status
from support import cuda_c
from support.cuda_c import Decode, Encode
from support.cuda_c_calls import (
    BAD_ARGUMENT,
    GPU,
    USABLE,
    VERIFY,
    check_round_trip,
    level_of,
    native_frame,
    on_cpu,
    values,
)
from support.specs import TRUNCATES
from support.tensors import ALL_DTYPES, KINDS, random_bits
from support.tiers import every

F32 = np.float32


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
    [(result, back)] = cuda.decode(Decode(frame, spec, "float32", x.shape))  # without segments: the frame contains them
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
    """Return arguments of Encode for tensors of several codecs, dtypes and sizes."""
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
    """Return libcodec_cuda on a fake GPU with 132 multiprocessors, which logs launches without running them."""
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
    """Scratch memory in a workspace does not grow from 2,000 to 3,000 tensors; only arguments and results do."""
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
    assert each < 100_000  # bytes per tensor; with its own scratch memory for warps, a tensor would need 660,000
    assert one < few - 1999 * each < 300_100_000


@pytest.mark.parametrize("cuda", [GPU], indirect=True)
def test_graphs_encode_and_decode_new_values(cuda):
    """A captured graph encodes and decodes new values; its decoder reads the frame's size on the device."""
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
    """CMake compiles the kernels by NVRTC, a C program links by pkg-config, and the Python engine finds the kernels.

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
    assert code.names.keys() >= KERNELS.keys()
    assert all(name.encode() in code.image for name in code.names.values())
