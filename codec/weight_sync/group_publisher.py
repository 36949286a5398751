"""Publish updates from all ranks of a trainer: each rank encodes and writes the shards that it holds, without a gather.

A version is published in two phases. Each rank writes the file of its part; once all ranks have done so, rank 0 writes
the list of parts, and then the list of the store, which publishes the version. Then each rank applies its part to its
base. A rank that dies before leaves the previous version valid. A rank that dies after the publication lacks it in its
base, and applies it when it is started again with the same base. In all other cases in which the base of a rank is not
the published version, all ranks begin a new run with a snapshot.
"""

import functools
import hashlib
import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codec.errors import ArgumentError, CodecError, StateError
from codec.weight_sync.bases.base import Base
from codec.weight_sync.bases.folder import base_in
from codec.weight_sync.closing import Closing
from codec.weight_sync.http.server import UpdateServer, serve
from codec.weight_sync.ranks import Held, PublishingRanks, assigned, described, held_in, plan_of
from codec.weight_sync.store.source import StoreReader
from codec.weight_sync.store.update_store import UpdateStore
from codec.weight_sync.updates.identity import RUN_NBYTES, other_run
from codec.weight_sync.updates.listing import Listed
from codec.weight_sync.updates.parts import Part, PartedUpdate, Parts
from codec.weight_sync.updates.shards import Shard, check_name, local_shards
from codec.weight_sync.updates.update import Update
from codec.weight_sync.updates.weights import Given, is_streamed, items, kind_of, view_of
from codec.weight_sync.updates.writing import write_update

if TYPE_CHECKING:
    from codec.files.signing import Key, SigningKey
    from codec.weight_sync.http.credentials import Tls


class GroupPublisher(Closing):
    """Implementation of :class:`Publisher` for ``group=``; all ranks of the group make the same calls.

    Parameters
    ----------
    folder, host, port, base, snapshot_every, token, tls, sign : optional
        As in :class:`Publisher`.
    group : ProcessGroup
        Group of ranks.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        group: Any,
        *,
        host: str | None,
        port: int,
        base: str | PathLike[str] | None,
        snapshot_every: int,
        token: str | None,
        tls: "Tls | None",
        sign: "Key | SigningKey | None",
    ) -> None:
        self._ranks = PublishingRanks(group)
        self._every = snapshot_every
        self._folder = None if base is None else Path(base) / f"rank-{self._ranks.rank}"
        self._base: Base | None = None
        self._staged: PartedUpdate | None = None
        self._plan = ""  # identity of the assignment of shards to ranks
        self._own: list[Shard] = []  # shards that this rank sends
        self._published: bytes | None = None  # run that this object has published
        self._number = -1  # highest version that was staged
        self._server: UpdateServer | None = None
        self._server: UpdateServer | None = None
        self._url: str | None = None
        start = functools.partial(self._serve, host, port, token, tls)
        del token
        try:
            # Rank 0 creates the list of the store before another rank looks for it
            with self._ranks.call():
                first = self._ranks.agree("open", lambda: self._open(folder, sign) if self._ranks.rank == 0 else None)[
                    0
                ]
                self._ranks.agree("open all", lambda: None if self._ranks.rank == 0 else self._open(folder, sign))
                urls = self._ranks.agree("serve", start, last=True)
        except BaseException:
            self.close()
            raise
        finally:
            del start  # tracebacks may show local variables
        self.source: str = urls[0] or first["source"]
        self.version: int | None = first["version"]

    def _open(self, folder: str | PathLike[str], sign: "Key | SigningKey | None") -> dict[str, Any]:
        self._store = UpdateStore(folder, sign=sign)
        last = self._store.listing().last
        return {"source": self._store.source, "version": None if last is None else last.version}

    def _serve(self, host: str | None, port: int, token: str | None, tls: "Tls | None") -> str | None:
        if host is None:
            return None
        self._server = serve(self._store.folder, host, port and port + self._ranks.rank, token=token, tls=tls)
        self._url = self._server.url
        return self._url

    def stage(self, weights: Given, full: bool) -> PartedUpdate:
        """Encode the shards of this rank, write the file of its part, and return the update of all ranks."""
        self._staged = None
        with self._ranks.call():
            self._staged = self._stage(weights, full)
        return self._staged

    def _stage(self, weights: Given, full: bool) -> PartedUpdate:
        held: dict[Shard, Any] = {}
        kinds: Held = {}

        def describe() -> dict[str, Any]:
            held.update(_shards(weights))
            kinds.update({key: kind_of(key, view_of(key, x)) for key, x in held.items()})
            description = hashlib.blake2b(described(kinds).encode(), digest_size=16).hexdigest()
            run = os.urandom(RUN_NBYTES).hex()
            return {"held": description, "plan": self._plan, "run": run, "full": full, "last": self._last_version()}

        found = self._ranks.agree("describe", describe)
        self._assign(kinds, plan_of([each["held"] for each in found]), [each["plan"] for each in found])
        last: dict[str, Any] | None = found[0]["last"]
        own = {key: kinds[key] for key in self._own}
        states = self._ranks.agree("follow", lambda: self._follow(last, own))
        number = max(state["number"] for state in states) + 1
        base = None
        if all(state["ready"] for state in states):
            assert self._base is not None
            run, base = self._base.run or b"", None if any(each["full"] for each in found) else self._base.version
        else:
            run = bytes.fromhex(found[0]["run"])
        self._number = number
        written: list[Update] = []

        def encode() -> dict[str, Any]:
            written.append(self._write({key: held[key] for key in self._own}, run, number, base))
            return Part.of(written[0], self._url if self._ranks.rank else None).fields()

        return self._together(run, number, base, self._ranks.agree("encode", encode), written[0])

    def _last_version(self) -> dict[str, Any] | None:
        """Return the last version in the store, with the digests of its parts, on rank 0; None on other ranks."""
        if self._ranks.rank:
            return None
        listing = self._store.listing()
        if self._published is not None and other_run(listing.run, self._published):
            raise StateError(
                f"another publisher has published to {self._store.source}: only one may write to a store. Make a new "
                "Publisher to take the store over"
            )
        if not listing.updates:
            return None
        one, parts = listing.updates[-1], None
        if one.nparts:
            try:
                with StoreReader(self._store.source, key=self._store.key) as store:
                    parts = store.parts(one).to_bytes().decode()
            except CodecError:  # the store does not lead to its last version: the next update is a snapshot
                parts = None
        return {"version": one.head.version, "parts": parts}

    def _assign(self, kinds: Held, plan: str, known: list[str]) -> None:
        """Choose the shards that each rank sends, if they are not those of the previous call."""
        if any(each != plan for each in known):
            held = [held_in(each) for each in self._ranks.agree("assign", lambda: described(kinds))]
            self._own, self._plan = assigned(held)[self._ranks.rank], plan

    def _follow(self, last: dict[str, Any] | None, own: Held) -> dict[str, Any]:
        """Apply the last published version to the base, if the base lacks only that; return the state of the base."""
        if self._base is None:
            self._base = base_in(self._folder, None, None)
        base = self._base
        base.settle()
        ready, number = False, max(self._number, -1 if base.version is None else base.version)
        if last is not None:
            number = max(number, last["version"])
            if last["parts"] is not None:
                ready = self._reach(base, Parts.parse(last["parts"].encode())) and base.weights.kinds == own
        return {"ready": ready, "number": number}

    def _reach(self, base: Base, parts: Parts) -> bool:
        """Return True if the base has the values of this rank's part after an update, or after it is applied here."""
        rank = self._ranks.rank
        if len(parts.parts) != self._ranks.size:
            return False
        head = parts.head_of(rank)
        if head.after == base.identity:
            return True
        if head.before is None or head.before != base.identity:
            return False
        try:
            with StoreReader(self._store.source, key=self._store.key) as store:
                update = store.part(parts.listed(rank))
            if self._store.key is not None:
                update.check_signature(self._store.key)
            base.check(update)
        except CodecError:  # the file is lost or damaged
            return False
        base.apply(update)
        return True

    def _write(self, shards: dict[Any, Any], run: bytes, number: int, base: int | None) -> Update:
        """Write the file of this rank's part."""
        assert self._base is not None
        rank = self._ranks.rank
        update = write_update(
            shards,
            number,
            None if base is None else self._base.weights,
            base,
            file=self._store.path(number, base, rank),
            options=None,
            run=run,
            key=self._store.key,
        )
        self._store.put(update, rank)
        return update

    def _together(
        self, run: bytes, number: int, base: int | None, fields: list[dict[str, Any]], own: Update
    ) -> PartedUpdate:
        """Return the update of all ranks, after rank 0 has seen all parts, and has written their list."""
        parts = Parts.of(run, number, base, [Part.read(each) for each in fields])
        update = PartedUpdate(parts.to_bytes(self._store.key), parts, {self._ranks.rank: own})

        def put() -> None:
            if self._ranks.rank == 0:
                self._check_parts(update)
                self._store.put(update)

        self._ranks.agree("put", put, last=True)
        return update

    def _check_parts(self, update: PartedUpdate) -> None:
        """Raise ArgumentError if a part that another rank has written is not in the folder of the store."""
        for rank, part in enumerate(update.parts.parts):
            one = update.parts.listed(rank)
            if part.url is None and not self._store.has(one):
                raise ArgumentError(
                    f"rank {rank} has written {one.file}, which is not in {self._store.source} on rank 0: pass a "
                    "store that all ranks share, or host=, with which each rank serves its own folder"
                )

    def commit(self) -> int:
        """Publish the staged update, and apply the part of this rank to its base."""
        with self._ranks.call():
            return self._commit()

    def _commit(self) -> int:
        def check() -> int:
            if self._staged is None:
                raise StateError("no update is staged: call stage(weights) first")
            return self._staged.version

        versions = self._ranks.agree("check", check)
        if len(set(versions)) > 1:
            raise StateError(f"the ranks have staged different versions, {versions}: call stage(weights) again")
        update, base = self._staged, self._base
        assert update is not None
        assert base is not None
        since = self._publish(update)

        def apply() -> None:
            part = update.found[self._ranks.rank]
            base.settle()
            if not base.has(part):
                base.apply(part)

        self._ranks.agree("apply", apply, last=since < self._every)
        self._staged = None
        if since >= self._every:
            self._snapshot(base, update)
        return update.version

    def _publish(self, update: PartedUpdate) -> int:
        """Publish an update; return the number of updates after the last snapshot."""

        def publish() -> dict[str, Any]:
            if self._ranks.rank:
                return {}
            self._store.publish(update)
            listing = self._store.listing()
            return {"since": listing.since_snapshot, "kept": [one.fields() for one in listing.updates]}

        listed = self._ranks.agree("publish", publish)[0]
        self._published, self.version = update.run, update.version
        if self._url is not None:  # this rank may have a folder of its own
            self._store.retain([Listed.read(one, update.run) for one in listed["kept"]])
        return listed["since"]

    def _snapshot(self, base: Base, update: PartedUpdate) -> None:
        """Publish a snapshot of the last version."""
        assert update.run is not None
        views: dict[Any, Any] = {key: slot.view for key, slot in base.weights.items()}
        written: list[Update] = []

        def encode() -> dict[str, Any]:
            written.append(self._write(views, update.head.run or b"", update.version, None))
            return Part.of(written[0], self._url if self._ranks.rank else None).fields()

        fields = self._ranks.agree("encode snapshot", encode)
        self._publish(self._together(update.run, update.version, None, fields, written[0]))

    def abandon(self) -> None:
        """Drop the staged update."""
        self._staged = None

    def close(self) -> None:
        """Stop the HTTP server, and unlock the folder of the base."""
        if self._server is not None:
            self._server.close()
        if self._base is not None:
            self._base.close()


def _shards(weights: Given) -> dict[Shard, Any]:
    """Return the shards that this rank holds.

    Raises
    ------
    ArgumentError
        `weights` computes its tensors when they are read, which would be read twice.
    """
    if is_streamed(weights):
        raise ArgumentError(f"with group=, weights are read twice: pass a dict or module, not {type(weights).__name__}")
    return local_shards({check_name(name): x for name, x in items(weights)})
