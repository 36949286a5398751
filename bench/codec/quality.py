"""Size and error of every lossy codec on the committed gradients or the given files. Takes ten seconds.

bits        bits per value of the whole frame
error       root mean square of the error, relative to that of the gradient
mean        mean magnitude of the decoded values, relative to the gradient's
max         largest error, relative to the gradient's largest value
bias        mean error * sqrt(number of values) / root mean square of the gradient; about `error` for an unbiased codec

For files with an optimizer's state, the table also shows the fraction of parameters that are bit-identical after the
optimizer's step with and without compression, and the largest difference of other parameters in ulps.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import codec
from codec.tensors.floats import widen

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from family import FAMILY, SPARSE, TRUNCATE, optimizer_state, step_of
from gradients import SAMPLE, segments, tensors

Array = np.ndarray[Any, Any]


def errors(x: Array, y: Array) -> dict[str, float]:
    a, e = x.astype(np.float64), y.astype(np.float64) - x
    rms = float(np.sqrt((a * a).mean()))
    return {
        "error": float(np.sqrt((e * e).mean())) / rms,
        "mean": float(np.abs(e).mean() / np.abs(a).mean()),
        "max": float(np.abs(e).max() / np.abs(a).max()),
        "bias": float(e.mean()) / rms * float(np.sqrt(a.size)),
    }


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, x, dtype, shapes in tensors(path):
        if ":grad" not in name or not shapes:
            continue
        real, inside = widen(x, dtype), segments(shapes)
        for codec_name, spec in {**FAMILY, **SPARSE}.items():
            frame = codec.encode(codec.view(x, dtype, segments=inside), spec)
            y = codec.decode(frame, like=x)
            y = widen(y, dtype) if y.dtype == np.uint16 else np.asarray(y)
            rows.append({"tensor": name, "codec": codec_name, "bits": 8 * len(frame) / x.size, **errors(real, y)})
        few = int(np.load(path)["param"].size) if "param" in np.load(path).files else 0
        given = optimizer_state(path, few)
        if dtype != "float32" or given is None:
            continue
        metric, state = given
        g = x[:few].copy()
        inside = [s for s in inside if s[0] + int(np.prod(s[1])) <= few]
        plain = step_of(metric, g, state)
        for codec_name, spec in TRUNCATE.items():
            bound = spec.bind(metric, **state)
            y = codec.decode(frame := codec.encode(codec.view(g, segments=inside), bound), bound)
            after = step_of(metric, y, state)
            unit = np.spacing(np.maximum(np.abs(plain), np.abs(state["theta"])))
            rows.append(
                {
                    "tensor": name,
                    "codec": codec_name,
                    "bits": 8 * len(frame) / g.size,
                    **errors(g, y),
                    "saved": 1 - len(frame) / g.nbytes,
                    "same": float((after == plain).mean()),
                    "ulp": float((np.abs(after.astype(np.float64) - plain) / unit).max()),
                }
            )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    kinds = dict.fromkeys(type(spec).__name__ for spec in [*FAMILY.values(), *SPARSE.values(), *TRUNCATE.values()])
    marks = dict(zip(kinds, "os^Dv*PXp", strict=False))
    names = list(dict.fromkeys(r["tensor"] for r in rows))
    for i, tensor in enumerate(names):
        for kind, mark in marks.items():
            some = [r for r in rows if r["tensor"] == tensor and r["codec"].startswith(kind) and r["error"] > 0]
            axes.scatter(
                [r["bits"] for r in some],
                [r["error"] for r in some],
                marker=mark,
                color=f"C{i}",
                s=70 if mark == "*" else 36,
            )
    for i, tensor in enumerate(names):
        axes.scatter([], [], color=f"C{i}", label=tensor.split(":")[0].replace("_", " "))
    for kind, mark in marks.items():
        axes.scatter([], [], marker=mark, color="gray", label=kind)
    axes.set(xscale="log", yscale="log", xlabel="bits a value", ylabel="root mean square error / gradient")
    ticks = [0.5, 1, 2, 4, 8, 16]
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=SAMPLE)
    parser.add_argument("--plot", type=Path, help="PNG file for a plot of error against bits")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [r for path in args.files for r in rows_of(path)]
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for tensor in dict.fromkeys(r["tensor"] for r in rows):
        print(f"\n{tensor:26} {'bits':>6} {'error':>9} {'mean':>9} {'max':>9} {'bias':>8}   saved  same step")
        for r in rows:
            if r["tensor"] == tensor:
                step = f"{100 * r['saved']:6.1f}% {100 * r['same']:8.3f}% {r['ulp']:.1f} ulp" if "same" in r else ""
                print(
                    f"{r['codec']:26} {r['bits']:6.3f} {r['error']:9.2g} {r['mean']:9.2g} {r['max']:9.2g}"
                    f" {r['bias']:8.2g} {step}"
                )


if __name__ == "__main__":
    main()
