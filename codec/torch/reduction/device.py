"""Values of a collective on a GPU: the CUDA engine encodes and reduces them there; frames cross to the host."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

import codec
from codec import ArgumentError, CodecError, decoding
from codec._c.library import lib
from codec.decoding import decode_request
from codec.encoding import encode_request
from codec.engines import choose
from codec.explain import explain
from codec.frame_size import has_fixed_rate
from codec.specs import BoundSpec
from codec.stateful.ranges import Memory
from codec.tensors.view import view, view_bytes
from codec.tensors.wrapper import View
from codec.torch._compat import from_numpy
from codec.torch.reduction.host import FLOATS, Frame, Reduction, Values
from codec.torch.reduction.partition import Piece
from codec.torch.transport.buffers import Scratch
from codec.torch.transport.collective import Part
from codec.torch.transport.messages import Array
from codec.torch.transport.nccl import DeviceTransfer

_ALIGN = 64  # bytes: frames on the GPU begin at multiples of this
_SLACK = 16  # 1 / _SLACK of a frame's size is copied beyond the size of the last frame
_sizes: dict[tuple[Any, ...], int] = {}  # expected bytes of frames by spec, dtype and values; the last used is last


_MOST_KEPT = 1024  # sizes, or heads, of frames that are kept


def keep(found: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    """Keep a value, and drop the one that was kept first of too many."""
    found.pop(key, None)
    found[key] = value
    if len(found) > _MOST_KEPT:
        del found[next(iter(found))]


class DeviceMemory(Memory):
    """Memory of a GPU, whose arrays are flat tensors of float32."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, n: int) -> Any:
        """Return a tensor of `n` values."""
        return torch.empty(n, dtype=torch.float32, device=self._device)

    def zeros(self, n: int) -> Any:
        """Return a tensor of `n` zeros."""
        return torch.zeros(n, dtype=torch.float32, device=self._device)

    def has(self, array: Any) -> bool:
        """Return True if an array is a tensor on this GPU."""
        return isinstance(array, torch.Tensor) and array.device == self._device

    def bring(self, array: Any) -> Any:
        """Return a tensor if it is on this GPU, else a copy of an array or tensor there."""
        return torch.as_tensor(array, device=self._device)


class Term(NamedTuple):
    """Values of a piece on a GPU, and how they are encoded."""

    values: torch.Tensor
    piece: Piece
    residual: torch.Tensor | None
    number: int  # of the random stream
    summed: bool = False  # values of several ranks


class Found(NamedTuple):
    """Frame of a rank."""

    frame: Any  # on the GPU, a tensor of bytes; or in host memory, an array of them
    head: Array | None  # header and side section of a frame on the GPU, in host memory; the header has been checked
    arriving: Array | None = None  # the same, which will be there after `settle`; `head` is what is expected


class Encoded(NamedTuple):
    """Frame of this rank, on the GPU and in host memory."""

    there: torch.Tensor
    here: Array

    @property
    def found(self) -> Found:
        """The frame, as those of other ranks."""
        return Found(self.there, self.here)


class DeviceReduction(Reduction):
    """Reduction of a tensor on a GPU. Values, results and sums are flat tensors there; frames are on the host."""

    on_device = True
    scratch = Scratch()  # counts memory of the engine; :func:`exchange` sets that of the group

    @property
    def memory(self) -> Memory:
        """Memory of the GPU."""
        return DeviceMemory(self.x.device)

    def empty(self, n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory on the GPU for `n` values, of the tensor's dtype unless given."""
        return torch.empty(n, dtype=dtype or FLOATS[self.dtype], device=self.x.device)

    def result(self, part: Part, n: int) -> Values:
        """Return memory for a result of `n` values."""
        return self.empty(n) if self.out is None else self.out

    def sum_buffer(self, part: Part, n: int) -> Values:
        """Return memory for a sum of `n` float32 values."""
        return self.empty(n, torch.float32)

    @property
    def can_defer(self) -> bool:
        """False: results are decoded to memory of their own, and copied on the GPU after the agreement."""
        return False

    @property
    def nontemporal(self) -> bool:
        """False: the option is for stores of CPUs."""
        return False

    # Calls of the engine, whose errors :meth:`settle` raises

    @functools.cached_property
    def _calls(self) -> Any:
        """Calls for which the host has not waited: :class:`codec.engines.cuda.DeferredCalls`."""
        engine: Any = choose("cuda", "a tensor", "cuda")
        return engine.DeferredCalls(self.scratch.note)

    def request_verdicts(self) -> None:
        """Have the stream copy the verdicts of all calls so far to the host."""
        self._calls.request()

    def settle(self, transfer: DeviceTransfer) -> None:
        """Wait for all calls so far, and raise the error of the first one that has failed.

        `transfer`: messages between GPUs, which the calls may wait for.
        """
        self._calls.request()
        try:
            transfer.settle()
        except BaseException:
            self._calls.wait()  # the stream goes on, and copies to host memory, which is not ours any more
            raise
        self._calls.conclude()

    def sum(
        self,
        parts: Sequence[Frame | None],
        piece: Piece,
        total: Values,
        *,
        nontemporal: bool = False,
        check_finite: bool = False,
    ) -> None:
        """Store the float32 sum, mean or maximum of a piece in `total`, as :meth:`Reduction.sum` does.

        `parts` are :class:`Found`.
        """
        found = [None if part is None else self._request(part, piece, total) for part in parts]
        frames = [request for request in found if request is not None]
        if len(frames) == len(found):
            first = frames[0]._replace(check_finite=check_finite)
            self._calls.reduce([first, *frames[1:]], self.op, _explain_sum)
        else:
            for i, request in enumerate(found):
                if request is None:
                    self._add_own(total, self.as_float32(self.own_term(piece)), first=i == 0)
                else:
                    self._calls.accumulate(request, lib.CODEC_INTO_ADD if i else lib.CODEC_INTO_FLOAT32)
            self._complete(total, len(found))
        if not self.rejects_nonfinite:
            _unify_nan(total)

    def refuse_overflow(self, total: Values) -> None:
        """Refuse a sum in the tensor's dtype that holds NaN or Inf."""
        self._refuse(total, total)

    def refuse_nonfinite(self, values: Values) -> None:
        """Refuse NaN or Inf in this rank's values, or in what is computed from them."""
        self._refuse(values, None)

    def _refuse(self, values: Values, total: Values | None) -> None:
        flag = (~torch.isfinite(values)).any().to(torch.int32).reshape(1)

        def explain(e: CodecError) -> None:
            self.explain_nonfinite(cast(ArgumentError, e), total)

        self._calls.refuse(view(flag), explain)

    def _add_own(self, total: Values, own: Values, *, first: bool) -> None:
        total.copy_(own) if first else total.add_(own)

    def _complete(self, total: Values, count: int) -> None:
        if self.op == "mean":
            total.div_(count)

    def as_float32(self, x: Values) -> Values:
        """Return values as float32, without a copy if they are."""
        return x.float()

    def tensor_of(self, x: Values) -> torch.Tensor:
        """Return values as a tensor."""
        return x

    def rounded(self, total: Values) -> Values:
        """Return float32 values rounded to the reduction's dtype."""
        if self.dtype == "float32":
            return total
        rounded = total.to(FLOATS[self.dtype])
        if not self.rejects_nonfinite:
            _unify_nan(rounded)
        return rounded

    # Frames that stay on the GPU, many in one call of the engine

    def empty_bytes(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory on the GPU for bytes."""
        return torch.empty(shape, dtype=torch.uint8, device=self.x.device)

    def term(self, piece: Piece, number: int) -> Term:
        """Return this rank's term of a piece."""
        residual = None if self.residual is None else self.residual[piece.begin : piece.end]
        return Term(self.own_term(piece), piece, residual, number)

    def sum_term(self, total: Values, piece: Piece, number: int) -> Term:
        """Return the float32 sum of a piece as a term."""
        residual = None if self.sum_residual is None else self.sum_residual(piece.begin, piece.end)
        return Term(self.rounded(total), piece, residual, number, summed=True)

    def encode_all(self, terms: Sequence[Term], out: Sequence[torch.Tensor]) -> Any:
        """Encode terms into memory on the GPU; return their :class:`codec.engines.cuda.deferred.Encoded`."""
        requests = [
            encode_request(
                View(term.values, self.dtype, term.piece.segments),
                self.spec_of(term.piece),
                self._options(term.piece),
                room,
                term.residual,
                term.residual is not None,
                self.codebook,
                self.random_stream(term.number),
            )
            for term, room in zip(terms, out, strict=True)
        ]

        def explain_error(e: CodecError) -> None:
            if isinstance(e, ArgumentError) and isinstance(e.item, int):
                term = terms[e.item]
                explain(e, requests[e.item])
                self.explain_nonfinite(e, term.values if term.summed else None)
                e.item = None  # the caller has given one tensor

        encoded = self._calls.encode_many(requests, explain_error)
        if self.count_symbols is not None:
            for term in terms:
                self.count_symbols(View(term.values, self.dtype, term.piece.segments), self._bound_to(term.piece))
        return encoded

    def encode_to_host(self, terms: Sequence[Term], rooms: Sequence[Array]) -> list["Encoded"]:
        """Encode terms, and copy their frames to page-locked memory; raise the errors of all calls so far.

        The host waits once, if all frames have the expected sizes: those of the last frames of as many values.
        """
        if not terms:
            return []
        starts = [0, *itertools.accumulate(-(-room.nbytes // _ALIGN) * _ALIGN for room in rooms)]
        memory = self.empty_bytes((starts[-1],))
        there = [memory[at : at + room.nbytes] for at, room in zip(starts, rooms, strict=False)]
        encoded = self.encode_all(terms, there)
        keys = [(self.spec, self.dtype, term.piece.n) for term in terms]
        exact = has_fixed_rate(self.spec)
        sizes = [
            room.nbytes if exact else min(room.nbytes, _sizes.get(key, 0))
            for key, room in zip(keys, rooms, strict=True)
        ]
        try:
            self._copy_to_host(there, rooms, [(0, size) for size in sizes])
            lengths: list[int] = encoded.lengths
            self._copy_to_host(there, rooms, list(zip(sizes, lengths, strict=True)))
        finally:  # no copy may arrive in memory that others use
            self._calls.wait()
        for key, length in zip(keys, lengths, strict=True):
            keep(_sizes, key, length + length // _SLACK)
        return [
            Encoded(frame[:length], room[:length]) for frame, room, length in zip(there, rooms, lengths, strict=True)
        ]

    def _copy_to_host(
        self, frames: Sequence[torch.Tensor], rooms: Sequence[Array], ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Copy a range of each frame to its room, and wait for all calls."""
        for frame, room, (begin, end) in zip(frames, rooms, ranges, strict=True):
            if end > begin:
                self._calls.read_back(view_bytes(frame[begin:end]), room[begin:end])
        self._calls.conclude()

    def read_back(self, x: torch.Tensor) -> Array:
        """Return the bytes of a tensor, which are there after :meth:`settle`."""
        return np.frombuffer(self._calls.read_back(view_bytes(x)), np.uint8)

    def check_later(self, check: Callable[[], Any]) -> None:
        """Have :meth:`settle` call a function, behind all calls so far; it can read what :meth:`read_back` returned."""
        self._calls.check(check)

    def _request(self, found: "Found", piece: Piece, out: Values) -> Any:
        """Return the request to decode a frame of a piece."""
        if found.head is None:
            self.check_frame(found.frame, piece)
        frame, head = view_bytes(found.frame), None if found.head is None else view_bytes(found.head)
        request = decode_request(
            (frame,), self.shared_levels(piece), self._options(piece), out, codebooks=self.codebooks
        )
        if frame.device == "cpu":
            return request
        arriving = None if found.arriving is None else view_bytes(found.arriving)
        return request._replace(head=head, arriving=arriving, in_flight=True)

    def decode_all(self, frames: Sequence[tuple["Found", Piece, torch.Tensor]]) -> None:
        """Decode frames, each to its piece of a tensor."""
        if frames:
            self._calls.decode_many(
                [self._request(found, piece, into[piece.begin : piece.end]) for found, piece, into in frames]
            )

    # Algorithms that send uncompressed values, or compute on the host

    def on_host(self) -> Reduction:
        """Return the same reduction of copies of the values and residuals in host memory."""
        self._residuals: list[tuple[torch.Tensor, Array]] = []  # on the GPU, and their copies
        sum_residual = self.sum_residual
        return Reduction(
            host_array(self.x),
            self.dtype,
            self.spec,
            self.op,
            self.stream,
            self.segments,
            None if self.bound_spec is None else _on_host(self.bound_spec),
            self.settings,
            None if self.residual is None else self._residual_on_host(self.residual),
            None if sum_residual is None else lambda a, b: self._residual_on_host(sum_residual(a, b)),
            self.codebook,
            self.codebooks,
            self.count_symbols,
        )

    def _residual_on_host(self, residual: torch.Tensor) -> Array:
        """Return a copy of a residual, which :meth:`from_host` copies back."""
        copy = host_array(residual)
        self._residuals.append((residual, copy))
        return copy

    def from_host(self, result: Array) -> Values:
        """Return a copy of a result on the GPU, after the residuals of :meth:`on_host` were copied back."""
        for residual, copy in self._residuals:
            residual.copy_(from_numpy(copy))
        values = from_numpy(result).view(FLOATS[self.dtype])
        return values.to(self.x.device) if self.out is None else self.out.copy_(values)


def _explain_sum(e: CodecError) -> None:
    """Explain NaN or Inf in a sum as :func:`codec.reduce` does."""
    if isinstance(e, ArgumentError):
        decoding.explain(e, cast(Any, None), None)


def _unify_nan(x: torch.Tensor) -> None:
    """Give all NaN the bits of other engines' NaN; those that a GPU computes differ."""
    x.masked_fill_(x.isnan(), torch.nan)


def host_array(x: torch.Tensor) -> Array:
    """Return a flat tensor as an array in host memory, bfloat16 as uint16."""
    x = x.detach().cpu()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def _on_host(spec: BoundSpec) -> BoundSpec:
    """Return a bound spec whose arrays are in host memory."""

    def moved(x: Any) -> Any:
        return x.cpu() if isinstance(x, torch.Tensor) else x

    state: Mapping[str, Any] = {name: moved(x) for name, x in spec.state.items()}
    return codec.BoundSpec(spec.spec, spec.optimizer, state, moved(spec.levels))
