"""Decode a frame by every engine and call, for tests that compare the library with the reference decoder."""

import struct

import numpy as np

import codec
from codec._c.library import isas, use_isa
from codec.delta import find_changes
from reference import decoder as oracle
from support import flatcall

DELTA = 8


def decode_all_ways(frame, **how):
    """Return the decoded bytes by way of decoding; None if the frame is rejected, which must leave `out` unchanged."""
    kind = np.dtype(f"u{oracle.DTYPES[frame[6]][1]}")
    shape = struct.unpack_from(f"<{frame[7]}Q", frame, 48)
    results = {}
    for isa in isas():
        with use_isa(isa):
            for threads in (1, 4):
                try:
                    y = flatcall.decode(frame, like=np.empty(0, kind), threads=threads, **how)
                    results[isa, threads] = y.tobytes()
                except codec.FrameError:
                    results[isa, threads] = None
                if np.prod([s or 1 for s in shape], dtype=object) >= 1 << 60:
                    continue  # numpy cannot make such an array
                out = np.full(shape, 7, kind)
                try:
                    assert flatcall.decode(frame, out=out, threads=threads, **how) is out
                    results[isa, threads, "out"] = out.tobytes()
                except codec.FrameError:
                    assert (out == 7).all()
                    results[isa, threads, "out"] = None
    if frame[5] == DELTA:
        results["numba"] = decode_delta(frame, kind, "numba", **how)
        results["changes"] = apply_changes(frame, results["numba"], **how)
    return results


def apply_changes(frame, expected, base=None, **how):
    """Return the bytes of the base with the changes of a Delta frame; None if the frame is rejected.

    Return `expected` if the changes are not listed.
    """
    if base is None:
        return expected
    weights = base.copy()
    try:
        changes = find_changes(frame, base=weights)
    except codec.FrameError:
        return None
    if changes is None:
        return expected
    changes.put(weights)
    return weights.tobytes()


def decode_delta(frame, kind, engine, base=None, **how):
    """Return the bytes of a Delta frame's values, decoded in place; None if the frame is rejected."""
    weights = None if base is None else base.copy()
    try:
        y = flatcall.decode(frame, like=np.empty(0, kind), base=weights, out=weights, engine=engine, **how)
        return y.tobytes()
    except codec.FrameError:
        assert base is None or (weights == base).all()
        return None
