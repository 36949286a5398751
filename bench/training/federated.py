"""Compare codecs in federated learning with Flower's FedAvg and client apps: bytes and rounds to a target accuracy.

    python bench/training/federated.py             # a minute; needs flwr and scikit-learn

Trains a perceptron with 64 hidden units to classify scikit-learn's digits (1,797 images of 8 x 8; a fifth is held out).
Each of ten clients has images of mostly two digits, and trains for one epoch per round, from the same seeds. Messages
and states pass through Flower's serialization, in one process.

Columns:

accuracy      held-out accuracy after all rounds, mean over seeds
rounds        first round with an accuracy of at least --target, mean over seeds
up, down      bytes of a client's reply, and of the message to it, relative to float32, excluding Flower's envelope
to target     KiB that a client sends until the target is reached
"""

import argparse
import logging
import statistics
import sys
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

import codec
import codec.integrations.flower

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.federation import Federation, reply_of, trained

Compressed, CompressionMod = codec.integrations.flower.Compressed, codec.integrations.flower.CompressionMod
CLIENTS = 10
ROWS = {
    "float32, no mod": None,
    "Lossless()": CompressionMod(),
    "Delta()": CompressionMod(codec.Delta()),
    "Float8(group_size=128)": CompressionMod("balanced"),
    "Quantize(4)": CompressionMod("small"),
    "Quantize(4), no feedback": CompressionMod("small", feedback=False),
    "Sign(group_size=1024)": CompressionMod("smallest"),
    "Sign(group_size=1024), no feedback": CompressionMod("smallest", feedback=False),
    "TopK()": CompressionMod(codec.TopK()),
}


class Average(Compressed, FedAvg):
    """Flower's strategy FedAvg, which here decodes compressed replies of clients."""


def data(seed):
    """Return the images and labels of each client, and the held-out images and labels."""
    rng = np.random.default_rng(seed)
    x, y = load_digits(return_X_y=True)
    order = rng.permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    held = len(x) // 5
    owner = np.where(
        rng.random(len(y)) < 0.8, y, rng.integers(0, CLIENTS, len(y))
    )  # owner of each image: client i has most images of digit i, and some images of other digits
    parts = [np.flatnonzero(owner[held:] == i) + held for i in range(CLIENTS)]
    return [(x[p], y[p]) for p in parts], (x[:held], y[:held])


def initial(seed):
    rng = np.random.default_rng(seed)
    return {
        "w1": (rng.standard_normal((64, 64)) / 8).astype(np.float32),
        "b1": np.zeros(64, np.float32),
        "w2": (rng.standard_normal((64, 10)) / 8).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def forward(w, x):
    hidden = np.maximum(x @ w["w1"] + w["b1"], 0)
    logits = hidden @ w["w2"] + w["b2"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    return hidden, p / p.sum(1, keepdims=True)


def epoch(w, x, y, rng, lr=0.1, batch=16):
    """Train the perceptron with weights `w` for one epoch by SGD, and return the new weights."""
    w = dict(w)
    order = rng.permutation(len(x))
    for i in range(0, len(x), batch):
        rows = order[i : i + batch]
        hidden, p = forward(w, x[rows])
        p[np.arange(len(rows)), y[rows]] -= 1
        p /= len(rows)
        back = (p @ w["w2"].T) * (hidden > 0)
        steps = {"w2": hidden.T @ p, "b2": p.sum(0), "w1": x[rows].T @ back, "b1": back.sum(0)}
        w = {name: (v - lr * steps[name]).astype(np.float32) for name, v in w.items()}
    return w


def values(record):
    return {name: a.numpy() for name, a in record.items()}


def run(mod, seed, rounds):
    """Train for `rounds` rounds; return the accuracy after each round, and the federation."""
    parts, (held_x, held_y) = data(seed)
    app = ClientApp(mods=[] if mod is None else [mod])

    @app.train()
    def train(message, context):
        x, y = parts[context.node_id - 1]
        rng = np.random.default_rng([seed, context.node_id, message.content["config"]["server-round"]])
        return reply_of(message, epoch(values(message.content["arrays"]), x, y, rng), examples=len(x))

    accuracies = []

    def evaluate(server_round, arrays):
        hits = forward(values(arrays), held_x)[1].argmax(1) == held_y
        accuracies.append(float(hits.mean()))
        return MetricRecord({"accuracy": accuracies[-1]})

    federation = Federation(app, CLIENTS)
    strategy = (FedAvg if mod is None else Average)(fraction_evaluate=0)
    start = ArrayRecord({name: Array(x) for name, x in initial(seed).items()})
    trained(federation, strategy, start, rounds, evaluate)
    assert not federation.errors, federation.errors
    return accuracies[1:], federation


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--target", type=float, default=0.9)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    raw = sum(x.nbytes for x in initial(0).values())
    print(f"{'codec':36s} accuracy  rounds     up   down  to target")
    for name, mod in ROWS.items():
        runs = [run(mod, seed, args.rounds) for seed in range(args.seeds)]
        reached = [next((i + 1 for i, a in enumerate(acc) if a >= args.target), None) for acc, _ in runs]
        per_reply = 1 / (raw * CLIENTS * args.rounds)
        up, down = (statistics.mean(getattr(f, way) for _, f in runs) * per_reply for way in ("up", "down"))
        accuracy = statistics.mean(acc[-1] for acc, _ in runs)
        if None in reached:
            rounds, sent = "never", "-"
        else:
            rounds = f"{statistics.mean(reached):.1f}"
            sent = f"{statistics.mean(reached) * up * raw / 1024:.0f} KiB"
        print(f"{name:36s} {accuracy:8.3f} {rounds:>7s} {up:6.1%} {down:6.1%} {sent:>10s}", flush=True)


if __name__ == "__main__":
    main()
