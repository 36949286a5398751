"""Apply the mean of a synchronization. If an error interrupts this on one rank, the next call completes it.

When the mean is known, all ranks have agreed. A rank that did not apply it would differ from the others for ever.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from codec.torch.replicas.changes import Changes
from codec.torch.replicas.fragment import Fragment, ParameterRows, difference
from codec.torch.replicas.model import Masters
from codec.torch.replicas.ranks import Flight
from codec.torch.replicas.undone import Probe

Tensors = list[torch.Tensor]


@dataclass
class Landing:
    """Synchronization that has started, and whose mean is to be applied to the parameters of this rank."""

    fragments: Sequence[Fragment]
    means: Sequence[Tensors]  # by fragment, for each piece: mean change over the ranks
    mine: Sequence[Tensors] | None  # this rank's changes when the synchronization started; None: those until now
    outer: torch.optim.Optimizer | None  # optimizer of the anchors that takes a step; None: the mean is added
    due: int | None = None  # step after which the mean is applied; None: as soon as it is known
    is_exact: bool = False  # True: residuals were sent, so that none remain
    changes: Changes | None = None  # values of the collective; None: the mean is from a checkpoint
    flight: Flight | None = None  # collective in flight; None if the mean is known
    former: int = 0  # number of steps of the round that ended with this synchronization; 0: none has ended
    before: Sequence[Tensors] | None = None  # anchors before the mean is applied
    state: dict[Any, Any] | None = None  # state of the outer optimizer before its step
    moved: bool = False  # True: the anchors, and the outer optimizer, are those after this synchronization
    written: bool = False  # True: the parameters are, too
    probe: Probe | None = None  # samples of the parameters before and after this synchronization
    targets: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list[tuple[torch.Tensor, torch.Tensor]])

    @torch.no_grad()
    def hold(self, masters: Masters) -> None:
        """Record this rank's changes so far, so that changes of later steps are kept when the mean is applied.

        Call this before further steps, if the synchronization cannot be completed now.
        """
        if self.mine is None and not self.written:
            before = self.before or [[a.detach() for a in f.anchors] for f in self.fragments]
            self.mine = [
                [difference(piece, x, masters) for piece, x in zip(f.pieces, anchors, strict=True)]
                for f, anchors in zip(self.fragments, before, strict=True)
            ]

    @torch.no_grad()
    def move_anchors(self) -> None:
        """Add the mean to the anchors, or step the outer optimizer. After an error nothing is changed."""
        if self.moved:
            return
        if self.before is not None:  # an earlier attempt was interrupted, perhaps while it was undone
            self._undo()
        self.before = [[a.detach().clone() for a in f.anchors] for f in self.fragments]
        if self.outer is not None:
            self.state = _copied(self.outer.state)
        try:
            for f, mean in zip(self.fragments, self.means, strict=True):
                self._move(f, mean)
            self.moved = True
        except BaseException:
            if not self.moved:
                self._undo()
            raise

    def _move(self, f: Fragment, mean: Tensors) -> None:
        if self.outer is None:
            for anchor, x in zip(f.anchors, mean, strict=True):
                anchor.add_(x.to(anchor))
            return
        self.outer.zero_grad()
        bases = f.bases or [a.detach().clone() for a in f.anchors]
        for anchor, base, x in zip(f.anchors, bases, mean, strict=True):
            anchor.grad = (base - anchor.detach()) - x.to(anchor)
            anchor.copy_(base)
        with torch.enable_grad():
            self.outer.step()
        self.outer.zero_grad()

    def _undo(self) -> None:
        for f, before in zip(self.fragments, self.before or (), strict=True):
            for anchor, old in zip(f.anchors, before, strict=True):
                anchor.copy_(old)
        if self.outer is not None and self.state is not None:
            self.outer.zero_grad()
            self.outer.state.clear()
            self.outer.state.update(_copied(self.state))

    @torch.no_grad()
    def write(self, masters: Masters) -> None:
        """Set the parameters and their copies in optimizers. This can be repeated after an error."""
        assert self.before is not None
        if self.written:
            return
        self.targets = []
        pieces: list[tuple[ParameterRows, torch.Tensor]] = []
        for i, (f, before) in enumerate(zip(self.fragments, self.before, strict=True)):
            for k, (piece, anchor) in enumerate(zip(f.pieces, f.anchors, strict=True)):
                target = anchor.detach()
                if self.mine is not None:  # keep the changes of later steps
                    target = target + (difference(piece, before[k], masters) - self.mine[i][k].to(anchor))
                pieces.append((piece, target))
                self.targets += [(x, target) for x in (piece.values, *piece.copies(masters))]
        self.probe = Probe(pieces)
        try:
            self._store()
        except BaseException:  # such as KeyboardInterrupt between two copies
            self._store()
            raise

    def _store(self) -> None:
        for x, target in self.targets:
            x.copy_(target)
        self.written = True


def _copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of an optimizer's state, by parameter."""
    return {
        p: {k: x.clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x) for k, x in entries.items()}
        for p, entries in state.items()
    }
