"""Send weight updates: encode the difference of a trainer's weights from the weights that receivers have."""

import os
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from codec._options import CallOptions
from codec.arguments import whole
from codec.errors import ArgumentError, StateError
from codec.files.signing import Key, SigningKey
from codec.weight_sync.bases.folder import base_in
from codec.weight_sync.closing import Closing
from codec.weight_sync.http import environment
from codec.weight_sync.updates.identity import MAX_VERSION, RUN_NBYTES, Identity
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.weights import Given, kinds_of
from codec.weight_sync.updates.writing import Progress, write_update


class WeightSender(Closing):
    """Trainer side of weight synchronization: stores the base, a copy of the receivers' weights, and encodes updates.

    A sender that begins with new weights begins a *run*, which has a random identity. Updates and receivers have the
    identity of their run, so that a receiver refuses updates of another run, whatever their versions.

    The base changes in two phases. :meth:`diff` encodes an update and does not change the base. :meth:`commit` applies
    the update to the base; call it after the receivers have confirmed the update. After a failed transfer, the next
    :meth:`diff` refers to the same base, so that no change is lost.

    Parameters
    ----------
    weights : mapping, torch.nn.Module, or iterable of (str, tensor); optional
        Weights that receivers have. They are copied to host memory, without conversion, and become the base. Default:
        the weights in `folder`.
    version : int
        Version of `weights`.
    folder : str or path, optional
        Folder for the base, whose file is mapped to memory and survives the process. Default: the base is stored in
        memory only.
    options : CallOptions, optional
        Engine and number of threads, made by :func:`options`.
    sign : bytes, str, path or Ed25519PrivateKey; optional
        Key that signs all updates for receivers with ``verify=``: a secret key of at least 16 bytes, which receivers
        need, too, or an Ed25519 key, in PEM or of the package cryptography. A str or path names a file with the key.
        Default: the key in the file that the environment variable CODEC_SIGN_KEY_FILE names, if it is set.

    Attributes
    ----------
    run : bytes
        Run of the base, 16 random bytes. A folder keeps its run.
    version : int
        Version of the base.
    digest : bytes
        Digest of the base, 16 bytes.
    pending : Update or None
        Update that is encoded but not yet committed.

    Raises
    ------
    ArgumentError
        A tensor cannot be read, or `weights` and `folder` are both missing.
    StateError
        The folder is in use, damaged, or holds weights although `weights` are given.

    Examples
    --------
    >>> weights = {"w": np.zeros((64, 64), np.float32)}
    >>> sender, receiver = codec.WeightSender(weights), codec.WeightReceiver(weights)
    >>> weights["w"][0, :3] = 1.0
    >>> update = sender.diff(weights)
    >>> receiver.apply(update.data)
    >>> sender.commit(update.version)
    >>> sender.version, receiver.version, bool((dict(receiver.tensors())["w"] == weights["w"]).all())
    (1, 1, True)
    """

    def __init__(
        self,
        weights: Given | None = None,
        *,
        version: int = 0,
        folder: str | PathLike[str] | None = None,
        options: CallOptions | None = None,
        sign: Key | SigningKey | None = None,
    ) -> None:
        self._key = environment.sign_key(sign)
        if weights is None and folder is None:
            raise ArgumentError("pass weights, those that receivers have, or a folder that holds them")
        self._base = base_in(folder, None, options)
        self._options = options
        self._pending: Update | None = None
        try:
            if weights is not None:
                self._base.fill(weights, version, os.urandom(RUN_NBYTES))
            if self._base.version is None:
                raise StateError(f"{folder} holds no weights: pass weights")
        except BaseException:
            self._base.close()
            raise
        self._last = self._base.version

    @property
    def identity(self) -> Identity:
        """Run, version and digest of the base."""
        self._base.settle()
        if (identity := self._base.identity) is None:
            raise StateError("the sender is closed")
        return identity

    @property
    def run(self) -> bytes:
        """Run of the base, 16 random bytes."""
        run = self.identity.run
        assert run is not None
        return run

    @property
    def version(self) -> int:
        """Version of the base."""
        return self.identity.version

    @property
    def digest(self) -> bytes:
        """Digest of the base, 16 bytes."""
        return self.identity.digest

    @property
    def pending(self) -> Update | None:
        """Update that is encoded but not yet committed; None if there is none."""
        return self._pending

    @property
    def next_version(self) -> int:
        """Default version of the next update: one more than the last update's, whether committed or not."""
        return max(self._last, self.version) + 1

    def diff(
        self,
        weights: Given,
        *,
        version: int | None = None,
        full: bool | None = False,
        file: str | PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> Update:
        """Encode the difference of new weights from the base. The base is unchanged until :meth:`commit`.

        A pending update is abandoned first, as by :meth:`abandon`.

        Parameters
        ----------
        weights : mapping, torch.nn.Module, or iterable of (str, tensor)
            All new weights, in any order. An iterable is read once, and each of its tensors is encoded before the next
            one is requested: a generator may gather sharded tensors one by one, also into one buffer. So is a mapping
            that is not a dict. Tensors on a device are copied to host memory in pieces of 32 MiB.
        version : int, optional
            Version of the new weights, at least :attr:`next_version`, the default.
        full : bool or None
            True: encode a snapshot, which needs no base and may change names, dtypes and shapes. None: encode a
            snapshot if names, dtypes or shapes have changed, or if it is smaller; `weights` must be a dict or a module,
            which is read up to three times.
        file : str or path, optional
            File for the update. It appears once it is complete, and must not change before :meth:`commit`. Encoding
            then needs at most 256 MB of memory, for weights of any size. Default: the update is in memory.
        progress : callable, optional
            Called after each tensor as ``progress(done, total)``, with numbers of bytes of weights.

        Returns
        -------
        Update
            Encoded update; send its ``data`` to the receivers.

        Raises
        ------
        ArgumentError
            Names, dtypes or shapes differ from the base, a tensor is missing, or the file cannot be written.
        """
        self._base.settle()
        number = self.next_version if version is None else whole("version", version, self.next_version, MAX_VERSION)
        self._pending = None
        choose = full is None
        if choose:
            full = kinds_of(weights) != self._base.weights.kinds
        base = None if full else self._base.weights
        update = write_update(weights, number, base, self.version, **self._how(file, progress))
        if choose and base is not None and 2 * update.nbytes > update.total.nbytes:
            update = self._smaller(update, weights, file)
        self._pending, self._last = update, number
        return update

    def _smaller(self, update: Update, weights: Given, file: str | PathLike[str] | None) -> Update:
        """Return `update` or a snapshot of the same version, whichever is smaller; `file` contains what is returned."""
        path = None if file is None else Path(file)
        other = None if path is None else path.with_name(f".{path.name}.full.tmp")  # a name that stores clean up
        try:
            snapshot = write_update(weights, update.version, None, None, **self._how(other, None))
            if snapshot.nbytes >= update.nbytes:
                return update
            if path is not None and other is not None:
                try:
                    other.replace(path)
                except OSError as e:
                    raise ArgumentError(f"{str(path)!r} cannot be written: {e.strerror}") from None
            return snapshot
        finally:
            if other is not None:
                with suppress(OSError):
                    other.unlink(missing_ok=True)

    def commit(self, version: int | None = None) -> None:
        """Apply the pending update to the base. Call this after the receivers have applied the update.

        Parameters
        ----------
        version : int, optional
            Version that the receivers have confirmed. If given, it must be the pending update's.

        Raises
        ------
        StateError
            No update is pending, or the pending update has another version.
        """
        self._base.settle()
        update = self._pending
        if update is None or (version is not None and update.version != version):
            found = "no update" if update is None else f"the update to version {update.version}"
            raise StateError(f"{found} is pending" + ("" if version is None else f", but version={version} was passed"))
        self._base.apply(update)
        self._pending = None

    def adopt(self, update: Update) -> None:
        """Apply an update that receivers already have to the base, such as one that an earlier process published.

        Raises
        ------
        StateError, FrameError
            As in :meth:`WeightReceiver.stage`.
        """
        self._base.settle()
        self._base.check_order(update)
        self._base.check(update)
        self._base.apply(update)
        self._pending, self._last = None, max(self._last, update.version)

    def abandon(self) -> None:
        """Drop the pending update, if any. Call this if receivers have not applied it. Its version is not reused.

        A receiver that has applied the update nevertheless needs a snapshot: ``diff(weights, full=True)``.
        """
        self._pending = None

    def snapshot(self, *, file: str | PathLike[str] | None = None, progress: Progress | None = None) -> Update:
        """Encode the whole base as a snapshot, for receivers that have no weights or another version.

        Parameters
        ----------
        file, progress : optional
            As in :meth:`diff`.

        Returns
        -------
        Update
            Snapshot of version :attr:`version`.
        """
        self._base.settle()
        views = {name: slot.view for name, slot in self._base.weights.items()}
        return write_update(views, self.version, None, None, **self._how(file, progress))

    def _how(self, file: str | PathLike[str] | None, progress: Progress | None) -> dict[str, Any]:
        """Return the keyword arguments of :func:`write_update`."""
        return {"file": file, "options": self._options, "progress": progress, "run": self.run, "key": self._key}

    def close(self) -> None:
        """Unlock the folder, so that another object may open it."""
        self._base.close()

    def __repr__(self) -> str:
        return f"<codec.WeightSender version {self._base.version}, {len(self._base.weights)} tensors>"
