"""Speed of encoding and decoding in GB/s of tensor bytes, into preallocated memory.

    python bench/codec/throughput.py                                  # everything: more than five minutes
    python bench/codec/throughput.py --only lossy                     # one family
    python bench/codec/throughput.py --only lossy --codec mxfp8 zero  # codecs whose names contain these texts
    python bench/codec/throughput.py --dtypes float32 --sizes 1048576 # one dtype and size

Lossless is measured by dtype, instruction set, size and number of threads; lossy codecs on float32 with one thread.

decode          validates the whole frame before it writes, as ``decode(out=)`` guarantees
decode once     validates while it writes (``verify_first=False``); one thread
scaling         speedup of encoding with several threads over one thread. In brackets the limit of the machine: as many
                concurrent one-thread calls, each for a part of the rows, relative to the same calls in sequence
reduce 4        sum of four frames, in GB/s of all four tensors
copy            numpy.copyto of the same tensor in the same run. Compare fractions of it, since machines differ.
of a copy       encoding and decoding as fractions of the copy's GB/s; other percentages are fractions of the roofline

``float32:bfloat16`` is float32 whose values were computed in bfloat16, as gradients under autocast are.

A copy reads and writes every byte. Lossless encoding reads the tensor and writes `size` of it, so no coder exceeds
2 / (1 + size) copies. The roofline of a lossy codec is the time to read and write its bytes at the copy's rate; the
tensor counts twice if one scale serves all values, unless the codes need no scale. Truncate also reads the optimizer's
state, and is given as a fraction of the copy.

``--engine numba`` prints the speed of the Numba engine, and its fraction of the native engine with AVX2: the best of
five rounds, and the median of five fractions.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import codec
from codec import optimizers
from codec._c.library import check, ffi, isas, lib, new_bytes, use_isa
from codec._c.spec_structs import spec_struct
from codec._call import new_tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from family import FAMILY, SPARSE, TRUNCATE, moved
from measure import best, tensor


def lossy_peers(x: np.ndarray[Any, Any]) -> dict[str, tuple[float, float]]:
    """Return the seconds of encoding and decoding x by numpy, and by torch if it is installed, on one thread."""
    rows = x.reshape(-1, x.shape[-1])
    signs, _ = best(lambda: (np.packbits(np.signbit(x)), np.abs(x).mean()))
    packed, scale = np.packbits(np.signbit(x)), np.abs(x).mean()
    back, _ = best(lambda: np.where(np.unpackbits(packed, count=x.size), -scale, scale))
    out = {"numpy packbits": (signs, back)}
    try:
        import torch
    except ImportError:
        return out
    torch.set_num_threads(1)
    t = torch.from_numpy(rows)

    def float8(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = 448 / t.abs().amax(1, keepdim=True)
        return (t * s).clamp(-448, 448).to(torch.float8_e4m3fn), s

    def float8_back(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return q.to(torch.float32) / s

    def ternary(t: torch.Tensor) -> torch.Tensor:
        return (torch.bernoulli(t.abs() / t.abs().max()) * t.sign()).to(torch.int8)

    def quantize(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = t.view(-1, 64)
        s = g.abs().amax(1, keepdim=True)
        return ((g / s + 1) * 7.5 + torch.rand_like(g)).floor_().to(torch.uint8), s

    enc, (q, s) = best(lambda: float8(t))
    dec, _ = best(lambda: float8_back(q, s))
    out["torch eager float8"] = (enc, dec)
    try:
        fast, slow = torch.compile(float8), torch.compile(float8_back)
        enc, (q, s) = best(lambda: fast(t))
        dec, _ = best(lambda: slow(q, s))
        out["torch.compile float8"] = (enc, dec)
    except Exception as e:  # raised if torch.compile finds no C++ compiler or no headers of Python
        print(f"torch.compile: {type(e).__name__}", file=sys.stderr)
    try:
        import fbgemm_gpu  # noqa: F401 - registers the operators

        pack, unpack = (
            torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized,
            torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat,
        )
        enc, packed8 = best(lambda: pack(t))
        out["fbgemm row-wise 8 bit"] = (enc, best(lambda: unpack(packed8))[0])
    except (ImportError, OSError) as e:
        print(f"fbgemm: {type(e).__name__}", file=sys.stderr)
    codes = ternary(t)
    out["torch bernoulli ternary"] = (best(lambda: ternary(t))[0], best(lambda: codes * t.abs().max())[0])
    q4, s4 = quantize(t)
    out["torch rand quantize 4"] = (best(lambda: quantize(t))[0], best(lambda: (2.0 * q4 - 15) / 15 * s4)[0])
    return out


def lossy(nbytes: int, dtype: str, parts: Sequence[str] = ()) -> dict[str, Any]:
    """Measure the lossy codecs whose names contain one of `parts` (all if `parts` is empty), and peers for float32."""
    x = tensor(dtype, nbytes // codec._c.library.ITEMSIZE[dtype])
    rng = np.random.default_rng(1)
    state = {k: rng.standard_normal(x.shape, np.float32) * np.float32(0.02) for k in ("theta", "m", "v")}
    state["v"] *= state["v"]
    metric = optimizers.AdamW(1e-5, step=999)
    back, residual, total = np.empty_like(x), np.empty(x.shape, np.float32), np.zeros(x.shape, np.float32)
    copy, _ = best(lambda: np.copyto(back, x))
    rows: list[dict[str, Any]] = []
    most = float(np.abs(tensor("float32", x.size)).max())
    given = {"Ternary 2bit": codec.Ternary(scale=most), "Ternary base3": codec.Ternary("base3", most)}
    for name, spec in {**FAMILY, **SPARSE, **given, **TRUNCATE}.items():
        if parts and not any(part in name for part in parts):
            continue
        print(f"\r{name:30}", end="", file=sys.stderr, flush=True)
        bound = spec.bind(metric, **state) if isinstance(spec, codec.Truncate) else None
        values, by, one = codec.view(x, dtype), bound or spec, codec.options(threads=1)
        out = np.empty(codec.bound(x.shape, dtype, spec) + (1 << 20), np.uint8)
        enc, frame = best(lambda: codec.encode(values, by, out=out, options=one))
        frame = bytes(frame)
        dec, _ = best(lambda: codec.decode(frame, bound, out=back, options=one))
        with_residual, _ = best(lambda: codec.encode(values, by, out=out, residual=residual, options=one))
        add, _ = best(lambda: codec.accumulate(frame, total, bound, options=one))
        reduce, _ = best(lambda: codec.reduce([frame] * 4, bound, out=total, options=one))
        least, (lost, _) = moved(spec, x.nbytes, len(frame)), moved(spec, x.nbytes, len(frame), residual.nbytes)
        rows.append(
            {
                "codec": name + (", scale given" if name in given else ""),
                "bits": 8 * len(frame) / x.size,
                "encode_gbps": x.nbytes / enc / 1e9,
                "decode_gbps": x.nbytes / dec / 1e9,
                "residual_gbps": x.nbytes / with_residual / 1e9,
                "accumulate_gbps": x.nbytes / add / 1e9,
                "reduce_gbps": 4 * x.nbytes / reduce / 1e9,
                "encode_roofline": copy * least[0] / (2 * x.nbytes) / enc,
                "decode_roofline": copy * least[1] / (2 * x.nbytes) / dec,
                "residual_roofline": copy * lost / (2 * x.nbytes) / with_residual,
                "residual_copy": copy / with_residual,
                "encode_copy": copy / enc,
                "decode_copy": copy / dec,
            }
        )
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    named = {
        k: {"encode_gbps": x.nbytes / e / 1e9, "decode_gbps": x.nbytes / d / 1e9}
        for k, (e, d) in (lossy_peers(x).items() if dtype == "float32" and not parts else ())
    }
    return {"dtype": dtype, "copy_gbps": x.nbytes / copy / 1e9, "rows": rows, "peers": named}


def print_lossy(result: dict[str, Any]) -> None:
    print(f"\n{result['dtype']}, one thread; copy {result['copy_gbps']:.1f} GB/s")
    print(
        f"{'':28} {'bits':>6} {'encode':>17} {'decode':>17} {'with residual':>17} {'accumulate':>11} {'reduce 4':>11} "
        f"{'of a copy':>11}"
    )
    for r in result["rows"]:
        of = "copy" if r["codec"].startswith("Truncate") else "roofline"
        columns = (
            f"{r[f'{k}_gbps']:6.2f} GB/s {100 * r[f'{k}_{of}']:3.0f}%".rjust(17)
            for k in ("encode", "decode", "residual")
        )
        print(
            f"{r['codec']:28} {r['bits']:6.3f} {' '.join(columns)} "
            f"{r['accumulate_gbps']:6.2f} GB/s {r['reduce_gbps']:6.2f} GB/s "
            f"{100 * r['encode_copy']:5.0f}% {100 * r['decode_copy']:3.0f}%"
        )
    for name, r in result["peers"].items():
        print(f"{name:35} {r['encode_gbps']:6.2f} GB/s {r['decode_gbps']:12.2f} GB/s")


def once_through(frame: Any, back: np.ndarray[Any, Any], isa: str) -> Any:
    """Return a call that decodes on one thread in one pass, which may write before it detects damage."""
    data = np.frombuffer(frame, np.uint8)
    t = new_tensor(codec._c.library.DTYPES[codec.inspect(frame).dtype], back.shape, ffi.from_buffer(back), back.nbytes)
    context = ffi.new("codec_context *")
    context.struct_nbytes, context.isa = ffi.sizeof("codec_context"), 1 + isas().index(isa)
    size = ffi.new("size_t *")
    check(lib.codec_scratch(spec_struct(codec.Lossless()), t, size))
    scratch = new_bytes(size[0])

    def call() -> None:
        check(lib.codec_decode(ffi.from_buffer(data), data.nbytes, t, context, scratch, size[0]))

    return call


def side_by_side(x: np.ndarray[Any, Any], dtype: str, out: np.ndarray[Any, Any], threads: int) -> float:
    """Return the speedup of concurrent one-thread calls over the same calls in sequence."""
    calls = [
        functools.partial(codec.encode, codec.view(part, dtype), out=room, options=codec.options(threads=1))
        for part, room in zip(np.array_split(x, threads), np.array_split(out, threads), strict=True)
    ]
    with concurrent.futures.ThreadPoolExecutor(threads) as executor:
        at_once, _ = best(lambda: concurrent.futures.wait([executor.submit(call) for call in calls]))
        in_turn, _ = best(lambda: [call() for call in calls])
    return in_turn / at_once


def beside_native(engine: str, nbytes: int) -> list[dict[str, Any]]:
    """Print an engine's GB/s on one thread, and its fraction of the native engine's speed with AVX2."""
    cases: dict[str, tuple[str, codec.Spec]] = {
        **{f"Lossless {made}": (made, codec.Lossless()) for made in ("float32", "float32:bfloat16", "bfloat16")},
        **{name: ("float32", spec) for name, spec in {**FAMILY, **SPARSE, **TRUNCATE}.items()},
    }
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for name, (made, spec) in cases.items():
        print(f"\r{name:30}", end="", file=sys.stderr, flush=True)
        dtype = made.partition(":")[0]
        x = tensor(made, nbytes // codec._c.library.ITEMSIZE[dtype])
        bound: codec.BoundSpec | None = None
        if isinstance(spec, codec.Truncate):
            state = {k: rng.standard_normal(x.shape, np.float32) * np.float32(0.02) for k in ("theta", "m", "v")}
            state["v"] *= state["v"]
            bound = spec.bind(optimizers.AdamW(1e-5, step=999), **state)
        out, back = np.empty(codec.bound(x.shape, dtype, spec) * 2 + (1 << 20), np.uint8), np.empty_like(x)
        rounds: list[dict[tuple[str, str], float]] = []
        for _ in range(5):  # alternate between both engines, so that other load of the machine affects both
            seconds: dict[tuple[str, str], float] = {}
            for who in (engine, "native"):
                by = codec.options(engine=who, threads=1)
                once = codec.options(engine=who, threads=1, verify_first=False)
                with use_isa("avx2" if who == "native" else None):
                    seconds["encode", who], frame = best(
                        lambda: codec.encode(codec.view(x, dtype), bound or spec, out=out, options=by), 0.1
                    )
                    seconds["decode", who], _ = best(lambda: codec.decode(frame, bound, out=back, options=by), 0.1)
                    seconds["once", who], _ = best(lambda: codec.decode(frame, bound, out=back, options=once), 0.1)
            rounds.append(seconds)
        row: dict[str, Any] = {"codec": name}
        for what in WAYS:
            row[what] = statistics.median(r[what, "native"] / r[what, engine] for r in rounds)
            for who in (engine, "native"):
                row[f"{what}_{who}_gbps"] = x.nbytes / min(r[what, who] for r in rounds) / 1e9
        rows.append(row)
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    return rows


def print_beside(engine: str, rows: list[dict[str, Any]]) -> None:
    print(f"{'one thread, GB/s':30}" + "".join(f"{w + ': ' + engine:>18}{'native avx2':>14}" for w in WAYS))
    for r in rows:
        columns = (f"{r[f'{w}_{engine}_gbps']:11.2f} {100 * r[w]:4.0f}% {r[f'{w}_native_gbps']:13.2f} " for w in WAYS)
        print(f"{r['codec']:31}" + "  ".join(columns))


WAYS = ("encode", "decode", "once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "float32:bfloat16", "bfloat16", "float16", "float64", "float8_e4m3fn", "int8"],
    )
    parser.add_argument("--isas", nargs="+", default=list(isas()))
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[1 << 12, 1 << 20, 1 << 26], help="sizes of tensors in bytes"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--cols", type=int, default=1024, help="columns of the matrices (1,024)")
    parser.add_argument("--lossy-dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--only", choices=("lossless", "lossy"))
    parser.add_argument("--codec", nargs="+", default=[], help="only lossy codecs whose name contains one of these")
    parser.add_argument(
        "--engine", default="native", choices=("native", "numba"), help="numba: compare with the native engine"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.engine != "native":
        beside = beside_native(args.engine, min(max(args.sizes), 1 << 24))
        print(json.dumps(beside, indent=1)) if args.json else print_beside(args.engine, beside)
        return
    rows: list[dict[str, Any]] = []
    for made in args.dtypes if args.only != "lossy" else []:
        dtype = made.partition(":")[0]
        for nbytes in args.sizes:
            x = tensor(made, nbytes // codec._c.library.ITEMSIZE[dtype], args.cols)
            out, back = np.empty(codec.bound(x.shape, dtype) * 2 + (1 << 20), np.uint8), np.empty_like(x)
            for isa in args.isas:
                for threads in args.threads:
                    if threads > 1 and nbytes < 1 << 22:
                        continue
                    print(f"\r{made} {nbytes} {isa} {threads}   ", end="", file=sys.stderr, flush=True)
                    with use_isa(isa):
                        enc, frame = best(
                            lambda: codec.encode(codec.view(x, dtype), out=out, options=codec.options(threads=threads))
                        )
                        dec, _ = best(lambda: codec.decode(frame, out=back, options=codec.options(threads=threads)))
                        once, _ = best(once_through(frame, back, isa))
                        alone, _ = best(
                            lambda: codec.encode(codec.view(x, dtype), out=out, options=codec.options(threads=1))
                        )
                        beside = side_by_side(x, dtype, out, threads) if threads > 1 else 1
                    copy, _ = best(lambda: np.copyto(back, x))
                    rows.append(
                        {
                            "dtype": made,
                            "nbytes": x.nbytes,
                            "isa": isa,
                            "threads": threads,
                            "ratio": len(frame) / x.nbytes,
                            "encode_gbps": x.nbytes / enc / 1e9,
                            "decode_gbps": x.nbytes / dec / 1e9,
                            "once_gbps": x.nbytes / once / 1e9,
                            "copy_gbps": x.nbytes / copy / 1e9,
                            "scaling": alone / enc,
                            "side_by_side": beside,
                        }
                    )
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    family = [lossy(max(args.sizes), d, args.codec) for d in args.lossy_dtypes] if args.only != "lossless" else []
    if args.json:
        print(json.dumps({"rows": rows, "lossy": family}, indent=1))
        return
    if rows:
        print_lossless(rows)
    for result in family:
        print_lossy(result)


def print_lossless(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'dtype':16} {'bytes':>10} {'isa':7} thr   size {'encode':>17} {'decode':>17} {'decode once':>17} "
        f"{'copy':>9} {'scaling':>13}"
    )
    for r in rows:
        enc, dec, once = (
            f"{r[k]:6.2f} GB/s {100 * r[k] / r['copy_gbps']:3.0f}%" for k in ("encode_gbps", "decode_gbps", "once_gbps")
        )
        print(
            f"{r['dtype']:16} {r['nbytes']:10} {r['isa']:7} {r['threads']:3}  {r['ratio']:.3f} {enc:>17} {dec:>17} "
            f"{once:>17} {r['copy_gbps']:9.1f}"
            + (f" {r['scaling']:6.2f} ({r['side_by_side']:.2f})" if r["threads"] > 1 else "")
        )


if __name__ == "__main__":
    main()
