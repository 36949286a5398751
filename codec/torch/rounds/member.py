"""Membership of a site in a run: it sends changes, and closes rounds."""

import logging
import time

from codec import FrameError, PeerError
from codec.readable import count
from codec.torch.network.version import hash64
from codec.torch.rounds.access import Access
from codec.torch.rounds.arrivals import Arrivals
from codec.torch.rounds.follower import LATE, Follower, RunPlace, SentChange
from codec.torch.rounds.names import ChangeName, StoreContents, manifest_name
from codec.torch.rounds.objects import ChangeHead, ListedChange, ManifestHead, digest
from codec.torch.rounds.site import Site

_log = logging.getLogger("codec.torch")

_LONGEST_PAUSE = 1.0  # seconds between two looks at the store, while this site waits


class Member(Follower):
    """Site that takes part in a run.

    Parameters
    ----------
    site, access, name
        As for :class:`Follower`.
    quorum : int
        Number of sites without which no round is closed.
    grace : float or None
        Seconds for which a round with a quorum waits; see :class:`Arrivals`.
    """

    def __init__(self, site: Site, access: Access, name: str, quorum: int, grace: float | None) -> None:
        super().__init__(site, access, name)
        self.quorum = quorum
        self.arrivals = Arrivals(grace)
        self._refused = set[ChangeName]()  # changes that are not valid
        self._sent_at = 0.0  # monotonic time of the last change

    def send(self, *, early: bool = False, leaves: bool = False) -> None:
        """Send the changes since the last change of this site.

        Parameters
        ----------
        early : bool
            True: the change is sent before it is due, so that the round is not closed because of it.
        leaves : bool
            True: the next round does not wait for this site.

        Raises
        ------
        ArgumentError
            The parameters cannot be sent. Nothing is changed.
        PeerError
            The store fails. The next call sends the same object.
        """
        name = ChangeName(self.version, self.life, self.name, early)
        found = self.site.encoded(self.steps, hash64(str(name)) % (1 << 63))
        sizes = [len(frame) for frame in found.frames]
        head = ChangeHead(self.place.run, *name, self._digest(), self.weight, leaves, sizes)
        data = self.access.sealed(str(name), head.entries(), found.frames)
        now = time.monotonic()
        self.arrivals.pace = now - self._sent_at if self._sent_at else 0.0
        self._sent_at = now
        sent = SentChange(name, data, self.steps, self.since, self.weight, found.changes.parts, found.residual)
        self.sent, self.since, self.weight = sent, 0, 0.0
        self._store()

    def _store(self) -> None:
        """Write this site's change to the store, if this has not succeeded yet. A repetition writes the same bytes."""
        if (sent := self.sent) is not None and not sent.stored:
            self.access.put(str(sent.name), sent.data)
            self._cache[sent.name] = sent.data
            sent.stored = True

    def look(self) -> StoreContents:
        """Send this site's change, if that has failed before, and merge all rounds that were closed.

        Return the contents of the store. Errors are those of :meth:`Follower.look`, and the failures of the store.
        """
        self._finish(self._advance)
        self._store()
        contents = super().look()
        self.arrivals.see([c for c in contents.changes if c.life != self.life], time.monotonic())
        self.arrivals.forget(self.version - LATE)
        self._refused = {change for change in self._refused if change.round >= self.version - LATE}
        return contents

    def wait(self, seconds: float, quorum: int) -> None:
        """Wait until the current round is closed, and merge it.

        Parameters
        ----------
        seconds : float
            Maximum time.
        quorum : int
            Number of sites without which the round is not closed.

        Raises
        ------
        PeerError
            The store fails, or too few sites have sent changes. The next call continues.
        FrameError, StateError
            As for :meth:`look`.
        """
        number, begin = self.version, time.monotonic()
        while True:
            contents = self.look()
            if self.version > number:
                return
            if self.close(contents, quorum, waits=True):
                continue
            waited = time.monotonic() - begin
            if waited > seconds:
                sites = sorted({change.site for change in self.open_changes(contents)})
                raise PeerError(
                    f"round {number} has changes of {count(len(sites), 'site')} ({', '.join(sites)}) after "
                    f"{seconds:g} s, but the quorum is {quorum}: the next call continues to wait"
                )
            time.sleep(min(_LONGEST_PAUSE, max(0.01, 0.1 * waited)))

    def open_changes(self, contents: StoreContents) -> list[ChangeName]:
        """Return the changes in the store that the current round can merge."""
        return [
            change
            for change in contents.changes
            if self.version - LATE <= change.round <= self.version
            and not self._has(self.place.merged, change)
            and change not in self._refused
        ]

    def is_due(self, contents: StoreContents) -> bool:
        """Return True if another site has sent a due change of the current round, and so waits for the others."""
        return any(change.life != self.life for change in self._due(contents))

    def _due(self, contents: StoreContents) -> list[ChangeName]:
        return [c for c in self.open_changes(contents) if c.round == self.version and not c.early]

    def close(self, contents: StoreContents, quorum: int, *, waits: bool = False) -> bool:
        """Write the manifest of the current round, if this site has a change in it, and need not wait for others.

        The fastest site sets the pace: changes that were sent early or late close no round, unless this site waits,
        which then has taken further steps. Return True if the round was closed, by this site or another one.
        """
        some, now = self.open_changes(contents), time.monotonic()
        sites = {change.site for change in some}
        if self.sent is None or self.sent.name not in some or len(sites) < quorum:
            return False
        if not waits and not self._due(contents):
            return False
        if set(self.place.awaited) - sites and self.arrivals.waits(self.version, now):
            return False
        heads = [(head, self._cache[head.name]) for change in some if (head := self._valid(change)) is not None]
        if len({head.site for head, _ in heads}) < quorum:
            return False
        listed = [ListedChange(head.name, digest(data), len(data)) for head, data in heads]
        awaited = sorted({head.site for head, _ in heads if not head.leaves})
        manifest = ManifestHead(self.place.run, self.version, self.place.before, self._digest(), listed, awaited)
        name = manifest_name(self.version)
        if self.access.create(name, self.access.sealed(name, manifest.entries())):
            self._written = self.version
        self._closed = self.version
        return True

    def _valid(self, change: ChangeName) -> ChangeHead | None:
        """Return the head of a change if it can be merged. Otherwise no manifest of this site lists it."""
        name, data = str(change), self._cache.get(change)
        try:
            if data is None:
                data, entries, payload = self.access.read(name, self.site.most_nbytes)
            else:
                entries, payload = self.access.opened(name, data)
            head = ChangeHead.read(name, entries)
            if head.name != change or head.run != self.place.run:
                raise FrameError(f"{name!r} is an object of another site or run")
            if self._digests.get(change.round, head.base) != head.base:
                raise FrameError("the site has other anchors than this one")
            if change not in self._cache:
                self.site.check_norms(self.site.decoded(payload, head.frames))
        except FrameError as e:
            _log.warning("round %d does not merge the change of site %r: %s", self.version, change.site, e)
            self._refused.add(change)
            return None
        self._cache[change] = data
        return head

    def resume(self, life: str, place: RunPlace, sent: SentChange | None, progress: tuple[int, int, float]) -> None:
        """Continue from the state of an earlier process of this site, which the site's model and anchors already have.

        If that process has sent a change after its state was saved, the change counts. The state's changes, which it
        contains, are then dropped.

        Parameters
        ----------
        life : str
            Identity of the process.
        place : RunPlace
            Its place in the run.
        sent : SentChange or None
            Change that it had sent, and that was not merged.
        progress : (int, int, float)
            Numbers of steps of the process, and of those that no change contains, and the weight of the latter.
        """
        joined = self.place.merged.get(life, -1)
        self._digests, self._cache, self._advance, self._diverged = {}, {}, None, ""
        self.place, self.sent = place, sent
        self.steps, self.since, self.weight = progress
        known = place.merged.get(life, -1) if sent is None else sent.name.round
        contents = self.access.contents()
        if joined > known or any(c.life == life and c.round > known for c in contents.changes):
            _log.warning(
                "site %r has sent a change after this state was saved, which counts: changes in the state are dropped",
                self.name,
            )
            self.sent, self.since, self.weight, self.site.residual = None, 0, 0.0, None
            self.site.restore()
        self.look()

    @property
    def unmerged(self) -> bool:
        """True if this site has changes that no round has merged."""
        return self.sent is not None or self.since > 0
