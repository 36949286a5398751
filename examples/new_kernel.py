"""Compare the Numba engine's quantizer with one that has half the dither (docs/tutorials/new-kernel.md).

Every engine can decode the frames of both, because the quantizers differ only in the codes that they choose.
"""

import numpy as np

import codec
from codec.engines.numba import rows
from codec.engines.numba.patching import trying
from codec.engines.numba.words import F32, I64, U8, U16, over, place


def narrow_codes(odd, levels, x, up, by, half, code):
    """Choose codes as codes.level_codes does for even levels, but with a dither in [1/4, 3/4) of a step."""
    half_n = F32(F32(levels) * F32(0.5))
    for i in range(len(x)):
        draw = U16((I64(half[i]) >> 1) + 0x4000)
        c = U8(place(F32(F32(over(x[i], up[i], by[i]) + F32(1)) * half_n), draw))
        code[i] = c if by[i] > F32(0) else U8(0)


def measure(x: np.ndarray, spec: codec.Spec) -> tuple[float, float]:
    """Return the relative errors of one frame and of the mean of 64 frames."""
    frames = [codec.encode(x, spec, stream=i, options=codec.options(engine="numba")) for i in range(64)]
    one, mean = codec.decode(frames[0]), codec.reduce(frames, op="mean")  # the native engine decodes the frames
    size = np.sqrt(np.mean(x**2))
    return float(np.sqrt(np.mean((one - x) ** 2)) / size), float(np.sqrt(np.mean((mean - x) ** 2)) / size)


def main() -> None:
    """Print the errors of both quantizers."""
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
