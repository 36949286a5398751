"""Values of a collective on a GPU: the CUDA engine encodes and reduces them there; frames cross to the host."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import codec
from codec import ArgumentError
from codec.decoding import decode_request
from codec.encoding import encode_request
from codec.engines import choose
from codec.explain import explain
from codec.specs import BoundSpec
from codec.stateful.ranges import Memory
from codec.tensors.view import view_bytes
from codec.tensors.wrapper import View
from codec.torch._compat import from_numpy
from codec.torch.reduction.host import FLOATS, Frame, Reduction, Values
from codec.torch.reduction.partition import Piece
from codec.torch.transport.collective import Part
from codec.torch.transport.messages import Array


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


class DeviceReduction(Reduction):
    """Reduction of a tensor on a GPU. Values, results and sums are flat tensors there; frames are on the host."""

    on_device = True

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

    def sum(
        self,
        parts: Sequence[Frame | None],
        piece: Piece,
        total: Values,
        *,
        nontemporal: bool = False,
        check_finite: bool = False,
    ) -> None:
        """Store the float32 sum, mean or maximum of a piece in `total`, as :meth:`Reduction.sum` does."""
        super().sum(parts, piece, total, nontemporal=nontemporal, check_finite=check_finite)
        if not self.rejects_nonfinite:
            _unify_nan(total)

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

    def encode_all(self, terms: Sequence[Term], out: Sequence[torch.Tensor]) -> list[int]:
        """Encode terms into memory on the GPU; return the bytes of each frame."""
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
        try:
            frames = choose("cuda", "a tensor", "cuda").encode_many(requests)
        except ArgumentError as e:
            if isinstance(e.item, int):
                term = terms[e.item]
                explain(e, requests[e.item])
                self.explain_nonfinite(e, term.values if term.summed else None)
                e.item = None  # the caller has given one tensor
            raise
        if self.count_symbols is not None:
            for term in terms:
                self.count_symbols(View(term.values, self.dtype, term.piece.segments), self._bound_to(term.piece))
        return [view_bytes(frame).nbytes for frame in frames]

    def check_frame(self, frame: Frame, piece: Piece) -> None:
        """Check a frame in host memory, or its header; those on the GPU have been checked by their headers."""
        if not isinstance(frame, torch.Tensor):
            super().check_frame(frame, piece)

    def decode_all(self, frames: Sequence[tuple[torch.Tensor, Piece, torch.Tensor]]) -> None:
        """Decode frames on the GPU, each to its piece of a tensor."""
        requests = [
            decode_request(
                (view_bytes(frame),),
                self.shared_levels(piece),
                self._options(piece),
                into[piece.begin : piece.end],
                codebooks=self.codebooks,
            )
            for frame, piece, into in frames
        ]
        choose("cuda", "a frame", "cuda").decode_many(requests)

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
