"""Federated averaging with Flower: three clients in one process reply in 4 bits per value.

    pip install 'flwr>=1.42'
    python examples/federated.py
    python examples/federated.py --codec smallest

Client app and strategy are those of a real federation. Only the grid is not: `OneProcess` passes each message to the
client app at once. `flwr run` starts server and clients as processes.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

import codec.integrations.flower

TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0  # set by Flower in its own processes
CLIENTS = (1, 2, 3)
TRUE = np.random.default_rng(0).standard_normal((256, 16), np.float32)  # weights to find


class Strategy(codec.integrations.flower.Compressed, FedAvg):
    """FedAvg, which sends and receives frames."""


def batch(node: int) -> tuple[Any, Any]:
    """Return the inputs and outputs of a client."""
    x = np.random.default_rng(node).standard_normal((512, 256), np.float32)
    return x, x @ TRUE


def train(message: Message, context: Context) -> Message:
    """Take ten steps of gradient descent on the client's own data."""
    w = message.content["arrays"]["weight"].numpy()
    x, y = batch(context.node_id)
    for _ in range(10):
        w = w - 0.2 * x.T @ (x @ w - y) / len(x)
    content = {"arrays": ArrayRecord({"weight": Array(w)}), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict(content), reply_to=message)


class OneProcess(Grid):
    """Clients in this process, each with its own state, in which the mod stores residuals."""

    def __init__(self, app: ClientApp) -> None:
        self.app, self.nbytes = app, 0
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in CLIENTS}

    def get_node_ids(self) -> list[int]:
        return list(CLIENTS)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self.handle(message) for message in messages]

    def handle(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        copy = Message(message.content, dst_node_id=node, message_type=message.metadata.message_type)
        reply = Message(self.app(copy, self.contexts[node]).content, reply_to=message)
        self.nbytes += sum(len(a.data) for record in reply.content.array_records.values() for a in record.values())
        return reply

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    run = property(lambda self: None)
    create_message = push_messages = pull_messages = set_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="small", help="codec of the clients' replies; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    app = ClientApp(mods=[codec.integrations.flower.CompressionMod(args.codec)])
    app.train()(train)
    grid = OneProcess(app)
    start = ArrayRecord({"weight": Array(np.zeros_like(TRUE))})
    result = Strategy(fraction_evaluate=0).start(grid, start, args.rounds)
    error = np.linalg.norm(result.arrays["weight"].numpy() - TRUE) / np.linalg.norm(TRUE)
    share = grid.nbytes / (args.rounds * len(CLIENTS) * TRUE.nbytes)
    print(f"{args.codec}: replies have {share:.1%} of the bytes of float32; relative error of the weights {error:.4f}")


if __name__ == "__main__":
    main()
