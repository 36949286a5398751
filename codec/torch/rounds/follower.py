"""Follow a run: join it, merge the rounds that were closed, and continue from snapshots."""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from codec import CodecError, FrameError, StateError
from codec.torch.replicas.landing import Landing
from codec.torch.rounds.access import Access, check_arguments
from codec.torch.rounds.names import ChangeName, StoreContents, manifest_name, snapshot_name
from codec.torch.rounds.objects import (
    HEAD_NBYTES,
    MOST_LIVES,
    ChangeHead,
    ListedChange,
    ManifestHead,
    SnapshotHead,
    digest,
)
from codec.torch.rounds.site import Site

_log = logging.getLogger("codec.torch")

LATE = 4  # number of rounds after its own in which a change can still be merged
_SNAPSHOT_ROUNDS = 16  # number of rounds between two snapshots


@dataclass
class SentChange:
    """Change of this site that was sent, and is in no manifest yet."""

    name: ChangeName
    data: bytes  # of the object
    steps: int  # number of steps of the site when the change was made
    since: int  # number of steps in the change
    weight: float
    parts: Sequence[Any]  # the change before encoding, by fragment and piece
    residual: Any  # residual after this change
    stored: bool = False  # True: the store has the object


@dataclass
class RunPlace:
    """Place of a site in a run."""

    run: str
    before: str  # digest of the manifest of the previous round
    awaited: list[str] = field(default_factory=list[str])  # sites for which the next round waits
    merged: dict[str, int] = field(default_factory=dict[str, int])  # round of the last merged change, by process


@dataclass
class Advance:
    """Merge or snapshot that is being applied. If this is interrupted, the next call applies it again."""

    apply: Callable[[], None]
    number: int  # number of rounds after it
    place: RunPlace
    sent: SentChange | None  # change of this site that it contains
    digests: dict[int, str]  # digests of the anchors before the last rounds


class Follower:
    """Site that follows a run; base class of :class:`Member`.

    Parameters
    ----------
    site : Site
        The model.
    access : Access
        Objects of the run.
    name : str
        Name of the site.

    Attributes
    ----------
    steps : int
        Number of steps of this site.
    since : int
        Number of steps that no change of this site contains.
    weight : float
        Weight of these steps.
    sent : SentChange or None
        Change that was sent, and is not merged yet.
    """

    def __init__(self, site: Site, access: Access, name: str) -> None:
        self.site, self.access, self.name = site, access, name
        self.life = secrets.token_hex(8)
        self.steps = self.since = 0
        self.weight = 0.0
        self.sent: SentChange | None = None
        self.place = RunPlace("", "")
        self.late = self.dropped = 0  # numbers of this site's changes that were merged late, or never
        self.sites = 0  # number of sites in the last round
        self.merged_steps = 0  # number of this site's steps that rounds have merged
        self._advance: Advance | None = None
        self._digests: dict[int, str] = {}  # digests of the anchors before the last rounds
        self._diverged = ""  # error of a round that this site cannot follow; only a snapshot helps
        self._cache: dict[ChangeName, bytes] = {}  # valid changes that were read, and not merged yet
        self._closed = -1  # number of a round whose manifest exists, even if a list of the store's objects lacks it
        self._written = -1  # number of the last round that this site has closed

    @property
    def version(self) -> int:
        """Number of rounds that were merged, which is the number of the current round."""
        return self.site.rounds

    def join(self) -> None:
        """Adopt the state of the run; begin the run if the store has none.

        Raises
        ------
        ArgumentError
            The run has another model or other arguments.
        FrameError, PeerError
            The store fails, or its objects are damaged.
        """
        self.access.check_conditional(self.name)
        contents = self.access.contents()
        if not contents.snapshots:
            self._begin()
            contents = self.access.contents()
        self.site.record_former()
        self._adopt(max(contents.snapshots, default=0), joins=True)
        self.look()

    def _begin(self) -> None:
        """Write the snapshot of this site's parameters before the first round, unless another site has written it."""
        self.site.reset()
        self.place = RunPlace(secrets.token_hex(16), "")
        self._write_snapshot()

    def _write_snapshot(self) -> None:
        name = snapshot_name(self.version)
        place = self.place
        merged = dict(sorted(place.merged.items(), key=lambda item: item[1])[-MOST_LIVES:])
        head = SnapshotHead(
            place.run, self.version, self.site.arguments(), place.before, self._digest(), place.awaited, merged
        )
        self.access.create(name, self.access.sealed(name, head.entries(), [self.site.snapshot()]))

    def _adopt(self, number: int, *, joins: bool = False) -> None:
        """Continue from the snapshot before round `number`. A site that `joins` drops its own parameters."""
        name = snapshot_name(number)
        _, entries, payload = self.access.read(name, self.site.most_snapshot_nbytes)
        head = SnapshotHead.read(name, entries)
        if head.round != number or (not joins and head.run != self.place.run):
            raise StateError(f"{name!r} in the store is of another run: create a new Rounds to join it")
        check_arguments(self.site.arguments(), head.arguments)
        state = self.site.parsed(payload)
        sent = self.sent if self.sent is not None and self._has(head.merged, self.sent.name) else None
        mine = None if joins else (self.site.unmoved() if sent is None else sent.parts)
        apply = self.site.adoption(state, mine=mine, buffers=joins)
        if self.site.digest_of(state) != head.anchors:
            raise FrameError(f"{name!r} in the store is damaged: its tensors have another digest")
        place = RunPlace(head.run, head.before, head.awaited, dict(head.merged))
        try:
            self._finish(Advance(apply, number, place, sent, {}))
        except StateError:  # the state of the outer optimizer does not fit, and nothing was changed
            self._advance = None
            raise
        if not joins:
            _log.warning("site %r was away, and continues from the snapshot before round %d", self.name, number)

    @staticmethod
    def _has(merged: dict[str, int], change: ChangeName) -> bool:
        return merged.get(change.life, -1) >= change.round

    def look(self) -> StoreContents:
        """Merge all rounds that were closed; return the contents of the store.

        Raises
        ------
        FrameError, PeerError, StateError
            The store fails, its objects are damaged, or this site's anchors are not those of the run.
        """
        self._finish(self._advance)
        while True:
            self._forget()
            contents = self.access.contents()
            contents.manifests |= {self._closed} & {self.version}
            newest = max(contents.snapshots, default=-1)
            if self._diverged and newest <= self.version:
                raise StateError(self._diverged)
            if not self._diverged and self.version in contents.manifests:
                self._follow(contents, newest)
            elif newest > self.version:
                self._adopt(newest)
                self._diverged = ""
            elif not contents.snapshots or any(n > self.version for n in contents.manifests):
                raise StateError("the store has lost objects of the run: create a new Rounds to join or to begin one")
            else:
                return contents

    def _follow(self, contents: StoreContents, newest: int) -> None:
        """Merge the rounds that were closed; if one is damaged, continue from the snapshot before round `newest`."""
        try:
            while self.version in contents.manifests:
                self._merge()
                self._keep_snapshot(newest)
        except _Deleted:
            pass
        except FrameError as e:
            if newest <= self.version:
                raise
            _log.warning("site %r cannot merge round %d: %s", self.name, self.version, e)
            self._adopt(newest)

    def _merge(self) -> None:
        """Merge the current round, whose manifest is in the store."""
        name, number = manifest_name(self.version), self.version
        try:
            data, entries, _ = self.access.read(name, HEAD_NBYTES + 1024)
            manifest = ManifestHead.read(name, entries)
            self._check(name, manifest)
        except FrameError:
            if number not in self.access.contents().manifests:
                raise _Deleted from None
            raise
        heads = [self._listed(item) for item in manifest.changes]
        total = sum(head.weight for head, _ in heads)
        decoded = ((head.weight / total, self.site.decoded(payload, head.frames)) for head, payload in heads)
        mean = self.site.mean(decoded)
        names = [head.name for head, _ in heads]
        sent = self.sent if self.sent is not None and self.sent.name in names else None
        mine = self.site.unmoved() if sent is None else sent.parts
        landing = Landing(self.site.fragments, mean.parts, mine, self.site.outer, changes=mean)

        def apply() -> None:  # buffers that have changed since this site has sent them are kept
            self.site.complete(landing, buffers=sent is not None and sent.steps == self.steps)

        merged = self.place.merged | {change.life: change.round for change in sorted(names)}
        place = RunPlace(self.place.run, digest(data), manifest.awaited, merged)
        digests = {n: x for n, x in self._digests.items() if n >= number - LATE}
        self._finish(Advance(apply, number + 1, place, sent, digests))
        self.sites = len({change.site for change in names})

    def _check(self, name: str, manifest: ManifestHead) -> None:
        """Check that a manifest continues the run from this site's anchors."""
        place, number = self.place, self.version
        if manifest.run != place.run or manifest.round != number:
            raise StateError(f"{name!r} in the store is of another run: create a new Rounds to join it")
        if manifest.before != place.before or manifest.anchors != self._digest():
            self._diverged = (
                f"before round {number}, the anchors of site {self.name!r} are not those of the site that has closed "
                "the round: steps of the outer optimizer must be bit-identical on all sites. This site continues from "
                "the next snapshot"
            )
            raise StateError(self._diverged)
        names = [change.name for change in manifest.changes]
        if len({change.life for change in names}) < len(names) or any(
            not number - LATE <= change.round <= number or self._has(place.merged, change) for change in names
        ):
            raise FrameError(f"{name!r} in the store lists a change that is merged already, or too old")

    def _listed(self, item: ListedChange) -> tuple[ChangeHead, memoryview]:
        """Return the head and the frames of a change that a manifest lists."""
        name, data = str(item.name), self._cache.get(item.name)
        if data is not None and digest(data) == item.digest:
            entries, payload = self.access.opened(name, data)
        else:
            _, entries, payload = self.access.read(name, min(item.nbytes, self.site.most_nbytes), item.digest)
        head = ChangeHead.read(name, entries)
        if head.name != item.name or head.run != self.place.run:
            raise FrameError(f"{name!r} in the store is an object of another site or run")
        return head, payload

    def _finish(self, advance: Advance | None) -> None:
        """Apply a merge or a snapshot. If this is interrupted, the next call of :meth:`look` repeats it."""
        if advance is None:
            return
        self._advance = advance
        advance.apply()
        if (sent := advance.sent) is not None:
            self.site.residual = sent.residual
            if self.sent is sent:
                self.late += sent.name.round < advance.number - 1
                self.merged_steps += sent.since
            self.sent = None
        self.place, self._digests, self.site.rounds = advance.place, advance.digests, advance.number
        self._advance = None

    def _forget(self) -> None:
        """Drop what no later round needs, and this site's change if it is too old to be merged."""
        number = self.version - LATE
        if (sent := self.sent) is not None and sent.name.round < number:
            _log.warning(
                "no round has merged the change that site %r has sent in round %d; its next change contains it",
                self.name,
                sent.name.round,
            )
            self.sent, self.since, self.weight = None, self.since + sent.since, self.weight + sent.weight
            self.dropped += 1
        self._cache = {
            change: data
            for change, data in self._cache.items()
            if change.round >= number and not self._has(self.place.merged, change)
        }

    def _digest(self) -> str:
        """Return the digest of the anchors."""
        if self.version not in self._digests:
            self._digests[self.version] = self.site.anchors_digest()
        return self._digests[self.version]

    def _keep_snapshot(self, newest: int) -> None:
        """Write a snapshot if this site has closed the last round and there was none for long; delete old objects.

        A failure is logged, because training does not depend on it: a later round writes the snapshot.
        """
        if self._written != self.version - 1 or self.version - newest < _SNAPSHOT_ROUNDS:
            return
        try:
            self._write_snapshot()
            self.access.delete(self.access.contents().before(newest, newest - LATE))
        except CodecError as e:
            _log.warning("site %r could not write a snapshot, or delete old objects: %s", self.name, e)


class _Deleted(Exception):
    """Reason why a round cannot be merged: another site has deleted its manifest meanwhile."""
