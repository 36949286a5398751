"""Find copies of parameters in the state of optimizers, such as float32 masters of bfloat16 parameters.

An optimizer that computes its steps from such a copy overwrites the parameter with the rounded copy. So whoever sets a
parameter must set the copies, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch


class _Piece(Protocol):
    """Part of a parameter: a :class:`codec.torch.replicas.fragment.Piece`."""

    @property
    def parameter(self) -> torch.nn.Parameter: ...

    def of(self, x: torch.Tensor) -> torch.Tensor: ...


class Masters:
    """Copies of parameters in the states of optimizers, as found at one time.

    Parameters
    ----------
    copies : dict of Parameter to sequence of tensor
        Copies by parameter, the most precise one first.
    """

    def __init__(self, copies: Mapping[torch.Tensor, Sequence[torch.Tensor]]) -> None:
        self.copies = copies

    @classmethod
    def find(cls, parameters: Iterable[torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> "Masters":
        """Find the entries of optimizer states that equal the parameters, rounded to the dtypes of the parameters.

        An entry counts as a copy if it equals the parameter for all parameters that have this entry, and is not zero
        everywhere: a momentum may be zero for a parameter that is zero.
        """
        found: dict[torch.Tensor, list[torch.Tensor]] = {}
        some = list(parameters)
        for optimizer in optimizers:
            entries: dict[str, list[tuple[torch.Tensor, Any]]] = {}
            for p in some:
                for key, x in optimizer.state.get(p, {}).items():
                    if isinstance(x, torch.Tensor) and x.shape == p.shape:
                        entries.setdefault(str(key), []).append((p, x))
            for pairs in entries.values():
                if all(_is_copy(x, p) for p, x in pairs) and any(bool(p.any()) for p, _ in pairs):
                    for p, x in pairs:
                        found.setdefault(p, []).append(x)
        return cls({p: sorted(copies, key=lambda x: torch.finfo(x.dtype).eps) for p, copies in found.items()})

    def of(self, piece: _Piece) -> list[torch.Tensor]:
        """Return the parts of the copies that belong to a piece of a parameter."""
        return [piece.of(x.detach()) for x in self.copies.get(piece.parameter, ())]


NONE = Masters({})


def _is_copy(x: torch.Tensor, p: torch.Tensor) -> bool:
    """Return True if a tensor with the shape of a parameter has its values, in a dtype of at least its precision."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and not x.is_meta
    if (
        not plain
        or x.data_ptr() == p.data_ptr()
        or not x.dtype.is_floating_point
        or torch.finfo(x.dtype).eps > torch.finfo(p.dtype).eps
    ):
        return False
    return torch.equal(x.detach().to(p.dtype).to(p.device), p.detach())
