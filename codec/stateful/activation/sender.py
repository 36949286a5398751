"""Encode activations and gradients as messages."""

from typing import Any, NamedTuple

import numpy as np

from codec._options import CallOptions
from codec.decoding import decode
from codec.encoding import encode
from codec.errors import ArgumentError, Status
from codec.inspection import inspect
from codec.specs import Lossless, Spec
from codec.stateful.activation.change import Change
from codec.stateful.activation.coding import difference, encode_delta
from codec.stateful.activation.entries import BITS
from codec.stateful.activation.ledger import Ledger, Staging
from codec.stateful.activation.message import Checks, ContentKind, Ids, MessageHead, build, next_checks
from codec.stateful.activation.values import Values, as_rows
from codec.tensors.floats import Bits, Floats, widen
from codec.tensors.wrapper import View

LOSSLESS = Lossless()
_MAX_FLOAT16 = 65520.0  # smallest magnitude that rounds to Inf in float16


class _Part(NamedTuple):
    """Frame of a message, the rows (samples) in the frame, and their new m."""

    rows: Any  # indices of the rows in the message, ascending
    frame: Any
    m: Floats  # new m of the sample in each row


class Sender:
    """Sending side of a pipeline edge: sends each sample raw or as a delta, and stages the new m.

    Parameters
    ----------
    ledger : Ledger
        Committed and staged m.
    change : Change
        Measures the relative change of each message.
    first : Spec
        Codec for samples that are sent raw.
    """

    def __init__(self, ledger: Ledger, change: Change, first: Spec) -> None:
        self._ledger = ledger
        self._change = change
        self.first = first
        self.draws = 0  # number of messages sent; selects the random bits, and is reset by a rollback

    def direct(self, head: MessageHead, x: Values, options: CallOptions | None) -> bytes:
        """Encode a message of kind DIRECT."""
        frame = self._first_frame(x.bits.reshape(x.shape), head, options)
        return build(head._replace(kind=ContentKind.DIRECT), *_NO_SAMPLES, frame)

    def gradient(self, head: MessageHead, x: Values, spec: Spec, options: CallOptions | None) -> bytes:
        """Encode a message of kind GRADIENT, or of kind POISON if the codec refuses NaN or Inf in the gradient."""
        try:
            frame = _encode(x.bits.reshape(x.shape), head, spec, self._stream(head, 0), options)
        except ArgumentError as e:
            if e.code != Status.NONFINITE:
                raise
            return build(head._replace(kind=ContentKind.POISON), *_NO_SAMPLES)
        return build(head._replace(kind=ContentKind.GRADIENT), *_NO_SAMPLES, frame)

    def activation(
        self, head: MessageHead, x: Values, samples: list[int], spec: Spec, options: CallOptions | None
    ) -> tuple[bytes, list[Staging]]:
        """Encode a message of kind RAW, DELTA or MIXED. Return it and the argument for :meth:`Ledger.stage`."""
        a = as_rows(x, len(samples))
        self._ledger.check_size(a.shape[1])
        old = self._ledger.checks(samples, a.shape[1])
        sample_shape = x.shape[1:]
        delta = self._delta_part(head, a, samples, old, sample_shape, spec, options)
        raw = self._raw_part(head, a, old, sample_shape, options)
        staging: list[Staging] = []
        for part in (raw, delta):
            if part is not None:
                known: list[int] = [samples[i] for i in part.rows]
                checks = next_checks(inspect(part.frame).checksum, old[part.rows])
                visits = self._ledger.visits(known) if part is delta else [-1] * len(known)
                staging.append(Staging(known, checks, part.m, [v + 1 for v in visits]))
        kind = ContentKind.RAW if delta is None else ContentKind.DELTA if raw is None else ContentKind.MIXED
        frames = (b"" if part is None else part.frame for part in (raw, delta))
        ids = np.array(samples, np.int64)
        return build(head._replace(kind=kind), ids, old, *frames), staging

    def _raw_part(
        self, head: MessageHead, a: Bits, old: Checks, sample_shape: tuple[int, ...], options: CallOptions | None
    ) -> _Part | None:
        rows = np.flatnonzero(old == 0)
        if not len(rows) and len(old):
            return None
        part = a if len(rows) == len(a) else a[rows]
        frame = self._first_frame(part.reshape(-1, *sample_shape), head, options)
        m = self._ledger.buffer(*part.shape)
        if not isinstance(inspect(frame).spec, Lossless):
            part = decode(frame, out=np.empty((len(part), *sample_shape), BITS[head.dtype])).reshape(part.shape)
        return _Part(rows, frame, widen(part, head.dtype, m))

    def _first_frame(self, x: Bits, head: MessageHead, options: CallOptions | None) -> Any:
        try:
            return _encode(x, head, self.first, self._stream(head, 0), options)
        except ArgumentError as e:
            if e.code != Status.NONFINITE:
                raise
            return _encode(x, head, LOSSLESS, self._stream(head, 0), options)

    def _delta_part(
        self,
        head: MessageHead,
        a: Bits,
        samples: list[int],
        old: Checks,
        sample_shape: tuple[int, ...],
        spec: Spec,
        options: CallOptions | None,
    ) -> _Part | None:
        """Encode rows whose check in `old` is not 0 as deltas. Set the check to 0 for rows that must be sent raw."""
        while len(rows := np.flatnonzero(old)):
            known = [samples[i] for i in rows]
            m = self._ledger.buffer(len(rows), a.shape[1])
            if damaged := self._ledger.gather(known, m):
                old[rows[damaged]] = 0
                continue
            part = widen(a if len(rows) == len(a) else a[rows], head.dtype)
            moved = self._change.measure(part, m, self._ledger.visits(known), head.number)
            shape = (len(rows), *sample_shape)
            try:
                frame = encode_delta(part.reshape(shape), m.reshape(shape), spec, self._stream(head, 1), options)
            except ArgumentError as e:
                if e.code != Status.NONFINITE:
                    raise
                self._ledger.gather(known, m)  # restore the old m, which the failed call has changed
                old[rows[~np.isfinite(difference(part, m)).all(axis=1)]] = 0
                continue
            if head.dtype == "float16" and (over := (np.abs(m) >= _MAX_FLOAT16).any(axis=1)).any():
                old[rows[over]] = 0
                continue
            self._change.add(moved)
            return _Part(rows, frame, m)
        return None

    def _stream(self, head: MessageHead, frame: int) -> int:
        """Return the number of the random stream for the raw frame (0) or the delta frame (1) of a message."""
        return (head.edge << 40 ^ 2 * (self.draws + 1) + frame) & (1 << 64) - 1


_NO_SAMPLES: tuple[Ids, Checks] = (np.empty(0, np.int64), np.empty(0, np.uint64))


def _encode(x: Bits, head: MessageHead, spec: Spec, stream: int, options: CallOptions | None) -> Any:
    return encode(View(x, head.dtype), spec, stream=stream, options=options)
