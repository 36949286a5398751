"""Decode generated frames (grammar.h) with libcodec and with tests/reference/decoder.py: both must agree.

    python fuzz/compare.py [--first SEED] [--frames N] [--most VALUES]

A frame's number is the seed that determines its bytes. A disagreement is printed with that number, and the frame is
written to build/fuzz/disagree.
"""

import argparse
import ctypes
import math
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from reference import decoder as oracle  # noqa: E402

_MADE = ("lossless", "rows", "scale_model", "topk", "truncate")
SOURCES = ("grammar.c", "maker.c", *(f"make_{name}.c" for name in _MADE), "frames.c")

LIMIT = 51  # number of the status CODEC_LIMIT


class One(ctypes.Structure):
    """The C struct frames_one of frames.c: a frame, the inputs to decode it, and the library's result."""

    _fields_ = [
        *((name, ctypes.POINTER(ctypes.c_uint8)) for name in ("frame", "ea", "values")),
        *((name, ctypes.c_uint64) for name in ("nbytes", "n", "values_nbytes", "book_id")),
        ("lengths", ctypes.c_uint8 * 257),
        ("planted", ctypes.c_uint32),
        ("status", ctypes.c_int32),
    ]


def build(folder: Path, library: Path) -> Any:
    """Compile the frame generator, link it to `library`, and return it as a ctypes library."""
    made = folder / "frames.so"
    command = ["cc", "-std=c11", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-o", made]
    command += [f"-I{ROOT / 'native/include'}", f"-I{ROOT / 'native/src'}"]
    command += [ROOT / "fuzz" / s for s in SOURCES] + [library, f"-Wl,-rpath,{library.parent}", "-lm"]
    subprocess.run(command, check=True)
    lib = ctypes.CDLL(str(made))
    lib.frames_make.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.POINTER(One)]
    lib.frames_make.restype = None
    return lib


def values_declared(one: One) -> int:
    """Return the number of values that the frame's header declares, or 0 if the header is malformed."""
    rank = one.frame[7] if one.nbytes > 7 else 0
    if rank > 8 or one.nbytes < 48 + 8 * rank:
        return 0
    return math.prod(struct.unpack_from(f"<{rank}Q", bytes(one.frame[48 : 48 + 8 * rank])))


def verdict(one: One) -> tuple[str, bytes]:
    """Return the reference decoder's reason to reject a frame and b"", or "" and the bytes of the decoded values."""
    frame = bytes(one.frame[: one.nbytes])
    books = {one.book_id: list(one.lengths)} if one.book_id else {}
    a = np.ctypeslib.as_array(one.ea, (one.n,)) if one.ea else None
    try:
        return "", oracle.decode(frame, books, a)[2]
    except oracle.Bad as e:
        return str(e), b""
    except KeyError:
        return "unknown codebook", b""


def compare(lib: Any, seed: int, most: int) -> tuple[One, str]:
    """Return frame number `seed`, and a description of the disagreement, which is "" if both decoders agree."""
    one = One()
    lib.frames_make(seed, most, one)
    if one.ea and values_declared(one) != one.n:
        return one, ""  # the frame declares another number of values than the optimizer state has
    if one.status == LIMIT:
        return one, ""  # the frame exceeds a size limit of the library
    why, values = verdict(one)
    if (one.status == 0) != (not why):
        return one, f"the library returns {one.status}, the reference decoder {why or 'success'!r}"
    if one.status and not one.planted:
        return one, f"a frame without a planted fault is rejected: {one.status}, {why!r}"
    if one.status == 0 and values != ctypes.string_at(one.values, one.values_nbytes):
        return one, "values differ"
    return one, ""


def main() -> int:
    """Compare frames and print progress; return True if the decoders disagree on any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--most", type=int, default=100000)
    parser.add_argument("--library", type=Path, default=ROOT / "build/native/libcodec.so")
    args = parser.parse_args()
    left = ROOT / "build/fuzz/disagree"
    accepted = bad = 0
    begin = last = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lib = build(Path(folder), args.library.resolve())
        for seed in range(args.first, args.first + args.frames):
            one, why = compare(lib, seed, args.most)
            accepted += one.status == 0
            if why:
                bad += 1
                left.mkdir(parents=True, exist_ok=True)
                (left / f"{seed}.codec").write_bytes(bytes(one.frame[: one.nbytes]))
                print(f"{seed}: {why}; codec {one.frame[5]}, dtype {one.frame[6]}, {one.n} values", flush=True)
            if time.monotonic() - last > 10:
                last = time.monotonic()
                done = seed + 1 - args.first
                print(f"{done} frames, {accepted} valid, {bad} disagreements", flush=True)
    print(f"{args.frames} frames, {accepted} valid for both, {bad} disagreements, {time.monotonic() - begin:.0f} s")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
