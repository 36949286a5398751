"""Fine-tune a small byte transformer in pipeline stages, connected by ActivationDelta objects in one process.

    PYTHONPATH=.:tests python -m support.pipeline_training --help

The model is trained on the source of Python's standard library, then fine-tuned on the text of its help topics.
"""

import argparse
import functools
import itertools
import json
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import codec

CONTEXT, BLOCKS, BATCH = 32, 4, 16


class Block(nn.Module):
    """Causal transformer block."""

    def __init__(self, width):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (y.view(b, t, 4, -1).transpose(1, 2) for y in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    """Byte transformer whose blocks are stages of a pipeline."""

    def __init__(self, width):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x, edges=(), samples=None):
        h = self.token(x) + self.place.weight[: x.shape[1]]
        for i, block in enumerate(self.blocks):
            h = block(h)
            if i < len(edges):
                h = Cross.apply(h, edges[i], samples)
        return self.head(self.norm(h))

    def loss(self, rows, edges=(), samples=None):
        return F.cross_entropy(self(rows[:, :-1], edges, samples).flatten(0, 1), rows[:, 1:].flatten())


class Cross(torch.autograd.Function):
    """Send activations over an edge in the forward pass, and their gradients back in the backward pass."""

    @staticmethod
    def forward(ctx, h, edge, samples):
        ctx.edge = edge
        return edge.forward(h.detach().contiguous(), samples)

    @staticmethod
    def backward(ctx, g):
        return ctx.edge.backward(g.contiguous()), None, None


class Edge:
    """Sender and receiver of an edge. `delta`: encode changes of activations; if False, quantize activations."""

    def __init__(self, number, delta, spec, backward, **arguments):
        self.delta, self.spec, self.number, self.nbytes = delta, spec, number, 0
        self.sides = [codec.ActivationDelta(spec, backward=backward, edge=number, **arguments) for _ in range(2)]

    def forward(self, h, samples):
        if not self.delta:
            self.number += 1 << 20
            frame = codec.encode(h, self.spec, stream=self.number)
            self.nbytes += len(frame)
            return codec.decode(frame, like=h)
        message = self.sides[0].encode(h, samples)
        self.nbytes += len(message)
        return self.sides[1].decode(message, samples, like=h)

    def backward(self, g):
        message = self.sides[1].encode_gradient(g)
        self.nbytes += len(message)
        return self.sides[0].decode_gradient(message, like=g)

    def commit(self):
        for side in self.sides:
            side.commit()


def rows_of(text, count, generator):
    at = torch.randperm(len(text) // (CONTEXT + 1) - 1, generator=generator)[:count] * (CONTEXT + 1)
    return torch.stack([text[i : i + CONTEXT + 1] for i in at]).long()


@functools.cache
def texts():
    root = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(p.read_bytes() for p in sorted(root.glob("*.py")))
    topics = (root / "pydoc_data/topics.py").read_bytes().replace(b"\\n", b"\n").replace(b"'\n", b"\n")
    return [torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (source, topics)]


def train(model, rows, lr, steps, order, edges=()):
    """Train on batches of rows, and return the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    losses = []
    for step, batch in enumerate(itertools.islice(order, steps)):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 10) * (1 - step / steps)
        loss = model.loss(rows[batch], edges, batch.tolist())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for edge in edges:
            edge.commit()
        losses.append(loss.item())
    return losses


def batches(n, generator):
    while True:
        yield from torch.randperm(n, generator=generator).view(-1, BATCH)


@functools.cache
def pretrained(width, steps):
    """Return the parameters of a model trained on the standard library."""
    torch.manual_seed(0)
    model = Model(width)
    generator = torch.Generator().manual_seed(0)
    rows = rows_of(texts()[0], 8192, generator)
    train(model, rows, 2e-3, steps, batches(len(rows), generator))
    return {k: v.clone() for k, v in model.state_dict().items()}


def fine_tune(edges=(), *, seed=0, width=64, pretraining=1500, samples=256, epochs=6, lr=5e-4, scratch=False):
    """Fine-tune, and return the mean training loss of each epoch."""
    torch.manual_seed(seed)
    model = Model(width)
    if not scratch:
        model.load_state_dict(pretrained(width, pretraining))
    rows = rows_of(texts()[1], samples, torch.Generator().manual_seed(1))
    order = batches(samples, torch.Generator().manual_seed(seed + 100))
    losses = train(model, rows, lr, epochs * samples // BATCH, order, edges)
    return np.reshape(losses, (epochs, -1)).mean(axis=1).tolist()


def edges_of(
    delta,
    forward,
    backward,
    *,
    rounding="nearest",
    backward_rounding="stochastic",
    seed=0,
    group_size=64,
    levels="even",
    **arguments,
):
    """Return the three edges between four stages."""
    fw = codec.Quantize(forward, group_size, levels, rounding, seed)
    bw = codec.Quantize(backward, group_size, "even", backward_rounding, seed + 1)
    return [Edge(i, delta, fw, bw, **arguments) for i in range(BLOCKS - 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "settings", nargs="+", help='"fp32", or JSON: {"delta": true, "forward": 4, "backward": 8, ...}'
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pretraining", type=int, default=1500, help="steps")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--scratch", action="store_true", help="random initial parameters")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {k: v for k, v in vars(args).items() if k not in ("settings", "seeds")}
    for setting in args.settings:
        for seed in range(args.seeds):
            given = None if setting == "fp32" else json.loads(setting)
            edges = [] if given is None else edges_of(seed=seed, **given)
            losses = fine_tune(edges, seed=seed, **sizes)
            print(setting, "seed", seed, "loss of each epoch", *(f"{x:.4f}" for x in losses), flush=True)
            if edges:
                print(
                    "  bytes",
                    sum(e.nbytes for e in edges),
                    "change by edge and visit",
                    *(" ".join(f"{x:.3f}" for x in e.sides[0].stats().change) + ";" for e in edges),
                    flush=True,
                )


if __name__ == "__main__":
    main()
