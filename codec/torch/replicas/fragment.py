"""Fragments of a model, each of which is synchronized as a whole, and their values at the last synchronization."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from codec import ArgumentError
from codec.torch._compat import local
from codec.torch.replicas.model import Masters, Parameters


@dataclass(frozen=True, eq=False)
class ParameterRows:
    """Parameter, or some of its rows, that belongs to one fragment: a piece of the fragment."""

    name: str  # name of the parameter, followed by "[begin:end]" if the piece has only these rows
    whole: str  # name of the parameter
    parameter: torch.nn.Parameter
    rows: slice | None = None  # None: the whole parameter
    exact: bool = False  # True: the changes are sent lossless

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of `x`, a tensor with the shape of the parameter on this rank, that belongs to this piece."""
        return x if self.rows is None else x[self.rows]

    @property
    def values(self) -> torch.Tensor:
        """Current values, which share the memory of the parameter."""
        return self.of(local(self.parameter).detach())

    def copies(self, masters: Masters) -> list[torch.Tensor]:
        """Return the parts of the parameter's copies that belong to this piece."""
        return [self.of(x) for x in masters.get(self.parameter, ())]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of :attr:`values`."""
        return tuple(self.values.shape)

    @property
    def n(self) -> int:
        """Number of values."""
        return prod(self.shape)


class Fragment:
    """Pieces of parameters and their anchors, which are their values at the last synchronization, equal on all ranks.

    Anchors are float32 even if parameters are not (float64 if a parameter is float64), so that changes below the
    resolution of bfloat16 add up over synchronizations.

    Parameters
    ----------
    pieces : sequence of ParameterRows
        Pieces of the fragment.

    Attributes
    ----------
    anchors : list of Parameter
        Anchor of each piece: a parameter of the outer optimizer.
    bases : list of tensor or None
        Anchors after the last step of the outer optimizer, if synchronizations outside the schedule have changed the
        anchors since; otherwise None.
    """

    def __init__(self, pieces: Sequence[ParameterRows]) -> None:
        self.pieces = list(pieces)
        self.n = sum(piece.n for piece in self.pieces)
        self.anchors = [torch.nn.Parameter(_anchor_of(piece)) for piece in self.pieces]
        self.bases: list[torch.Tensor] | None = None

    @torch.no_grad()
    def reset(self) -> None:
        """Set the anchors to the current values of the parameters."""
        for piece, anchor in zip(self.pieces, self.anchors, strict=True):
            anchor.copy_(piece.values)

    @torch.no_grad()
    def restore(self, masters: Masters) -> None:
        """Set the parameters, and their copies in optimizers, to the anchors."""
        for piece, anchor in zip(self.pieces, self.anchors, strict=True):
            for x in (piece.values, *piece.copies(masters)):
                x.copy_(anchor)

    @torch.no_grad()
    def differences(self, masters: Masters) -> list[torch.Tensor]:
        """Return, in float32, the change of each piece since the last synchronization.

        Changes are relative to the anchor rounded to the parameter's dtype, from which the local steps started. If an
        optimizer has a copy of the parameter in a wider dtype, it is the copy's change, since the anchor.
        """
        return [
            difference(piece, anchor, masters).to(torch.float32)
            for piece, anchor in zip(self.pieces, self.anchors, strict=True)
        ]

    @torch.no_grad()
    def has_changed(self, masters: Masters) -> bool:
        """Return True if a parameter, or its copy in an optimizer, differs from its anchor."""
        pairs = zip(self.pieces, self.anchors, strict=True)
        return any(bool(difference(piece, anchor, masters).any()) for piece, anchor in pairs)


def difference(piece: ParameterRows, anchor: torch.Tensor, masters: Masters) -> torch.Tensor:
    """Return the change of a piece since it had the values of an anchor, in the dtype of the anchor."""
    x = next(iter(piece.copies(masters)), piece.values)
    return x.to(anchor) - anchor.to(x.dtype).to(anchor.dtype)


def _anchor_of(piece: ParameterRows) -> torch.Tensor:
    x = piece.values
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=True).contiguous()


def cut(parameters: Parameters, exact: Iterable[torch.nn.Parameter], count: int) -> list[Fragment]:
    """Split a model's parameters, in their order, into `count` fragments with about equal numbers of values.

    A fragment has values of this rank's shard of a DTensor. On a rank without any values, fragments are empty.
    Parameters of two or more dimensions may be divided between rows. Each boundary is the one that is nearest to a
    multiple of 1 / `count` of all values.

    Parameters
    ----------
    parameters : dict of str to Parameter
        Parameters by name.
    exact : iterable of Parameter
        Parameters whose changes are sent lossless.
    count : int
        Number of fragments.

    Raises
    ------
    ArgumentError
        The parameters have too few rows.
    """
    lossless = set(exact)
    shards = {name: local(p) for name, p in parameters.items()}
    rows = {name: (len(x) if x.dim() > 1 else 1) if x.numel() else 0 for name, x in shards.items()}
    if not (most := sum(rows.values())):
        return [Fragment([]) for _ in range(count)]
    if most < count:
        raise ArgumentError(f"fragments={count} cannot be made of {most} rows of parameters: use fewer fragments")
    counts = list(rows.values())
    # Number of values up to the end of each row, of all parameters one after the other
    values = np.repeat([x.numel() // (n or 1) for x, n in zip(shards.values(), counts, strict=True)], counts).cumsum()
    ends = [0]
    for k in range(1, count):
        nearest = int(np.abs(values - values[-1] * k / count).argmin()) + 1
        ends.append(min(max(nearest, ends[-1] + 1), most - (count - k)))  # each fragment has at least one row
    ends.append(most)
    fragments: list[list[ParameterRows]] = [[] for _ in range(count)]
    first = 0  # number of the first row of the parameter
    for (name, p), n in zip(parameters.items(), counts, strict=True):
        for pieces, (begin, end) in zip(fragments, itertools.pairwise(ends), strict=True):
            a, b = max(begin, first) - first, min(end, first + n) - first
            if a >= b:
                continue
            whole = b - a == n
            label = name if whole else f"{name}[{a}:{b}]"
            pieces.append(ParameterRows(label, name, p, None if whole else slice(a, b), p in lossless))
        first += n
    return [Fragment(pieces) for pieces in fragments]


def split(flat: torch.Tensor, shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Split a flat tensor into consecutive views of the given shapes."""
    found: list[torch.Tensor] = []
    begin = 0
    for shape in shapes:
        n = prod(shape)
        found.append(flat[begin : begin + n].view(tuple(shape)))
        begin += n
    return found
