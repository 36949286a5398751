"""Reduction: the values of a collective on one rank, with methods that encode, sum and decode them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

import codec
from codec import ArgumentError, BoundSpec, CallOptions, Codebook, FrameError, Status
from codec._c.library import DTYPES, lib
from codec._c.spec_structs import spec_struct
from codec._c.traits import is_entropy_coded, is_lossless, rejects_nonfinite
from codec._options import EngineName
from codec.decoding import check_values
from codec.explain import nonfinite_message, overflow_message
from codec.inspection import read_header
from codec.reducing import Op
from codec.specs import Spec, Truncate
from codec.stateful.ranges import HOST
from codec.tensors.segments import Records, unpack
from codec.tensors.view import view, view_bytes
from codec.tensors.wrapper import View
from codec.torch._compat import from_numpy
from codec.torch.reduction.partition import Piece, bound_to_range, chunk_nbytes, cut, cut_evenly
from codec.torch.transport.collective import CollectivePart
from codec.torch.transport.messages import Array
from codec.torch.transport.nccl import DeviceTransfer
from codec.torch.transport.values import check_norm, norm_of

bound = functools.lru_cache(1024)(codec.bound)  # cached, because a training run uses few sizes
Frame = Any  # bytes of a frame: an array in host memory, or a tensor on a GPU
Values = Any  # flat values of a reduction: an array in host memory, bfloat16 as uint16; or a tensor on a GPU
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TERMS = "the ranks' tensors"  # name of the terms of sums, for error messages
_LARGE = 1 << 21  # number of values of a piece above which several threads encode it
_STREAM_STRIDE = 0x9E3779B97F4A7C15  # stride between random streams; odd and large, so that pieces never collide


@dataclass
class Reduction:
    """Values of a collective on this rank, with the settings for encoding them, which are equal on all ranks."""

    x: Values  # values of this rank
    dtype: str
    spec: Spec
    op: Op
    stream: int  # number of the random stream
    segments: Records | None = None
    bound_spec: BoundSpec | None = None  # `spec` bound to an optimizer; its arrays are flat, each as long as `x`
    settings: CallOptions = CallOptions()  # noqa: RUF009 - immutable
    residual: Values | None = None  # residual of the terms, float32, as long as `x`; encoding updates it
    sum_residual: Callable[[int, int], Values] | None = None  # returns the residual of the sums [begin, end)
    codebook: Codebook | None = None  # codebook with which all ranks encode
    codebooks: Sequence[Codebook] = ()  # codebooks to which received frames may refer
    count_symbols: Callable[[View, BoundSpec | None], None] | None = None  # called with the values of each frame
    weights: tuple[int, ...] | None = None  # relative sizes of the ranks' slices; None: equal sizes
    out: Values | None = None  # memory for the result; None: allocate it from the collective's arena
    # Functions that decode the result into `x`, called after all ranks have succeeded; None: decode at once. Deferring
    # is faster for large tensors with small frames than decoding to other memory and copying the result.
    deferred: list[Callable[[], None]] | None = None
    whole: tuple[int, Records | None] | None = None  # number of values and segments of the tensor, if `x` is a window
    summed: int = 1  # number of ranks of this machine whose sum `x` is

    on_device = False  # True in DeviceReduction, whose values lie on a GPU
    memory = HOST  # memory (host or GPU) of values and residuals

    @property
    def n(self) -> int:
        """Number of values on this rank."""
        return len(self.x)

    @property
    def whole_shape(self) -> tuple[int, ...] | None:
        """Shape of the tensor if a single segment covers it, otherwise None."""
        parts = unpack(self.segments) if self.segments else []
        return parts[0][1] if len(parts) == 1 and prod(parts[0][1]) == self.n else None

    def bound(self, n: int) -> int:
        """Return an upper bound of the bytes of a frame of `n` values with any segments, for choosing chunk sizes."""
        return bound(n, self.dtype, self.spec)

    def frame_bound(self, piece: Piece) -> int:
        """Return an upper bound of the bytes of a piece's frame; the exact size if the codec has a fixed rate."""
        return bound(piece.n, self.dtype, self.spec, segments=piece.segments or ())

    def slices(self, size: int) -> list[list[Piece]]:
        """Split the tensor into one slice per rank, for `size` ranks; return the pieces of each slice."""
        return cut(self.n, size, self.x.itemsize, self.segments, self._chunk_nbytes, self.weights)

    def even_slices(self, size: int) -> list[list[Piece]]:
        """Split the tensor into slices of equal size for `size` ranks; return the pieces by slice."""
        return cut_evenly(self.n, size, self.x.itemsize, self._chunk_nbytes, self.segments)

    @property
    def _chunk_nbytes(self) -> int:
        return chunk_nbytes(self.x.itemsize, self.bound)

    def narrowed(self, piece: Piece, x: Values, out: Values, size: int) -> "Reduction":
        """Return the reduction of a piece of the tensor, with values `x` over `size` ranks, and without residuals."""
        state, whole, summed = self._bound_to(piece), (self.n, self.segments), self.ranks_in_sum(size)
        made = replace(self, x=x, segments=piece.segments, bound_spec=state, out=out, deferred=None, whole=whole)
        return replace(made, summed=summed)

    # Encoding

    def own_term(self, piece: Piece) -> Values:
        """Return this rank's values of a piece."""
        return self.x[piece.begin : piece.end]

    def encode(self, piece: Piece, out: Array, number: int) -> int:
        """Encode this rank's values of a piece to `out`, using random stream `number`; return the number of bytes."""
        residual = None if self.residual is None else self.residual[piece.begin : piece.end]
        try:
            return self._encode(self.own_term(piece), piece, out, residual, number)
        except ArgumentError as e:
            self.explain_nonfinite(e)
            raise

    def encode_sum(self, total: Values, piece: Piece, out: Array, number: int) -> int:
        """Encode the float32 sum of a piece to `out`; return the frame's size in bytes."""
        residual = None if self.sum_residual is None else self.sum_residual(piece.begin, piece.end)
        x = self.rounded(total)
        try:
            return self._encode(x, piece, out, residual, number)
        except ArgumentError as e:
            self.explain_nonfinite(e, x)
            raise

    def explain_nonfinite(self, error: ArgumentError, total: Values | None = None) -> None:
        """Add the position of NaN or Inf to an encoding error: in this rank's values, or in the sum `total`."""
        if error.code == Status.NONFINITE:
            text = self.nonfinite_text() if total is None else overflow_message(view(total, self.dtype), TERMS)
            error.args = (text,)

    def _encode(self, x: Values, piece: Piece, out: Array, residual: Values | None, number: int) -> int:
        spec = self.spec_of(piece)
        values = View(x, self.dtype, piece.segments)
        frame = codec.encode(
            values,
            spec,
            out=out,
            residual=residual,  # undefined after an error; nobody reads the residual then
            feedback=residual is not None,
            codebook=self.codebook,
            stream=self.random_stream(number),
            options=self._options(piece),
        )
        if self.count_symbols is not None:
            self.count_symbols(values, self._bound_to(piece))
        return len(frame)

    def random_stream(self, number: int) -> int:
        """Return the random stream of a frame from its number."""
        return (self.stream * _STREAM_STRIDE + number) % (1 << 64)

    def spec_of(self, piece: Piece) -> Spec | BoundSpec:
        """Return the spec of a piece's frame, bound to the optimizer and state of the piece if the spec is bound."""
        return self._bound_to(piece) or self.spec

    @property
    def own_term_is_exact(self) -> bool:
        """True if encoding is lossless, so that this rank need not decode its own frame."""
        return is_lossless(self.spec) and self.op != "max"

    @property
    def rejects_nonfinite(self) -> bool:
        """True if the codec refuses NaN and Inf."""
        return rejects_nonfinite(self.spec)

    def nonfinite_text(self) -> str:
        """Return the message for NaN or Inf among this rank's values."""
        return nonfinite_message(view(self.x, self.dtype), self.spec, "the tensor", self.whole_shape)

    # Decoding

    def empty(self, n: int) -> Values:
        """Return new memory for `n` values of the tensor's dtype."""
        return np.empty(n, self.x.dtype)

    def result(self, part: CollectivePart, n: int) -> Values:
        """Return memory for a result of `n` values."""
        if self.deferred is not None:
            return self.x
        return part.arena.result_buffer(n, self.x.dtype) if self.out is None else self.out

    def sum_buffer(self, part: CollectivePart, n: int) -> Values:
        """Return memory for a sum of `n` float32 values; it may be the memory of the previous sum."""
        return part.arena.sum_buffer(n)

    @property
    def can_defer(self) -> bool:
        """True if decoding results into the tensor, after all ranks have succeeded, is faster than copying them."""
        return self.nontemporal and not is_entropy_coded(self.spec)

    @property
    def nontemporal(self) -> bool:
        """True if results are stored with non-temporal stores, because they do not fit into caches."""
        return self.x.nbytes >= lib.CODEC_UNCACHED_NBYTES

    def decode_or_defer(self, frame: Array, piece: Piece, into: Values) -> None:
        """Decode a frame to a piece of the result; with deferred decoding, validate it now and decode it later."""
        if self.deferred is None:
            self.decode(frame, piece, into)
            return
        self.check_frame(frame, piece)
        check_values(frame, into[piece.begin : piece.end], options=self._options(piece))
        self.deferred.append(partial(self.decode, frame, piece, into))

    def decode(self, frame: Array, piece: Piece, into: Values) -> None:
        """Decode a frame to a piece of a flat tensor."""
        self.check_frame(frame, piece)
        into = into[piece.begin : piece.end]
        options = self._options(piece, nontemporal=self.nontemporal)
        codec.decode(frame, self.shared_levels(piece), out=into, codebooks=self.codebooks, options=options)

    def sum(
        self,
        parts: Sequence[Frame | None],
        piece: Piece,
        total: Values,
        *,
        nontemporal: bool = False,
        check_finite: bool = False,
    ) -> None:
        """Store the float32 sum, mean or maximum of a piece in `total`, added in the order of ranks.

        Parameters
        ----------
        parts : sequence of ndarray or None
            Frame of each rank; None: this rank's own values.
        piece : Piece
            Values of the frames.
        total : ndarray or tensor of float32
            Memory for the result.
        nontemporal : bool
            True: use non-temporal stores. Ignored if an item of `parts` is None.
        check_finite : bool
            True: raise ArgumentError if the result contains NaN or Inf. Ignored if an item of `parts` is None.
        """
        frames = [part for part in parts if part is not None]
        for frame in frames:
            self.check_frame(frame, piece)
        shared = self.shared_levels(piece)
        how: dict[str, Any] = {"codebooks": self.codebooks, "options": self._options(piece, nontemporal=nontemporal)}
        if len(frames) == len(parts):
            codec.reduce(frames, shared, op=self.op, out=total, check_finite=check_finite, **how)
            return
        for i, part in enumerate(parts):
            if part is None:
                self._add_own(total, self.as_float32(self.own_term(piece)), first=i == 0)
            elif i:
                codec.accumulate(part, total, shared, **how)
            else:
                codec.reduce([part], shared, op="sum", out=total, **how)
        self._complete(total, len(parts))

    def mean_of_senders(self, parts: Sequence[Frame | None], piece: Piece, place: Values) -> None:
        """Store in `place` the mean of each value over the ranks whose value is not zero, added in the order of ranks.

        `parts` is as for :meth:`sum`.
        """
        total, count = np.zeros(piece.n, np.float32), np.zeros(piece.n, np.float32)
        term = np.empty(piece.n, np.float32)
        for part in parts:
            if part is None:
                term[:] = self.as_float32(self.own_term(piece))
            else:
                self.sum([part], piece, term)
            total += term
            count += term != 0
        np.divide(total, count, out=total, where=count > 1)
        place[:] = self.rounded(total)

    def _add_own(self, total: Values, own: Values, *, first: bool) -> None:
        """Add this rank's float32 values to a sum, or begin the sum with them."""
        with np.errstate(over="ignore", invalid="ignore"):  # Inf and NaN are part of the result
            np.copyto(total, own) if first else np.add(total, own, out=total)

    def _complete(self, total: Values, count: int) -> None:
        """Divide the sum of `count` terms if the operation is a mean, and give all NaN the same bits."""
        if self.op == "mean":
            total /= np.float32(count)
        if total.size and np.isnan(total.min()):  # the payload of a NaN depends on the order of operands
            total[np.isnan(total)] = np.nan

    def check_terms(self, part: CollectivePart, frames: Sequence[Frame | None], piece: Piece) -> None:
        """Check the norms of the ranks' values of a piece, whose frames are as for :meth:`sum`."""
        for rank, frame in enumerate(frames):
            self.check_norm(part, rank, piece, frame)

    def check_norm(self, part: Any, rank: int, piece: Piece, frame: Frame | None, count: int | None = None) -> None:
        """Raise FrameError if the norm of the values in `frame` is above ``options(max_norm=)``.

        `frame` is None for this rank's own values. `count`: number of ranks that a value sums; default: `summed`.
        """
        if self.settings.max_norm is not None:
            values = self.as_float32(self.own_term(piece)) if frame is None else self.decoded(frame, piece)
            self.check_values(part, rank, values, count)

    def decoded(self, frame: Frame, piece: Piece) -> Values:
        """Return the float32 values in a frame of a term of a piece."""
        self.check_frame(frame, piece)
        how: dict[str, Any] = {"codebooks": self.codebooks, "options": self._options(piece)}
        return codec.reduce([frame], self.shared_levels(piece), op="sum", **how)

    def check_values(self, part: Any, rank: int, values: Values, count: int | None = None) -> None:
        """Check the norm of float32 values of a rank, as :meth:`check_norm` does."""
        if (most := self.settings.max_norm) is not None:
            check_norm(norm_of(values), most, part.ranks[rank], self.summed if count is None else count)

    def ranks_in_sum(self, size: int) -> int:
        """Return the number of ranks that a value of the result over `size` ranks sums; 1 for a mean."""
        return 1 if self.op == "mean" else size * self.summed

    def check_frame(self, frame: Array, piece: Piece) -> None:
        """Raise FrameError unless a frame has the agreed codec, parameters and dtype, and the shape of a piece."""
        info = read_header(view_bytes(frame))
        if _codec_of(info.spec) != self._codec:
            raise FrameError(
                f"a rank has sent a frame of {codec.inspect(frame).spec}, but the ranks have agreed on {self.spec}"
            )
        if info.dtype != DTYPES[self.dtype] or info.rank != 1 or info.n != piece.n:
            found = codec.inspect(frame)
            raise FrameError(
                f"a rank has sent a frame of {found.dtype} {found.shape}, but the ranks have agreed on {self.dtype} "
                f"({piece.n},)"
            )

    @functools.cached_property
    def _codec(self) -> tuple[int, ...]:
        return _codec_of(spec_struct(self.spec))

    def _bound_to(self, piece: Piece) -> BoundSpec | None:
        """Return the spec bound to the optimizer and state of a piece; None if it is not bound."""
        if self.bound_spec is None:
            return None
        return bound_to_range(self.bound_spec, piece.begin, piece.end)

    def shared_levels(self, piece: Piece) -> BoundSpec | None:
        """Return the bound spec that decoding a piece needs if frames do not contain levels, otherwise None."""
        shared = isinstance(self.spec, Truncate) and self.spec.level_coding == "shared"
        return self._bound_to(piece) if shared else None

    def _options(self, piece: Piece, *, nontemporal: bool = False) -> CallOptions:
        """Return the options of a piece. A small piece gets one thread, since other ranks may share the cores."""
        return _options_for(self.settings.engine, self.settings.threads, piece.n > _LARGE, nontemporal)

    # Values

    def add_residual(self, residual: Values) -> None:
        """Add float32 values to `x`, rounded to its dtype."""
        if residual.any():
            self.x = self.rounded(self.as_float32(self.x) + residual)

    def as_float32(self, x: Values) -> Values:
        """Return values of the reduction's dtype as float32, without a copy if possible; float64 stays float64."""
        return x if self.dtype == "float64" else from_numpy(x).view(FLOATS[self.dtype]).float().numpy()

    def tensor_of(self, x: Values) -> torch.Tensor:
        """Return values as a tensor of the reduction's dtype, which shares their memory."""
        return from_numpy(x).view(FLOATS[self.dtype])

    def rounded(self, total: Values) -> Values:
        """Return float32 values rounded to the reduction's dtype; float32 and float64 unchanged."""
        if self.dtype in ("float32", "float64"):
            return total
        rounded = from_numpy(total).to(FLOATS[self.dtype])
        return rounded.view(torch.uint16).numpy().view(self.x.dtype)

    def request_verdicts(self) -> None:
        """Prepare :meth:`settle`, so that settling several reductions waits only once."""

    def settle(self, transfer: DeviceTransfer) -> None:
        """Wait for asynchronous calls on a GPU and raise their errors; there are none in host memory."""

    def on_host(self) -> "Reduction":
        """Return the reduction with its values in host memory, for algorithms that need them there."""
        return self

    def from_host(self, result: Array) -> Values:
        """Move a result of the :meth:`on_host` reduction to the memory of this reduction."""
        return result


@functools.lru_cache(64)
def _options_for(engine: EngineName | None, threads: int | None, large: bool, nontemporal: bool) -> CallOptions:
    if threads is None and not large:
        threads = 1
    return CallOptions(engine, threads, verify_first=False, nontemporal=nontemporal)


def _codec_of(struct: Any) -> tuple[int, ...]:
    """Return the codec and those parameters of a spec that are stored in frame headers."""
    return struct.codec, struct.variant, struct.bits, struct.options, struct.max_code_length, struct.model
