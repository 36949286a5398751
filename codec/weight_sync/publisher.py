"""Publish updates from a trainer: a sender, a store, and an optional HTTP server of the store in one object."""

from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codec.arguments import whole
from codec.errors import ArgumentError, CodecError, FrameError, StateError
from codec.files.signing import Key, SigningKey
from codec.stores.locations import scheme_of
from codec.weight_sync.closing import Closing
from codec.weight_sync.group_publisher import GroupPublisher
from codec.weight_sync.http.server import UpdateServer, serve
from codec.weight_sync.sender import WeightSender
from codec.weight_sync.store.source import read_update
from codec.weight_sync.store.update_store import UpdateStore
from codec.weight_sync.updates.identity import Identity, other_run
from codec.weight_sync.updates.listing import chain
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.weights import Given

if TYPE_CHECKING:
    from codec.weight_sync.http.credentials import Tls


class Publisher(Closing):
    """Trainer side of weight synchronization through a folder or a bucket, with a two-phase commit.

    :meth:`stage` writes the file of an update, which receivers can check if the caller sends them its name.
    :meth:`commit` publishes the update, so that :func:`pull` finds it, and applies it to the base. A receiver that has
    failed or joins late catches up with the chain of updates, or from a snapshot.

    Parameters
    ----------
    folder : str or path
        Folder of the store, or URL of a folder in a bucket, as in :class:`UpdateStore`.
    group : ProcessGroup, optional
        Group of ranks of torch.distributed that all make the same calls with their shards of the weights. Each rank
        sends the shards that it holds, and no values are gathered. Default: this process has all weights.
    host : str, optional
        Address on which to serve the folder over HTTP. Default: no server; receivers read the folder directly.
    port : int
        Port on which to serve the folder; 0: any free port. With `group`, each rank serves its folder on the port
        `port` + its rank.
    base : str or path, optional
        Folder for the base, as in :class:`WeightSender`. With `group`, each rank uses a folder ``rank-N`` in it.
    snapshot_every : int
        Number of updates after which a snapshot of the last version is published, too.
    token, tls : optional
        Token and certificate of the server, as in :func:`serve`.
    sign : bytes, str, path or Ed25519PrivateKey; optional
        Key that signs updates and their list, as in :class:`codec.WeightSender`.

    Attributes
    ----------
    source : str
        Absolute path or URL of the store, to pass to :func:`pull`.

    Examples
    --------
    >>> from codec.weight_sync import Publisher, pull
    >>> publisher = Publisher(tempfile.mkdtemp(), host="127.0.0.1")
    >>> publisher.publish({"w": np.zeros(3, np.float32)})
    0
    >>> publisher.publish({"w": np.ones(3, np.float32)})
    1
    >>> pull(codec.WeightReceiver(), publisher.source)
    1
    >>> publisher.close()
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        group: Any = None,
        host: str | None = None,
        port: int = 0,
        base: str | PathLike[str] | None = None,
        snapshot_every: int = 100,
        token: str | None = None,
        tls: "Tls | None" = None,
        sign: Key | SigningKey | None = None,
    ) -> None:
        if host is None and (token is not None or tls is not None):
            raise ArgumentError("token= and tls= are for a server: pass host=")
        self._every = whole("snapshot_every", snapshot_every, 1)
        if host is not None and scheme_of(folder) not in (None, "file"):
            raise ArgumentError(
                "host= serves a folder over HTTP, and receivers read a bucket themselves: leave out host="
            )
        self._group: GroupPublisher | None = None
        self._server: UpdateServer | None = None
        self._sender: WeightSender | None = None
        if group is not None:
            how: dict[str, Any] = {"host": host, "port": port, "base": base, "token": token, "tls": tls, "sign": sign}
            try:
                self._group = GroupPublisher(folder, group, snapshot_every=self._every, **how)
            finally:
                del token, how  # tracebacks may show local variables
            self.source = self._group.source
            return
        self._store = UpdateStore(folder, sign=sign)
        self._base = base
        self._staged: Update | None = None
        self._published = False  # True: the list in the store is of this object's run
        try:
            if host is not None:
                self._server = serve(self._store.folder, host, port, token=token, tls=tls)
        finally:
            del token  # tracebacks may show local variables
        self.source = self._store.source if self._server is None else self._server.url

    @property
    def version(self) -> int | None:
        """Last published version; None if nothing was published."""
        if self._group is not None:
            return self._group.version
        last = self._store.listing().last
        return None if last is None else last.version

    def stage(self, weights: Given, *, full: bool | None = False) -> Update:
        """Encode new weights, and write the file of the update. The update is published only by :meth:`commit`.

        Parameters
        ----------
        weights : mapping, torch.nn.Module, or iterable of (str, tensor)
            All weights, as in :meth:`WeightSender.diff`. With `group`, a dict or module with the weights of this rank:
            DTensors, tensors that other ranks hold, too, or both.
        full : bool or None
            True: write a snapshot. It is needed if receivers do not have the base, or if names, dtypes or shapes of
            tensors change. The first update is always a snapshot. None: choose, as in :meth:`WeightSender.diff`.

        Returns
        -------
        Update
            The staged update.

        Raises
        ------
        StateError
            Another publisher has published to the store, or the folder of the base cannot be used.
        PeerError
            The call has failed on another rank of `group`, or the rank is lost.
        ArgumentError
            The weights cannot be encoded, as in :meth:`WeightSender.diff`, or the store cannot be used.
        """
        if self._group is not None:
            return self._group.stage(weights, bool(full))
        self._staged = None
        last = self._follow_store()
        if self._sender is None:
            version = 0 if last is None else last.version + 1
            self._sender = WeightSender(weights, version=version, **self._how())
            self._staged = self._sender.snapshot(file=self._store.path(version, None))
            return self._staged
        sender = self._sender
        if sender.identity != last:  # receivers do not have the base
            full = True
        number = max(sender.next_version, 0 if last is None else last.version + 1)
        file = self._store.path(number, None if full else sender.version)
        update = sender.diff(weights, version=number, full=full, file=file)
        if update.base is None and not full:  # the sender has chosen
            self._store.rename(file, self._store.path(number, None))
        self._staged = update
        return update

    def _how(self) -> dict[str, Any]:
        """Return the keyword arguments of the sender."""
        return {"folder": self._base, "sign": self._store.key}

    def _follow_store(self) -> Identity | None:
        """Apply published updates that the base lacks, and return the last version in the store.

        The store decides what was published. An earlier call, or an earlier process, may have been interrupted between
        the publication of an update and its commit to the base.
        """
        listing = self._store.listing()
        if self._sender is None:
            if self._base is None or not (Path(self._base) / "state").exists():
                return listing.last
            self._sender = WeightSender(**self._how())
        elif self._published and other_run(listing.run, self._sender.run):
            raise StateError(
                f"another publisher has published to {self._store.source}: only one may write to a store. Make a new "
                "Publisher to take the store over"
            )
        sender, last = self._sender, listing.last
        if last is None or last.run != sender.run or last.version <= sender.version:
            return last
        try:
            key, source = self._store.key, self._store.source
            updates = [read_update(source, one, key=key) for one in chain(listing, sender.identity)]
            if key is not None:
                for update in updates:
                    update.check_signature(key)
        except CodecError:  # the store does not lead to its last version: the next update is a snapshot
            return last
        with suppress(FrameError):
            for update in updates:
                sender.adopt(update)
        return last

    def commit(self) -> int:
        """Publish the staged update, and apply it to the base.

        If a call fails or is interrupted after receivers can see the update, the next call of :meth:`commit`,
        :meth:`stage` or :meth:`publish` completes it.

        Returns
        -------
        int
            Version of the update.

        Raises
        ------
        StateError
            No update is staged, or the folder of the base cannot be written.
        ArgumentError
            The store cannot be written.
        """
        if self._group is not None:
            return self._group.commit()
        sender, update = self._sender, self._staged
        if sender is None or update is None:
            raise StateError("no update is staged: call stage(weights) first")
        self._store.publish(update)
        self._published = True
        if sender.identity != update.head.after:
            sender.commit(update.version)
        self._staged = None
        if self._store.listing().since_snapshot >= self._every:
            self._store.publish(sender.snapshot(file=self._store.path(sender.version, None)))
        return update.version

    def abandon(self) -> None:
        """Drop the staged update. The next update refers to the same base, and has a higher version."""
        if self._group is not None:
            self._group.abandon()
        if self._sender is not None:
            self._sender.abandon()
        self._staged = None

    def publish(self, weights: Given) -> int:
        """Stage and commit an update, and return its version."""
        self.stage(weights)
        return self.commit()

    def close(self) -> None:
        """Stop the HTTP server, and unlock the folder of the base."""
        if self._group is not None:
            self._group.close()
        if self._server is not None:
            self._server.close()
        if self._sender is not None:
            self._sender.close()
