"""Reduction of a tensor on a GPU: the CUDA engine encodes and sums values there; frames are copied to the host."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

import codec
from codec import ArgumentError, CodecError, SpecError, decoding
from codec._c.traits import has_fixed_rate
from codec.decoding import decode_request
from codec.encoding import encode_request
from codec.explain import explain
from codec.specs import BoundSpec
from codec.stateful.ranges import Memory
from codec.tensors.view import view, view_bytes
from codec.tensors.wrapper import View
from codec.torch._compat import from_numpy
from codec.torch.reduction.host import FLOATS, Frame, Reduction, Values
from codec.torch.reduction.partition import Piece
from codec.torch.transport.arena import aligned_begins
from codec.torch.transport.buffers import DeviceMemory
from codec.torch.transport.collective import CollectivePart
from codec.torch.transport.joint import Copied, Found, Joint, JointEncoding, JointFrames, JointSum
from codec.torch.transport.messages import Array
from codec.torch.transport.nccl import DeviceTransfer
from codec.torch.transport.streams import host_array
from codec.torch.transport.values import check_norm

_GAP = 1 << 15  # maximum bytes between two frames that are copied together, since two copies would take longer
_SLACK = 16  # a frame is expected to be larger than the previous one by at most 1 / _SLACK of its size
_sizes: dict[tuple[Any, ...], int] = {}  # expected bytes of frames by (spec, dtype, values); most recent last


_MOST_KEPT = 1024  # maximum number of entries in a cache of sizes or heads of frames


def keep(found: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    """Add a value to a cache of at most _MOST_KEPT entries; drop the oldest entry if it is full."""
    found.pop(key, None)
    found[key] = value
    if len(found) > _MOST_KEPT:
        del found[next(iter(found))]


class DeviceTerm(NamedTuple):
    """Values of a piece on a GPU, with the arguments for encoding them."""

    values: torch.Tensor
    piece: Piece
    residual: torch.Tensor | None
    number: int  # number of the random stream
    summed: bool = False  # True: the values are a sum over ranks


class DeviceReduction(Reduction):
    """Reduction of a tensor on a GPU. Values, results and sums are flat tensors on that GPU."""

    on_device = True
    member = 0  # number of this reduction among those that share `joint`

    @property
    def memory(self) -> Memory:
        """Memory of the GPU."""
        return DeviceMemory(self.x.device)

    def empty(self, n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor on the GPU for `n` values; default: the dtype of the reduction."""
        return torch.empty(n, dtype=dtype or FLOATS[self.dtype], device=self.x.device)

    def result(self, part: CollectivePart, n: int) -> Values:
        """Return memory for a result of `n` values."""
        return self.empty(n) if self.out is None else self.out

    def sum_buffer(self, part: CollectivePart, n: int) -> Values:
        """Return memory for a sum of `n` float32 values."""
        return self.empty(n, torch.float32)

    @property
    def can_defer(self) -> bool:
        """False: results are decoded to new memory, and copied on the GPU after all ranks have succeeded."""
        return False

    @property
    def nontemporal(self) -> bool:
        """False: non-temporal stores are an option for CPUs only."""
        return False

    # Asynchronous calls of the engine, whose errors settle() raises

    @functools.cached_property
    def joint(self) -> Joint:
        """Engine calls of this reduction and of the reductions that run concurrently with it."""
        return Joint()

    async def meet(self, item: Any, act: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait for the concurrent reductions; see :meth:`Joint.meet`."""
        return await self.joint.meet(self.member, item, act)

    async def launched(self) -> None:
        """Wait until all sums and frames so far are launched, including those of concurrent reductions."""
        await self.meet(None, self.joint.launch_for)

    def request_verdicts(self) -> None:
        """Request a copy of the error flags of all calls so far to the host, in stream order."""
        self.joint.launch()
        self.joint.calls.request()

    def settle(self, transfer: DeviceTransfer) -> None:
        """Wait for all calls so far, and raise the error of the first call that has failed.

        `transfer` is the transfer between GPUs for whose messages the calls may wait.
        """
        self.joint.settle(transfer)

    def sum(
        self,
        parts: Sequence[Frame | None],
        piece: Piece,
        total: Values,
        *,
        nontemporal: bool = False,
        check_finite: bool = False,
    ) -> None:
        """Store the float32 sum, mean or maximum of a piece in `total`; see :meth:`Reduction.sum`.

        Items of `parts` are :class:`Found`, or None for this rank's own values.
        """
        found: list[Any] = [None if part is None else self._request(part, piece, total) for part in parts]
        if None not in found:
            found[0] = found[0]._replace(check_finite=check_finite)

        def add_own(first: bool) -> None:
            self._add_own(total, self.as_float32(self.own_term(piece)), first=first)

        def complete() -> None:
            if None in found:
                self._complete(total, len(found))
            if not self.rejects_nonfinite:
                _unify_nan(total)

        self.joint.sum(JointSum(found, self.op, _explain_sum, piece.n, add_own, complete))

    def refuse_overflow(self, total: Values) -> None:
        """Make :meth:`settle` raise an error if a sum in the tensor's dtype contains NaN or Inf."""
        self._refuse(total, total)

    def refuse_nonfinite(self, values: Values) -> None:
        """Make :meth:`settle` raise an error if values computed from this rank's tensor contain NaN or Inf."""
        self._refuse(values, None)

    def _refuse(self, values: Values, total: Values | None) -> None:
        flag = (~torch.isfinite(values)).any().to(torch.int32).reshape(1)

        def explain(e: CodecError) -> None:
            self.explain_nonfinite(cast(ArgumentError, e), total)

        self.joint.calls.refuse(view(flag), explain)

    def _add_own(self, total: Values, own: Values, *, first: bool) -> None:
        total.copy_(own) if first else total.add_(own)

    def _complete(self, total: Values, count: int) -> None:
        if self.op == "mean":
            total.div_(count)

    def as_float32(self, x: Values) -> Values:
        """Return values as float32, without a copy if they already are."""
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

    # Frames on the GPU, several of which are encoded or decoded in one call of the engine

    def empty_bytes(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Allocate a uint8 tensor of this shape on the GPU."""
        return torch.empty(shape, dtype=torch.uint8, device=self.x.device)

    def term(self, piece: Piece, number: int) -> DeviceTerm:
        """Return this rank's values of a piece, with the arguments for encoding them."""
        residual = None if self.residual is None else self.residual[piece.begin : piece.end]
        return DeviceTerm(self.own_term(piece), piece, residual, number)

    def sum_term(self, total: Values, piece: Piece, number: int) -> DeviceTerm:
        """Return the float32 sum of a piece, with the arguments for encoding it."""
        residual = None if self.sum_residual is None else self.sum_residual(piece.begin, piece.end)
        return DeviceTerm(self.rounded(total), piece, residual, number, summed=True)

    async def encode_all(
        self,
        terms: Sequence[DeviceTerm],
        out: Sequence[torch.Tensor],
        read: Callable[[], None] | None = None,
    ) -> JointFrames:
        """Encode terms into memory on the GPU, together with the terms of concurrent reductions.

        If `read` is given, it is called to request copies to the host. The host then waits for all calls so far, and
        their errors are raised.
        """
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

        def explain_error(e: CodecError, i: int) -> None:
            if isinstance(e, ArgumentError | SpecError):
                explain(e, requests[i])
            if isinstance(e, ArgumentError):
                self.explain_nonfinite(e, terms[i].values if terms[i].summed else None)
                e.item = None  # no index in the message: the caller has passed a single tensor

        def count() -> None:
            if (note := self.count_symbols) is None:
                return
            for term in terms:
                note(View(term.values, self.dtype, term.piece.segments), self._bound_to(term.piece))

        return await self.meet(JointEncoding(requests, explain_error, count, read), self.joint.encode)

    async def encode_to_host(self, terms: Sequence[DeviceTerm], bounds: Sequence[int], block: Array) -> list[Copied]:
        """Encode terms, and copy their frames to page-locked memory; raise the errors of all calls so far.

        Frames are expected to be about as large as the previous frames with the same spec, dtype and number of values.
        If none is larger, the host waits only once.

        Parameters
        ----------
        terms : sequence of DeviceTerm
            Values to encode.
        bounds : sequence of int
            Maximum bytes of each frame.
        block : ndarray of uint8
            Memory for all frames, each at a multiple of the arena's alignment.
        """
        memory, begins = self.empty_bytes((block.nbytes,)), aligned_begins(bounds)
        there = [memory[at : at + most] for at, most in zip(begins, bounds, strict=True)]
        keys = [(self.spec, self.dtype, term.piece.n) for term in terms]
        exact = has_fixed_rate(self.spec)
        sizes = [most if exact else min(most, _sizes.get(key, 0)) for key, most in zip(keys, bounds, strict=True)]
        encoded = await self.encode_all(
            terms, there, lambda: self._copy_to_host(memory, block, begins, [0] * len(begins), sizes)
        )
        lengths = encoded.lengths
        if any(length > size for length, size in zip(lengths, sizes, strict=True)):
            self.joint.read([lambda: self._copy_to_host(memory, block, begins, sizes, lengths)])
        for key, length in zip(keys, lengths, strict=True):
            keep(_sizes, key, length + length // _SLACK)
        return [
            Copied(memory[at : at + length], block[at : at + length])
            for at, length in zip(begins, lengths, strict=True)
        ]

    def _copy_to_host(
        self,
        memory: torch.Tensor,
        block: Array,
        begins: Sequence[int],
        first: Sequence[int],
        last: Sequence[int],
    ) -> None:
        """Request copies of bytes [first, last) of each frame to the same offsets of a block; merge close ranges."""
        ranges: list[tuple[int, int]] = []
        for at, a, b in zip(begins, first, last, strict=True):
            if b > a:
                near = ranges and at + a - ranges[-1][1] <= _GAP
                ranges.append((ranges.pop()[0] if near else at + a, at + b))
        for a, b in ranges:
            self.joint.calls.read_back(view_bytes(memory[a:b]), block[a:b])

    def read_back(self, x: torch.Tensor) -> Array:
        """Request a copy of a tensor's bytes to the host; return an array that is valid after :meth:`settle`."""
        return np.frombuffer(self.joint.calls.read_back(view_bytes(x)), np.uint8)

    def check_later(self, check: Callable[[], Any]) -> None:
        """Make :meth:`settle` call a function after all calls so far; it may use arrays from :meth:`read_back`."""
        self.joint.calls.check(check)

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

    def decoded(self, frame: Any, piece: Piece) -> torch.Tensor:
        """Return memory for the float32 values in a frame of a term, which the next launch decodes."""
        values = self.empty(piece.n, torch.float32)
        request = self._request(frame, piece, values)
        self.joint.sum(JointSum([request], "sum", _explain_sum, piece.n, _ignore, _ignore))
        return values

    def check_values(self, part: Any, rank: int, values: Any, count: int | None = None) -> None:
        """Make :meth:`settle` raise the error of :meth:`Reduction.check_values`."""
        most, ranks = self.settings.max_norm, self.summed if count is None else count

        def check() -> None:
            norm: torch.Tensor = values.double().square().sum().sqrt()
            found = self.read_back(norm.reshape(1).view(torch.uint8))
            self.check_later(lambda: check_norm(float(found.view(np.float64)[0]), most or 0, part.ranks[rank], ranks))

        if most is not None:
            self.joint.after(check)

    def decode_all(self, frames: Sequence[tuple["Found", Piece, torch.Tensor]]) -> None:
        """Decode frames, each to its piece of a tensor."""
        requests = [self._request(found, piece, into[piece.begin : piece.end]) for found, piece, into in frames]
        self.joint.decode(requests, sum(piece.n for _, piece, _ in frames))

    # For algorithms that send uncompressed values, or compute on the host

    def on_host(self) -> Reduction:
        """Return an equal reduction with copies of the values and residuals in host memory."""
        self._residuals: list[tuple[torch.Tensor, Array]] = []  # residuals on the GPU, and their copies on the host
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
            self.weights,
            summed=self.summed,
        )

    def _residual_on_host(self, residual: torch.Tensor) -> Array:
        """Return a copy of a residual, which :meth:`from_host` copies back."""
        copy = host_array(residual)
        self._residuals.append((residual, copy))
        return copy

    def from_host(self, result: Array) -> Values:
        """Copy the residuals of :meth:`on_host` and a result back to the GPU; return the result there."""
        for residual, copy in self._residuals:
            residual.copy_(from_numpy(copy))
        values = from_numpy(result).view(FLOATS[self.dtype])
        return values.to(self.x.device) if self.out is None else self.out.copy_(values)


def _ignore(*_: object) -> None:
    """Do nothing."""


def _explain_sum(e: CodecError) -> None:
    """Set the message of an error about NaN or Inf in a sum, as :func:`codec.reduce` does."""
    if isinstance(e, ArgumentError):
        decoding.explain(e, cast(Any, None), None)


def _unify_nan(x: torch.Tensor) -> None:
    """Replace all NaN by the one NaN that other engines produce, since NaN computed by a GPU have other bits."""
    x.masked_fill_(x.isnan(), torch.nan)


def _on_host(spec: BoundSpec) -> BoundSpec:
    """Return a bound spec whose arrays are in host memory."""

    def moved(x: Any) -> Any:
        return x.cpu() if isinstance(x, torch.Tensor) else x

    state: Mapping[str, Any] = {name: moved(x) for name, x in spec.state.items()}
    return codec.BoundSpec(spec.spec, spec.optimizer, state, moved(spec.levels))
