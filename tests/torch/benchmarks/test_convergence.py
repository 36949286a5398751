"""Training with each codec's default settings reaches about the loss of Lossless (bench/training/convergence.py)."""

import argparse
import hashlib
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.ranks import RankPool
from support.tiers import every

pytestmark = pytest.mark.nightly

STEPS, CONTEXT, WIDTH = 60, 32, 64

# Largest allowed increase of the held-out loss over lossless training (loss 2.50). Measured increase on three texts:
# Sign 0.13, Quantize(2) 0.05, 4 bits 0.007, Ternary and other codecs at most 0.001. If training diverges, the loss is
# 0.7 to 40 higher.
MARGINS = {
    codec.Truncate(): 0.02,
    codec.Truncate(level_coding="shared", granularity="bit", guard="feedback"): 0.02,
    codec.Float8(): 0.02,
    codec.Float4(): 0.05,
    codec.Quantize(8): 0.02,
    codec.Quantize(4): 0.05,
    codec.Quantize(2): 0.15,
    codec.Sign(): 0.25,
    codec.Sign(group_size=1024): 0.25,
    codec.Ternary(): 0.15,
}
SPECS = every(3, MARGINS)
RATIO = 10  # largest allowed residual norm / gradient norm; measured: 4 for Sign, 0.02 for Truncate


class Language(nn.Module):
    """A byte-level causal transformer of one block."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.norm(self.block(self.token(x) + self.place.weight, mask, is_causal=True)))


def windows(text, count, generator):
    """Return inputs and targets of windows at random offsets in a text."""
    start = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    found = text[start + torch.arange(CONTEXT + 1)].long()
    return found[:, :-1], found[:, 1:]


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def train(rank, spec):
    """Train; return the held-out loss, a digest of the parameters, and the largest residual ratio."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8)
    kept, held_out = text[:-10_000], text[-10_000:]
    torch.manual_seed(0)
    model = DistributedDataParallel(Language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hook = codec.torch.ddp_hook(spec, optimizer=optimizer, options=codec.options(algorithm="two_shot")).register(model)
    generator, ratio = torch.Generator().manual_seed(rank), 0.0
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, windows(kept, 8, generator)).backward()
        optimizer.step()
        ratio = max(ratio, hook.stats().residual_ratio)
    with torch.no_grad():
        loss = loss_of(model.module, windows(held_out, 64, torch.Generator().manual_seed(2))).item()
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return loss, hashlib.sha256(parameters).hexdigest(), ratio


def train_all(rank, size):
    return {spec: train(rank, spec) for spec in (codec.Lossless(), *SPECS)}


@pytest.fixture(scope="module")
def trained():
    """Return each rank's results of training, by spec."""
    with RankPool(2, limit=300) as ranks:
        ranks.new_group()
        return ranks.run(train_all)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_default_settings_train_as_well_as_lossless(trained, spec):
    loss, _, ratio = trained[0][spec]
    assert loss - trained[0][codec.Lossless()][0] < MARGINS[spec]
    assert ratio < RATIO


def test_replicas_stay_identical(trained):
    first, second = ({spec: digest for spec, (_, digest, _) in of_rank.items()} for of_rank in trained)
    assert first == second
