"""Fragments of a model, each of which is synchronized as a whole, and their values at the last synchronization."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from codec import ArgumentError
from codec.torch.replicas.masters import Masters
from codec.torch.replicas.model import Parameters


@dataclass(frozen=True, eq=False)
class Piece:
    """Parameter, or some rows of a parameter, that belongs to one fragment."""

    name: str  # name of the parameter, followed by "[begin:end]" if the piece has only these rows
    parameter: torch.nn.Parameter
    rows: slice | None = None  # None: the whole parameter
    exact: bool = False  # True: the changes are sent lossless

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of `x`, a tensor with the shape of the parameter, that belongs to this piece."""
        return x if self.rows is None else x[self.rows]

    @property
    def values(self) -> torch.Tensor:
        """Current values, which share the memory of the parameter."""
        return self.of(self.parameter.detach())

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
    pieces : sequence of Piece
        Pieces of the fragment.

    Attributes
    ----------
    anchors : list of Parameter
        Anchor of each piece: a parameter of the outer optimizer.
    bases : list of tensor or None
        Anchors after the last step of the outer optimizer, if synchronizations outside the schedule have changed the
        anchors since; otherwise None.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
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
            for x in (piece.values, *masters.of(piece)):
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


def difference(piece: Piece, anchor: torch.Tensor, masters: Masters) -> torch.Tensor:
    """Return the change of a piece since it had the values of an anchor, in the dtype of the anchor."""
    x = next(iter(masters.of(piece)), piece.values)
    return x.to(anchor) - anchor.to(x.dtype).to(anchor.dtype)


def _anchor_of(piece: Piece) -> torch.Tensor:
    x = piece.values
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32, copy=True).contiguous()


def cut(parameters: Parameters, exact: Iterable[torch.nn.Parameter], count: int) -> list[Fragment]:
    """Split a model's parameters, in their order, into `count` fragments with about equal numbers of values.

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
    rows = {name: len(p) if p.dim() > 1 else 1 for name, p in parameters.items()}
    if (most := sum(rows.values())) < count:
        raise ArgumentError(f"fragments={count} cannot be made of {most} rows of parameters: use fewer fragments")
    # Boundaries are counted in rows of all parameters, one after the other; sizes[i] is the number of values of row i
    sizes = [p.numel() // rows[name] for name, p in parameters.items()]
    counts = list(rows.values())
    ends = _boundaries(counts, sizes, count)
    fragments: list[list[Piece]] = [[] for _ in range(count)]
    first = 0  # number of the first row of the parameter
    for (name, p), n in zip(parameters.items(), counts, strict=True):
        for pieces, (begin, end) in zip(fragments, itertools.pairwise([0, *ends]), strict=True):
            a, b = max(begin, first) - first, min(end, first + n) - first
            if a >= b:
                continue
            whole = b - a == n
            label = name if whole else f"{name}[{a}:{b}]"
            pieces.append(Piece(label, p, None if whole else slice(a, b), p in lossless))
        first += n
    return [Fragment(pieces) for pieces in fragments]


def _boundaries(counts: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Return the number of rows before the end of each of `count` fragments.

    `counts` and `sizes` are, for each parameter, the number of rows, and of values of a row.
    """
    total, rows = sum(c * s for c, s in zip(counts, sizes, strict=True)), sum(counts)
    ends: list[int] = []
    for k in range(1, count):
        at, row = total * k / count, 0
        for c, s in zip(counts, sizes, strict=True):
            if at <= c * s:
                row += round(at / s)
                break
            at, row = at - c * s, row + c
        least = ends[-1] + 1 if ends else 1
        ends.append(min(max(row, least), rows - (count - k)))  # each fragment has at least one row
    return [*ends, rows]


def split(flat: torch.Tensor, shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Split a flat tensor into consecutive views of the given shapes."""
    found: list[torch.Tensor] = []
    begin = 0
    for shape in shapes:
        n = prod(shape)
        found.append(flat[begin : begin + n].view(tuple(shape)))
        begin += n
    return found


def anchors_by_name(fragments: Sequence[Fragment]) -> dict[str, torch.Tensor]:
    """Return the anchor of each piece by name; they share the memory of the fragments."""
    return {piece.name: anchor.detach() for f in fragments for piece, anchor in zip(f.pieces, f.anchors, strict=True)}


def store(fragment: Fragment, values: Mapping[str, torch.Tensor]) -> None:
    """Set the anchors of a fragment to values by name."""
    with torch.no_grad():
        for piece, anchor in zip(fragment.pieces, fragment.anchors, strict=True):
            anchor.copy_(values[piece.name])
