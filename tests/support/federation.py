"""Flower federation in one process: real strategies and client apps, whose messages and states pass as bytes."""

import random

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0  # ids that Flower's own processes would set
CLIENT_RAISED = 2  # Flower's error code of a client app that raised


def _sent(content):
    """Serialize the content of a message; return the content that the receiver deserializes, and its size in bytes."""
    data = recorddict_to_proto(content).SerializeToString()
    return recorddict_from_proto(RecordDictProto.FromString(data)), len(data)


class Federation(Grid):
    """Nodes 1 to n, which run the same client app, each with its own state.

    `tamper(node, content)` may change replies. `down` and `up` count the bytes sent to and by clients so far; `errors`
    collects the errors of clients.
    """

    def __init__(self, app, nodes, tamper=None):
        self.app, self.tamper = app, tamper
        self.states = {
            n: self._kept(Context(1, n, {"partition-id": n - 1}, RecordDict(), {})) for n in range(1, nodes + 1)
        }
        self.down = self.up = 0
        self.errors, self.lost = {}, []

    @staticmethod
    def _kept(context):
        return context_to_proto(context).SerializeToString()

    def context(self, node):
        return context_from_proto(ContextProto.FromString(self.states[node]))

    def send_and_receive(self, messages, *, timeout=None):
        return [self._handled(m) for m in messages]

    def _handled(self, message):
        node = message.metadata.dst_node_id
        content, size = _sent(message.content)
        self.down += size
        arrived = Message(content, dst_node_id=node, message_type=message.metadata.message_type)
        context = self.context(node)
        try:
            reply = self.app(arrived, context)
        except Exception as e:
            self.errors[node] = e
            return Message(Error(CLIENT_RAISED, str(e)), reply_to=message)
        self.states[node] = self._kept(context)
        content, size = _sent(reply.content)
        self.up += size
        if self.tamper and "arrays" in content:
            self.tamper(node, content)
        return Message(content, reply_to=message)

    def get_node_ids(self):
        return list(self.states)

    def set_run(self, run):
        raise NotImplementedError

    run = property(lambda self: None)

    def create_message(self, *args, **how):
        raise NotImplementedError

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError


def trained(federation, strategy, arrays, rounds, evaluate=None):
    """Run a strategy for `rounds` rounds, and return Flower's result."""
    random.seed(0)  # FedAvg sums in the order in which it samples nodes
    return strategy.start(federation, arrays, rounds, evaluate_fn=evaluate, train_config=ConfigRecord())


def reply_of(message, arrays, examples=1, loss=0.0):
    """Return a client's reply to `message`, with its parameters, number of examples and loss."""
    record = arrays if isinstance(arrays, ArrayRecord) else ArrayRecord(_arrays_of(arrays))
    metrics = MetricRecord({"num-examples": examples, "loss": float(loss)})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


def _arrays_of(values):
    from flwr.app import Array

    return {name: Array(np.asarray(x)) for name, x in values.items()}
