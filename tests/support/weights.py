"""Weights before and after updates, as bit patterns of bfloat16, and their Delta frames."""

import numpy as np

import codec
from codec.errors import Status
from support.frame_builder import recompute_checksums


def encode(new, base, dtype, spec=codec.Delta(), **how):  # noqa: B008 - immutable
    """Return the Delta frame of the bit patterns `new`, relative to those of `base`."""
    return codec.encode(codec.view(new, dtype), spec, base=codec.view(base, dtype), **how)


def weights(n=300_000, density=0.01):
    """Return bit patterns of bfloat16 weights before and after an update; small weights change more often."""
    rng = np.random.default_rng(1)
    base = (rng.standard_normal(n).astype(np.float32) / 50).view(np.uint32)
    moved = base.view(np.float32) + rng.standard_normal(n).astype(np.float32) * np.float32(density * 1e-4)
    round_ = lambda x: ((x + 0x7FFF + (x >> 16 & 1)) >> 16).astype(np.uint16)
    return round_(base), round_(moved.view(np.uint32))


def frames_with_invalid_changes():
    """Yield frames whose block 2 is invalid, each with a base and the status of the first error that decoding meets.

    In some cases, the checksum or the directory entry of block 4 is damaged too, or the base differs in the last block.
    """
    base, new = weights(6000, 0.1)
    frame = bytearray(encode(new, base, "bfloat16", codec.Delta(1024)))
    directory, _ = codec.inspect(frame).sections["directory"]
    at = 8 * int.from_bytes(frame[directory + 8 : directory + 12], "little")  # byte offset of the end of block 1
    frame[at + 2] += 1  # bits 16 to 23 of the head: claims four more changes
    valid = recompute_checksums(frame)
    assert valid
    other = base.copy()
    other[-1] ^= 1
    for entry, damage in ((None, Status.OTHER_BASE), (0, Status.BAD_DIRECTORY), (4, Status.CHECKSUM)):
        damaged = bytearray(valid)
        if entry is not None:
            damaged[directory + 8 * 4 + entry : directory + 8 * 4 + entry + 4] = b"\xff" * 4
        yield bytes(damaged), base, Status.BAD_REGION
        yield bytes(damaged), other, damage
