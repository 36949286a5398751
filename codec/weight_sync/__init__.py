"""Weight synchronization: updates from a trainer to programs that serve its weights, such as rollouts of RL.

A :class:`codec.WeightSender` encodes an update, which is bytes for any transport. A :class:`codec.WeightReceiver`
checks it, hands the changed tensors on, and commits it. An :class:`UpdateStore` is a folder of updates, which
:func:`serve` offers over HTTP, and from which :func:`pull` brings a receiver to the last version. A :class:`Publisher`
joins these parts of a trainer. This package needs no framework, and never changes a tensor of the caller.
"""

from codec.weight_sync.http import UpdateServer, serve
from codec.weight_sync.publisher import Publisher
from codec.weight_sync.store import UpdateStore, pull
from codec.weight_sync.update import Kind

__all__ = [
    "Kind",
    "Publisher",
    "UpdateServer",
    "UpdateStore",
    "pull",
    "serve",
]
