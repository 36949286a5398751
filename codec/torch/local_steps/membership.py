"""Compare the ranks of a group, and give those that differ the state of the most advanced rank."""

import logging
from collections.abc import Sequence

from codec.torch.local_steps.replica import Replica
from codec.torch.replicas import agreement
from codec.torch.replicas.ranks import Ranks

_log = logging.getLogger("codec.torch")
_MOST_NAMES = 5  # maximum number of tensors that a message names


def check(state: Replica, ranks: Ranks, steps: int) -> None:
    """Compare arguments, models and positions of all ranks after `steps` steps.

    Raises
    ------
    PeerError
        They differ, or a rank is lost.
    """
    position = state.position(steps, whole=False)
    agreement.check_equal(agreement.agree(ranks, state.arguments(ranks), position))


def join(state: Replica, ranks: Ranks, steps: int) -> int | None:
    """Compare the ranks; a rank that is behind receives the state of the most advanced one.

    Before the first step, frozen parameters and buffers are compared, too.

    Parameters
    ----------
    state : Replica
        State of this rank.
    ranks : Ranks
        The ranks.
    steps : int
        Number of steps of this rank.

    Returns
    -------
    int or None
        Number of steps of the rank whose state this rank has received; None if it has received none.

    Raises
    ------
    PeerError
        Arguments or models differ, or a rank is lost.
    """
    positions = agreement.agree(ranks, state.arguments(ranks), state.position(steps, whole=steps == 0))
    source = agreement.source_of(positions)
    receivers = [rank for rank, theirs in enumerate(positions) if theirs != positions[source]]
    names = state.take_from(ranks, source, receivers, positions[source]) if receivers else []
    if ranks.rank not in receivers:
        return None
    before, now = positions[ranks.rank], positions[source]
    _report(ranks, source, names, joins=(before.steps, before.rounds) != (now.steps, now.rounds))
    return now.steps


def _report(ranks: Ranks, source: int, names: Sequence[str], *, joins: bool) -> None:
    """Log which tensors were replaced by those of rank `source`: a warning, unless this rank `joins` a training."""
    what = ", ".join(map(repr, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    _log.log(
        logging.INFO if joins else logging.WARNING,
        "rank %d of %d had other values than rank %d in %s%s, and has taken those of rank %d%s",
        ranks.rank,
        ranks.size,
        source,
        what,
        more,
        source,
        "" if joins else "; to resume from a checkpoint, call load_state_dict() of the LocalSteps, too",
    )
