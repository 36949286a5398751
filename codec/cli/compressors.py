"""Third-party compressors that ``codec bench`` measures if their packages are installed."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from codec._c.library import ITEMSIZE

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_BITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
_PACKAGES = {
    "zstandard": "zstd",
    "blosc2": "blosc2",
    "pcodec": "pcodec",
    "zipnn": "zipnn",
    "openzl": "openzl",
    "lmz": "lmzip",
}

_ZIPNN_LEAST, _RAW = (
    1 << 16,
    b"\0",
)  # bytes: ZipNN 0.5 may read outside of smaller inputs, so these are stored raw; first byte of raw data


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
        ("zstandard", _zstd), ("blosc2", _blosc2), ("pcodec", _pcodec), ("zipnn", _zipnn), ("openzl", _openzl)
    ):  # fmt: skip
        if importlib.util.find_spec(package):
            yield from make()


def _zstd() -> Iterator[Compressor]:
    zstd: Any = importlib.import_module("zstandard")
    d = zstd.ZstdDecompressor()

    def made(level: int) -> Compressor:
        c = zstd.ZstdCompressor(level=level)

        def compress(x: Bytes, _: str) -> Any:
            return c.compress(x)

        return Compressor(f"zstd -{level}", compress, decompress, level > 9)

    def decompress(data: Any, _: str) -> Any:
        return d.decompress(data)

    yield from map(made, (3, 19))


def _blosc2() -> Iterator[Compressor]:
    blosc2: Any = importlib.import_module("blosc2")

    def compress(x: Bytes, dtype: str) -> Any:
        how: dict[str, Any] = {"codec": blosc2.Codec.ZSTD, "clevel": 5, "filters": [blosc2.Filter.SHUFFLE]}
        return blosc2.compress2(x, typesize=ITEMSIZE[dtype], nthreads=1, **how)

    def decompress(data: Any, _: str) -> Any:
        return blosc2.decompress2(data, nthreads=1)

    yield Compressor("blosc2 shuffle+zstd", compress, decompress)


def _pcodec() -> Iterator[Compressor]:
    pcodec: Any = importlib.import_module("pcodec")
    native = {"float16", "float32", "float64", "int16", "int32", "int64", "uint16", "uint32", "uint64"}

    def compress(x: Bytes, dtype: str) -> Any:
        kind = dtype if dtype in native else "u2"  # pcodec compresses other dtypes as 2-byte integers
        values = np.pad(x, (0, len(x) % 2)).view(kind)
        return pcodec.standalone.simple_compress(values, pcodec.ChunkConfig())

    def decompress(data: Any, _: str) -> Any:
        return np.asarray(pcodec.standalone.simple_decompress(data)).view(np.uint8)

    yield Compressor("pcodec", compress, decompress)


def _zipnn() -> Iterator[Compressor]:
    zipnn: Any = importlib.import_module("zipnn")

    def made(dtype: str) -> Any:
        known = dtype if dtype in ("float32", "bfloat16", "float16") else "float32"
        return zipnn.ZipNN(input_format="byte", bytearray_dtype=known, threads=1)

    def compress(x: Bytes, dtype: str) -> Any:
        if len(x) < _ZIPNN_LEAST:
            return _RAW + x.tobytes()
        return b"\1" + made(dtype).compress(bytearray(x))  # compress a copy, because ZipNN overwrites its input

    def decompress(data: Any, dtype: str) -> Any:
        return data[1:] if data[:1] == _RAW else made(dtype).decompress(data[1:])

    yield Compressor("zipnn", compress, decompress)


def _openzl() -> Iterator[Compressor]:
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
        return context.compress([z.Input(z.Type.Numeric, x.view(_BITS[ITEMSIZE[dtype]]))])

    def decompress(data: Any, _: str) -> Any:
        return z.DCtx().decompress(data)[0].content.as_nparray()

    yield Compressor("openzl", compress, decompress)


def lmzip(path: str, packed: str, restored: str) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Return functions that pack and restore a .safetensors file with lmzip; None if lmzip is not installed."""
    if not importlib.util.find_spec("lmz"):
        return None
    lmz: Any = importlib.import_module("lmz")
    return (
        lambda: lmz.compress(path, packed, workers=1),
        lambda: lmz.decompress(packed, restored, workers=1, overwrite=True),
    )
