"""Other compressors of tensors, for ``codec bench``: those whose packages are installed."""

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


class Compressor(NamedTuple):
    """Compressor of the values of one dtype.

    Parameters
    ----------
    name : str
    compress : callable
        Takes the bytes of values and their dtype, and returns bytes.
    decompress : callable
        Takes these bytes and the dtype, and returns something with a buffer.
    slow : bool
        True if it is much slower than 50 MB/s.
    """

    name: str
    compress: Callable[[Bytes, str], Any]
    decompress: Callable[[Any, str], Any]
    slow: bool = False


def missing() -> list[str]:
    """Return the names of compressors whose packages are not installed."""
    return [name for package, name in _PACKAGES.items() if not importlib.util.find_spec(package)]


def compressors() -> Iterator[Compressor]:
    """Yield the compressors that are installed."""
    for package, make in (
        ("zstandard", _zstd), ("blosc2", _blosc2), ("pcodec", _pcodec), ("zipnn", _zipnn), ("openzl", _openzl)
    ):  # fmt: skip
        if importlib.util.find_spec(package):
            yield from make()


def _zstd() -> Iterator[Compressor]:
    zstd: Any = importlib.import_module("zstandard")
    for level in (3, 19):
        c, d = zstd.ZstdCompressor(level=level), zstd.ZstdDecompressor()
        yield Compressor(
            f"zstd -{level}", lambda x, _, c=c: c.compress(x), lambda data, _, d=d: d.decompress(data), level > 9
        )


def _blosc2() -> Iterator[Compressor]:
    blosc2: Any = importlib.import_module("blosc2")

    def compress(x: Bytes, dtype: str) -> Any:
        how: dict[str, Any] = {"codec": blosc2.Codec.ZSTD, "clevel": 5, "filters": [blosc2.Filter.SHUFFLE]}
        return blosc2.compress2(x, typesize=ITEMSIZE[dtype], nthreads=1, **how)

    yield Compressor("blosc2 shuffle+zstd", compress, lambda data, _: blosc2.decompress2(data, nthreads=1))


def _pcodec() -> Iterator[Compressor]:
    pcodec: Any = importlib.import_module("pcodec")
    native = {"float16", "float32", "float64", "int16", "int32", "int64", "uint16", "uint32", "uint64"}

    def compress(x: Bytes, dtype: str) -> Any:
        values = x.view(dtype if dtype in native else _BITS[max(2, ITEMSIZE[dtype])]) if len(x) % 2 == 0 else None
        return x.tobytes() if values is None else pcodec.standalone.simple_compress(values, pcodec.ChunkConfig())

    yield Compressor(
        "pcodec", compress, lambda data, _: np.asarray(pcodec.standalone.simple_decompress(data)).view(np.uint8)
    )


def _zipnn() -> Iterator[Compressor]:
    zipnn: Any = importlib.import_module("zipnn")

    def made(dtype: str) -> Any:
        known = dtype if dtype in ("float32", "bfloat16", "float16") else "float32"
        return zipnn.ZipNN(input_format="byte", bytearray_dtype=known, threads=1)

    # ZipNN overwrites its input
    yield Compressor("zipnn", lambda x, dtype: made(dtype).compress(x.tobytes()), lambda d, t: made(t).decompress(d))


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

    yield Compressor("openzl", compress, lambda data, _: z.DCtx().decompress(data)[0].content.as_nparray())


def lmzip(path: str, packed: str, restored: str) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Return functions that pack a .safetensors file by lmzip and restore it; None if it is not installed."""
    if not importlib.util.find_spec("lmz"):
        return None
    lmz: Any = importlib.import_module("lmz")
    return (
        lambda: lmz.compress(path, packed, workers=1),
        lambda: lmz.decompress(packed, restored, workers=1, overwrite=True),
    )
