"""Command ``codec bench``: compare sizes and speeds of presets and other compressors on a user's file."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from codec import readable
from codec._c.library import MANTISSA_BITS, UNSIGNED
from codec._options import options
from codec.batch import decode_many, encode_many
from codec.cli.compressors import Bytes, T, best, compressors, lmzip, missing
from codec.cli.console import (
    EXIT_CODES,
    STANDARD,
    add_json,
    check_output,
    output_file,
    print_error,
    print_table,
    progress_bar,
)
from codec.errors import ArgumentError, CodecError, EngineError
from codec.files.opening import printable
from codec.tensors.floats import widen
from codec.tensors.view import Array
from codec.tensors.wrapper import view

_PRESETS = ("lossless", "balanced", "small", "smallest")  # without "near", which needs an optimizer
_SECONDS = 0.3  # time in seconds for which a measurement is repeated
_SLOW_MB = 16  # MB; on larger inputs, slow compressors run only with --slow


class Row(NamedTuple):
    """Result of one compressor: compressed / uncompressed size, speeds in uncompressed MB/s, relative error."""

    name: str
    ratio: float
    compress: float
    decompress: float
    error: float = 0.0


def add_commands(commands: Any) -> None:
    """Add the parser of the command ``bench`` to the parsers of all commands."""
    p = commands.add_parser(
        "bench",
        help="compare sizes and speeds on a file",
        description="Measure the presets, and other compressors that are installed (zstandard, blosc2, pcodec, zipnn, "
        "openzl, lmzip), on the tensors of a file: one thread, in memory, best of several runs; lmzip, which takes "
        f"files alone, with its files. {EXIT_CODES}",
    )
    p.add_argument("file", help=".safetensors, .npz, .npy or .pt file")
    p.add_argument("--key", help="key of the dict of tensors in a .pt file")
    p.add_argument("--max-mb", type=float, default=256, metavar="MB", help="measure the first tensors; default: 256")
    p.add_argument("--slow", action="store_true", help=f"run slow compressors on more than {_SLOW_MB} MB, too")
    p.add_argument("--plot", metavar="FILE", help="draw a plot, such as bench.png; needs matplotlib")
    p.add_argument("--force", action="store_true", help="replace the plot if it exists")
    add_json(p)
    p.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Run ``codec bench``: print a table of sizes and speeds."""
    if args.plot is not None:
        if check_output(args.plot, args.force, args.file) == STANDARD:
            raise ArgumentError("--plot must name a file, since the table is printed on standard output")
        _matplotlib()
    tensors = _tensors(args.file, args.key, args.max_mb * 1e6)
    total = sum(len(values) for *_, values in tensors)
    slow = args.slow or total <= _SLOW_MB * 1e6
    rows = list[Row]()
    with progress_bar("rows") as progress:
        for row in _rows(tensors, args.file, slow):
            rows.append(row)
            if progress is not None:
                progress(len(rows), len(rows) + 1)
    if args.plot is not None:
        _draw(rows, args.plot, args.file)
    if args.json:
        print(json.dumps({"file": args.file, "nbytes": total, "rows": [r._asdict() for r in rows]}, indent=1))
        return 0
    print(f"{readable.count(len(tensors), 'tensor')}, {readable.size(total)}; one thread, MB/s of tensors")
    print_table(
        ["", "size", "compress", "decompress", "error"],
        [[r.name, f"{100 * r.ratio:.1f}%", f"{r.compress:.0f}", f"{r.decompress:.0f}",
          f"{r.error:.2g}" if r.error else "none"] for r in rows],
    )  # fmt: skip
    if absent := missing():
        print(f"not installed: {', '.join(absent)}", file=sys.stderr)
    return 0


Tensors = list[tuple[str, str, tuple[int, ...], Bytes]]  # name, dtype, shape, bytes


def _tensors(path: str, key: str | None, most: float) -> Tensors:
    """Read the first tensors of a file, about `most` bytes in all."""
    from codec.files.index import is_container
    from codec.files.sources import source_of

    found, total = Tensors(), 0
    with source_of(path, key) as source:
        if is_container(source.header):
            raise ArgumentError(
                f"{printable(path)} is packed: restore it with codec unpack, and measure the restored file"
            )
        for k, t in enumerate(source.header.tensors):
            if not t.nbytes or (total + t.nbytes > most and found):
                continue
            room = np.empty(t.nbytes, np.uint8)
            values = source.read(k, 0, t.nbytes, room)
            known = int(np.prod(t.shape)) * t.itemsize == t.nbytes and len(t.shape) <= 8
            found.append((t.name, t.wire, t.shape if known else (t.nbytes // t.itemsize,), values.copy()))
            total += t.nbytes
    if not found:
        raise ArgumentError(f"{printable(path)} has no tensor with values: there is nothing to measure")
    return found


def _rows(tensors: Tensors, path: str, slow: bool) -> Iterator[Row]:
    """Measure each compressor, and yield its result."""
    yield _packed(tensors)
    for preset in _PRESETS:
        try:
            yield _preset(tensors, preset)
        except CodecError as e:  # for example because of NaN or Inf in the tensors
            print_error(f"{preset}: {e}")
    dtypes = dict.fromkeys(dtype for _, dtype, _, _ in tensors)
    together = {d: np.concatenate([values for _, dtype, _, values in tensors if dtype == d]) for d in dtypes}
    total = sum(map(len, together.values()))
    for c in compressors():
        if c.slow and not slow:
            continue
        try:
            seconds, data = _best(lambda c=c: {d: c.compress(x, d) for d, x in together.items()}, c.slow)
            back, restored = _best(lambda c=c, f=data: {d: c.decompress(x, d) for d, x in f.items()}, c.slow)
        except Exception as e:  # a third-party compressor may raise anything
            print_error(f"{c.name} failed: {e}")
            continue
        if any(np.frombuffer(restored[d], np.uint8)[: len(x)].tobytes() != x.tobytes() for d, x in together.items()):
            print_error(f"{c.name} does not restore the tensors")
            continue
        yield Row(c.name, sum(map(_length, data.values())) / total, total / seconds / 1e6, total / back / 1e6)
    if path.endswith(".safetensors"):
        yield from _lmzip(path)


def _length(data: Any) -> int:
    return memoryview(data).nbytes


def _lmzip(path: str) -> Iterator[Row]:
    """Measure the compressor lmzip on the whole file."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        packed = str(Path(folder) / "model.lmz")
        calls = lmzip(path, packed, str(Path(folder) / "model.safetensors"))
        if calls is None:
            return
        try:
            (seconds, _), (back, _) = (_best(call, once=True) for call in calls)
        except Exception as e:  # a third-party compressor may raise anything
            print_error(f"lmzip failed: {e}")
            return
        total = os.path.getsize(path)
        yield Row("lmzip, files", os.path.getsize(packed) / total, total / seconds / 1e6, total / back / 1e6)


def _packed(tensors: Tensors) -> Row:
    """Measure the compression of ``codec pack`` in memory, without file access."""
    from codec.files.header import CODES
    from codec.files.packing import pack
    from codec.files.reading import open_bytes
    from codec.files.restoring import read_all
    from codec.files.sources import MemorySource

    source = MemorySource([(name, CODES[dtype], shape, values) for name, dtype, shape, values in tensors])

    def compress() -> bytes:
        file = BytesIO()
        pack(source, file, threads=1)
        return file.getvalue()

    seconds, data = _best(compress)
    back, _ = _best(lambda: read_all(open_bytes(data), lambda t: (None, np.empty(t.nbytes, np.uint8)), 1))
    total = source.header.data_nbytes
    return Row("codec pack", len(data) / total, total / seconds / 1e6, total / back / 1e6)


def _preset(tensors: Tensors, preset: str) -> Row:
    """Measure a preset. Tensors that it does not accept, such as integers, are encoded lossless."""
    one = options(threads=1)
    xs = [view(values.view(UNSIGNED[d]).reshape(shape), d) for _, d, shape, values in tensors]
    lossy = [d in MANTISSA_BITS for _, d, _, _ in tensors]
    specs: Any = [preset if fits else "lossless" for fits in lossy]
    seconds, frames = _best(lambda: encode_many(xs, specs, options=one))
    outs = [np.empty_like(x.tensor) for x in xs]
    back, _ = _best(lambda: decode_many(frames, out=outs, options=one))
    total = sum(x.tensor.nbytes for x in xs)
    error = 0.0 if preset == "lossless" else _error(xs, outs, lossy)
    return Row(preset, sum(map(len, frames)) / total, total / seconds / 1e6, total / back / 1e6, error)


def _error(xs: list[Any], outs: list[Array], lossy: list[bool]) -> float:
    """Return the norm of the errors of all lossy tensors, divided by the norm of these tensors."""
    squares = norms = 0.0
    for x, out, fits in zip(xs, outs, lossy, strict=True):
        if fits:
            a, b = (widen(bits, x.dtype).astype(np.float64) for bits in (x.tensor, out))
            squares, norms = squares + float(((a - b) ** 2).sum()), norms + float((a**2).sum())
    return (squares / norms) ** 0.5 if norms else 0.0


def _best(call: Callable[[], T], once: bool = False) -> tuple[float, T]:
    return best(call, 0 if once else _SECONDS, times=1)


def _matplotlib() -> Any:
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise EngineError("--plot needs matplotlib, which is not installed: pip install matplotlib") from None


def _draw(rows: list[Row], path: str, name: str) -> None:
    """Plot size against decompression speed; compressors that are small and fast are at the lower right."""
    plt = _matplotlib()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for row in rows:
        ours = row.name in ("codec pack", *_PRESETS)
        axes.plot(row.decompress, 100 * row.ratio, "o" if ours else "s", color="tab:blue" if ours else "tab:gray")
        axes.annotate(row.name, (row.decompress, 100 * row.ratio), xytext=(5, 4), textcoords="offset points")
    axes.set(
        xscale="log", xlabel="decompression, MB/s, one thread", ylabel="size, % of the tensors", title=Path(name).name
    )
    axes.set_xlim(right=4 * max(row.decompress for row in rows))  # space for the names beside the points
    axes.grid(alpha=0.3)
    try:
        with output_file(path, name) as file:
            figure.savefig(file, format=Path(path).suffix[1:] or "png", dpi=120)
    except CodecError:
        raise
    except ValueError as e:  # matplotlib has no such format
        raise ArgumentError(f"{printable(path)} cannot be written: {e}") from None
    finally:
        plt.close(figure)
