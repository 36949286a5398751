"""LocalSteps between sites in each of which FSDP2 shards the model."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import codec
import codec.torch
from support.local_sites import Pushed, Tied, parallel, push, pushed, sites, text, train, train_with_pause
from support.local_training import ROUNDED, adam, nesterov, raised, state_bytes
from support.ranks import RankPool, run_ranks

LR = 0.01


@pytest.fixture(scope="module")
def four():
    """Return four ranks in two sites."""
    with RankPool(4) as ranks:
        ranks.new_group()
        yield ranks


def sharded(group=None, **how):
    """Return a model that FSDP2 shards within the site, its optimizer, and a LocalSteps between sites."""
    mesh = sites()
    model = Tied()
    for layer in (model.hidden, model.back):
        fully_shard(layer, mesh=mesh["within"])
    fully_shard(model, mesh=mesh["within"])
    optimizer = adam(model)
    chosen = mesh if group is None else mesh.get_group(group)
    return model, optimizer, codec.torch.LocalSteps(model, optimizer, group=chosen, **how)


def whole(model):
    """Return all parameters as one float64 array."""
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return np.concatenate([p.detach().double().numpy().reshape(-1) for p in full])


def _trained(rank, size, make, group, how, steps):
    model, optimizer, local = make(group, **how)
    train(model, optimizer, range(steps), local.step)
    inner = getattr(model, "module", model)
    with local.averaged():
        mean = whole(inner)
    train(model, optimizer, range(steps, steps + 2), local.step)
    local.finish()
    return whole(inner), mean, local.stats()


HOWS = {
    "now": {"spec": ROUNDED},
    "between": {"spec": ROUNDED},
    "outer": {"outer": nesterov, "spec": ROUNDED},
    "warmup": {"spec": ROUNDED, "warmup": 3},
}


@pytest.mark.parametrize("name", HOWS)
def test_shards_have_the_means_of_whole_parameters(four, name):
    how = HOWS[name] | {"every": 4}
    group = "between" if name == "between" else None
    found = four.run(_trained, sharded, group, how, 7)
    wholes = four.run(_trained, parallel, None, how, 7)
    for ours, theirs in zip(found, wholes, strict=True):
        np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(ours[0], found[0][0])
    sent = [sum(stats.sent_nbytes for *_, stats in some) for some in (found, wholes)]
    assert sent[0] < 1.2 * sent[1]


def _pushed(rank, size, how):
    mesh = sites()
    model = Pushed()
    start = whole(model)
    fully_shard(model, mesh=mesh["within"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    local = codec.torch.LocalSteps(model, optimizer, group=mesh, **how)
    push(model, optimizer, rank, range(9), local.step)
    local.finish(exact=True)
    return whole(model) - start, local.stats().residual_norm


@pytest.mark.parametrize(
    "how",
    [
        {"spec": codec.Sign(), "every": 3},
        {"spec": codec.Sign(), "every": 4, "fragments": 3, "delay": 1},
        {"spec": codec.Lossless(), "every": 3, "warmup": 2},
    ],
    ids=str,
)
def test_all_changes_of_uneven_shards_arrive(four, how):
    found = four.run(_pushed, how)
    expected = pushed(range(4), range(9), LR)
    for change, norm in found:
        np.testing.assert_allclose(change, expected, rtol=0, atol=5e-6)
        assert norm == 0
        np.testing.assert_array_equal(change, found[0][0])


def _resumed(rank, size, how):
    """Train with and without a pause; return parameters and states of both."""
    both = [train_with_pause(sharded, pause, **how) for pause in (None, 5)]
    return [(whole(model).tobytes(), state_bytes(local)) for model, local in both]


@pytest.mark.parametrize("how", [{"every": 3}, {"every": 4, "fragments": 2, "delay": 2, "outer": nesterov}], ids=str)
def test_training_of_shards_resumes_to_the_bit(four, how):
    for first, resumed in four.run(_resumed, how):
        assert first == resumed


def _evaluated(rank, size):
    """Evaluate within averaged(), where FSDP2 keeps gathered parameters; return what differs from no evaluation."""
    found = []
    for evaluates in (False, True):
        model, optimizer, local = sharded(every=100, spec=ROUNDED)
        train(model, optimizer, range(2), local.step)
        with local.averaged(), torch.no_grad():
            mean = model(torch.arange(40)) if evaluates else None
        train(model, optimizer, range(2, 4), local.step)
        found.append(whole(model))
    return mean.numpy(), np.abs(found[0] - found[1]).max()


def test_evaluation_of_the_mean_leaves_training_unchanged(four):
    found = four.run(_evaluated)
    for mean, difference in found:
        np.testing.assert_array_equal(mean, found[0][0])
        assert difference == 0


def _bfloat16(rank, size):
    """Train bfloat16 shards, a frozen embedding and a replicated layer; return parameters, and the values sent."""
    mesh = sites()
    model = Tied().bfloat16()
    model.embedding.weight.requires_grad_(False)
    ignored = set(model.back.parameters())
    fully_shard(model, mesh=mesh["within"], ignored_params=ignored)
    optimizer = adam(model)
    local = codec.torch.LocalSteps(model, optimizer, group=mesh, every=2, spec=ROUNDED)
    group = mesh.get_group("within")
    for step in range(4):
        x, y = text(rank, step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x).float(), y).backward()
        for p in ignored:
            dist.all_reduce(p.grad, group=group)
        optimizer.step()
        local.step()
    return whole(model), local.stats()


def test_shards_and_whole_parameters_are_synchronized_together(four):
    found = four.run(_bfloat16)
    start = np.concatenate([p.detach().bfloat16().double().numpy().reshape(-1) for p in Tied().parameters()])
    for ours, _ in found:
        np.testing.assert_array_equal(ours, found[0][0])
        assert 0.5 < (ours != start).mean() < 0.95  # frozen ones are unchanged
    trained = sum(p.numel() for p in Tied().parameters()) - 40 * 64 - 64 * 64 - 64
    assert sum(stats.values for _, stats in found) == pytest.approx(2 * trained, abs=4)


def _one_site(rank, size):
    """Train shards of one site of four ranks, after which two more steps need no other site."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("between", "within"))
    model = Pushed()
    start = whole(model)
    fully_shard(model, mesh=mesh["within"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    local = codec.torch.LocalSteps(model, optimizer, group=mesh, every=2, spec=codec.Sign())
    push(model, optimizer, rank, range(3), local.step)
    local.finish(exact=True)
    return whole(model) - start, local.stats().sent_nbytes


def test_one_site_sends_nothing(four):
    for change, sent in four.run(_one_site):
        np.testing.assert_allclose(change, pushed(range(4), range(3), LR), rtol=0, atol=5e-6)
        assert sent == 0


def _refused(rank, size):
    """Return the errors for groups that do not fit the shards."""
    mesh = sites()
    errors = []
    for place, group in ((mesh["within"], None), (mesh, mesh), (mesh["between"], mesh)):
        model = Pushed()
        fully_shard(model, mesh=place)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        errors.append(raised(lambda m=model, o=optimizer, g=group: codec.torch.LocalSteps(m, o, group=g)))
    return errors


def test_groups_that_do_not_fit_shards_are_refused(four):
    for missing, across, turned in four.run(_refused):
        assert missing[0] == across[0] == turned[0] == "ArgumentError"
        assert "is sharded over 2 ranks: pass group= a DeviceMesh" in missing[1]
        assert "is sharded over ranks of several sites" in across[1]
        assert "is sharded over ranks of several sites" in turned[1]


def _swapped(rank, size):
    """Return the error for shards whose order at the second site is not that of the ranks in group=."""
    swapped = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("between", "within"))
    model = Pushed()
    fully_shard(model, mesh=swapped["within"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return raised(lambda: codec.torch.LocalSteps(model, optimizer, group=sites()))


def test_ranks_with_other_shards_at_other_sites_are_an_error(four):
    for kind, message in four.run(_swapped):
        assert kind in ("ArgumentError", "PeerError")
        assert "holds another shard of 'all.0'" in message


def _not_finite(rank, size):
    """Change a shard of rank 3 to NaN; return the error, whether it changed nothing, and whether training goes on."""
    model, optimizer, local = sharded(every=100, spec=codec.Sign())
    train(model, optimizer, range(3), local.step)
    local.synchronize()
    train(model, optimizer, range(3, 5), local.step)
    shard = model.back.weight.detach().to_local()
    kept = shard[0, 0].item()
    if rank == 3:
        shard[0, 0] = torch.nan
    before = whole(model).tobytes(), state_bytes(local)
    error = raised(local.synchronize)
    same = before == (whole(model).tobytes(), state_bytes(local))
    shard[0, 0] = kept
    local.synchronize()
    return error, same, whole(model)


def test_error_of_one_shard_changes_nothing_on_any_rank(four):
    found = four.run(_not_finite)
    for (kind, message), same, after in found:
        assert kind in ("ArgumentError", "PeerError")
        assert "parameter 'back.weight' holds NaN or Inf after step 5" in message
        assert same
        np.testing.assert_array_equal(after, found[0][2])


def _hybrid(rank, size):
    """Train two sites of four ranks, in each of which HSDP has two copies of two shards; then change one copy."""
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("between", "copies", "shards"))
    within = cube["copies", "shards"]
    model = Tied()
    fully_shard(model, mesh=within)
    optimizer = adam(model)
    group = (cube.get_group("between"), within._flatten().get_group())
    local = codec.torch.LocalSteps(model, optimizer, group=group, every=3, spec=ROUNDED)
    train(model, optimizer, range(4), local.step)
    local.finish()
    found = whole(model)
    again = codec.torch.LocalSteps(model, optimizer, group=group, every=100, spec=ROUNDED)
    train(model, optimizer, range(4, 5), again.step)
    if rank == 5:
        model.back.weight.detach().to_local()[0, 0] += 1e-3
    return found, local.stats(), raised(again.synchronize)


def test_copies_of_shards_are_sent_once_and_must_be_equal():
    found = run_ranks(8, _hybrid)
    total = sum(p.numel() for p in Tied().parameters() if p.requires_grad)
    for ours, stats, (kind, message) in found:
        np.testing.assert_array_equal(ours, found[0][0])
        assert stats.synchronizations == 2
        assert kind == "PeerError"
        assert "other arguments" in message
    assert sum(stats.values for _, stats, _ in found) == pytest.approx(2 * total, abs=8)
    assert sum(stats.sent_nbytes for _, stats, _ in found[:4]) < 2 * 0.75 * total
