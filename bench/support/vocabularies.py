"""Small training tasks with rarely used rows: recommendation, a model over words, an encoder-decoder like T5.

Most rows of large embeddings and heads are rarely used, so that their gradients, and Adam's second moments, have very
different magnitudes. The ids of the recommendation model are drawn from a Zipf distribution. Texts are those of
models.py. :data:`TASKS` has these tasks and those of bench/support/architectures.py.
"""

import collections
import functools
import re
from collections.abc import Callable

import architectures
import torch
from models import Batch, Task, task_of, text
from torch import nn
from torch.nn import functional as F

FIELDS, ROWS = 8, 2000  # embeddings of the recommendation model, and rows of each
WORDS, WORD_CONTEXT = 8192, 24  # vocabulary of the word model, and its context in words
SOURCE, TARGET = 48, 24  # bytes that the encoder reads, and following bytes that the decoder predicts


class Recommendation(nn.Module):
    """Click model like DLRM: a perceptron on the embeddings of a sample's ids and their pairwise products."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, width) for _ in range(FIELDS))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)
        self.pairs = torch.triu_indices(FIELDS, FIELDS, 1)
        inputs = FIELDS * width + self.pairs.shape[1]
        self.perceptron = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([table(ids) for table, ids in zip(self.tables, x.unbind(1), strict=True)], 1)
        products = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.perceptron(torch.cat([rows.flatten(1), products], 1))


class WordModel(nn.Module):
    """GRU language model over words, whose head has weights of its own."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.token, self.gru = nn.Embedding(WORDS, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.token(x))[0])


class RelativeAttention(nn.Module):
    """Attention with a learned bias for each relative position, as in T5; across two sequences without it."""

    def __init__(self, width: int, heads: int, causal: bool = False, across: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.places = None if across else nn.Embedding(2 * SOURCE, heads)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (
            y.view(b, -1, self.heads, w // self.heads).transpose(1, 2)
            for y in (self.q(x), *self.kv(other).chunk(2, -1))
        )
        bias = None
        if self.places is not None:
            at = torch.arange(t)
            bias = self.places(at[None, :] - at[:, None] + SOURCE).permute(2, 0, 1)
            if self.causal:
                bias = bias.masked_fill(at[None, :] > at[:, None], -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class Layer(nn.Module):
    """Layer of the encoder, or of the decoder, which also attends to the encoder's output."""

    def __init__(self, width: int, decoder: bool) -> None:
        super().__init__()
        self.own = RelativeAttention(width, 4, causal=decoder)
        self.across = RelativeAttention(width, 4, across=True) if decoder else None
        self.n1, self.n3 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.n2 = nn.RMSNorm(width) if decoder else None
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normal = self.n1(x)
        x = x + self.own(normal, normal)
        if self.across is not None and self.n2 is not None and memory is not None:
            x = x + self.across(self.n2(x), memory)
        return x + self.down(F.relu(self.up(self.n3(x))))


class EncoderDecoder(nn.Module):
    """Encoder-decoder over bytes, whose head shares the weights of the embedding.

    The input is the concatenation of the encoder's and the decoder's bytes.
    """

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.encoder = nn.ModuleList(Layer(width, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, True) for _ in range(layers))
        self.norm, self.last = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, y = self.token(x[:, :SOURCE]), self.token(x[:, SOURCE:])
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.norm(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return F.linear(self.last(y) * y.shape[-1] ** -0.5, self.token.weight)


def recommendation_task(seed: int, steps: int, rank: int = 0, world: int = 1, batch: int = 128) -> Task:
    """Return the task that trains the recommendation model by AdamW, on clicks that a fixed random model draws."""
    fixed = torch.Generator().manual_seed(0)
    weights = torch.randn(FIELDS, ROWS, generator=fixed)
    factors = 0.5 * torch.randn(FIELDS, ROWS, 4, generator=fixed)
    frequencies = 1 / torch.arange(1, ROWS + 1, dtype=torch.float32) ** 1.1
    fields = torch.arange(FIELDS)

    def clicks(count: int, g: torch.Generator) -> Batch:
        ids = torch.multinomial(frequencies.expand(FIELDS, -1), count, replacement=True, generator=g).T
        pairs = (factors[fields, ids].sum(1) ** 2).sum(1) - (factors[fields, ids] ** 2).sum((1, 2))
        score = weights[fields, ids].sum(1) / FIELDS**0.5 + pairs / FIELDS
        return ids, (torch.rand(count, generator=g) < torch.sigmoid(2 * score)).long()

    def share() -> Batch:
        x, y = clicks(batch, generator)
        return x[rank::world], y[rank::world]

    held = clicks(4096, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    model = Recommendation()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    return task_of(model, optimizer, steps, share, (held[0][rank::world], held[1][rank::world]))


@functools.cache
def words() -> torch.Tensor:
    """Return the words and signs of the text as numbers of the vocabulary; 0 stands for words that it lacks."""
    found = re.findall(rb"\w+|[^\w\s]", text().numpy().tobytes())
    most = collections.Counter(found).most_common(WORDS - 1)
    numbers = {word: i for i, (word, _) in enumerate(most, 1)}
    return torch.tensor([numbers.get(word, 0) for word in found])


def _sequences(
    source: torch.Tensor, length: int, seed: int, rank: int, world: int, batch: int
) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """Return a source of batches from the first 90% of a text, and this rank's part of 256 held-out sequences."""
    cut, generator = int(0.9 * len(source)), torch.Generator().manual_seed(seed)

    def some(first: int, end: int, count: int, g: torch.Generator) -> torch.Tensor:
        starts = torch.randint(first, end - length, (count,), generator=g)[rank::world]
        return source[starts[:, None] + torch.arange(length)].long()

    held = some(cut, len(source), 256, torch.Generator().manual_seed(0))
    return lambda: some(0, cut, batch, generator), held


def words_task(seed: int, steps: int, rank: int = 0, world: int = 1, batch: int = 16) -> Task:
    """Return the task that trains the word model by AdamW."""
    share, held = _sequences(words(), WORD_CONTEXT + 1, seed, rank, world, batch)

    def parts(rows: torch.Tensor) -> Batch:
        return rows[:, :-1], rows[:, 1:]

    torch.manual_seed(seed)
    model = WordModel()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.01)
    return task_of(model, optimizer, steps, lambda: parts(share()), parts(held))


def encoder_decoder_task(seed: int, steps: int, rank: int = 0, world: int = 1, batch: int = 16) -> Task:
    """Return the task that trains the encoder-decoder by AdamW to continue a text."""
    share, held = _sequences(text(), SOURCE + TARGET + 1, seed, rank, world, batch)

    def parts(rows: torch.Tensor) -> Batch:
        return rows[:, :-1], rows[:, SOURCE + 1 :]

    torch.manual_seed(seed)
    model = EncoderDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.01)
    return task_of(model, optimizer, steps, lambda: parts(share()), parts(held))


TASKS: dict[str, Callable[..., Task]] = {
    **architectures.TASKS,
    "recommendation": recommendation_task,
    "words": words_task,
    "encoder-decoder": encoder_decoder_task,
}
