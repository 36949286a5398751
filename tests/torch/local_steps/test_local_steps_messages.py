"""Messages of LocalSteps are those of docs/spec/protocol/collectives.md, section 4.4."""

import torch

from codec.specs import Lossless, Quantize
from codec.torch.replicas.ranks import Ranks
from support.local_training import adam, local_steps, net, train


def _terms(rank, size):
    """Return the text and the terms of each collective."""
    begin, found = Ranks.begin, []

    def recorded(self, terms, error, item):
        found.append((item, [(t.spec, t.stream, t.feedback is not None, _count(t.values)) for t in terms]))
        return begin(self, terms, error, item)

    model = torch.nn.Sequential(net(), torch.nn.BatchNorm1d(3))
    optimizer = adam(model)
    Ranks.begin = recorded
    try:
        local = local_steps(model, optimizer, every=2, warmup=1)
        train(model, optimizer, rank, range(3), local.step)
        with local.averaged():
            pass
        train(model, optimizer, rank, range(3, 4))
        local.synchronize(exact=True)
        local.finish()
    finally:
        Ranks.begin = begin
    return found


def _count(values):
    return values.numel() if isinstance(values, torch.Tensor) else values.tensor.numel()


def test_collectives_have_the_terms_and_texts_of_the_specification(pool):
    coded = 3 * 40 + 12 * 40 + 40 * 40
    total = sum(p.numel() for p in torch.nn.Sequential(net(), torch.nn.BatchNorm1d(3)).parameters())
    buffers = 6
    small = total - coded
    assert small > total / 32  # so that small parameters are not lossless
    rest = Lossless(), 0, False, buffers + 1
    expected = [
        ("gradients of optimizer 0 in step 0", [(Lossless(), 0, False, total)]),
        (
            "step() after step 3, synchronization 0, then 2 steps",
            [(Quantize(4), 0, True, total), rest],
        ),
        ("averaged(), synchronization 1", [(Quantize(4), 1, True, total), rest]),
        (
            "synchronize(), synchronization 1, then 2 steps",
            [(Lossless(), 0, False, total), rest],
        ),
        ("finish(), synchronization 2, then 2 steps", [rest]),
    ]
    for found in pool.run(_terms):
        assert found == expected
