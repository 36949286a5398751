"""Send an update from a trainer to a vLLM server; shared by the TRL and vLLM integrations."""

from collections.abc import Iterable
from typing import Any, Protocol

from codec.weight_sync import Publisher
from codec.weight_sync.listing import Listed
from codec.weight_sync.update import Update


class Client(Protocol):
    """Interface of the client with which the trainer calls the weight-transfer functions of a vLLM server."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> object:
        """Send the location of updates to the workers."""
        ...

    def start_weight_update(self) -> object:
        """Tell all workers that an update begins."""
        ...

    def update_weights(self, update_info: Any) -> object:
        """Make all workers check or load an update, and wait for them."""
        ...

    def finish_weight_update(self) -> object:
        """Tell all workers that the update is complete."""
        ...


def synchronize(publisher: Publisher, client: Client, weights: Iterable[tuple[str, Any]]) -> int:
    """Send weights to a server: all workers check the update, then it is published, then all workers load it.

    Parameters
    ----------
    publisher : Publisher
        Publisher whose ``source`` was sent to the workers.
    client : Client
        Client of the server.
    weights : iterable of (str, tensor)
        All weights. The iterable is exhausted even after an error, because it may run collectives with other ranks.

    Returns
    -------
    int
        Version of the update.

    Raises
    ------
    Exception
        Raised by the client if a worker refused the update or failed to load it. After a refusal, all workers serve the
        previous version, and the next update refers to that version. A worker that failed to load serves the previous
        version, and catches up with the next update.
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
    """Return the message that describes an update. Workers read the update itself from the store."""
    return {"phase": phase, "update": Listed.of(update).fields(with_run=True)}
