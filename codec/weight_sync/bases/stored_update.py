"""Update whose values another receiver of the same folder has stored."""

import numpy as np

from codec.files.signing import SigningKey
from codec.weight_sync.updates.identity import UpdateHead
from codec.weight_sync.updates.kinds import WeightsSize
from codec.weight_sync.updates.shards import Name
from codec.weight_sync.updates.update import TensorEntry, Update
from codec.weight_sync.updates.weights import Weights


class StoredUpdate(Update):
    """Update whose values another receiver has stored in the folder. It has no bytes.

    Parameters
    ----------
    head : UpdateHead
        Header of the update; its base may be a later version than `before`.
    before, after : Weights
        Weights of this receiver, and the stored ones.
    """

    __slots__ = ()

    def __init__(self, head: UpdateHead, before: Weights, after: Weights) -> None:
        self.memory, self.head, self.signature = np.empty(0, np.uint8), head, None
        self.total = WeightsSize.of(after.kinds.values())
        self.entries = dict[Name, TensorEntry]()
        for name, slot in after.items():
            old = before.get(name)
            known = old.digests if old is not None and old.kind == slot.kind and head.base is not None else None
            changed = [known is None or digest != known[k] for k, digest in enumerate(slot.digests)]
            if known is None or any(changed):  # the frame of a changed piece is not empty
                self.entries[name] = TensorEntry(slot.kind, tuple((0, int(c)) for c in changed))

    def check_signature(self, key: SigningKey) -> None:
        """Another receiver with this key has checked the update."""
