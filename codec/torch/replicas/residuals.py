"""Convert the residuals of a Feedback to another number of ranks, or add them to the values of an exact mean."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from codec.stateful.checkpoint import ROLES, load
from codec.stateful.ranges import Range, pieces
from codec.stateful.schema import signed
from codec.torch._compat import from_numpy
from codec.torch.feedback.checkpoint import UNKNOWN
from codec.torch.feedback.feedback import Feedback


def ranges(state: Mapping[str, Any]) -> Iterator[tuple[str, Range, torch.Tensor]]:
    """Yield the role, the range of a parameter, and the values of each residual in a Feedback's state."""
    for role in ROLES:
        for r, values in pieces(load(state[role])[1]):
            yield role, r, from_numpy(values)


def moved(feedback: Feedback, rank: int, size: int, *, by_senders: bool = False) -> Feedback:
    """Return a Feedback with the residuals of this rank, converted to another group.

    In a mean over N ranks, a worker's residual counts 1 / N. For a new group of M ranks it is multiplied by M / N, so
    that its effect on the parameters stays the same. Residuals of encoded sums are errors of the mean itself, and stay
    unchanged.

    Parameters
    ----------
    feedback : Feedback
        Residuals of the old group. This object is not changed.
    rank, size : int
        Number of this rank in the new group, and number of ranks there.
    by_senders : bool
        True: means are those over the ranks that sent a value, in which a residual does not count 1 / N, and so stays
        unchanged.
    """
    state, found = feedback.state_dict(), Feedback(feedback.spec, decay=feedback.decay)
    if state["world_size"] != UNKNOWN:
        factor = 1.0 if by_senders else size / state["world_size"]
        worker = {name: x * factor if isinstance(x, torch.Tensor) else x for name, x in state["worker"].items()}
        found.load_state_dict(signed(state | {"rank": rank, "world_size": size, "worker": worker}))
    return found


def add_to(feedback: Feedback, parts: Mapping[str, torch.Tensor], size: int) -> None:
    """Add the residuals to the values that this rank contributes to a mean over `size` ranks.

    Parameters
    ----------
    feedback : Feedback
        Residuals. This object is not changed, because the mean may fail.
    parts : dict of str to tensor
        Values of each parameter, by name; changed in place.
    size : int
        Number of ranks. A residual of encoded sums is an error of the mean, so it is multiplied by `size`.
    """
    for role, (name, start, stop), values in ranges(feedback.state_dict()):
        place = parts[name].view(-1)[start:stop]
        place.add_(values.to(place.device), alpha=size if role == "server" else 1)
