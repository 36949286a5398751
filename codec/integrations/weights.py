"""Send an update from a trainer to a vLLM server, and open the weights of its workers; shared by integrations."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from codec.errors import StateError
from codec.integrations.adapter_folders import version_path
from codec.weight_sync import Publisher
from codec.weight_sync.receiver import WeightReceiver
from codec.weight_sync.updates.listing import Listed
from codec.weight_sync.updates.update import Update


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
    with _session(client):
        try:
            client.update_weights(update_info(update, "stage"))
        except BaseException:
            publisher.abandon()
            raise
        version = publisher.commit()
        client.update_weights(update_info(update, "load"))
    return version


def synchronize_shards(publisher: Publisher, client: Client | None, weights: Any) -> int:
    """Send the shards of all ranks of a trainer to a server, as :func:`synchronize`. All ranks must call this.

    Parameters
    ----------
    publisher : Publisher
        Publisher with ``group=``.
    client : Client or None
        Client of the server on rank 0; None on other ranks.
    weights : mapping or module
        Weights of this rank, as in :meth:`Publisher.stage`.

    Returns
    -------
    int
        Version of the update.

    Raises
    ------
    Exception
        On rank 0, as in :func:`synchronize`. If a worker refused the update, other ranks raise PeerError.
    """
    update = publisher.stage(weights)
    if client is None:
        return publisher.commit()
    with ExitStack() as stack:
        try:
            stack.enter_context(_session(client))
            client.update_weights(update_info(update, "stage"))
        except BaseException:
            publisher.abandon()
            with suppress(StateError):
                publisher.commit()  # nothing is staged here: the call fails on the other ranks, which wait in it
            raise
        version = publisher.commit()
        client.update_weights(update_info(update, "load"))
    return version


@contextmanager
def _session(client: Client) -> Generator[None]:
    """Begin an update, and end it, also after an error: workers that have not failed would refuse the next one."""
    client.start_weight_update()
    try:
        yield
    except BaseException:
        with suppress(Exception):
            client.finish_weight_update()
        raise
    client.finish_weight_update()


def update_info(update: Update, phase: str) -> dict[str, Any]:
    """Return the message that describes an update. Workers read the update itself from the store."""
    return {"phase": phase, "update": Listed.of(update).fields(with_run=True)}


def worker_receiver(folder: str | None) -> WeightReceiver:
    """Return the receiver of a worker, which shares the weights in `folder` with the other workers of its machine.

    None: the worker stores the weights in its memory.
    """
    return WeightReceiver(folder=folder, shared=folder is not None)


def send_adapters(
    publisher: Publisher, client: Client, adapters: Mapping[str, Any], folder: Path, keep: int
) -> dict[str, str]:
    """Publish adapters, and make all workers of a server write them to their disks.

    Parameters
    ----------
    publisher : AdapterPublisher
        Publisher whose ``source`` the workers can read.
    client : Client
        Client of the server.
    adapters : mapping
        All adapters, as in :meth:`AdapterPublisher.stage`.
    folder : path
        Absolute path of a folder on the disk of each worker.
    keep : int
        Number of older versions that workers keep in `folder`.

    Returns
    -------
    dict of str to str
        Folder of each adapter on the disks of the workers.

    Raises
    ------
    Exception
        Raised by the client if a worker has refused the adapters, or cannot write them. The server has loaded nothing.
    """
    update = publisher.stage(adapters)
    publisher.commit()
    where = {"source": publisher.source, "folder": str(folder), "keep": keep}
    with _session(client):
        client.update_weights({**update_info(update, "adapters"), "adapters": where})
    return {name: str(version_path(folder, update.head.after) / name) for name in adapters}
