"""Rules for the order of updates: which update may follow which weights."""

from codec.errors import StateError
from codec.weight_sync.updates.identity import Identity, other_run
from codec.weight_sync.updates.update import Update


def check_order(update: Update, at: Identity | None, *, restart: bool = False) -> None:
    """Check that an update is newer than the weights `at`, and of their run.

    Parameters
    ----------
    update : Update
        The update.
    at : Identity or None
        Identity of the weights; None: there are none.
    restart : bool
        True: accept an update of another run, and a snapshot of any version that was not applied already.

    Raises
    ------
    StateError
        The update was applied already, is older, or is of another run.
    """
    if update.head.after.matches(at):
        raise StateError(f"the update to version {update.version} was applied already; the weights are unchanged")
    if at is None or (restart and (update.base is None or other_run(update.run, at.run))):
        return
    if other_run(update.run, at.run):
        raise StateError(
            f"the update to version {update.version} is of another run of the trainer than these weights, version "
            f"{at.version}. If the trainer has begun again, pass its snapshot with restart=True; pull() does so by "
            "itself"
        )
    if update.version <= at.version:
        raise StateError(f"the update to version {update.version} is not newer than the current version, {at.version}")


def check_base(update: Update, at: Identity | None) -> None:
    """Raise StateError if an update needs another base than the weights `at`."""
    if update.base is None or (at is not None and (update.base, update.base_digest) == at[1:]):
        return
    needed = f"the update needs version {update.base} as its base, but "
    if at is None:
        raise StateError(f"{needed}there are no weights yet: apply a snapshot first")
    if update.base == at.version:
        raise StateError(
            f"{needed}the weights of version {at.version} have other values: apply a snapshot, or begin with the "
            "weights that the sender began with"
        )
    way = "apply the missing updates first, or a snapshot" if update.base > at.version else "apply a snapshot"
    raise StateError(f"{needed}the current version is {at.version}: {way}")
