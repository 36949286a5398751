"""Receive weight updates: check an update, pass the changed tensors to the serving program, and commit it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any

from codec._options import CallOptions
from codec.errors import ArgumentError, StateError
from codec.files.signing import Key, SigningKey
from codec.weight_sync.bases.folder import base_in
from codec.weight_sync.bases.shared_folder import shared_base
from codec.weight_sync.closing import Closing
from codec.weight_sync.http import environment
from codec.weight_sync.served import Load, writer
from codec.weight_sync.serving import Serving
from codec.weight_sync.updates.identity import Identity
from codec.weight_sync.updates.kinds import TensorKind
from codec.weight_sync.updates.listing import Listed, check_newer
from codec.weight_sync.updates.shards import Selection
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.weights import Given, known_names


class WeightReceiver(Closing):
    """Server side of weight synchronization: stores the weights of one version, and applies updates to them.

    An update is staged, passed to the program that serves the weights, and committed. It is applied to all tensors or
    to none: after any failure, the receiver has either the weights before the update or the weights after it.

    A receiver serves one program. Once a call with `load` or `into` returns, the program has the weights of the
    receiver's version: the receiver remembers in :attr:`unloaded` which tensors the program lacks, and passes them
    together with those that an update changes. After an error, the program has the weights of :attr:`version`, except
    for tensors in :attr:`unloaded`, which the next call passes again.

    Parameters
    ----------
    weights : mapping, torch.nn.Module, or iterable of (str, tensor); optional
        Weights of `version`, which the program serves. They are copied to host memory. Default: the weights in
        `folder`, of which the program has none yet. Without either, the first update must be a snapshot.
    version : int
        Version of `weights`.
    folder : str or path, optional
        Folder for the weights, whose file is mapped to memory. The weights survive the process, even if it is killed
        during an update. Default: the weights are stored in memory only.
    shared : bool
        True: receivers of several processes on one machine share `folder`, and its memory. Each of them serves a
        program, and has a version of its own; an update is read, checked and stored by the first one. They need the
        same user and the same `verify`. An update needs disk space for a second copy of the weights. Default: the
        folder is in use by one receiver.
    max_nbytes : int, optional
        Maximum size of all kept tensors in bytes, for senders that are not trusted: a small snapshot may expand.
    options : CallOptions, optional
        Engine and number of threads, made by :func:`options`.
    verify : bytes, str, path or Ed25519PublicKey; optional
        Secret or public key of the trainer, as ``sign=`` of :class:`WeightSender`. Updates and lists that are not
        signed with it are refused, and so are lower versions, even of another run. Default: the key in the file that
        the environment variable CODEC_VERIFY_KEY_FILE names; if it is not set, signatures are ignored.
    only : mapping, or iterable of str; optional
        Tensors to keep: names, or a mapping as `into` of :meth:`apply`, whose boxes are read. Shards without a value of
        a box are not kept. Not with `weights` or `shared`. Default: all tensors.

    Attributes
    ----------
    run : bytes or None
        Run of the trainer that the weights belong to, 16 random bytes; None: the first update decides.
    version : int or None
        Version of the weights; None before the first weights.
    digest : bytes
        Digest of the weights, 16 bytes.
    kinds : dict of str to TensorKind
        ``dtype`` and ``shape`` of all tensors.
    unloaded : frozenset of str
        Names of the tensors that the serving program may lack.
    staged : Update or None
        Update that is staged but not yet committed.

    Raises
    ------
    ArgumentError
        A tensor cannot be read, or arguments exclude each other.
    StateError
        The folder is in use, damaged, or holds weights although `weights` are given.

    Examples
    --------
    >>> sender = codec.WeightSender({"w": np.arange(4, dtype=np.float32)})
    >>> receiver = codec.WeightReceiver()
    >>> receiver.apply(sender.snapshot().data)
    >>> update = sender.diff({"w": np.array([0, 1, 2, 5], np.float32)})
    >>> receiver.apply(update.data, load=lambda tensors: print(dict(tensors)))
    {'w': array([0., 1., 2., 5.], dtype=float32)}
    >>> receiver.apply(update.data)
    Traceback (most recent call last):
    codec.errors.StateError: the update to version 1 was applied already; the weights are unchanged
    """

    def __init__(
        self,
        weights: Given | None = None,
        *,
        version: int = 0,
        folder: str | PathLike[str] | None = None,
        shared: bool = False,
        max_nbytes: int | None = None,
        options: CallOptions | None = None,
        verify: Key | SigningKey | None = None,
        only: Mapping[str, Any] | Iterable[str] | None = None,
    ) -> None:
        self.key = environment.verify_key(verify)
        where = folder, max_nbytes, options
        if only is not None and (weights is not None or shared):
            raise ArgumentError("only= is not for a receiver with weights, or with shared=True: leave out only=")
        chosen = None if only is None else Selection.of(only)
        self._base = shared_base(*where, self.key) if shared else base_in(*where, chosen)
        self._serving = Serving(self._base)
        self.staged: Update | None = None
        try:
            if weights is not None:
                self._base.fill(weights, version)
        except BaseException:
            self._base.close()
            raise

    @property
    def identity(self) -> Identity | None:
        """Run, version and digest of the weights; None before the first weights."""
        self._base.settle()
        return self._base.identity

    @property
    def run(self) -> bytes | None:
        """Run of the trainer that the weights belong to, 16 random bytes; None: the first update decides."""
        self._base.settle()
        return self._base.run

    @property
    def version(self) -> int | None:
        """Version of the weights; None before the first weights."""
        self._base.settle()
        return self._base.version

    @property
    def digest(self) -> bytes:
        """Digest of the weights, 16 bytes."""
        self._base.settle()
        return self._base.weights.digest()

    @property
    def kinds(self) -> dict[str, TensorKind]:
        """Dtype and shape of all tensors."""
        return self._base.weights.tensors

    @property
    def max_nbytes(self) -> int | None:
        """Maximum size of all tensors together, in bytes; None: no limit."""
        return self._base.max_nbytes

    @property
    def unloaded(self) -> frozenset[str]:
        """Names of the tensors that the serving program may lack; all of them after a folder was opened.

        The next call with `load` or `into` passes these tensors, too, as does :meth:`updated`.
        """
        return frozenset(self._serving.unloaded)

    @property
    def unneeded(self) -> dict[int, bytes]:
        """Digests of those parts of the weights of which nothing is kept, by rank of the trainer, as far as known."""
        return self._base.unneeded

    @property
    def turn(self) -> AbstractContextManager[bool]:
        """Lock of a thread that stages an update, loads and commits it."""
        return self._base.turn

    def stage(self, update: Any, *, restart: bool = False) -> Update:
        """Check an update completely, and stage it. The weights are unchanged. Any staged update is dropped first.

        Parameters
        ----------
        update : Update, bytes, buffer or array
            The update. Its bytes must not change before :meth:`commit`.
        restart : bool
            True: accept a snapshot of any run and version, such as that of a trainer that has begun again; with
            ``verify=``, no lower version. Default: the update must be of the same run as the weights, and newer.

        Returns
        -------
        Update
            The staged update.

        Raises
        ------
        StateError
            The update needs another base than the weights, is older, of another run, or was applied already.
        FrameError
            The update is damaged, invalid, or not signed with the key of this receiver.
        LimitError
            The weights would be larger than `max_nbytes`.
        """
        self._base.settle()
        self.staged = None
        parsed = update if isinstance(update, Update) else Update(update)
        if self.key is not None:
            parsed.check_signature(self.key)
            check_newer(parsed.run, parsed.version, self._base.identity)
        self._base.check_order(parsed, restart=restart)
        self._base.check(parsed)
        self._serving.begin()
        self.staged = parsed
        return parsed

    def stage_next(self, updates: Sequence[Listed], read: Callable[[Listed], Update]) -> int:
        """Stage the first of the `updates` that lead to the last version of a store, and return 1.

        Receivers that share a folder call `read` in turn. If another one has stored a version of `updates`, the last
        such version is staged without `read`; the result is the number of updates that lead to it.
        """
        with self._base.preparing():
            stored = self._base.stored([one.head for one in updates])
            n, update = (0, read(updates[0])) if stored is None else stored
            try:
                self.stage(update, restart=True)
            except BaseException:
                self.discard()
                raise
            return n + 1

    def updated(self, names: Iterable[str] | None = None, *, like: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield copies of tensors with their values after the staged update, for the program to load.

        :meth:`commit` then counts these tensors as loaded.

        Parameters
        ----------
        names : iterable of str, optional
            Names of the tensors. Default: the tensors that the update changes, and those in :attr:`unloaded`.
        like : array or tensor, optional
            Yield tensors of the library of this one, such as ``torch.empty(0)``. Default: numpy arrays.

        Yields
        ------
        (str, tensor)
            Name, and a new tensor in host memory.

        Raises
        ------
        StateError
            No update is staged, or the weights have changed since the first tensor was yielded.
        """
        update = self._require_staged()
        chosen = (
            self._serving.lacking(update) if names is None else known_names(names, self._base.tensors_after(update))
        )
        yield from self._serving.updated(chosen, update, like)

    def tensors(self, names: Iterable[str] | None = None, *, like: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield copies of tensors with their current values, which do not include a staged update.

        Parameters
        ----------
        names : iterable of str, optional
            Names of the tensors. Default: all.
        like : array or tensor, optional
            As in :meth:`updated`.

        Raises
        ------
        StateError
            The weights have changed since the first tensor was yielded.
        """
        self._base.settle()
        table = self._base.weights.tensors
        yield from self._base.tensors(list(table) if names is None else known_names(names, table), None, like)

    def commit(self) -> None:
        """Apply the staged update to the weights of this receiver, after the program has loaded :meth:`updated`.

        Tensors that :meth:`updated` has not yielded since :meth:`stage` are then in :attr:`unloaded`.

        Raises
        ------
        StateError
            No update is staged, or the folder cannot be written: the update is not applied, or is completed later.
        """
        self._serving.commit(self._require_staged())
        self.staged = None

    def discard(self) -> None:
        """Drop the staged update, if there is one."""
        self.staged = None
        self._base.drop()

    def apply(
        self, update: Any, load: Load | None = None, *, like: Any = None, into: Any = None, restart: bool = False
    ) -> None:
        """Stage an update, pass the changed tensors to `load` or write them to `into`, and commit.

        Tensors in :attr:`unloaded` are passed with the changed ones, so that the program then serves the version of the
        update. If the weights have this version already, as after a restart, only these tensors are passed.

        Parameters
        ----------
        update : Update, bytes, buffer or array
            As in :meth:`stage`.
        load : callable, optional
            Function of an iterator of (name, tensor), such as the ``load_weights`` method of a model. If `load` raises
            an exception, or the commit fails, `load` is called a second time with the old values of these tensors, so
            that the program serves the old version again; then the exception is re-raised. For a first snapshot there
            are no old values, and no second call. If the second call fails, too, the tensors stay in :attr:`unloaded`.
        like : array or tensor, optional
            As in :meth:`updated`.
        into : mapping from names to tensors, or torch.nn.Module; optional
            Served tensors, as an alternative to `load`, which are overwritten in pieces of 32 MiB. They must be
            contiguous, writable, and in host memory or torch tensors on any device. Of a DTensor, the local shard is
            overwritten. A pair (tensor, offsets) gets the values of the box that begins at these indices; a list of
            pairs gets several boxes. Nothing may read them during the call. After an error they have their old values.
        restart : bool
            As in :meth:`stage`.

        Raises
        ------
        StateError, FrameError, LimitError
            As in :meth:`stage`; `load` was not called, and `into` is unchanged. StateError: the folder cannot be
            written, as in :meth:`commit`; the program serves :attr:`version`.
        ArgumentError
            `load` and `into` are both given, or `into` lacks a tensor, or has another dtype or shape for one.
        """
        with self.turn:
            parsed = update if isinstance(update, Update) else Update(update)
            if self.unloaded and (load is not None or into is not None) and self._base.has(parsed):
                self.reload(load, like=like, into=into, names=self.unloaded)
                return
            self.stage(parsed, restart=restart)
            self.load_staged(load, like=like, into=into)

    def load_staged(self, load: Load | None = None, *, like: Any = None, into: Any = None) -> None:
        """Pass the tensors that the staged update changes to `load` or `into`, and commit, as :meth:`apply`."""
        with self.turn:
            staged = self._require_staged()
            try:
                if load is None and into is None:
                    self._serving.commit(staged)
                else:
                    after = self._base.tensors_after(staged)
                    kinds = {name: after[name] for name in self._serving.lacking(staged)}
                    self._serving.advance(staged, writer(self._base, load, into, kinds, like))
            finally:
                self.discard()

    def reload(
        self, load: Load | None = None, *, like: Any = None, into: Any = None, names: Iterable[str] | None = None
    ) -> None:
        """Pass the current values of all tensors to a program that lacks them, such as one that was restarted.

        Parameters
        ----------
        load, like, into : optional
            As in :meth:`apply`.
        names : iterable of str, optional
            Names of the tensors. Default: all.

        Raises
        ------
        ArgumentError
            Not exactly one of `load` and `into` is given, or `into` does not fit.
        """
        with self.turn:
            self._base.settle()
            kinds = self._base.weights.tensors
            chosen = list(kinds) if names is None else known_names(names, kinds)
            self._serving.reload(chosen, writer(self._base, load, into, {name: kinds[name] for name in chosen}, like))

    def verify(self) -> None:
        """Recompute the digests of all tensors in memory, and compare them with the stored digests.

        Raises
        ------
        StateError
            The memory was changed by something other than this receiver.
        """
        self._base.settle()
        if damaged := self._base.weights.damaged():
            raise StateError(
                f"{len(damaged)} tensors are damaged in memory: {', '.join(map(repr, damaged[:5]))}. Apply a snapshot"
            )

    def close(self) -> None:
        """Unlock the folder, so that another object may open it."""
        self._base.close()

    def __repr__(self) -> str:
        return f"<codec.WeightReceiver version {self._base.version}, {len(self._base.weights.tensors)} tensors>"

    def _require_staged(self) -> Update:
        self._base.settle()
        if self.staged is None:
            raise StateError("no update is staged: call stage(update) first")
        return self.staged
