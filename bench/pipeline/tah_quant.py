"""TAH-Quant (He et al., arXiv 2506.01352), implemented from the paper: stateless quantization of activations by tiles.

A tile is 64 consecutive channels of a token. In each sample, the 80% of tiles with the highest entropy get 4 bits per
value, and the other tiles 3 bits. A tile is rotated if its largest magnitude is at least twice the second largest one:
the largest value is swapped with the first value, and a Hadamard matrix spreads it over the tile. Each tile stores a
zero point and a scale in float16.

Gradients are quantized to 6 bits in tiles of 32 values, with stochastic rounding and a scale in float16, as in the
authors' script. Scales are divided by one float32 number per message, since gradients may be too small for float16.

Entropy is Shannon's, as the paper's text says; the sign of its formula differs. Codes are packed without gaps.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
TILE, HIGH, LOW, SHARE = 64, 4, 3, 0.8  # values per tile, bits per value of either kind, fraction of HIGH tiles
GRADIENT_TILE, GRADIENT_BITS = 32, 6
OUTLIER = 2.0  # minimum ratio of the largest to the second largest magnitude for which a tile is rotated
BITS = HIGH * SHARE + LOW * (1 - SHARE)


def hadamard(n: int) -> Array:
    """Return the orthogonal symmetric Hadamard matrix of order n, a power of two."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.float32(np.sqrt(n))


_ROTATION = hadamard(TILE)


def pack(codes: Array, bits: int) -> bytes:
    """Pack uint8 codes into `bits` bits each. The number of codes must be a multiple of 8."""
    groups = codes.reshape(-1, 8)
    words = np.zeros(len(groups), "<u8")
    for i in range(8):
        words |= groups[:, i].astype("<u8") << np.uint64(bits * i)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].tobytes()


def unpack(data: Array, bits: int) -> Array:
    """Unpack the codes that :func:`pack` packed."""
    padded = np.zeros((len(data) // bits, 8), np.uint8)
    padded[:, :bits] = data.reshape(-1, bits)
    words, mask = padded.view("<u8").reshape(-1), np.uint64((1 << bits) - 1)
    return np.stack([(words >> np.uint64(bits * i) & mask).astype(np.uint8) for i in range(8)], 1).reshape(-1)


def entropies(magnitudes: Array) -> Array:
    """Return the entropy of each tile, with normalized magnitudes as probabilities."""
    total = magnitudes.sum(-1) + np.float32(1e-30)
    weighted = (magnitudes * np.log(magnitudes + np.float32(1e-30))).sum(-1)
    return np.log(total) - weighted / total


def low_tiles(tiles: Array) -> Array:
    """Return a mask of the tiles with LOW bits per value, of shape (samples, tiles per sample)."""
    count = int(tiles.shape[1] * (1 - SHARE) + 1e-9)
    order = np.argsort(entropies(np.abs(tiles)), axis=1, kind="stable")
    low = np.zeros(tiles.shape[:2], bool)
    np.put_along_axis(low, order[:, :count], True, axis=1)
    return low


def rotate(tiles: Array) -> tuple[Array, Array]:
    """Rotate tiles that have an outlier, in place; return a mask of these tiles, and the indices of their outliers."""
    magnitudes = np.abs(tiles)
    rows, pivots = np.arange(len(tiles)), magnitudes.argmax(1)
    first = magnitudes[rows, pivots]
    magnitudes[rows, pivots] = 0
    which = first >= OUTLIER * magnitudes.max(1)
    some, at = tiles[which], pivots[which]
    swap(some, at)
    tiles[which] = some @ _ROTATION
    return which, at


def swap(tiles: Array, pivots: Array) -> None:
    """Swap the first value of each tile with the value at the tile's pivot, in place."""
    rows = np.arange(len(tiles))
    first = tiles[:, 0].copy()
    tiles[:, 0] = tiles[rows, pivots]
    tiles[rows, pivots] = first


class Reader:
    """Reads the fields of a message one after the other."""

    def __init__(self, message: Any) -> None:
        self._data = np.frombuffer(message, np.uint8)

    def take(self, nbytes: int) -> Array:
        if nbytes > len(self._data):
            raise ValueError(f"the message ends {nbytes - len(self._data)} bytes too early")
        part, self._data = self._data[:nbytes], self._data[nbytes:]
        return part

    def bitmap(self, count: int) -> Array:
        return np.unpackbits(self.take(-(-count // 8)), count=count).astype(bool)

    def end(self) -> None:
        if len(self._data):
            raise ValueError(f"{len(self._data)} bytes follow the message")


class TahQuant:
    """Side of an edge, with the interface of codec.ActivationDelta. Its only state is a random generator."""

    def __init__(self, seed: Any = 0) -> None:
        self._random = np.random.default_rng(seed)

    def encode(self, activation: Any, samples: Iterable[int] | None = None) -> bytes:
        """Return the message of float32 activations, whose last dimension is a multiple of 64."""
        x = np.asarray(activation, np.float32)
        tiles = x.reshape(len(x), -1, TILE).copy()
        low = low_tiles(tiles)
        which, pivots = rotate(tiles.reshape(-1, TILE))
        flat, is_low = tiles.reshape(-1, TILE), low.reshape(-1)
        levels = np.where(is_low, (1 << LOW) - 1, (1 << HIGH) - 1).astype(np.float32)
        zero = flat.min(1).astype(np.float16)
        scale = ((flat.max(1) - zero.astype(np.float32)) / levels).astype(np.float16)
        divisor = np.maximum(scale.astype(np.float32), np.float32(1e-30))
        codes = np.rint((flat - zero.astype(np.float32)[:, None]) / divisor[:, None])
        codes = np.clip(codes, 0, levels[:, None]).astype(np.uint8)
        bitmaps = np.packbits(is_low).tobytes() + np.packbits(which).tobytes()
        places = np.zeros(-(-len(pivots) // 8) * 8, np.uint8)
        places[: len(pivots)] = pivots
        packed = pack(codes[is_low], LOW) + pack(codes[~is_low], HIGH) + pack(places, 6)
        return bitmaps + zero.tobytes() + scale.tobytes() + packed

    def decode(self, message: Any, samples: Iterable[int] | None = None, *, out: Any) -> Any:
        """Write the activations of a message to a float32 array or CPU tensor, and return it."""
        x = np.asarray(out)
        count, reader = x.size // TILE, Reader(message)
        low, which = reader.bitmap(count), reader.bitmap(count)
        zero, scale = (reader.take(2 * count).view(np.float16).astype(np.float32)[:, None] for _ in range(2))
        tiles = np.empty((count, TILE), np.float32)
        n = int(low.sum())
        tiles[low] = unpack(reader.take(n * TILE * LOW // 8), LOW).reshape(-1, TILE)
        tiles[~low] = unpack(reader.take((count - n) * TILE * HIGH // 8), HIGH).reshape(-1, TILE)
        rotated = int(which.sum())
        pivots = unpack(reader.take(-(-rotated // 8) * 6), 6)[:rotated]
        reader.end()
        tiles = tiles * scale + zero
        some = tiles[which] @ _ROTATION
        swap(some, pivots)
        tiles[which] = some
        x[...] = tiles.reshape(x.shape)
        return out

    def encode_gradient(self, gradient: Any) -> bytes:
        """Return the message of a float32 gradient, whose number of values is a multiple of 32."""
        tiles = np.asarray(gradient, np.float32).reshape(-1, GRADIENT_TILE)
        most = (1 << GRADIENT_BITS - 1) - 1
        scale = np.abs(tiles).max(1) / np.float32(most)
        unit = np.maximum(scale.max(), np.float32(1e-30))
        relative = np.nextafter((scale / unit).astype(np.float16), np.float16(2))  # rounded up, to cover all values
        steps = np.maximum(relative.astype(np.float32) * unit, np.float32(1e-30))[:, None]
        codes = np.floor(tiles / steps + self._random.random(tiles.shape, np.float32))
        codes = (np.clip(codes, -most, most) + most).astype(np.uint8)
        return np.float32(unit).tobytes() + relative.tobytes() + pack(codes, GRADIENT_BITS)

    def decode_gradient(self, message: Any, *, out: Any) -> Any:
        """Write the gradient of a message to a float32 array or CPU tensor, and return it."""
        x, reader = np.asarray(out), Reader(message)
        unit = reader.take(4).view(np.float32)[0]
        relative = reader.take(2 * x.size // GRADIENT_TILE).view(np.float16).astype(np.float32)
        codes = unpack(reader.take(x.size * GRADIENT_BITS // 8), GRADIENT_BITS).astype(np.float32)
        reader.end()
        most = (1 << GRADIENT_BITS - 1) - 1
        x[...] = ((codes.reshape(-1, GRADIENT_TILE) - most) * (relative * unit)[:, None]).reshape(x.shape)
        return out

    def commit(self) -> None:
        """Do nothing: there is no state."""


def activation_nbytes(values: int, rotated: int = 0, samples: int = 1) -> int:
    """Return the size in bytes of a message of activations with `rotated` rotated tiles."""
    tiles = values // TILE
    low = samples * int(tiles // samples * (1 - SHARE) + 1e-9)
    bitmaps = 2 * -(-tiles // 8)
    return bitmaps + 4 * tiles + (low * LOW + (tiles - low) * HIGH) * TILE // 8 + -(-rotated // 8) * 6


def gradient_nbytes(values: int) -> int:
    """Return the size in bytes of a message of a gradient."""
    return 4 + 2 * values // GRADIENT_TILE + values * GRADIENT_BITS // 8
