"""Changes of a rank's parameters and its buffers, laid out for the collective that replaces them by their means."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from codec import ArgumentError, Status, view
from codec.specs import Lossless, Spec
from codec.stateful.ranges import Range, cut
from codec.torch.feedback.feedback import Feedback
from codec.torch.replicas import residuals
from codec.torch.replicas.fragment import Fragment, ParameterRows, split
from codec.torch.replicas.holders import Holders
from codec.torch.replicas.model import Masters
from codec.torch.replicas.ranks import MeanTerm
from codec.torch.replicas.windows import Region, windows_of


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
    holders : Holders
        Ranks of this site that have the same changes.

    Attributes
    ----------
    parts : list of list of tensor
        By fragment, the change of each piece. After the collective they hold the mean changes.
    means : dict of str to tensor
        Value of each buffer. After the collective they are the means.
    norm : float
        Euclidean norm of all changes of this rank.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        masters: Masters,
        buffers: Mapping[str, torch.Tensor],
        holders: Holders,
    ) -> None:
        self._pieces = [piece for f in fragments for piece in f.pieces]
        self._holders = holders
        device = next((x.device for x in [*(p.values for p in self._pieces), *buffers.values()]), None)
        coded, self._coded_regions = _ordered(fragments, holders, exact=False)
        exact, self._exact_regions = _ordered(fragments, holders, exact=True)
        shapes = [*(piece.shape for piece in exact), (1,), *(tuple(b.shape) for b in buffers.values())]
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
        self.means = dict(zip(buffers, views[len(exact) + 1 :], strict=True))
        for name, place in self.means.items():
            place.copy_(buffers[name].detach())
        self.norm = self._norm()
        self._norms = views[len(exact)]
        self._norms.fill_(self.norm)
        if not holders.flat:
            self._coded_regions = [with_checksum(self._coded, region) for region in self._coded_regions]
            self._exact_regions = [with_checksum(self._exact, region) for region in self._exact_regions]
        n = sum(piece.n for piece in exact)
        self._exact_regions.append(Region(n, n + 1, holders.twins))  # no checksum: the norm may depend on threads

    def _all(self) -> list[torch.Tensor]:
        return [x for parts in self.parts for x in parts]

    def _norm(self) -> float:
        squares = [x.double().square().sum() for x in self._all()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

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
        """Return the terms of the collective. Small parameters are lossless. Ranks of a site average their buffers."""
        coded: Any = view(self._coded, segments=self._segments)
        flat, end = self._holders.flat, self._exact_regions[-1].end
        found = [MeanTerm(self._exact if flat else self._exact[:end], Lossless(), regions=self._exact_regions)]
        if self.means and not flat:
            found.append(MeanTerm(self._exact[end:], Lossless()))
        if len(self._coded) or (self._coded_regions and not flat):  # other ranks of the site may have values
            found.insert(0, MeanTerm(coded, spec, feedback, stream, algorithm, self._coded_regions))
        return found

    def agreement(self) -> float:
        """Return the norm of the mean change, divided by the mean of the ranks' norms, after the collective.

        The result is 1 if all ranks have the same changes, and 1 / sqrt(N) if changes of N ranks are unrelated. It is
        NaN if nothing has changed. Of DTensors, only the shards of this rank count.
        """
        norms = float(self._norms)
        mean = (
            float(torch.stack([x.double().square().sum() for x in self._all()]).sum().sqrt()) if self._pieces else 0.0
        )
        return mean / norms if norms else float("nan")


def coded_ranges(fragments: Sequence[Fragment], holders: Holders) -> list[Range]:
    """Return the ranges of pieces that this rank encodes: its windows."""
    pieces, regions = _ordered(fragments, holders, exact=False)
    ends = [0, *accumulate(piece.n for piece in pieces)]
    segments = [(begin, piece.shape) for begin, piece in zip(ends, pieces, strict=False)]
    layout = [(piece.name, 0, piece.n) for piece in pieces]
    mine = [each[region.holders.rank] for each, region in zip(windows_of(regions, segments), regions, strict=True)]
    return [r for piece in mine for r in cut(tuple(layout), piece.begin, piece.end)]


def _ordered(
    fragments: Sequence[Fragment], holders: Holders, *, exact: bool
) -> tuple[list[ParameterRows], list[Region]]:
    """Return the pieces that are sent lossless, or those that are not, and a region for those of each fragment."""
    found: list[ParameterRows] = []
    regions: list[Region] = []
    end = 0
    for held in holders.groups:
        for f in fragments:
            some = [piece for piece in f.pieces if piece.exact is exact and piece.whole in held.names]
            begin, end = end, end + sum(piece.n for piece in some)
            found += some
            regions.append(Region(begin, end, held.holders))
    return found, regions


def with_checksum(x: torch.Tensor, region: Region) -> Region:
    """Return a region with the sum of its bits, as integers, which does not depend on the order of additions."""
    values = x[region.begin : region.end]
    return region if region.holders.size == 1 else region._replace(checksum=int(values.view(torch.int32).sum()))
