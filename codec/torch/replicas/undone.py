"""Detect optimizers that overwrite synchronized parameters with copies that :func:`masters_of` has not found."""

from collections.abc import Sequence

import torch

from codec.torch.replicas.fragment import ParameterRows

_MOST = 64  # maximum number of values of a parameter that are compared
_CLOSE = 0.25  # share of the distance to the synchronized values below which a parameter counts as overwritten
LEAST_STEPS = 4  # least number of steps between synchronizations: one step of an optimizer is then a small part of them


class Probe:
    """Samples of parameters before and after a synchronization.

    Parameters
    ----------
    targets : sequence of (ParameterRows, torch.Tensor)
        Pieces that are about to be set, and their new values.
    """

    def __init__(self, targets: Sequence[tuple[ParameterRows, torch.Tensor]]) -> None:
        self._samples = [(piece, _sample(piece.values), _sample(target)) for piece, target in targets]

    def overwritten(self) -> str:
        """Return the name of a parameter that has gone back to its former value; "" if most have not.

        Call this after the next step of an optimizer. A parameter without a gradient is where it was set.
        """
        back = apart = 0.0
        name = ""
        for piece, old, new in self._samples:
            now = _sample(piece.values)
            here, there = float((now - old).square().sum()), float((now - new).square().sum())
            back, apart = back + here, apart + there
            if not name and here < _CLOSE**2 * there:
                name = piece.name
        return name if back < _CLOSE**2 * apart else ""


def _sample(x: torch.Tensor) -> torch.Tensor:
    """Return a few values of a tensor, of its middle row."""
    x = x.detach()
    while x.dim() > 1:
        x = x[len(x) // 2]
    return x.reshape(-1)[:_MOST].to("cpu", torch.float32, copy=True)
