"""A quantiser tried in an afternoon: dither half as wide, in place of the engine's (docs/new-kernel.md).

The frames are frames like others, which every engine decodes; only their codes are chosen otherwise.
"""

import numpy as np

import codec
from codec.engines.numba import rows
from codec.engines.numba.patching import trying
from codec.engines.numba.words import F32, I64, U8, U16, over, place


def narrow_codes(odd, levels, x, up, by, half, code):
    """codes.level_codes for even levels, but draws are from [1/4, 3/4) of a step instead of [0, 1)."""
    half_n = F32(F32(levels) * F32(0.5))
    for i in range(len(x)):
        draw = U16((I64(half[i]) >> 1) + 0x4000)
        c = U8(place(F32(F32(over(x[i], up[i], by[i]) + F32(1)) * half_n), draw))
        code[i] = c if by[i] > F32(0) else U8(0)


def measure(x: np.ndarray, spec: codec.Spec) -> tuple[float, float]:
    """The error of one frame, and of the mean of 64 of them, in shares of the values' own size."""
    frames = [codec.encode(x, spec, stream=i, engine="numba") for i in range(64)]
    one, mean = codec.decode(frames[0]), codec.reduce(frames, "mean")  # by the native engine, which need not know
    size = np.sqrt(np.mean(x**2))
    return float(np.sqrt(np.mean((one - x) ** 2)) / size), float(np.sqrt(np.mean((mean - x) ** 2)) / size)


def main() -> None:
    """Print both quantisers' errors."""
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    spec = codec.Quantize(3)
    print("            error of one   of the mean of 64")
    noise, bias = measure(x, spec)
    print(f"full dither {noise:14.4f} {bias:12.4f}")
    with trying(rows, level_codes=narrow_codes):
        noise, bias = measure(x, spec)
    print(f"half dither {noise:14.4f} {bias:12.4f}")


if __name__ == "__main__":
    main()
