"""Small tensors: "auto" chooses all-gather by size and number of ranks, and empty slices cause no messages."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.reduction import execution
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.partition import cut, sent
from codec.torch.transport.levels import Levels
from support.ranks import RankPool

SIZE = 4
LIMIT = 2 * 65_536 // SIZE // 4  # largest number of float32 values for which SIZE ranks use all-gather
SPEC = codec.Quantize(4)


@pytest.fixture(scope="module")
def four():
    with RankPool(SIZE) as ranks:
        ranks.new_group()
        yield ranks


def chosen(nbytes, size):
    r = Reduction(np.zeros(nbytes // 4, np.float32), "float32", SPEC, "sum", 0)
    channel = SimpleNamespace(levels=Levels(size, 0), device=SimpleNamespace(connected=False))
    return execution.choose("auto", r, channel).name


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16, 64, 512])
def test_auto_takes_all_gather_up_to_128_kib_of_all_ranks_together(size):
    limit = 131_072 // size // 4 * 4
    assert chosen(limit, size) == "all_gather"
    assert chosen(limit + 4, size) == ("all_gather" if size <= 2 else "two_shot")
    assert chosen(0, size) == "all_gather"


def measured(call):
    """Return the counters by which a call has increased those of the channel."""
    counters = communicator.communicator_of(None).channel.counters
    before = counters.copy()
    call()
    return counters.copy() - before


def reduced(rank, size, n, algorithm, spec=SPEC):
    """Return the result of an all-reduce, and what it has sent."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    options = None if algorithm == "auto" else codec.options(algorithm=algorithm)
    delta = measured(lambda: codec.torch.all_reduce(x, spec, op="mean", options=options))
    return x.numpy().tobytes(), delta.sent_nbytes, delta.round_trips


@pytest.mark.parametrize(
    ("n", "algorithm"), [(256, "all_gather"), (LIMIT, "all_gather"), (LIMIT + 1, "two_shot"), (16_384, "two_shot")]
)
def test_auto_gives_the_bits_and_bytes_of_the_algorithm_it_takes(four, n, algorithm):
    auto, named = four.run(reduced, n, "auto"), four.run(reduced, n, algorithm)
    assert auto == named
    assert len({result for result, _, _ in auto}) == 1
    assert {trips for _, _, trips in auto} == {2.0 if algorithm == "two_shot" else 1.5}


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "raw"])
@pytest.mark.parametrize("n", [256, 3000])
def test_empty_slices_send_nothing(four, n, algorithm):
    """Bytes are those of the messages for slices with values, which are those of rank 3, or all but that of rank 0."""
    found = four.run(reduced, n, algorithm, codec.Float8())
    assert len({result for result, _, _ in found}) == 1
    slices = [pieces[0].n for pieces in cut(n, SIZE, 4, None)]
    assert sum(each > 0 for each in slices) == (1 if n == 256 else 3)
    nbytes = [
        each * 4 if algorithm == "raw" else codec.bound(each, "float32", codec.Float8(), segments=()) for each in slices
    ]
    nbytes = [b if each else 0 for each, b in zip(slices, nbytes, strict=True)]
    for rank, (_, sent_nbytes, _) in enumerate(found):
        if algorithm == "ring":  # in both rounds, every slice but one passes from this rank to the next
            expected = 2 * sum(nbytes) - nbytes[(rank + 1) % SIZE] - nbytes[(rank + 2) % SIZE]
        else:
            expected = sum(nbytes) - nbytes[rank] + (SIZE - 1) * nbytes[rank]
        assert sent_nbytes == expected


def test_pieces_of_a_tensor_without_values_are_sent():
    assert sent(cut(0, SIZE, 4, None)) == [{0: (0, 0, None)}] * SIZE
    assert [len(pieces) for pieces in sent(cut(1, SIZE, 4, None))] == [0, 0, 0, 1]


def differing(rank, size, algorithm, numbers):
    n = numbers[rank]
    with pytest.raises(codec.PeerError, match="number of values"):
        codec.torch.all_reduce(torch.ones(n), SPEC, options=codec.options(algorithm=algorithm))
    x = torch.ones(100)
    with pytest.raises(codec.PeerError, match="op is"):
        codec.torch.all_reduce(x, SPEC, op="sum" if rank else "mean", options=codec.options(algorithm=algorithm))
    codec.torch.all_reduce(x, SPEC, options=codec.options(algorithm=algorithm))
    assert torch.equal(x, torch.full((100,), float(size)))


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "raw"])
@pytest.mark.parametrize("numbers", [[100, 100, 101, 101], [100, 101, 100, 100], [0, 0, 5, 0], [5, 0, 5, 5]])
def test_ranks_without_slices_find_different_arguments(four, algorithm, numbers):
    """All ranks exchange messages with the last one, so they raise PeerError before any timeout."""
    four.run(differing, algorithm, numbers)
