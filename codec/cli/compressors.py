"""Third-party compressors that ``codec bench`` measures if their packages are installed, and the clock."""

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from codec._c.library import ITEMSIZE, UNSIGNED

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
T = TypeVar("T")
_PACKAGES = {
    "zstandard": "zstd",
    "blosc2": "blosc2",
    "pcodec": "pcodec",
    "zipnn": "zipnn",
    "openzl": "openzl",
    "lmz": "lmzip",
}

_ZIPNN_LEAST = 1 << 16  # bytes; smaller inputs are stored raw, since ZipNN 0.5 may read outside of them
_RAW = b"\0"  # first byte of raw data; ZipNN's begins with b"ZN"


class Compressor(NamedTuple):
    """Compressor of the values of one dtype.

    Parameters
    ----------
    name : str
        Name in the table, including the level.
    compress : callable
        Called with the bytes of values and their dtype; returns compressed bytes.
    decompress : callable
        Called with compressed bytes and the dtype; returns an object with a buffer.
    slow : bool
        True if the compressor is much slower than 50 MB/s.
    """

    name: str
    compress: Callable[[Bytes, str], Any]
    decompress: Callable[[Any, str], Any]
    slow: bool = False


def missing() -> list[str]:
    """Return the names of compressors whose packages are not installed."""
    return [name for package, name in _PACKAGES.items() if not importlib.util.find_spec(package)]


def compressors() -> Iterator[Compressor]:
    """Yield the compressors whose packages are installed."""
    for package, make in (
        ("zstandard", lambda: zstd(3)), ("zstandard", lambda: zstd(19)), ("blosc2", blosc2), ("pcodec", pcodec),
        ("zipnn", zipnn), ("openzl", openzl),
    ):  # fmt: skip
        if importlib.util.find_spec(package):
            yield make()


def best(
    call: Callable[[], T], seconds: float = 0.4, times: int = 2, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, T]:
    """Repeat a call at least `times` times and for `seconds`; return its shortest time in seconds, and its result."""
    shortest, count, result, began = float("inf"), 0, None, clock()
    while True:
        result = None  # frees its memory before the next call
        start = clock()
        result = call()
        end = clock()
        shortest, count = min(shortest, end - start), count + 1
        if count >= times and end - began >= seconds:
            return shortest, result


def zstd(level: int) -> Compressor:
    """Return zstd, which takes values as bytes."""
    package: Any = importlib.import_module("zstandard")
    c, d = package.ZstdCompressor(level=level), package.ZstdDecompressor()

    def compress(x: Bytes, _: str) -> Any:
        return c.compress(x)

    def decompress(data: Any, _: str) -> Any:
        return d.decompress(data)

    return Compressor(f"zstd -{level}", compress, decompress, level > 9)


def blosc2(codec: str = "zstd", filter_: str = "shuffle", level: int = 5) -> Compressor:
    """Return Blosc2 with a codec, and a filter that transposes values, both named as in the package."""
    package: Any = importlib.import_module("blosc2")
    how = {"codec": package.Codec[codec.upper()], "filters": [package.Filter[filter_.upper()]], "clevel": level}

    def compress(x: Bytes, dtype: str) -> Any:
        return package.compress2(x, typesize=ITEMSIZE[dtype], nthreads=1, **how)

    def decompress(data: Any, _: str) -> Any:
        return package.decompress2(data, nthreads=1)

    return Compressor(f"blosc2 {filter_}+{codec}", compress, decompress)


def pcodec() -> Compressor:
    """Return pcodec. Dtypes that it lacks, such as bfloat16, are compressed as 2-byte integers."""
    package: Any = importlib.import_module("pcodec")
    native = {"float16", "float32", "float64", "int16", "int32", "int64", "uint16", "uint32", "uint64"}

    def compress(x: Bytes, dtype: str) -> Any:
        values = np.pad(x, (0, len(x) % 2)).view(dtype if dtype in native else "u2")
        return package.standalone.simple_compress(values, package.ChunkConfig())

    def decompress(data: Any, _: str) -> Any:
        return np.asarray(package.standalone.simple_decompress(data)).view(np.uint8)

    return Compressor("pcodec", compress, decompress)


def zipnn() -> Compressor:
    """Return ZipNN. Its time includes a copy of the values, because ZipNN overwrites its input."""
    package: Any = importlib.import_module("zipnn")

    def made(dtype: str) -> Any:
        known = dtype if dtype in ("float32", "bfloat16", "float16") else "float32"
        return package.ZipNN(input_format="byte", bytearray_dtype=known, threads=1)

    def compress(x: Bytes, dtype: str) -> Any:
        return _RAW + x.tobytes() if len(x) < _ZIPNN_LEAST else made(dtype).compress(bytearray(x))

    def decompress(data: Any, dtype: str) -> Any:
        return data[1:] if data[:1] == _RAW else made(dtype).decompress(data)

    return Compressor("zipnn", compress, decompress)


def openzl() -> Compressor:
    """Return OpenZL with its smallest graph for floats: exponents by FSE, other bytes by planes.

    Generic backends (Compress, Zstd, FieldLz) gave larger frames, or frames 0.3% smaller at a tenth of the speed.
    """
    z: Any = importlib.import_module("openzl.ext")

    def graph(compressor: Any, dtype: str) -> Any:
        exponents, rest = z.graphs.Fse()(compressor), z.graphs.Entropy()(compressor)
        if dtype == "float32":
            lanes = z.nodes.TransposeSplit()(compressor, rest)
            return z.nodes.Float32Deconstruct()(compressor, lanes, exponents)
        if dtype == "bfloat16":
            return z.nodes.BFloat16Deconstruct()(compressor, rest, exponents)
        return z.graphs.Compress()(compressor)

    def compress(x: Bytes, dtype: str) -> Any:
        compressor, context = z.Compressor(), z.CCtx()
        compressor.set_parameter(z.CParam.FormatVersion, z.MAX_FORMAT_VERSION)
        compressor.select_starting_graph(graph(compressor, dtype))
        context.ref_compressor(compressor)
        return context.compress([z.Input(z.Type.Numeric, x.view(UNSIGNED[dtype]))])

    def decompress(data: Any, _: str) -> Any:
        return z.DCtx().decompress(data)[0].content.as_nparray()

    return Compressor("openzl", compress, decompress)


def lmzip(path: str, packed: str, restored: str) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Return functions that pack and restore a .safetensors file with lmzip; None if lmzip is not installed."""
    if not importlib.util.find_spec("lmz"):
        return None
    lmz: Any = importlib.import_module("lmz")
    return (
        lambda: lmz.compress(path, packed, workers=1),
        lambda: lmz.decompress(packed, restored, workers=1, overwrite=True),
    )
