"""Weight synchronization: send updates from a trainer to programs that serve its weights, such as RL rollouts.

A :class:`codec.WeightSender` encodes an update as bytes, which any transport can carry. A
:class:`codec.WeightReceiver` checks the update, passes the changed tensors to the serving program, and commits it. An
:class:`UpdateStore` is a folder of updates, on a disk or in a bucket. :func:`serve` serves a folder over HTTP;
:func:`pull` updates a receiver to the last version in a store. A :class:`Publisher` combines sender, store and server
for a trainer. This package needs no framework. It changes only tensors that the caller passes as ``into=``.
"""

from codec.weight_sync.http.server import serve
from codec.weight_sync.publisher import Publisher
from codec.weight_sync.pulling import pull
from codec.weight_sync.store.update_store import UpdateStore

__all__ = [
    "Publisher",
    "UpdateStore",
    "pull",
    "serve",
]
