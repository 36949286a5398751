"""Fragments of a model, each of which is synchronized as a whole, and their values at the last synchronization."""

from collections.abc import Iterator, Sequence

import torch

from codec import view
from codec.tensors.wrapper import View
from codec.torch.local_steps.model import Parameters, parts_of


class Fragment:
    """Parameters and their anchors, which are their values at the last synchronization, equal on all ranks.

    Anchors are float32 even if parameters are not (float64 if a parameter is float64), so that changes below the
    resolution of bfloat16 add up over synchronizations.

    Parameters
    ----------
    parameters : dict of str to Parameter
        Parameters by name.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.n = sum(p.numel() for p in parameters.values())
        wide = any(p.dtype == torch.float64 for p in parameters.values())
        first = next(iter(parameters.values()))
        self.flat = torch.empty(self.n, dtype=torch.float64 if wide else torch.float32, device=first.device)
        # Autograd leaves that share the memory of `flat`: the parameters of the outer optimizer.
        self.anchors = {name: torch.nn.Parameter(x) for name, x in self.parts(self.flat)}
        self.reset()

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield, for each parameter, its name and the view of its values in `flat`, in the parameter's shape."""
        pieces = parts_of(flat, (p.numel() for p in self.parameters.values()))
        for (name, p), piece in zip(self.parameters.items(), pieces, strict=True):
            yield name, piece.view(p.shape)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the anchors to the current values of the parameters."""
        for name, anchor in self.parts(self.flat):
            anchor.copy_(self.parameters[name])

    @torch.no_grad()
    def restore(self) -> None:
        """Set the parameters to their anchors."""
        for name, anchor in self.parts(self.flat):
            self.parameters[name].copy_(anchor)

    @torch.no_grad()
    def differences(self, out: torch.Tensor) -> None:
        """Store the changes of the parameters since the last synchronization in `out`, a flat float32 tensor.

        Changes are relative to the anchor rounded to the parameter's dtype, from which the local steps started.
        """
        for (name, anchor), (_, place) in zip(self.parts(self.flat), self.parts(out), strict=True):
            p = self.parameters[name]
            place.copy_(p.to(anchor.dtype) - anchor.to(p.dtype).to(anchor.dtype))

    @torch.no_grad()
    def apply(self, mean: torch.Tensor, outer: torch.optim.Optimizer | None, since: torch.Tensor | None = None) -> None:
        """Add the mean change to the anchors, or step the outer optimizer; then set the parameters to the anchors.

        Parameters
        ----------
        mean : tensor of float32, shape (n,)
            Mean of :meth:`differences` over the ranks.
        outer : torch.optim.Optimizer or None
            Optimizer of the anchors, which takes a step with the gradient ``-mean``. None: add the mean to the anchors.
        since : tensor of float32, shape (n,), optional
            This rank's own :meth:`differences` when the synchronization started. Changes of later local steps are then
            kept: the parameters are set to the anchors plus these changes.
        """
        begun = None if since is None else self.flat.clone()
        if outer is None:
            self.flat.add_(mean)
        else:
            outer.zero_grad()
            for name, part in self.parts(mean):
                self.anchors[name].grad = part.neg().to(self.flat.dtype)
            outer.step()
            outer.zero_grad()
        if begun is None or since is None:
            self.restore()
            return
        parts = zip(self.parts(self.flat), self.parts(begun), self.parts(since), strict=True)
        for (name, anchor), (_, old), (_, mine) in parts:
            p = self.parameters[name]
            p.copy_(p.to(anchor.dtype) + (anchor - old.to(p.dtype).to(anchor.dtype) - mine))


def cut(parameters: Parameters, count: int) -> list[Fragment]:
    """Split a model's parameters, in their order, into `count` fragments with about equal numbers of values.

    Parameters are not divided. `count` must be at most the number of parameters.
    """
    total, found = sum(p.numel() for p in parameters.values()), list[Parameters]()
    names, before = list(parameters), 0
    for i, name in enumerate(names):
        must = len(names) - i == count - len(found)  # each of the remaining parameters must start a fragment
        if not found or (len(found) < count and (must or before * count >= total * len(found))):
            found.append({})
        found[-1][name] = parameters[name]
        before += parameters[name].numel()
    return [Fragment(part) for part in found]


def view_of(fragments: Sequence[Fragment], flat: torch.Tensor) -> View:
    """Return a View that names the fragments' parameters in a flat tensor, so that residuals are stored by name."""
    return view(flat, segments={name: tuple(p.shape) for f in fragments for name, p in f.parameters.items()})


def split(fragments: Sequence[Fragment], flat: torch.Tensor) -> list[torch.Tensor]:
    """Split a flat tensor into a view for each fragment."""
    return parts_of(flat, (f.n for f in fragments))


def named(fragments: Sequence[Fragment], flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return, by parameter name, the view of the parameter's values in a flat tensor, in the parameter's shape."""
    pairs = zip(fragments, split(fragments, flat), strict=True)
    return {name: x for f, part in pairs for name, x in f.parts(part)}


def nonfinite(fragments: Sequence[Fragment], flat: torch.Tensor) -> str:
    """Return the name of the first parameter whose values in a flat tensor hold NaN or Inf; "" if there is none."""
    if bool(flat.sum().isfinite()) or bool(flat.isfinite().all()):
        return ""
    return next(name for name, x in named(fragments, flat).items() if not bool(x.isfinite().all()))
