"""Train a small model on the ranks of a pipeline."""

import hashlib
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import codec
from codec.torch.pipelining import CompressedStage, attempts
from codec.torch.pipelining.end import End
from codec.torch.point_to_point.send_recv import PeerLink
from support.activations import m_of

WIDTH, SAMPLES, BATCH, CHUNKS = 16, 24, 8, 4

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # 2 stages per rank: rank i of n has i and n + i
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # 2 stages per rank: rank i of n has i and 2 n - 1 - i
SCHEDULES = SINGLE + LOOPED + V_SHAPED


class Block(nn.Module):
    """Layer with dropout and running statistics, which a repeated step must restore.

    Each statistic is updated in another way: `norm` in place, `mean` by assignment, `largest` from None in the first
    step; the attribute `steps` is created in the first step. `scale` is an expanded tensor.
    """

    def __init__(self, seed, dropout):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("largest", None, persistent=False)
        self.register_buffer("scale", torch.ones(()).expand(WIDTH), persistent=False)

    def _observe(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        if hasattr(self, "steps"):
            self.steps += 1
        else:
            self.register_buffer("steps", torch.ones((), dtype=torch.int64), persistent=False)
        largest = (x.abs() * self.scale).max()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def forward(self, x):
        if self.training:
            self._observe(x.detach())
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


def places(schedule, rank, size):
    """Return the indices of the stages of a rank, and the total number of stages."""
    if schedule in SINGLE:
        return [rank], size
    return [rank, 2 * size - 1 - rank if schedule in V_SHAPED else rank + size], 2 * size


def data():
    """Return the inputs, targets and ids of all samples."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH, generator=g), torch.randn(SAMPLES, WIDTH, generator=g), torch.arange(SAMPLES) * 7


class Pipeline:
    """The pipeline stages of a rank, with their schedule and optimizer.

    Parameters
    ----------
    schedule : str
        Name of the schedule's class in torch.
    rank, size : int
        This rank, and the number of ranks.
    group : ProcessGroup, optional
        Group of the pipeline.
    dropout : float
        Probability of dropout.
    plain : bool
        True: use torch's own PipelineStage. False: use CompressedStage.
    static : bool
        True: shapes are given. False: torch infers shapes by running the modules on uninitialized memory.
    **arguments
        Arguments of CompressedStage.
    """

    def __init__(self, schedule, rank, size, *, group=None, dropout=0.0, plain=False, static=False, **arguments):
        indices, n = places(schedule, rank, size)
        self.is_first, self.is_last = 0 in indices, n - 1 in indices
        kind = PipelineStage if plain else CompressedStage
        self.plain = plain
        if static:
            example = torch.zeros(BATCH // CHUNKS, WIDTH, requires_grad=True)
            arguments |= {"input_args": example, "output_args": example}
        self.stages = [kind(Block(i, dropout), i, n, torch.device("cpu"), group=group, **arguments) for i in indices]
        made = schedules.get_schedule_class(schedule)
        one = self.stages[0] if schedule in SINGLE else self.stages
        self.schedule = made(one, CHUNKS, loss_fn=nn.functional.mse_loss)
        self.parameters = [p for s in self.stages for p in s.submod.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)
        self.x, self.y, self.ids = data()

    def run(self, batch, losses=None, *, ids_everywhere=False):
        """Run the schedule once on the samples of a batch."""
        x, y, ids = (t[batch] for t in (self.x, self.y, self.ids))
        keywords = {"sample_ids": ids} if not self.plain and (self.is_first or ids_everywhere) else {}
        if self.is_last:
            keywords |= {"target": y, "losses": losses}
        self.schedule.step(*([x] if self.is_first else []), **keywords)

    def step(self, batch, **keywords):
        """Run one training step, and return the mean loss on the rank of the last stage."""
        losses = []
        self.optimizer.zero_grad()
        if self.plain:
            self.run(batch, losses)
        else:
            for attempt in attempts(*self.stages):
                with attempt:
                    self.run(batch, losses, **keywords)
        self.optimizer.step()
        return float(torch.stack([x.detach() for x in losses]).mean()) if losses else None

    def train(self, epochs, **keywords):
        """Train, and return the mean loss of each epoch on the rank of the last stage."""
        torch.manual_seed(5)
        batches = torch.arange(SAMPLES).view(-1, BATCH)
        found = [[self.step(b, **keywords) for b in batches] for _ in range(epochs)]
        return [sum(e) / len(e) for e in found] if self.is_last else None

    def digest(self):
        """Return a hash of parameters, momenta, buffers and the state of the random number generator."""
        h = hashlib.sha256()
        for s in self.stages:
            for name, t in [*s.submod.named_parameters(), *s.submod.named_buffers()]:
                h.update(name.encode() + t.detach().numpy().tobytes())
        h.update(torch.get_rng_state().numpy().tobytes())
        return h.hexdigest()

    def ends(self):
        return [end for s in self.stages for end in s.traffic.ends]

    def checks(self):
        """Return the checksums of all stored activations m, by edge and tensor."""
        _, _, ids = data()
        return [((e.edge, i), d.checks(ids).tolist()) for e in self.ends() for i, d in enumerate(e.deltas)]

    def memories(self):
        """Return the stored activations m of all samples, by edge and tensor."""
        found = ((e.edge, i, sorted(m_of(d).items())) for e in self.ends() for i, d in enumerate(e.deltas))
        return [((edge, i), [(s, m.tobytes()) for s, m in rows]) for edge, i, rows in found]


def check_equal_sides(results):
    """Check that :meth:`Pipeline.checks` or `memories` returned equal results on both sides of each edge."""
    sides = {}
    for found in results:
        for key, value in found:
            sides.setdefault(key, []).append(value)
    assert sides
    for key, values in sides.items():
        assert len(values) == 2, key
        assert values[0] == values[1], key
    return sides


LOSSLESS = {"forward": codec.Lossless(), "backward": codec.Lossless(), "activations": "direct"}


@contextmanager
def altered_messages(change):
    """Send change(message) in place of each message. `change` may raise an exception."""
    send = PeerLink.send
    PeerLink.send = lambda link, data: send(link, change(data))
    try:
        yield
    finally:
        PeerLink.send = send


@contextmanager
def recorded_messages():
    """Yield two dicts: messages that this rank encodes, and messages that it decodes without an error.

    A key is the edge, kind and position of a message; a value is the hash of the message's bytes.
    """
    encoded, decoded = {}, {}
    encode, decode = End.encode, End.decode

    def encode_and_record(end, kind, tensors, place, samples):
        message = encode(end, kind, tensors, place, samples)
        encoded[end.edge, int(kind), *place] = hashlib.sha256(message).digest()
        return message

    def decode_and_record(end, kind, message, outputs, place, samples):
        ids = decode(end, kind, message, outputs, place, samples)
        decoded[end.edge, int(kind), *place] = hashlib.sha256(message).digest()
        return ids

    End.encode, End.decode = encode_and_record, decode_and_record
    try:
        yield encoded, decoded
    finally:
        End.encode, End.decode = encode, decode


def damaged(message, at):
    """Return a message with one bit flipped; `at` is a fraction of its length."""
    changed = bytearray(message)
    changed[int(at * len(changed))] ^= 1 << 5
    return bytes(changed)
