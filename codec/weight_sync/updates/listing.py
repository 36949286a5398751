"""List of the updates in a store, the file ``head``, and the chain of updates that a receiver needs."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from codec.errors import StateError
from codec.files.signing import SigningKey
from codec.weight_sync.updates.identity import MAX_VERSION, NO_DIGEST, RUN_NBYTES, Identity, UpdateHead, other_run
from codec.weight_sync.updates.signatures import check_list, signed_list
from codec.weight_sync.updates.update import Update

_FORMAT = 2
MAX_PARTS = 1 << 16  # maximum number of parts of an update
MAX_NBYTES = 1 << 24  # maximum size of the file ``head``, in bytes


class Listed(NamedTuple):
    """Entry of an update in the list: contents of the update's header, size in bytes, and SHA-256.

    The file of an update in parts is the list of its parts, to which size and SHA-256 belong.
    """

    head: UpdateHead
    nbytes: int
    sha256: bytes | None = None  # None: unknown, so that the update is not read from mirrors
    nparts: int = 0
    rank: int | None = None  # number of a part; None: the whole update

    @classmethod
    def of(cls, update: Update) -> "Listed":
        """Return the entry of an update."""
        return cls(update.head, update.nbytes, update.sha256, update.nparts)

    @classmethod
    def read(cls, entry: Any, run: bytes | None = None) -> "Listed":
        """Return the entry that :meth:`fields` has written; `run` is the run of the list.

        Raises
        ------
        ValueError, LookupError, TypeError
            `entry` is something else.
        """
        version, base, nbytes = entry["version"], entry["base"], entry["nbytes"]
        if not all(type(n) is int and 0 <= n <= MAX_VERSION for n in (version, 0 if base is None else base, nbytes)):
            raise ValueError("an entry has no version, base or size")
        if base is not None and base >= version:
            raise ValueError(f"version {version} does not follow base version {base}")
        if type(nparts := entry.get("parts", 0)) is not int or not 0 <= nparts <= MAX_PARTS:
            raise ValueError("an entry has no number of parts")
        digests = [NO_DIGEST if base is None else _digest(entry["base_digest"]), _digest(entry["digest"])]
        head = UpdateHead(_digest(entry["run"]) if "run" in entry else run, version, base, *digests)
        return cls(head, nbytes, _bytes(entry["sha256"], 32) if "sha256" in entry else None, nparts)

    def fields(self, *, with_run: bool = False) -> dict[str, Any]:
        """Return the entry as JSON values; in a list, the entries do not repeat the run of the list."""
        run = {"run": self.head.run.hex()} if with_run and self.head.run is not None else {}
        before = {} if self.head.base is None else {"base_digest": self.head.base_digest.hex()}
        numbers = {"version": self.head.version, "base": self.head.base, "nbytes": self.nbytes}
        file = {} if self.sha256 is None else {"sha256": self.sha256.hex()}
        parts = {"parts": self.nparts} if self.nparts else {}
        return {**run, **numbers, **parts, **before, "digest": self.head.digest.hex(), **file}

    def describes(self, update: Update) -> bool:
        """Return True if the header and the size of an update are those of this entry."""
        return (update.head, update.nbytes) == (self.head, self.nbytes)

    @property
    def file(self) -> str:
        """Name of the file of the update or part."""
        return file_name(self.head.version, self.head.base, self.rank)


def file_name(version: int, base: int | None, rank: int | None = None) -> str:
    """Return the file name of an update, or of a snapshot if `base` is None; of the part of a rank if it is given."""
    return f"{version:020d}.{'snapshot' if base is None else 'update'}{'' if rank is None else f'.{rank}'}"


class Listing(NamedTuple):
    """List of the updates of one run, oldest first."""

    run: bytes | None = None  # None: the list is empty
    updates: tuple[Listed, ...] = ()

    @property
    def last(self) -> Identity | None:
        """Identity of the weights of the last version; None if the list is empty."""
        return self.updates[-1].head.after if self.updates else None

    @property
    def since_snapshot(self) -> int:
        """Number of updates after the last snapshot."""
        found = next((k for k, one in enumerate(reversed(self.updates)) if one.head.base is None), None)
        return len(self.updates) if found is None else found

    def to_bytes(self, key: SigningKey | None = None) -> bytes:
        """Return the contents of the file ``head``, signed if there is a key."""
        run = None if self.run is None else self.run.hex()
        body = {"format": _FORMAT, "run": run, "updates": [one.fields() for one in self.updates]}
        encoded = json.dumps(body).encode()
        return encoded if key is None else signed_list(encoded, key)

    @classmethod
    def parse(cls, body: bytes, key: SigningKey | None = None) -> "Listing":
        """Return the list in a file ``head``; check its signature if there is a key.

        Raises
        ------
        FrameError
            The list is not signed with `key`.
        ValueError, LookupError, TypeError, RecursionError
            The file is something else.
        """
        if key is not None:
            check_list(body, key)
        if len(body) > MAX_NBYTES or body.count(b",") > 16 + len(body) // 16:  # entries have 20 bytes for each comma
            raise ValueError(f"it is longer than {MAX_NBYTES} bytes, or has more values than a list of updates")
        head: Any = json.loads(body)
        if head["format"] != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        run = None if head["run"] is None else _digest(head["run"])
        updates = tuple(Listed.read(one, run) for one in head["updates"])
        if updates and run is None:
            raise ValueError("it names no run")
        return cls(run, updates)


def _digest(text: Any) -> bytes:
    return _bytes(text, RUN_NBYTES)


def _bytes(text: Any, nbytes: int) -> bytes:
    found = bytes.fromhex(text)
    if len(found) != nbytes:
        raise ValueError(f"a run or digest does not have {nbytes} bytes")
    return found


def chain(listing: Listing, at: Identity | None, *, newer: bool = False) -> list[Listed]:
    """Return the updates that lead from weights to the last version in a list.

    Parameters
    ----------
    listing : Listing
        List of a store.
    at : Identity or None
        Identity of the weights; None: there are none.
    newer : bool
        True: no version may be lower than that of the weights, and those of another run must be higher.

    Returns
    -------
    list of Listed
        Updates in the order of application. If no chain of updates begins at `at`, the list begins with the last
        snapshot from which a chain leads to the last version. Weights of another run always begin with a snapshot.

    Raises
    ------
    StateError
        Neither chain exists, or the last version in the list is older than the weights, or `newer` is violated.
    """
    last = listing.last
    if last is None:
        return []
    if newer:
        check_newer(listing.run, last.version, at)
    if at is not None and other_run(at.run, listing.run):
        at = None
    elif at is not None and at.run is not None and last.version < at.version:
        raise StateError(
            f"the last version in the store is {last.version}, which is older than version {at.version} of the weights:"
            " the store is an old copy, or its trainer went back to an earlier state"
        )
    found = _backwards(listing.updates, last, at)
    if found is None:
        now = "no weights" if at is None else f"version {at.version} of these weights"
        raise StateError(
            f"no chain of updates leads from {now}, or from a snapshot, to version {last.version} in the store: publish"
            " a snapshot"
        )
    if newer and found:
        check_newer(listing.run, found[0].head.version, at)
    return found


def check_newer(run: bytes | None, version: int, at: Identity | None) -> None:
    """Raise StateError if a version is lower than that of weights, or of another run and not higher."""
    if at is not None and version < at.version + other_run(at.run, run):
        raise StateError(
            f"a signed update leads to version {version}, but the weights had version {at.version} already: an old "
            "update was replayed, or the trainer has begun again with an empty store. In the second case, make a new "
            "receiver, without its old folder"
        )


def _backwards(updates: Iterable[Listed], last: Identity, at: Identity | None) -> list[Listed] | None:
    """Walk the chain once, from the last version backwards; each step leads to a lower version."""
    to: dict[Identity, Listed] = {}
    snapshots: dict[Identity, Listed] = {}
    for one in updates:
        (snapshots if one.head.base is None else to)[one.head.after] = one
    path: list[Listed] = []
    from_snapshot: list[Listed] | None = None
    now: Identity | None = last
    while now is not None and not now.matches(at):
        if from_snapshot is None and now in snapshots:
            from_snapshot = [snapshots[now], *reversed(path)]
        if (step := to.get(now)) is None:
            return from_snapshot
        path.append(step)
        now = step.head.before
    return path[::-1]
