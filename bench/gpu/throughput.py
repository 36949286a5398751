"""GB/s of encoding and decoding on an NVIDIA GPU, and fractions of a device copy in the same run.

    python bench/gpu/throughput.py                       # 2^28 values; --values 20 for fewer, --json for programs

A time is the median of 20 runs by CUDA events, of a graph with all work of a call: sampling, codebooks, checksums.
The fraction is (tensor bytes + frame bytes) / time, relative to that of a copy, which reads and writes as much. No
coder exceeds 100%; half of that if a tensor must be read twice (Ternary without a given scale). Truncate's optimizer
state counts as read. `decode` validates while it writes, and knows the header. A row is printed as soon as it is
measured; a case that fails is reported on stderr, and the others go on.

Peers, each measured if it is installed: nvCOMP's ANS (nvidia-nvcomp-cu12 or -cu13), and the same row scaling and sign
packing as torch.compile generates them, which check nothing.

One file: every row is measured by the same functions, in one process.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes

import codec
from codec import optimizers
from codec._c.library import lib
from codec.engines.cuda import cupy_backend, devices
from codec.engines.cuda.batch_decode import BatchDecode, Step, open_frames
from codec.engines.cuda.calls import reduction_steps
from codec.engines.cuda.decoding import Frame, Sink
from codec.engines.cuda.encoding import Encoding
from codec.engines.cuda.job import begin as begin_jobs
from codec.engines.cuda.workspace import Work
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.tensors.view import TensorView, view, view_bytes, view_output


def timed(begin: Callable[[], Any], times: int = 20) -> float:
    """Return the GPU seconds of asynchronous work: the median of runs of its graph."""
    import cupy

    stream, taken = cupy.cuda.Stream(non_blocking=True), []
    cupy.cuda.runtime.deviceSynchronize()  # wait for inputs made on other streams
    with stream:
        begin()
        stream.synchronize()
        stream.begin_capture()
        kept = begin()  # keeps the memory of the graph alive
        graph = stream.end_capture()
        for _ in range(times + 1):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            graph.launch()  # keep the GPU busy while the next graph is launched
            start.record()
            graph.launch()
            end.record()
            end.synchronize()
            taken.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    del kept
    return statistics.median(taken[1:])


def clock(call: Callable[[], Any], times: int = 20) -> float:
    """Return the median seconds of a call, including the work that it starts."""
    import cupy

    call()
    taken = []
    for _ in range(times):
        cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        call()
        cupy.cuda.runtime.deviceSynchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def copy_rate(n: int) -> float:
    """Return the bytes per second that a copy of n float32 by the driver reads and writes: the fastest of 20 runs."""
    import cupy

    a = cupy.empty(n, cupy.float32)
    b = cupy.empty_like(a)
    end, taken = time.perf_counter() + 0.5, []
    while time.perf_counter() < end:  # warm up: an idle GPU has low clocks
        b.data.copy_from_device_async(a.data, a.nbytes)
        cupy.cuda.runtime.deviceSynchronize()
    for _ in range(20):  # a copy within a graph takes half as long again
        begin, done = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        b.data.copy_from_device_async(a.data, a.nbytes)
        done.record()
        done.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(begin, done) / 1e3)
    return 2 * a.nbytes / min(taken)


def row_of(name: str, size: float, moved: float, values: float, bits: float, rate: float, **seconds: float) -> Any:
    """Return a row: GB/s of the tensor, and fractions of the copy's rate."""
    row: dict[str, Any] = {"name": name, "bits": bits / values}
    for way, taken in seconds.items():
        row |= {way: size / taken, f"{way} of a copy": moved / taken / rate, f"{way} us": 1e6 * taken}
    return row


def gradient(shape: tuple[int, ...], kind: str) -> Any:
    """Return values with scales by row and column, like a gradient's; flat: without scales."""
    import cupy

    rng = cupy.random.default_rng(0)
    x = rng.standard_normal(shape, dtype=cupy.float32)
    if len(shape) == 2 and "flat" not in kind:
        x *= cupy.exp(rng.standard_normal((shape[0], 1), dtype=cupy.float32))
        x *= cupy.exp(0.5 * rng.standard_normal(shape[1], dtype=cupy.float32))
    if "zeros" in kind:
        x[rng.random(shape, dtype=cupy.float32) < 0.02] = 0
    if "halved" in kind:  # 12 bits of mantissa
        x = (x.view(cupy.uint32) & 0xFFFFF000).view(cupy.float32)
    if "in bfloat16" in kind:
        x = (x.view(cupy.uint32) & 0xFFFF0000).view(cupy.float32)
    return (x.view(cupy.uint32) >> 16).astype(cupy.uint16) if kind.startswith("bfloat16") else x


def cases(log2: int) -> dict[str, tuple[tuple[int, ...], str, str, codec.Spec, dict[str, Any]]]:
    """Return shape, distribution, dtype, spec and arguments by name."""
    n = 1 << log2
    rows = (n >> 12, 1 << 12)
    auto, flat = codec.Lossless(), codec.Lossless(model="flat")
    found: dict[str, Any] = {
        "Lossless bfloat16, prior codebook": (rows, "bfloat16 flat", "bfloat16", flat, {}),
        "Lossless bfloat16, no scale model": (rows, "bfloat16 flat", "bfloat16", flat, {}),
        "Lossless bfloat16, offsets": (rows, "bfloat16", "bfloat16", auto, {}),
        "Lossless float32, offsets": (rows, "float32", "float32", auto, {}),
        "Lossless float32 made in bfloat16": (rows, "float32 in bfloat16", "float32", auto, {}),
        "Lossless float32, 2% zeros": (rows, "float32 zeros", "float32", auto, {}),
        "Lossless float32, a halved plane": (rows, "float32 halved", "float32", auto, {}),
        "Lossless bfloat16, flat tensor": ((n,), "bfloat16 flat", "bfloat16", auto, {}),
        "Sign": (rows, "float32", "float32", codec.Sign(), {}),
        "Ternary": (rows, "float32", "float32", codec.Ternary(), {}),
        "Ternary, its scale given": (rows, "float32", "float32", codec.Ternary(scale=1e6), {}),
        "Quantize 4": (rows, "float32", "float32", codec.Quantize(4), {}),
        "Float8": (rows, "float32", "float32", codec.Float8(), {}),
        "Truncate, AdamW, shared": (
            rows,
            "float32",
            "float32",
            codec.Truncate(level_coding="shared"),
            {"optimizer": True},
        ),
    }
    return found


def measured(name: str, case: Any, rate: float) -> dict[str, Any]:
    """Return the rows of encoding and decoding, by GPU time alone."""
    import cupy

    shape, kind, dtype, spec, how = case
    x = gradient(shape, kind)
    bound: codec.BoundSpec | None = None
    if how and isinstance(spec, codec.Truncate):
        rng = cupy.random.default_rng(1)
        state = {k: 0.02 * rng.standard_normal(shape, dtype=cupy.float32) for k in ("theta", "m", "v")}
        state["v"] *= state["v"]
        bound = spec.bind(optimizers.AdamW(1e-5, step=999), **state)
    books: tuple[codec.Codebook, ...] = ()
    if name.startswith("Lossless bfloat16, prior"):
        books = (codec.Codebook.from_tensors(x[:64].get().view(ml_dtypes.bfloat16), spec=spec),)
    values, book = codec.view(x, dtype), books[0] if books else None
    out, back = cupy.empty(codec.bound(shape, dtype, spec), cupy.uint8), cupy.empty_like(x)
    frame = codec.encode(values, bound or spec, out=out, codebook=book)
    assert codec.decode(frame, bound, out=back, codebooks=books) is back
    assert not isinstance(spec, codec.Lossless) or bool((back == x).all())
    moved = x.nbytes + frame.nbytes + sum(a.nbytes for a in (bound.state.values() if bound else ()))
    encode = timed(lambda: codec.encode_async(values, bound or spec, out=out, codebook=book))
    decode = timed(decoding(frame, back, codebooks=books, bound=bound))
    return row_of(name, x.nbytes, moved, x.size, 8 * frame.nbytes, rate, encode=encode, decode=decode)


def begun(frames: Sequence[Any], steps: Callable[[list[Frame]], list[Step]], into: int, **given: Any) -> Any:
    """Start decoding of frames whose headers are known."""
    work = Work(devices.device_for([("the frame", view_bytes(frames[0]))]), 0)
    asked = [(work, r, r.frames[0]) for r in (DecodeRequest((view_bytes(frame),), **given) for frame in frames)]
    opened = open_frames(asked)
    for frame in opened:
        if frame.is_delta:
            frame.open_base()
        frame.open(new(frame, into), into)

    def begin() -> BatchDecode:
        wanted = steps(opened)
        batch = BatchDecode(work, opened, wanted)
        for i in range(len(wanted)):
            batch.begin(i)
        return batch

    return begin


def new(frame: Frame, into: int) -> TensorView:
    """Return a destination like `into`."""
    dtype = frame.dtype if into == lib.CODEC_INTO_STORE else "float32"
    return frame.work.device.empty(dtype, frame.shape, frame.frame.owner)[1]


def decoding(frame: Any, back: Any, **given: Any) -> Callable[[], Any]:
    """Return a call that decodes a frame."""

    def steps(opened: list[Frame]) -> list[Step]:
        return [Step([(opened[0], Sink(view_output(back, opened[0].dtype).address))])]

    return begun([frame], steps, lib.CODEC_INTO_STORE, **given)


def nvcomp(x: Any, rate: float) -> dict[str, Any] | None:
    """Return the row of nvCOMP's ANS in its own chunks, by the host's clock, since its calls cannot be captured."""
    import cupy

    try:
        from nvidia import nvcomp as library
    except ImportError:
        print("nvCOMP is not installed: pip install nvidia-nvcomp-cu12, or -cu13", file=sys.stderr)
        return None
    kind = "<f2" if x.itemsize == 2 else "<f4"  # <f2: any format of 16 bits
    coder = library.Codec(algorithm="ANS", data_type=kind)
    array = library.as_array(x.view(kind).reshape(-1))
    frame = coder.encode(array)
    nbytes = frame.buffer_size
    assert bool((cupy.asarray(coder.decode(frame)).view(x.dtype) == x.reshape(-1)).all())
    encode, decode = clock(lambda: coder.encode(array)), clock(lambda: coder.decode(frame))
    name = f"nvCOMP {library.__version__} ANS, {'bfloat16' if x.itemsize == 2 else 'float32'}"
    return row_of(name, x.nbytes, x.nbytes + nbytes, x.size, 8 * nbytes, rate, encode=encode, decode=decode)


def timed_torch(call: Callable[[], Any], times: int = 20) -> float:
    """Return the GPU seconds of a call of torch: the median of replays of its graph."""
    import torch

    call()
    graph, taken = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        call()
    for _ in range(times + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken[1:])


def compiled_by_torch(codec_name: str, log2: int, rate: float) -> dict[str, Any] | None:
    """Return the row of Float8's or Sign's arithmetic as torch.compile generates it: codes and scales, no frame."""
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed: pip install torch", file=sys.stderr)
        return None
    x = torch.from_dlpack(gradient((1 << log2 - 12, 1 << 12), "float32"))
    shifts = torch.arange(8, device=x.device, dtype=torch.uint8)

    def scale_rows() -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn), scale

    def unscale_rows() -> torch.Tensor:
        return codes.to(torch.float32) * scale

    def pack_signs() -> tuple[torch.Tensor, torch.Tensor]:
        return ((x >= 0).view(-1, 8).to(torch.uint8) << shifts).sum(-1, dtype=torch.uint8), x.abs().mean()

    def unpack_signs() -> torch.Tensor:
        return torch.where(codes[:, None] >> shifts & 1 == 1, scale, -scale)

    encode, decode = (scale_rows, unscale_rows) if codec_name == "Float8" else (pack_signs, unpack_signs)
    encode, decode = torch.compile(encode), torch.compile(decode)
    codes, scale = encode()
    nbytes, size = codes.nbytes + scale.nbytes, x.nbytes
    seconds = {"encode": timed_torch(encode), "decode": timed_torch(decode)}
    name = f"torch.compile {torch.__version__} {codec_name}"
    return row_of(name, size, size + nbytes, x.numel(), 8 * nbytes, rate, **seconds)


def reduced(rate: float, log2: int) -> dict[str, Any]:
    """Return the row of reducing eight frames to their mean."""
    import cupy

    shape = (1 << log2 - 12, 1 << 12)
    frames = [codec.encode(gradient(shape, "float32"), codec.Float8()) for _ in range(8)]
    out = cupy.empty(shape, cupy.float32)
    to = view_output(out, "float32").address
    taken = timed(begun(frames, lambda opened: reduction_steps(opened, to, "mean"), lib.CODEC_INTO_FLOAT32))
    nbytes = sum(frame.nbytes for frame in frames)
    moved = out.nbytes + nbytes
    return row_of("reduce of 8 Float8", 8 * out.nbytes, moved, 8 * out.size, 8 * nbytes, rate, decode=taken)


def many(rate: float) -> dict[str, Any]:
    """Return the rows of calls with 200 tensors."""
    xs = [gradient((100_000,), "float32 flat").astype("float16") for _ in range(200)]
    frames = codec.encode_many(xs)
    device, spec = devices.device_for([("x", view(xs[0]))]), codec.Lossless()
    requests = [EncodeRequest(view(x), spec, None, None, None, None, 0, None, None, False, True) for x in xs]

    def encode() -> Any:
        work, encodings = Work(device, 0), [Encoding(Work(device, 0), r) for r in requests]
        begin_jobs(work, [encoding.job for encoding in encodings])
        return work, encodings

    def steps(opened: list[Frame]) -> list[Step]:
        return [Step([(f, Sink(view(x).address)) for f, x in zip(opened, xs, strict=True)])]

    size, nbytes = sum(x.nbytes for x in xs), sum(frame.nbytes for frame in frames)
    name = "200 tensors of 100,000 float16"
    seconds = {"encode": timed(encode), "decode": timed(begun(frames, steps, lib.CODEC_INTO_STORE))}
    return row_of(name, size, size + nbytes, size / 2, 8 * nbytes, rate, **seconds)


def updated(rate: float, log2: int, changed: float) -> dict[str, Any]:
    """Return the row of Delta for bfloat16 weights of which a share has moved by one pattern.

    Decoding is the check that precedes an update in place, and the writing of listed changes: the base is the
    destination. All runs apply the frame to the same base, whose changes are undone before each.
    """
    import cupy

    shape = (1 << log2 - 12, 1 << 12)
    base, rng = gradient(shape, "bfloat16"), cupy.random.default_rng(2)
    new = base + (rng.random(shape, dtype=cupy.float32) < changed).astype(cupy.uint16)
    old, values, spec = codec.view(base, "bfloat16"), codec.view(new, "bfloat16"), codec.Delta()
    out, weights = cupy.empty(codec.bound(shape, "bfloat16", spec), cupy.uint8), base.copy()
    frame = codec.encode(values, spec, out=out, base=old)
    assert codec.decode(frame, base=weights, out=weights) is weights
    assert bool((weights == new).all())
    encode = timed(lambda: codec.encode_async(values, spec, out=out, base=old))
    weights[:] = base

    def steps(opened: list[Frame]) -> list[Step]:
        opened[0].take_lists(opened[0].list_nbytes)
        return [Step([(opened[0], Sink(0))]), Step([(opened[0], Sink(view_output(weights).address))])]

    apply = begun([frame], steps, lib.CODEC_INTO_STORE, base=weights)

    def restore() -> None:
        weights.data.copy_from_device_async(base.data, base.nbytes)

    decode = timed(lambda: (restore(), apply())) - timed(restore)
    name = f"Delta bfloat16, {changed:.1%} changed"
    return row_of(
        name, new.nbytes, new.nbytes + frame.nbytes, new.size, 8 * frame.nbytes, rate, encode=encode, decode=decode
    )


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    both = [
        f"{row[way] / 1e9:10.0f}{row[f'{way} of a copy']:6.0%}{row[f'{way} us']:10.1f}" if way in row else " " * 26
        for way in ("encode", "decode")
    ]
    print(f"{row['name']:38}{row['bits']:6.2f}{''.join(both)}", flush=True)


def all_cases(log2: int, rate: float) -> list[tuple[str, Callable[[], dict[str, Any] | None]]]:
    """Return the label and the measuring call of each row."""
    small_rate = copy_rate(1 << 20)  # small tensors stay in the GPU's cache
    large = [(n, lambda n=n, c=c: measured(n, c, rate)) for n, c in cases(log2).items()]
    small = [(f"{n}, 1M", lambda n=n, c=c: measured(f"{n}, 1M", c, small_rate)) for n, c in cases(20).items()]
    shape = (1 << log2 - 12, 1 << 12)
    return [
        *large,
        *small,
        *((f"Delta, {share:.1%}", lambda share=share: updated(rate, log2, share)) for share in (0.003, 0.02)),
        ("reduce of 8 Float8", lambda: reduced(rate, log2 - 3)),
        ("200 tensors", lambda: many(rate)),
        ("nvCOMP ANS, bfloat16", lambda: nvcomp(gradient(shape, "bfloat16"), rate)),
        ("nvCOMP ANS, float32", lambda: nvcomp(gradient(shape, "float32"), rate)),
        ("torch.compile Float8", lambda: compiled_by_torch("Float8", log2, rate)),
        ("torch.compile Sign", lambda: compiled_by_torch("Sign", log2, rate)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=28, help="log2 of the values of a tensor (28)")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if (why_not := cupy_backend.CupyBackend().why_not()) is not None:
        sys.exit(f"no figures: {why_not}")
    import cupy

    rate = copy_rate(1 << args.values)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    if args.json:
        print(json.dumps({"gpu": name, "copy": rate, "values": 1 << args.values}), flush=True)
    else:
        print(f"{name}: a copy reads and writes {rate / 1e9:.0f} GB/s; tensors of 2^{args.values} values")
        print(f"{'':38}{'bits':>6}{'encode GB/s, of a copy, us':>26}{'decode GB/s, of a copy, us':>26}")
    failed = 0
    for label, call in all_cases(args.values, rate):
        if args.only not in label:
            continue
        try:
            row = call()
        except Exception as e:  # a peer or one of our kernels; other rows are still of use
            failed += 1
            print(f"{label}: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
            continue
        finally:
            cupy.get_default_memory_pool().free_all_blocks()
        if row is not None and args.json:
            print(json.dumps(row), flush=True)
        elif row is not None:
            show(row)
    sys.exit(f"{failed} cases failed" if failed else 0)


if __name__ == "__main__":
    main()
