"""Values that the ranks of a machine send each other in two levels: frames, bfloat16, or uncompressed."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import codec
import codec.torch
from codec.torch.group.communicator import communicator_of
from codec.torch.reduction.arguments import reduction_of
from codec.torch.reduction.partition import cut, messages
from codec.torch.reduction.raw import Within
from support.collective_values import rank_values, sum_in_order, tensor_bytes
from support.ranks import run_ranks

SHAPE = 601, 100  # more than 64 KiB in each dtype, in windows of unequal size
LARGE = 2, 400_000  # several messages a window
FORMS = {  # option within=, and its maximum relative error
    "uncompressed": (None, 0),
    "bfloat16": ("bfloat16", 2**-7),
    "lossless": ("lossless", 0),
    "float8": (codec.Float8(), 2**-3),
    "quantize": (codec.Quantize(8), 2**-6),
    "truncate": (codec.Truncate(1), 2**-6),
}


def _reduce(rank, size, cases):
    """Return the result of each all-reduce, and the bytes sent within the machine and between machines."""
    group, found = init_device_mesh("cpu", (2, 2)), []
    for name, shape, dtype, op in cases:
        x, before = rank_values(rank, shape, dtype), codec.torch.group_stats(group)
        how = codec.options(algorithm="two_shot", within=FORMS[name][0])
        codec.torch.all_reduce(x, op=op, group=group, options=how)
        used = codec.torch.group_stats(group) - before
        found.append((x, used.local_nbytes, used.sent_nbytes))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_results_are_equal_on_all_ranks_and_near_the_sum(name):
    """Values are encoded twice within a machine: before and after the sum between machines."""
    ops = ("mean", "sum", "max")
    cases = [(name, SHAPE, dtype, op) for dtype in (torch.float32, torch.bfloat16) for op in ops]
    found = run_ranks(4, _reduce, [*cases, (name, LARGE, torch.float32, "mean")])
    error = FORMS[name][1]
    for i, (_, shape, dtype, op) in enumerate([*cases, (name, LARGE, torch.float32, "mean")]):
        results = [each[i][0] for each in found]
        assert len({tensor_bytes(x) for x in results}) == 1, (dtype, op)
        xs = [rank_values(rank, shape, dtype) for rank in range(4)]
        halves = [sum_in_order(xs[:2], op), sum_in_order(xs[2:], op)]  # each machine adds and rounds first
        expected = sum_in_order(halves, op)
        if error == 0 or (name == "bfloat16" and dtype == torch.bfloat16):
            assert torch.equal(results[0], expected), (dtype, op)
            continue
        scale = sum(x.float().square().mean().sqrt() for x in xs) / (4 if op == "mean" else 1)
        change = (results[0].float() - expected.float()).square().mean().sqrt() / scale
        assert 0 < change < error, (dtype, op, change)


def test_frames_and_bfloat16_send_fewer_bytes_within_and_equal_bytes_between():
    names = ("uncompressed", "bfloat16", "float8")
    plain, narrow, frames = run_ranks(4, _reduce, [(name, LARGE, torch.float32, "mean") for name in names])[1]
    assert plain[1] == 4 * plain[0].numel() == 2 * narrow[1]
    assert frames[1] < 0.26 * plain[1]
    assert all(abs(each[2] / plain[2] - 1) < 0.5 for each in (narrow, frames))  # sizes of lossless frames vary


def _small(rank, size):
    group = init_device_mesh("cpu", (2, size // 2))
    x = rank_values(rank, (16, 1024))  # 64 KiB
    codec.torch.all_reduce(x, group=group, options=codec.options(within=codec.Float8()))
    return x


def test_small_tensors_stay_uncompressed_and_are_added_in_the_order_of_ranks():
    xs = [rank_values(rank, (16, 1024)) for rank in range(6)]
    expected, other = (sum_in_order([sum_in_order(some[:3]), sum_in_order(some[3:])]) for some in (xs, xs[::-1]))
    assert not torch.equal(expected, other)
    assert all(torch.equal(x, expected) for x in run_ranks(6, _small))


def _context(rank, size):
    group, x = init_device_mesh("cpu", (2, 2)), rank_values(rank, SHAPE)
    y, two_shot = x.clone(), codec.options(algorithm="two_shot")
    with codec.options(within="balanced"):
        codec.torch.all_reduce(x, group=group, options=two_shot)
    codec.torch.all_reduce(y, group=group, options=codec.options(algorithm="two_shot", within=codec.preset("balanced")))
    flat, plain = rank_values(rank, SHAPE), rank_values(rank, SHAPE)
    codec.torch.all_reduce(flat, options=codec.options(algorithm="two_shot", within=codec.Float8()))
    codec.torch.all_reduce(plain, options=two_shot)
    return torch.equal(x, y), torch.equal(flat, plain)


def test_option_is_inherited_and_ignored_by_flat_groups():
    assert run_ranks(4, _context) == [(True, True)] * 4


def _other_arguments(rank, size, whose):
    """Pass another `within` on some ranks; return the error, and True if the next all-reduce is exact again."""
    group = init_device_mesh("cpu", (2, 2))
    x, within = rank_values(rank, SHAPE), codec.Float8() if rank in whose else None
    before = x.clone()
    with pytest.raises(codec.PeerError) as raised:
        codec.torch.all_reduce(x, group=group, options=codec.options(within=within))
    assert torch.equal(x, before)
    codec.torch.all_reduce(x, group=group)
    return str(raised.value)


@pytest.mark.parametrize("whose", [(3,), (2, 3)], ids=["one-rank", "one-machine"])
def test_ranks_with_another_form_raise_an_error_that_names_it(whose):
    texts = run_ranks(4, _other_arguments, whose)
    assert any("within is uncompressed" in text or "uncompressed here" in text for text in texts), texts
    assert any("Float8" in text for text in texts), texts


def _nonfinite(rank, size):
    group, found = init_device_mesh("cpu", (2, 2)), []
    for at in (0, -1):  # in the window of either rank of the machine
        x = rank_values(rank, SHAPE)
        if rank == 2:
            x.view(-1)[at] = float("nan")
        before = x.clone()
        with pytest.raises(codec.CodecError) as raised:
            codec.torch.all_reduce(x, group=group, options=codec.options(within=codec.Float8()))
        assert tensor_bytes(x) == tensor_bytes(before)
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def test_nan_that_the_form_refuses_is_an_error_on_all_ranks():
    for rank, texts in enumerate(run_ranks(4, _nonfinite)):
        for text in texts:
            assert text.startswith("ArgumentError" if rank == 2 else "PeerError"), text
            assert "Float8" in text, text


def _sum_within(rank, size):
    """Return this rank's window of the mean within its machine of equal tensors, in frames with stochastic rounding."""
    comm = communicator_of(init_device_mesh("cpu", (2, 2)))
    x, settings = rank_values(0, SHAPE).flatten(), codec.options(within=codec.Quantize(4))

    async def run(collective):
        within = Within(collective, [reduction_of(x, codec.Lossless(), "mean", settings=settings)])
        [window] = await within.scatter()
        found = torch.from_numpy(window.x.copy())
        await within.gather([window.x])
        await collective.agree()
        return found

    return comm.run(run)


def test_machines_round_by_different_random_bits():
    windows = run_ranks(4, _sum_within)
    x = rank_values(0, SHAPE).flatten().split([len(windows[0]), len(windows[1])])
    for place in (0, 1):
        first, second = ((windows[rank] - x[place]).norm() for rank in (place, place + 2))
        both = (windows[place] + windows[place + 2] - 2 * x[place]).norm()
        assert both < 1.1 * (first**2 + second**2).sqrt()  # errors of equal random bits would add up to 1.41 times that


def _hook(rank, size, within):
    group = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    hook = codec.torch.ddp_hook(codec.Quantize(4), options=codec.options(algorithm="two_shot", within=within))
    hook.register(model, group=group)
    model(rank_values(rank, (8, 256))).square().sum().backward()
    weight, bias = (p.grad for p in model.parameters())
    return weight, bias, codec.torch.group_stats(group).local_nbytes


def test_hook_sends_frames_within_machines_and_small_parameters_uncompressed():
    plain, coded = run_ranks(4, _hook, None), run_ranks(4, _hook, codec.Float8())
    for i in (0, 1):
        assert len({tensor_bytes(each[i]) for each in coded}) == 1
    (weight, bias, nbytes), (coded_weight, coded_bias, coded_nbytes) = plain[0], coded[0]
    assert 0 < float((coded_weight - weight).norm() / weight.norm()) < 0.2
    assert torch.equal(coded_bias, bias)
    assert coded_nbytes < 0.27 * nbytes


def test_small_tensors_share_messages():
    """Pieces of up to the given bytes travel together; frames, of itemsize 0, and large pieces travel alone."""
    slices = [cut(n, 2, 4, None, 1 << 20) for n in (5000, 6000, 0, 1_000_000, 5000)]
    first, second = messages(slices, [4, 4, 4, 4, 0], 1 << 16)
    assert [[each.tensor for each in message] for message in first] == [[0, 1, 2], [3], [3], [4]]
    assert [[each.tensor for each in message] for message in second] == [[0, 1, 2], [3], [3], [4]]
    numbers = [(each.tensor, each.number) for rank in (first, second) for message in rank for each in message]
    assert len({*numbers}) == len(numbers)
    values = sum(each.piece.n for rank in (first, second) for message in rank for each in message)
    assert values == 5000 + 6000 + 1_000_000 + 5000
