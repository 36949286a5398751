"""Show the mean of the ranks' parameters in the model for a while, without any effect on the training."""

import copy

import torch

from codec.torch.local_steps.synchronizer import Synchronizer
from codec.torch.replicas.changes import Changes
from codec.torch.replicas.ranks import Ranks


class Reading:
    """Parameters and buffers of this rank, while the model has those that a synchronization would give it.

    All ranks must create this object together.

    Parameters
    ----------
    state : Synchronizer
        Parameters, buffers and residuals; the latter are not changed.
    ranks : Ranks
        The ranks.
    step : int
        Number of steps so far.
    exact : bool
        True: send the changes, with all residuals added, lossless.

    Raises
    ------
    ArgumentError, PeerError
        As for :meth:`Synchronizer.land`. The model is unchanged.
    """

    def __init__(self, state: Synchronizer, ranks: Ranks, step: int, *, exact: bool) -> None:
        some = state.fragments if step >= state.settings.warmup else []
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not some and not state.buffers:
            return
        masters = state.masters()
        changes = Changes(some, masters, state.buffers)
        problem = state.problem(changes, step)
        feedback = None if exact else copy.copy(state.feedback)  # its residuals are dropped with it
        if exact and state.feedback is not None:
            changes.add_residuals(state.feedback, ranks.size)
        terms = state.terms(changes, feedback, exact=exact)
        ranks.mean(terms, problem, f"{ranks.call}, synchronization {state.rounds}")
        means = [
            (piece.values, anchor.detach() + mean.to(anchor))
            for f, parts in zip(some, changes.parts, strict=True)
            for piece, anchor, mean in zip(f.pieces, f.anchors, parts, strict=True)
        ]
        means += [(state.buffers[name].detach(), x) for name, x in changes.buffer_means().items()]
        self._own = [(x, x.clone()) for x, _ in means]
        try:
            for x, mean in means:
                x.copy_(mean)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Set parameters and buffers to the values that they had before."""
        for x, own in self._own:
            x.copy_(own)
