"""Values of a collective on a GPU: the CUDA engine encodes and reduces them there; frames cross to the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import codec
from codec.specs import BoundSpec
from codec.torch.channel import Channel
from codec.torch.messages import Array
from codec.torch.partition import Piece
from codec.torch.reduction import FLOATS, Reduction, Values


class DeviceReduction(Reduction):
    """Reduction of a tensor on a GPU. Values, results and sums are flat tensors there; frames are on the host."""

    on_device = True

    def empty(self, n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory on the GPU for `n` values, of the tensor's dtype unless given."""
        return torch.empty(n, dtype=dtype or FLOATS[self.dtype], device=self.x.device)

    def result(self, channel: Channel, n: int) -> Values:
        """Return memory for a result of `n` values."""
        return self.empty(n) if self.out is None else self.out

    def sum_buffer(self, channel: Channel, n: int) -> Values:
        """Return memory for a sum of `n` float32 values."""
        return self.empty(n, torch.float32)

    @property
    def can_defer(self) -> bool:
        """False: results are decoded to memory of their own, and copied on the GPU after the verdict."""
        return False

    @property
    def nontemporal(self) -> bool:
        """False: the option is for stores of CPUs."""
        return False

    def sum(
        self,
        parts: Sequence[Array | None],
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

    def add_residual(self, residual: Array) -> None:
        """Add float32 values in host memory to `x`, rounded to its dtype."""
        if residual.any():
            self.x = self.rounded(self.as_float32(self.x) + torch.from_numpy(residual).to(self.x.device))

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

    # Algorithms that send uncompressed values, or compute on the host

    def on_host(self) -> Reduction:
        """Return the same reduction of a copy of the values in host memory."""
        return Reduction(
            host_array(self.x),
            self.dtype,
            self.spec,
            self.op,
            self.stream,
            self.segments,
            None if self.bound_spec is None else _on_host(self.bound_spec),
            self.settings,
            self.residual,
            self.sum_residual,
            self.codebook,
            self.codebooks,
            self.count_symbols,
        )

    def from_host(self, result: Array) -> Values:
        """Return a copy of a result on the GPU."""
        values = torch.from_numpy(result).view(FLOATS[self.dtype])
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
