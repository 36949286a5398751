"""States that differ between ranks, in checkpoints of torch.distributed.checkpoint."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch.distributed as dist

from codec import ArgumentError, StateError
from codec.arguments import shown


class HasState(Protocol):
    """Object with a state, such as a hook, a Feedback, LocalSteps, a CompressedStage or an ErrorFeedback."""

    def state_dict(self) -> Any:
        """Return the state of this rank."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Replace the state of this rank."""
        ...


class PerRank:
    """Object of :func:`per_rank`."""

    def __init__(self, of: HasState) -> None:
        self.of = of

    def __repr__(self) -> str:
        return f"per_rank({self.of!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, under a key with the number of the rank.

        The state is the only item of a tuple. torch.distributed.checkpoint saves and loads a tuple as one object. Of a
        dict, it loads only the entries that exist before, and a new object has no residuals.
        """
        return {_key(): (self.of.state_dict(),)}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of this rank.

        Raises
        ------
        StateError
            There is no state of this rank and this number of ranks.
        """
        entries = cast(Mapping[Any, Any], state_dict if isinstance(state_dict, Mapping) else {})
        found: object = entries.get(_key())
        items = cast(tuple[Any, ...], found) if isinstance(found, tuple) else ()
        if len(items) != 1:
            raise StateError(
                f"there is no state of {_key()!r}, only {', '.join(map(str, entries)) or 'nothing'}: load a checkpoint "
                "that was saved by the same number of ranks with codec.torch.per_rank()"
            )
        self.of.load_state_dict(items[0])


def per_rank(of: HasState) -> PerRank:
    """Return an object that torch.distributed.checkpoint saves and loads separately on each rank.

    torch.distributed.checkpoint saves entries of equal name once, since it takes them for copies. Residuals differ
    between ranks. Put the returned object in the dict that you pass to ``dcp.save``, ``dcp.async_save`` and
    ``dcp.load``; these call the object's ``state_dict`` and ``load_state_dict``.

    Parameters
    ----------
    of : Hook, Feedback, LocalSteps, CompressedStage, or another object with state_dict() and load_state_dict()
        Object whose state differs between ranks.

    Returns
    -------
    PerRank
        Object whose state has a key with the number of the rank and the number of ranks. ``dcp.load`` with another
        number of ranks raises CheckpointException, because the key is missing.

    Raises
    ------
    ArgumentError
        `of` lacks one of the methods.

    Examples
    --------
    >>> import tempfile, torch.distributed.checkpoint as dcp
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    >>> hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True).register(model)
    >>> model(torch.ones(8, 100)).sum().backward()
    >>> folder = tempfile.mkdtemp()
    >>> saved = dcp.save({"model": model.module.state_dict(), "hook": codec.torch.per_rank(hook)}, checkpoint_id=folder)
    >>> dcp.load({"model": model.module.state_dict(), "hook": codec.torch.per_rank(hook)}, checkpoint_id=folder)
    """
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(of, method, None)):
            raise ArgumentError(f"per_rank takes an object with state_dict() and load_state_dict(), got {shown(of)}")
    return PerRank(of)


def _key() -> str:
    """Return the key of this rank's state. Ranks are those of the job: several groups may have a rank 0."""
    together = dist.is_available() and dist.is_initialized()
    return f"rank {dist.get_rank()} of {dist.get_world_size()}" if together else "rank 0 of 1"
