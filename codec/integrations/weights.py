"""Common part of the weight transfers for vLLM servers: one update in two phases, from the trainer's side."""

from collections.abc import Iterable
from typing import Any, Protocol

from codec.weight_sync import Publisher
from codec.weight_sync.update import Update


class Client(Protocol):
    """Trainer's client of a vLLM server: its weight-transfer calls."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> object:
        """Send the location of updates to the workers."""
        ...

    def start_weight_update(self) -> object:
        """Begin an update."""
        ...

    def update_weights(self, update_info: Any) -> object:
        """Have all workers check or load an update."""
        ...

    def finish_weight_update(self) -> object:
        """End an update."""
        ...


def synchronize(publisher: Publisher, client: Client, weights: Iterable[tuple[str, Any]]) -> int:
    """Send weights to a server: all workers check the update, then it is published, then all workers load it.

    Parameters
    ----------
    publisher : Publisher
        Publisher whose ``source`` the workers have.
    client : Client
        Client of the server.
    weights : iterable of (str, tensor)
        All weights. It is read to its end also after an error, because other ranks take part in its collectives.

    Returns
    -------
    int
        Version.

    Raises
    ------
    Exception
        The client's, if a worker has refused or failed. After a refusal, all workers serve the version before, and the
        next update refers to it. A worker that has failed to load serves the version before, and catches up with the
        next update.
    """
    rest = iter(weights)
    try:
        update = publisher.stage(rest)
    finally:
        for _ in rest:
            pass
    try:
        client.start_weight_update()
        client.update_weights(update_info(update, "stage"))
    except BaseException:
        publisher.abandon()
        raise
    version = publisher.commit()
    client.update_weights(update_info(update, "load"))
    client.finish_weight_update()
    return version


def update_info(update: Update, phase: str) -> dict[str, Any]:
    """Return the description of an update for the workers, who read the update itself from the store."""
    return {"phase": phase, "version": update.version, "base": update.base, "nbytes": update.nbytes}
