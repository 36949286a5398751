"""What is reduced, and how: what of it frames hold, their sums, and what comes out of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import codec
from codec import ArgumentError, Codebook, Status
from codec._c.library import DTYPES, lib
from codec._c.spec_structs import spec_struct
from codec.decoding import check_values
from codec.inspection import read_header
from codec.optimizers import Custom, Optimizer
from codec.specs import BoundSpec, Lossless, Spec, Truncate
from codec.tensors.segments import Records
from codec.tensors.view import view_bytes
from codec.tensors.wrapper import View
from codec.torch.channel import Channel
from codec.torch.messages import Array
from codec.torch.partition import Piece, chunk_nbytes, cut, cut_evenly

bound = functools.lru_cache(1024)(codec.bound)  # of few sizes, again and again
_LARGE = 1 << 21  # values
_APART = 0x9E3779B97F4A7C15  # odd: so far do streams lie apart that numbers of pieces do not meet the next one's
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Reduction:
    """What is to be reduced, and how it is encoded: the same on all ranks but for the values."""

    x: Array  # flat; bfloat16 as uint16
    dtype: str
    spec: Spec
    op: str
    stream: int
    segments: Records | None = None
    metric: Any = None
    state: Mapping[str, Any] | None = None  # flat, each as long as x
    residual: Array | None = None  # float32, as long as x: what this rank's frames have lost; written
    sum_residual: Callable[[int, int], Array] | None = None  # the same of the sums [begin, end) that it encodes
    codebook: Codebook | None = None  # that all ranks encode with
    codebooks: Sequence[Codebook] = ()  # that frames may name
    count_symbols: Callable[..., None] | None = None  # told what was encoded: values, segments, metric and state
    out: Array | None = None  # for what comes out; None: memory of the channel's
    # What is to be done when all ranks have succeeded, if the result goes to x itself and is left in frames until then:
    # where values are many but frames small that is sooner than to decode them elsewhere and copy what comes out.
    deferred: list[Callable[[], None]] | None = None

    def bound(self, n: int) -> int:
        """Bytes of the largest frame of n values."""
        return bound(n, self.dtype, self.spec)

    def slices(self, size: int) -> list[list[Piece]]:
        """A slice for each of `size` ranks, in chunks."""
        return cut(self.x.size, size, self.x.itemsize, self.segments, self._chunk_nbytes)

    def even_slices(self, size: int) -> list[list[Piece]]:
        """The same, of one size."""
        return cut_evenly(self.x.size, size, self.x.itemsize, self._chunk_nbytes)

    @property
    def _chunk_nbytes(self) -> int:
        return chunk_nbytes(self.x.itemsize, self.bound)

    def encode(self, piece: Piece, out: Array, number: int) -> int:
        """Put the frame of a piece into `out`; its size in bytes."""
        residual = None if self.residual is None else self.residual[piece.begin : piece.end]
        return self._encode(self.own_term(piece), piece, out, residual, number)

    def encode_sum(self, total: Array, piece: Piece, out: Array, number: int) -> int:
        """The same of a piece's sum, float32."""
        residual = None if self.sum_residual is None else self.sum_residual(piece.begin, piece.end)
        return self._encode(self.rounded(total), piece, out, residual, number)

    def _encode(self, x: Array, piece: Piece, out: Array, residual: Array | None, number: int) -> int:
        bound = self._bound(piece)
        values = View(x, self.dtype, piece.segments)
        frame = codec.encode(
            values,
            self.spec if bound is None else bound,
            out=out,
            residual=residual,  # after an error nobody reads it: other pieces' may be written already
            feedback=residual is not None,
            codebook=self.codebook,
            stream=(self.stream * _APART + number) % (1 << 64),
            options=_options(piece),
        )
        if self.count_symbols is not None:
            self.count_symbols(values, bound)
        return len(frame)

    @property
    def own_term_is_exact(self) -> bool:
        """Whether frames would say of this rank's values just what they are, so that it needs none for itself."""
        return isinstance(self.spec, Lossless) and self.op != "max"

    @property
    def rejects_nonfinite(self) -> bool:
        """Whether encoding refuses NaN and Inf: frames have no words for them."""
        return not isinstance(self.spec, Lossless | Truncate) and getattr(self.spec, "nonfinite", "") != "propagate"

    def result(self, channel: Channel, n: int) -> Array:
        """Where n values go that come out."""
        if self.deferred is not None:
            return self.x
        return channel.result_buffer(n, self.x.dtype) if self.out is None else self.out

    @property
    def can_defer(self) -> bool:
        """Whether results are sooner decoded late than copied."""
        entropy = getattr(self.spec, "entropy", False) or getattr(self.spec, "packing", "") == "entropy"
        return self.nontemporal and not entropy and not isinstance(self.spec, Lossless | Truncate)

    def decode_or_defer(self, frame: Array, piece: Piece, into: Array) -> None:
        """Decode a frame to a piece of the result; what waits is only checked now."""
        if self.deferred is None:
            self.decode(frame, piece, into)
            return
        self.check_frame(frame, piece)
        check_values(frame, into[piece.begin : piece.end], options=_options(piece))
        self.deferred.append(partial(self.decode, frame, piece, into))

    def add_residual(self, owed: Array) -> None:
        """Reduce x and these values, float32, instead of x."""
        if owed.any():
            self.x = self.rounded(floats(self.x, self) + owed)

    def own_term(self, piece: Piece) -> Array:
        """What there is on this rank."""
        return self.x[piece.begin : piece.end]

    def decode(self, frame: Array, piece: Piece, into: Array) -> None:
        """The values of a frame, to a piece of a tensor like x."""
        self.check_frame(frame, piece)
        into = into[piece.begin : piece.end]
        options = _options(piece, nontemporal=self.nontemporal)
        codec.decode(frame, self.spec_to_decode(piece), out=into, codebooks=self.codebooks, options=options)

    @property
    def nontemporal(self) -> bool:
        """How results are stored that are not read again."""
        return self.x.nbytes >= lib.CODEC_UNCACHED_NBYTES

    def sum(
        self,
        parts: Sequence[Array | None],
        piece: Piece,
        total: Array,
        *,
        nontemporal: bool = False,
        check_finite: bool = False,
    ) -> None:
        """Frames of a piece to their sum, mean or maximum, in the order of ranks; None: this rank's values.

        If there are frames of all ranks, then as :func:`codec.reduce` is told.
        """
        frames = [part for part in parts if part is not None]
        for frame in frames:
            self.check_frame(frame, piece)
        shared = self.spec_to_decode(piece)
        how: dict[str, Any] = {"codebooks": self.codebooks, "options": _options(piece, nontemporal=nontemporal)}
        if len(frames) == len(parts):
            codec.reduce(frames, shared, op=self.op, out=total, check_finite=check_finite, **how)
            return
        for i, part in enumerate(parts):
            if part is None:
                own = floats(self.own_term(piece), self)
                with np.errstate(over="ignore", invalid="ignore"):  # what comes out says so
                    np.add(total, own, out=total) if i else np.copyto(total, own)
            elif i:
                codec.accumulate(part, total, shared, **how)
            else:
                codec.reduce([part], shared, op="sum", out=total, **how)
        if self.op == "mean":
            total /= np.float32(len(parts))
        if total.size and np.isnan(total.min()):  # which of two a sum keeps depends on how it is added
            total[np.isnan(total)] = np.nan

    def check_frame(self, frame: Array, piece: Piece) -> None:
        """Raise FrameError unless it is a frame of such a piece, by the codec and with the parameters agreed upon."""
        info = read_header(view_bytes(frame))
        if _codec_of(info.spec) != self._codec:
            raise codec.FrameError(f"a frame by {codec.inspect(frame).spec} came where {self.spec} was agreed upon")
        if info.dtype != DTYPES[self.dtype] or info.rank != 1 or info.n != piece.n:
            found = codec.inspect(frame)
            raise codec.FrameError(f"a frame of {found.dtype} {found.shape} came for {self.dtype} ({piece.n},)")

    @functools.cached_property
    def _codec(self) -> tuple[int, ...]:
        return _codec_of(spec_struct(self.spec))

    def _bound(self, piece: Piece) -> BoundSpec | None:
        """Return the spec bound to the optimizer and state of a piece; None if it is bound to none."""
        if self.metric is None or not isinstance(self.spec, Truncate):
            return None
        state = {name: x[piece.begin : piece.end] for name, x in (self.state or {}).items()}
        metric = self.metric
        if isinstance(metric, Optimizer | Custom | list):
            return self.spec.bind(_groups_of(metric, piece), **state)
        return self.spec.bind(levels=metric[piece.begin : piece.end])

    def spec_to_decode(self, piece: Piece) -> BoundSpec | None:
        """Return the bound spec that decoding a piece needs, if it needs one."""
        return self._bound(piece) if isinstance(self.spec, Truncate) and self.spec.level_coding == "shared" else None

    def tensor_of(self, x: Array) -> torch.Tensor:
        """Values in the dtype of x as a tensor of the same memory."""
        return torch.from_numpy(x).view(FLOATS[self.dtype])

    def rounded(self, total: Array) -> Array:
        """Float32 sums in the dtype of x."""
        if self.dtype in ("float32", "float64"):
            return total
        rounded = torch.from_numpy(total).to(FLOATS[self.dtype])
        return rounded.view(torch.uint16).numpy().view(self.x.dtype)


def _codec_of(struct: Any) -> tuple[int, ...]:
    """Return the codec's number and those parameters that a header repeats as they were asked for."""
    return struct.codec, struct.variant, struct.bits, struct.options, struct.max_code_length, struct.model


@functools.cache
def _options_for(large: bool, nontemporal: bool) -> codec.CallOptions:
    return codec.options(threads=None if large else 1, verify_first=False, nontemporal=nontemporal)


def _options(piece: Piece, *, nontemporal: bool = False) -> codec.CallOptions:
    """Return the options of a piece: one thread if it is small, since other ranks of this machine need the cores."""
    return _options_for(piece.n > _LARGE, nontemporal)


def _groups_of(metric: Any, piece: Piece) -> Any:
    """Return the optimizer of a piece, or its parameter groups with their offsets there."""
    if not isinstance(metric, list):
        return metric
    groups: list[tuple[int, Any]] = []
    for offset, each in metric:
        if offset <= piece.begin:
            groups = [(0, each)]
        elif offset < piece.end:
            groups.append((offset - piece.begin, each))
    return groups


def floats(x: Array, r: Reduction) -> Array:
    """Return values in the dtype of a reduction as float32, the same memory if they are; float64 stays float64."""
    if r.dtype == "float64":
        return x
    return torch.from_numpy(x).view(FLOATS[r.dtype]).float().numpy()


def nonfinite_error(r: Reduction, x: Array) -> ArgumentError | None:
    """What encoding would have said of NaN and Inf: which way values travel must not decide whether a step is good."""
    if not r.rejects_nonfinite or not x.size or all(torch.isfinite(t) for t in torch.aminmax(r.tensor_of(x))):
        return None
    return ArgumentError("the tensor holds NaN or Inf, which this codec does not take", Status.NONFINITE)
