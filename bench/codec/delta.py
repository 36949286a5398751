"""Updates of bfloat16 weights: sizes and speeds of Delta, and of other systems' formats, reimplemented for comparison.

The updates are synthetic, or are read from .npz files with uint16 arrays ``TENSOR/base``, the bits of the weights, and
``TENSOR/RATE/xor_STEPS``, the XOR of these bits with the bits after STEPS steps at the learning rate RATE.

Sizes are the bits of whole frames per changed value. The limit is the entropy of positions and steps, each given the
exponent of the base's value, excluding the cost of describing these distributions. Speeds are those of one thread, in
GB/s of the weights; encoding reads twice as many bytes. The speed of a copy of the weights is an upper bound of both
speeds. Times are CPU times of the thread, the best of several calls in the same run.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import codec
from codec._c.library import isas, use_isa

Bits = np.ndarray[Any, np.dtype[np.uint16]]
Update = tuple[str, Bits, Bits]
ONE = codec.options(threads=1)
NAMES = {  # formats, with the systems that are known to use them
    "xor1": "XOR, zstd -1 (slime)",
    "xor3": "XOR, zstd -3",
    "planes": "XOR, bytes apart, zstd -3",
    "gaps8": "u8 gaps + bf16, zstd -3 (PULSE)",
    "gaps16": "u16 gaps + bf16, zstd -1 (NeMo RL)",
    "index": "u32 index + bf16 (verl, TRL)",
    "index3": "u32 index + bf16, zstd -3",
    "bitmap": "bitmap + bf16, zstd -3",
    "steps8": "u8 gaps + i8 steps, zstd -3",
    "lossless": "Lossless of XOR",
}
DEPLOYED = ("xor1", "gaps8", "gaps16", "index")


def rounded(x: np.ndarray[Any, Any]) -> Bits:
    """Return the bits of float32 rounded to bfloat16, to nearest even."""
    u = x.view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def synthetic(n: int) -> Iterator[Update]:
    """Yield updates of float32 masters like Adam's, rounded to bfloat16.

    Weights are normal with a scale for each row. Steps are the learning rate times normally distributed numbers of
    standard deviation 0.2, the typical ratio m / sqrt(v) of Adam's moments in reinforcement learning.
    """
    rng = np.random.default_rng(0)
    base = rng.standard_normal((n // 1024, 1024), np.float32)
    base *= 0.02 * np.exp(0.3 * rng.standard_normal((n // 1024, 1), np.float32))
    base = base.reshape(-1)
    for rate in (0.0, 3e-7, 8e-7, 2.5e-6, 4e-5):
        step = np.float32(0.2 * rate) * rng.standard_normal(len(base), np.float32)
        yield f"synthetic, rate {rate:g}", rounded(base), rounded(base - step)


def captured(path: Path) -> Iterator[Update]:
    """Yield the updates of a file, each with all tensors concatenated."""
    arrays = np.load(path)
    names = [name.removesuffix("/base") for name in arrays.files if name.endswith("/base")]
    base = np.concatenate([arrays[f"{name}/base"].ravel() for name in names])
    for key in dict.fromkeys(f.removeprefix(f"{names[0]}/") for f in arrays.files if f.startswith(f"{names[0]}/")):
        if key != "base":
            changes = np.concatenate([arrays[f"{name}/{key}"].ravel() for name in names])
            rate, steps = key.split("/xor_")
            yield f"{path.stem}, rate {rate}, {steps} steps", base, base ^ changes


def ranks(x: Bits) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the rank of each bfloat16 value: its position in the ascending order of all bit patterns."""
    y = x.astype(np.int64)
    return np.where(y & 0x8000, -(y & 0x7FFF) - 1, y)


def entropy(counts: np.ndarray[Any, Any]) -> float:
    """Return the total entropy in bits of symbols with the given counts."""
    c = counts[counts > 0].astype(float)
    return float(-(c * np.log2(c / c.sum())).sum())


def limit(base: Bits, new: Bits) -> float:
    """Return the entropy in bits of an update, given the exponents of the base."""
    e = base >> 7 & 255
    step = ranks(new) - ranks(base)
    order = np.argsort(e, kind="stable")
    cuts = np.flatnonzero(np.diff(e[order])) + 1
    return sum(entropy(np.unique(s, return_counts=True)[1]) for s in np.split(step[order], cuts))


def gaps(changed: np.ndarray[Any, Any], most: int, kind: str) -> bytes:
    """Return gaps between changed positions as integers of type `kind`; gaps above `most` follow as 4 bytes each."""
    gap = np.diff(changed, prepend=-1) - 1
    return np.minimum(gap, most).astype(kind).tobytes() + gap[gap >= most].astype("<u4").tobytes()


def peers(base: Bits, new: Bits) -> dict[str, int]:
    """Return the size in bytes of an update in each of the deployed formats."""
    import zstandard

    fast, slow = zstandard.ZstdCompressor(level=1), zstandard.ZstdCompressor(level=3)
    xor = base ^ new
    changed = np.flatnonzero(xor)
    values, step = new[changed].tobytes(), (ranks(new) - ranks(base))[changed]
    large = step[abs(step) > 127].astype("<i4").tobytes()
    index = changed.astype("<u4").tobytes()
    planes = xor.view(np.uint8).reshape(-1, 2).T
    sizes = {
        "xor1": fast.compress(xor.tobytes()),
        "xor3": slow.compress(xor.tobytes()),
        "planes": slow.compress(planes[0].tobytes()) + slow.compress(planes[1].tobytes()),
        "gaps8": slow.compress(gaps(changed, 255, "u1")) + slow.compress(values),
        "gaps16": fast.compress(gaps(changed, 65535, "<u2") + values),
        "index": index + values,
        "index3": slow.compress(index + values),
        "bitmap": slow.compress(np.packbits(xor != 0).tobytes()) + slow.compress(values),
        "steps8": slow.compress(gaps(changed, 255, "u1"))
        + slow.compress(np.clip(step, -128, 127).astype(np.int8).tobytes() + large),
        "lossless": codec.encode(codec.view(xor, "bfloat16")),
    }
    return {name: len(frame) for name, frame in sizes.items()}


def shortest(f: Callable[[], Any], before: Callable[[], Any] | None = None, times: int = 7) -> float:
    """Return the least CPU time of a call in seconds. `before` runs before each call and is not timed."""
    found = float("inf")
    for _ in range(times):
        if before is not None:
            before()
        start = time.thread_time_ns()
        f()
        found = min(found, (time.thread_time_ns() - start) * 1e-9)
    return found


def speeds(base: Bits, new: Bits, isa: str, mib: int) -> dict[str, float]:
    """Return GB/s of the weights for encoding, updating in place, zstd -1 of the XOR, and copies of their inputs."""
    import zstandard

    base, new = (np.resize(x, mib << 19) for x in (base, new))
    old, now = codec.view(base, "bfloat16"), codec.view(new, "bfloat16")
    room = np.zeros(codec.bound(base.shape, "bfloat16", codec.Delta()), np.uint8)
    weights, other, xor = base.copy(), np.empty_like(base), np.empty_like(base)
    fast, back = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    frame = bytes(codec.encode(now, codec.Delta(), base=old, options=ONE))
    packed = fast.compress((base ^ new).data)

    def unzip() -> None:
        np.bitwise_xor(base, np.frombuffer(back.decompress(packed), np.uint16), out=xor)

    with use_isa(isa):
        seconds = {
            "copy": shortest(lambda: np.copyto(other, base)),
            "copy_both": shortest(lambda: (np.copyto(other, base), np.copyto(xor, new))),
            "encode": shortest(lambda: codec.encode(now, codec.Delta(), base=old, out=room, options=ONE)),
            "apply": shortest(
                lambda: codec.decode(frame, base=weights, out=weights, options=ONE), lambda: np.copyto(weights, base)
            ),
            "zstd_compress": shortest(lambda: fast.compress((base ^ new).data), times=3),
            "zstd_apply": shortest(unzip, times=3),
        }
    assert (weights == new).all()
    return {name: base.nbytes / s / 1e9 for name, s in seconds.items()}


def measure(update: Update, args: argparse.Namespace) -> dict[str, Any]:
    name, base, new = update
    changed = int(np.count_nonzero(base != new))
    bits = {"limit": limit(base, new)}
    for label, spec in (("delta", codec.Delta()), ("delta_2^18", codec.Delta(1 << 18))):
        frame = codec.encode(codec.view(new, "bfloat16"), spec, base=codec.view(base, "bfloat16"))
        out = np.empty_like(base)
        assert (codec.decode(frame, base=base, out=out) == new).all()
        bits[label] = 8.0 * len(frame)
    row: dict[str, Any] = {"update": name, "values": len(base), "changed": changed / len(base)}
    if changed:
        bits |= {peer: 8.0 * nbytes for peer, nbytes in peers(base, new).items()}
        row["bits"] = {peer: b / changed for peer, b in bits.items()}
    else:
        row["nbytes"] = bits["delta"] / 8
    if not args.sizes_only:
        row["gbps"] = {isa: speeds(base, new, isa, args.mib) for isa in args.isas}
    return row


def report(rows: list[dict[str, Any]]) -> None:
    print("bits for each changed value")
    for r in rows:
        if "bits" not in r:
            print(f"{r['update']}: {r['nbytes']:.0f} bytes")
            continue
        b = r["bits"]
        over = {name: f"{b[name]:.2f} ({100 * (b[name] / b['limit'] - 1):+.1f}%)" for name in ("delta", "delta_2^18")}
        best = min(b[name] for name in DEPLOYED)
        print(
            f"{r['update']}: {100 * r['changed']:.2f}% changed, limit {b['limit']:.2f}, Delta {over['delta']}, "
            f"blocks of 2^18 {over['delta_2^18']}, best deployed {best:.2f} = {best / b['delta']:.2f} x"
        )
        print("    " + ", ".join(f"{NAMES[name]} {b[name]:.1f}" for name in NAMES))
    for r in rows:
        for isa, g in r.get("gbps", {}).items():
            encode, apply = g["encode"] / g["copy_both"], g["apply"] / g["copy"]
            print(
                f"{r['update']}, {100 * r['changed']:.2f}%, {isa}: copy {g['copy']:.1f} GB/s, encode {g['encode']:.2f} "
                f"({100 * encode:.0f}% of a copy of both), apply {g['apply']:.2f} ({100 * apply:.0f}%), "
                f"zstd -1 of XOR {g['zstd_compress']:.2f} and {g['zstd_apply']:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="captured updates; default: synthetic ones")
    parser.add_argument("--values", type=int, default=1 << 23, help="values of synthetic updates")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensors whose speed is measured, in MiB")
    parser.add_argument("--isas", nargs="+", default=isas()[1:] or isas(), help="instruction sets")
    parser.add_argument("--sizes-only", action="store_true", help="print sizes only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sources = [captured(path) for path in args.files] or [synthetic(args.values)]
    rows = [measure(update, args) for source in sources for update in source]
    if args.json:
        print(json.dumps({"mib": args.mib, "peers": NAMES, "rows": rows}, indent=1))
    else:
        report(rows)


if __name__ == "__main__":
    main()
