"""Identity of weights: the run of a trainer, the version in this run, and the digest of the values."""

from typing import NamedTuple

MAX_VERSION = (1 << 64) - 2
NO_DIGEST = bytes(16)
RUN_NBYTES = 16  # size of the random identity of a run


class Identity(NamedTuple):
    """Identity of weights. Two runs of a trainer may give different weights the same version."""

    run: bytes | None  # run of the trainer, 16 random bytes; None: unknown
    version: int
    digest: bytes

    def matches(self, other: "Identity | None") -> bool:
        """Return True if `other` has the same version and digest, and is not known to be of another run."""
        return other is not None and self[1:] == other[1:] and not other_run(self.run, other.run)


def other_run(a: bytes | None, b: bytes | None) -> bool:
    """Return True if two runs are known, and differ."""
    return a is not None and b is not None and a != b


class UpdateHead(NamedTuple):
    """Run, versions and digests in the header of an update."""

    run: bytes | None
    version: int
    base: int | None
    base_digest: bytes
    digest: bytes

    @property
    def before(self) -> Identity | None:
        """Identity of the base; None for a snapshot."""
        return None if self.base is None else Identity(self.run, self.base, self.base_digest)

    @property
    def after(self) -> Identity:
        """Identity of the weights after the update."""
        return Identity(self.run, self.version, self.digest)
