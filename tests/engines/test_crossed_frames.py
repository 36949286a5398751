"""Mutants of a frame, with bytes of a second frame mixed in, give the same tensor or error with every engine.

Mutants have valid checksums, as an attacker's frames would, so that tests reach the checks after the checksum.
"""

import struct

import numpy as np
import pytest

import codec
from support import flatcall
from support.device import Emulated, build, use
from support.engine_comparison import level_arguments, like, outcome, sample_bits
from support.frame_builder import recompute_checksums
from support.sample_frames import FRAMES_TO_DAMAGE
from support.specs import SPECS
from support.tensors import LOSSY_DTYPES
from support.tiers import NIGHTLY

MAX_NBYTES = 1 << 22
LARGE = 40_000  # size in bytes above which a frame gets fewer mutants
NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 511, 512, 1023, 4095, 4096, 16383, 16384, 65535, 65536)
EXTREMES = (*NUMBERS, *(2**k + d for k in (31, 32, 40, 60, 62, 63, 64) for d in (-1, 0)))


def originals():
    """Return frames to mutate, each with its dtype and the arguments that decoding needs."""
    frames = [(bytes(frame), dtype, how) for frame, dtype, _, how in FRAMES_TO_DAMAGE.values()]
    rng = np.random.default_rng(0)
    for seed, spec in enumerate(SPECS.values()):
        for dtype in ("float32", "bfloat16"):
            n = int(rng.integers(1, 3000))
            how, x = level_arguments(spec, n), sample_bits(dtype, n, "zeros" if seed % 3 else "normal", seed)
            frames.append((bytes(flatcall.encode(x, spec, dtype=dtype, **how)), dtype, how))
    return frames


ORIGINALS = originals()


def sections_of(frame):
    """Return (offset, size) of each section that a mutation may change; a damaged frame may yield fewer sections."""
    found = outcome(lambda: codec.inspect(bytes(frame)).sections)
    found = {} if isinstance(found, tuple) else found
    whole = {"fields": (0, 48), "all": (0, len(frame)), "tail": (max(0, len(frame) - 100), 100)}
    return {name: (at, size) for name, (at, size) in {**found, **whole}.items() if size and at < len(frame)}


class Mutation:
    """One random change of a frame, in place."""

    def __init__(self, frame, other, rng):
        self.frame, self.other, self.rng = frame, other, rng
        sections = sections_of(frame)
        self.begin, size = sections[sorted(sections)[self.below(len(sections))]]
        self.size = min(size, len(frame) - self.begin)

    def below(self, n):
        """Return a random number below n."""
        return int(self.rng.integers(max(1, n)))

    def place(self, nbytes=1):
        """Return a random offset in the chosen section, at least `nbytes` bytes before its end."""
        return min(self.begin + self.below(self.size), len(self.frame) - nbytes)

    def put(self, at, data):
        """Write bytes at an offset; bytes beyond the end of the frame are dropped."""
        self.frame[at : at + len(data)] = data[: len(self.frame) - at]

    def take_header_byte(self):
        """Copy a byte of the other frame's header."""
        at = self.below(48)
        self.put(at, self.other[at : at + 1])

    def take_section(self):
        """Copy a section of the other frame over the same section."""
        mine, others = sections_of(self.frame), sections_of(self.other)
        names = sorted(mine.keys() & others.keys() - {"all"})
        name = names[self.below(len(names))]
        (at, size), (begin, nbytes) = mine[name], others[name]
        self.put(at, self.other[begin : begin + min(size, nbytes)])

    def splice(self):
        """Copy bytes from a random offset of the other frame."""
        at, begin = self.below(len(self.frame)), self.below(len(self.other))
        self.put(at, self.other[begin : begin + self.below(len(self.frame) - at) + 1])

    def swap(self):
        """Swap two pieces of the frame."""
        nbytes = (1, 2, 4, 8, 16, 64)[self.below(6)]
        a, b = self.below(len(self.frame) - nbytes), self.below(len(self.frame) - nbytes)
        first, second = self.frame[a : a + nbytes], self.frame[b : b + nbytes]
        self.put(a, second)
        self.put(b, first)

    def set_extreme(self):
        """Write an extreme number, such as the largest of a field."""
        nbytes = (1, 2, 4, 8)[self.below(4)]
        number = EXTREMES[self.below(len(EXTREMES))] % (1 << 8 * nbytes)
        self.put(self.place(nbytes), number.to_bytes(nbytes, "little"))

    def fill(self):
        """Fill a piece with one byte."""
        self.put(self.place(), bytes([(0, 255, 85)[self.below(3)]]) * (1, 4, 16, 256)[self.below(4)])

    def flip(self):
        """Flip one bit."""
        self.frame[self.place()] ^= 1 << self.below(8)

    def step(self):
        """Add 1 to a byte or subtract 1."""
        at = self.place()
        self.frame[at] = (self.frame[at] + (1, 255)[self.below(2)]) % 256

    def set_dimension(self):
        """Write a dimension near a block size into the shape."""
        if 0 < self.frame[7] <= 8 and len(self.frame) >= 48 + 8 * self.frame[7]:
            size = (0, 1, 2, 3, 3000, 4096, 16384, 16385, MAX_NBYTES)[self.below(9)]
            struct.pack_into("<Q", self.frame, 48 + 8 * self.below(self.frame[7]), size)

    WAYS = (take_header_byte, take_section, splice, swap, set_extreme, set_extreme, fill, flip, step, set_dimension)


def mutant_of(frame, other, rng):
    """Return a frame with one to three mutations, and valid checksums if its header still locates them."""
    data = bytearray(frame)
    for _ in range(rng.integers(1, 4)):
        way = Mutation.WAYS[int(rng.integers(len(Mutation.WAYS)))]
        way(Mutation(data, other, rng))
    return recompute_checksums(bytes(data)) or bytes(data)


def mutants(seed, count):
    """Yield the original frame, a mutant of it, its dtype, and the arguments that decoding needs."""
    rng = np.random.default_rng(seed)
    while count:
        frame, dtype, how = ORIGINALS[int(rng.integers(len(ORIGINALS)))]
        if len(frame) > LARGE and rng.random() < 0.8:
            continue
        other, _, _ = ORIGINALS[int(rng.integers(len(ORIGINALS)))]
        mutant = mutant_of(frame, other, rng)
        if mutant != frame:
            count -= 1
            yield frame, mutant, dtype, how


def check_decode(mutant, dtype, how, **given):
    """Decode a mutant; return shape, dtype and bits of the tensor, or the error."""

    def call():
        y = flatcall.decode(mutant, max_nbytes=MAX_NBYTES, **{"like": like(dtype), **how, **given})
        y = y.get() if hasattr(y, "get") else y
        return y.shape, str(y.dtype), y.tobytes()

    return outcome(call)


def check_numba(seed, count):
    """Compare the Numba engine with the native one, and return how many mutants were rejected."""
    refused = 0
    for i, (frame, mutant, dtype, how) in enumerate(mutants(seed, count)):
        threads = 1 + i % 2
        expected = check_decode(mutant, dtype, how, threads=threads)
        assert check_decode(mutant, dtype, how, threads=threads, engine="numba") == expected, mutant.hex()
        if not isinstance(expected[0], type):
            continue
        refused += 1
        if dtype in LOSSY_DTYPES and i % 4 == 0:
            total = np.full(codec.inspect(frame).shape, 7, np.float32)
            errors = [
                outcome(lambda: flatcall.reduce([frame, mutant], out=total, engine=engine, **how))[:2]  # noqa: B023
                for engine in ("native", "numba")
            ]
            assert errors[0] == errors[1], mutant.hex()
            assert issubclass(errors[0][0], codec.CodecError)
            assert (total == 7).all()
    return refused


def check_cuda(seed, count):
    """Compare the CUDA engine with the native one."""
    for _, mutant, dtype, how in mutants(seed, count):
        expected = check_decode(mutant, dtype, how)
        found = check_decode(mutant, dtype, how, engine="cuda")
        # If a frame has several faults, a GPU may report a different one, so messages of errors are not compared.
        # Decoded tensors must agree in every bit.
        same = found[:2] == expected[:2] if isinstance(expected[0], type) else found[::2] == expected[::2]
        assert same, mutant.hex()


def test_crossed_frames_agree_with_numba():
    count = 1500 if NIGHTLY else 300
    assert count // 2 < check_numba(0, count) < count


def test_crossed_frames_agree_with_cuda(monkeypatch):
    use(monkeypatch, Emulated(build()))
    check_cuda(1, 100 if NIGHTLY else 40)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_crossed_frames_agree_with_numba(seed):
    check_numba(seed, 20_000)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12, 16))
def test_many_crossed_frames_agree_with_cuda(seed, monkeypatch):
    use(monkeypatch, Emulated(build()))
    check_cuda(seed, 10_000)
