"""Names of the objects of a run in its store."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_SITE = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
SITE = re.compile(_SITE)
_OBJECT = re.compile(rf"(manifest|snapshot|change|early)-([0-9]{{10}})(?:-([0-9a-f]{{16}})-({_SITE}))?")
MOST_ROUNDS = 10**10 - 1


class ChangeName(NamedTuple):
    """Name of a change: round, and the site and its process that have sent it."""

    round: int
    life: str  # random identity of the process, 16 hexadecimal digits
    site: str
    early: bool = False  # True: sent before it was due, so that other sites need not hurry

    def __str__(self) -> str:
        return f"{'early' if self.early else 'change'}-{self.round:010d}-{self.life}-{self.site}"


def manifest_name(number: int) -> str:
    """Return the name of the manifest of a round."""
    return f"manifest-{number:010d}"


def snapshot_name(number: int) -> str:
    """Return the name of the snapshot before a round."""
    return f"snapshot-{number:010d}"


@dataclass
class StoreContents:
    """Objects of a run in a store. Other objects are ignored."""

    manifests: set[int]  # numbers of rounds
    snapshots: set[int]  # numbers of the rounds that follow the snapshots
    changes: list[ChangeName]  # in the order of rounds, processes and sites

    @classmethod
    def of(cls, names: Iterable[str]) -> "StoreContents":
        """Return the objects with some names."""
        found = cls(set(), set(), [])
        for match in filter(None, map(_OBJECT.fullmatch, names)):
            kind, number, life, site = match[1], int(match[2]), match[3], match[4]
            if kind in ("change", "early") and life:
                found.changes.append(ChangeName(number, life, site, kind == "early"))
            elif kind in ("manifest", "snapshot") and not life:
                (found.manifests if kind == "manifest" else found.snapshots).add(number)
        found.changes.sort()
        return found

    def before(self, number: int, changes_before: int) -> list[str]:
        """Return the names of objects that are no longer needed: those of rounds before `number`.

        Changes of rounds from `changes_before` on are still needed.
        """
        old = [manifest_name(n) for n in sorted(self.manifests) if n < number]
        old += [snapshot_name(n) for n in sorted(self.snapshots) if n < number]
        return old + [str(change) for change in self.changes if change.round < changes_before]
