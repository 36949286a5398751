"""Changes of a rank's parameters and its buffers, laid out for the collective that replaces them by their means."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from codec import ArgumentError, Status, view
from codec.specs import Lossless, Spec
from codec.torch.feedback.feedback import Feedback
from codec.torch.replicas import residuals
from codec.torch.replicas.fragment import Fragment, split
from codec.torch.replicas.model import Masters
from codec.torch.replicas.ranks import MeanTerm


class Changes:
    """Changes of some fragments since their last synchronization, and the values of some buffers.

    Parameters
    ----------
    fragments : sequence of Fragment
        Fragments of which changes are sent.
    masters : Masters
        Copies of parameters in optimizers.
    buffers : dict of str to tensor
        Buffers that are averaged, by name.

    Attributes
    ----------
    parts : list of list of tensor
        By fragment, the change of each piece. After the collective they hold the mean changes.
    means : dict of str to tensor
        Value of each buffer. After the collective they are the means.
    norm : float
        Euclidean norm of all changes of this rank.
    """

    def __init__(self, fragments: Sequence[Fragment], masters: Masters, buffers: Mapping[str, torch.Tensor]) -> None:
        self._pieces = [piece for f in fragments for piece in f.pieces]
        coded = [piece for piece in self._pieces if not piece.exact]
        exact = [piece for piece in self._pieces if piece.exact]
        shapes = [*(piece.shape for piece in exact), *(tuple(b.shape) for b in buffers.values()), (1,)]
        device = next(iter([*(p.values for p in self._pieces), *buffers.values()])).device
        self._coded = torch.empty(sum(piece.n for piece in coded), dtype=torch.float32, device=device)
        self._exact = torch.empty(sum(map(prod, shapes)), dtype=torch.float32, device=device)
        self._segments = {piece.name: piece.shape for piece in coded}
        views = split(self._exact, shapes)
        places = dict(zip(coded, split(self._coded, (piece.shape for piece in coded)), strict=True))
        places |= dict(zip(exact, views, strict=False))
        self.parts = [[places[piece] for piece in f.pieces] for f in fragments]
        for f, parts in zip(fragments, self.parts, strict=True):
            for x, place in zip(f.differences(masters), parts, strict=True):
                place.copy_(x)
        self.means = dict(zip(buffers, views[len(exact) : -1], strict=True))
        for name, place in self.means.items():
            place.copy_(buffers[name].detach())
        self.norm = (
            float(torch.stack([x.double().square().sum() for x in self._all()]).sum().sqrt()) if coded + exact else 0.0
        )
        self._norms = views[-1]
        self._norms.fill_(self.norm)

    def _all(self) -> list[torch.Tensor]:
        return [x for parts in self.parts for x in parts]

    def error(self, step: int) -> ArgumentError | None:
        """Return the error of values that cannot be sent, NaN or Inf; None if they can be sent."""
        if not self.norm < float("inf"):
            pairs = zip(self._pieces, self._all(), strict=True)
            if name := next((piece.name for piece, x in pairs if not bool(x.isfinite().all())), None):
                return ArgumentError(
                    f"parameter {name!r} holds NaN or Inf after step {step}: no rank was changed; load a checkpoint, "
                    "or lower the learning rate",
                    Status.NONFINITE,
                )
        if name := next((name for name, x in self.means.items() if bool(x.isnan().any())), None):
            return ArgumentError(f"buffer {name!r} holds NaN: no rank was changed", Status.NONFINITE)
        return None

    def add_residuals(self, feedback: Feedback, size: int) -> None:
        """Add the residuals to the changes, for an exact mean over `size` ranks."""
        parts = {piece.name: x for piece, x in zip(self._pieces, self._all(), strict=True) if not piece.exact}
        residuals.add_to(feedback, parts, size)

    def terms(self, spec: Spec, feedback: Feedback | None, stream: int, algorithm: str) -> list[MeanTerm]:
        """Return the terms of the collective. Small parameters are lossless."""
        coded: Any = view(self._coded, segments=self._segments)
        found = [MeanTerm(self._exact, Lossless())]
        if len(self._coded):
            found.insert(0, MeanTerm(coded, spec, feedback, stream, algorithm))
        return found

    def agreement(self) -> float:
        """Return the norm of the mean change, divided by the mean of the ranks' norms, after the collective.

        The result is 1 if all ranks have the same changes, and 1 / sqrt(N) if changes of N ranks are unrelated. It is
        NaN if nothing has changed.
        """
        norms = float(self._norms)
        mean = float(torch.stack([x.double().square().sum() for x in self._all()]).sum().sqrt()) if self.parts else 0.0
        return mean / norms if norms else float("nan")
