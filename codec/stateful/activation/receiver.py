"""Decode messages of activations, after checking that they refer to the m that this side has stored."""

from math import prod
from typing import Any, NamedTuple

import numpy as np

from codec._options import CallOptions
from codec.decoding import decode
from codec.errors import ArgumentError, FrameError, LimitError, StateError, Status
from codec.inspection import Info, inspect
from codec.stateful.activation.coding import add_delta
from codec.stateful.activation.entries import BITS
from codec.stateful.activation.ledger import Ledger, Staging
from codec.stateful.activation.message import Message, next_checks
from codec.stateful.activation.values import (
    Values,
    bits_of_view,
    limit_of,
    nbytes_of,
    output_values,
    shown_samples,
)
from codec.tensors.floats import Bits, Floats, narrow, widen
from codec.tensors.view import empty


class Target(NamedTuple):
    """Arguments `out` and `like` of decode(), which determine where values are written."""

    out: Any
    like: Any


class Receiver:
    """Receiving side of a pipeline edge.

    Parameters
    ----------
    ledger : Ledger
        Committed and staged m.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def plain(self, m: Message, nbytes: int, target: Target, options: CallOptions | None) -> Any:
        """Decode a message of kind DIRECT or GRADIENT, which does not use m."""
        info = _info(m.raw, m.head.dtype)
        if target.out is None:
            _check_limit(m.head.dtype, info.shape, nbytes)
        return decode(m.raw, out=target.out, like=target.like, options=options)

    def activation(self, m: Message, nbytes: int, target: Target, options: CallOptions | None) -> Any:
        """Decode the activations in a message of kind RAW, DELTA or MIXED, and stage the new m."""
        samples: list[int] = m.samples.tolist()
        deltas, raws = np.flatnonzero(m.checks), np.flatnonzero(m.checks == 0)
        sample_shape = _sample_shape(m, len(raws), len(deltas))
        shape = (len(samples), *sample_shape)
        if target.out is None:
            _check_limit(m.head.dtype, shape, nbytes)
            result, v = empty(m.head.dtype, shape, target.like)
            values = Values(bits_of_view(v), v.dtype, v.shape)
        else:
            result, values = target.out, output_values(target.out, m.head.dtype)
            if values.shape != shape:
                raise ArgumentError(f"out= must have shape {shape} for this message, got {values.shape}")
        coded = self._delta_rows(m, [samples[i] for i in deltas], sample_shape, options) if len(m.delta) else None
        raw = np.empty((len(raws), *sample_shape), BITS[m.head.dtype]) if len(m.raw) else None
        if raw is not None:
            decode(m.raw, out=raw, options=options)
        rows = values.bits.reshape(len(samples), prod(sample_shape))
        staging: list[Staging] = []
        if raw is not None:
            bits = raw.reshape(len(raws), rows.shape[1])
            rows[raws] = bits
            new = widen(bits, m.head.dtype, self._ledger.buffer(*bits.shape))
            staging.append(_staging(m.raw, raws, m, new, [0] * len(raws)))
        if coded is not None:
            _write_rows(coded, m.head.dtype, rows, deltas)
            visits = [v + 1 for v in self._ledger.visits([samples[i] for i in deltas])]
            staging.append(_staging(m.delta, deltas, m, coded, visits))
        self._ledger.stage(staging)
        return result

    def _delta_rows(
        self, m: Message, samples: list[int], sample_shape: tuple[int, ...], options: CallOptions | None
    ) -> Floats:
        """Return m + delta for the samples sent as deltas; raise StateError if this side has another m."""
        n = prod(sample_shape)
        checks = m.checks[m.checks != 0]
        wrong = np.flatnonzero(self._ledger.checks(samples, n) != checks)
        rows = self._ledger.buffer(len(samples), n)
        lost = wrong if len(wrong) else self._ledger.gather(samples, rows)
        if len(lost):
            ids = list(dict.fromkeys(samples[i] for i in lost))
            error = StateError(
                f"this side lacks, or has with other values, the stored activations m of samples {shown_samples(ids)}, "
                f"to which message {m.head.number} of edge {m.head.edge} refers: roll back on both sides, and call "
                "forget() for these samples at the sender"
            )
            error.item = tuple(ids)
            raise error
        add_delta(m.delta, rows.reshape(-1, *sample_shape), options)
        return rows


def _staging(frame: Any, at: Any, m: Message, new: Floats, visits: list[int]) -> Staging:
    checks = next_checks(inspect(frame).checksum, m.checks[at])
    return Staging(m.samples[at].tolist(), checks, new, visits)


def _write_rows(values: Floats, dtype: str, out: Bits, at: Any) -> None:
    """Convert float32 values to `dtype`, and write them to the rows `at` of `out`."""
    if len(at) == len(out):
        narrow(values, dtype, out)
    else:
        rounded = np.empty(values.shape, out.dtype)
        narrow(values, dtype, rounded)
        out[at] = rounded


def _info(frame: Any, dtype: str) -> Info:
    """Return the header of a frame; raise FrameError if the frame does not have this dtype."""
    info = inspect(frame)
    if info.dtype != dtype:
        raise FrameError(f"not a valid message: its frame has dtype {info.dtype}, but its head {dtype}")
    return info


def _sample_shape(m: Message, raws: int, deltas: int) -> tuple[int, ...]:
    """Return the shape of a sample, after checking that the frames have one row per sample."""
    parts = ((m.raw, m.head.dtype, raws), (m.delta, "float32", deltas))
    shapes: set[tuple[int, ...]] = set()
    for frame, dtype, count in parts:
        if len(frame):
            shape = _info(frame, dtype).shape
            if not shape or shape[0] != count or (count and not prod(shape)):
                raise FrameError(
                    f"not a valid message: its frame has shape {shape}, but {count} samples need {count} rows"
                )
            shapes.add(shape[1:])
    if len(shapes) != 1:
        raise FrameError(f"not a valid message: the shapes of samples differ between its frames: {sorted(shapes)}")
    return shapes.pop()


def _check_limit(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    """Raise LimitError if a message of `nbytes` bytes declares a suspiciously large tensor."""
    if nbytes_of(dtype, shape) > limit_of(nbytes):
        raise LimitError(
            f"a message of {nbytes} bytes declares a tensor of {nbytes_of(dtype, shape)} bytes, more than the limit of "
            f"{limit_of(nbytes)}: pass out= of this size if the sender is trusted",
            Status.LIMIT,
        )
