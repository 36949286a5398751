"""DDP hooks: replicas stay identical, Lossless gives sums in rank order, and a failed step changes nothing."""

import io
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from support.ddp_training import ENCODE_ALL, EqualLayers, data, hook_state_bytes, net, parameter_bytes, train, wrapped
from support.ranks import run_ranks
from support.tiers import HANG_SECONDS, NIGHTLY


def _lossless(rank, size, views):
    model, plain = wrapped(gradient_as_bucket_view=views), net()
    hook = codec.torch.ddp_hook().register(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, plain)]
    for step in range(6):
        train(model, optimizers[0], rank, 1, step)
        grads = []
        for r in range(size):
            x, y = data(r, step)
            plain.zero_grad()
            torch.nn.functional.cross_entropy(plain(x), y).backward()
            grads.append([p.grad for p in plain.parameters()])
        for p, *each in zip(plain.parameters(), *grads, strict=True):
            total = each[0].clone()
            for g in each[1:]:
                total += g
            p.grad = total / size
        optimizers[1].step()
        assert parameter_bytes(model) == parameter_bytes(plain), step
    stats = hook.stats()
    assert stats.steps == 6
    assert stats.buckets > 5 * 8, stats
    assert 0 < stats.sent_nbytes < stats.raw_nbytes * 2 * (size - 1)
    assert 0 < stats.cpu_s <= codec.torch.group_stats().cpu_s


@pytest.mark.parametrize(("size", "views"), [(2, False), (3, False), (3, True)])
def test_lossless_trains_with_sums_in_the_order_of_ranks(size, views):
    run_ranks(size, _lossless, views)


WAYS = ("two_shot", "all_gather")
CASES = [
    (codec.Float8(group_size=128), {}),
    (codec.Float8("mxfp8_e4m3"), {"feedback": True}),
    (codec.Quantize(4), {"feedback": True}),
    (codec.Sign(group_size=1024), {}),
    (codec.Ternary(), {}),
    (codec.Truncate(), {"optimizer": True}),
    (codec.Truncate(level_coding="shared"), {"optimizer": True}),
    (codec.Truncate(level_coding="shared", granularity="bit", guard=-11), {"optimizer": True, "feedback": True}),
]


def _lossy(rank, size):
    torch.use_deterministic_algorithms(True)
    found = {}
    for i, (spec, how) in enumerate(CASES):
        for algorithm in WAYS if NIGHTLY else (WAYS[i % 2],):
            model = wrapped()
            named = dict(model.module.named_parameters())
            groups = [
                {"params": [p for n, p in named.items() if n.endswith("weight")], "lr": 2e-3},
                {"params": [p for n, p in named.items() if not n.endswith("weight")], "weight_decay": 0},
            ]
            adam = "optimizer" in how
            optimizer = torch.optim.AdamW(groups) if adam else torch.optim.SGD(groups, 0.02, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
            kwargs = how | ({"optimizer": optimizer} if adam else {})
            codec.torch.ddp_hook(spec, options=codec.options(algorithm=algorithm), **kwargs).register(model)
            losses = []
            for step in range(6):
                losses += train(model, optimizer, rank, 1, step)
                schedule.step()
            found[repr(spec), repr(how), algorithm] = parameter_bytes(model), losses
    return found


def test_replicas_stay_identical():
    """With every codec, schedules and parameter groups, replicas stay identical and reach about float32's loss."""
    results = run_ranks(3, _lossy)
    assert len(results[0]) == len(CASES) * (len(WAYS) if NIGHTLY else 1)
    for key, (mine, losses) in results[0].items():
        assert all(r[key][0] == mine for r in results), key
        assert sum(losses[-3:]) < sum(losses[:3]) + 0.3, key


def _channels_last(rank, size):
    """Parameters in channels_last order get the same gradients as contiguous ones."""
    torch.manual_seed(5)
    net = torch.nn.Conv2d(16, 32, 3, bias=False)
    net.weight.data *= torch.logspace(-4, 3, 16).view(1, 16, 1, 1)
    model = wrapped(net.to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    spec, algorithm = codec.Truncate(), "all_gather"
    codec.torch.ddp_hook(spec, optimizer=optimizer, options=codec.options(algorithm=algorithm)).register(model)
    x = torch.randn(8, 16, 8, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        optimizer.zero_grad()
        with model.no_sync():
            model(x).square().mean().backward()
        state = {"theta": net.weight.detach()}
        for momentum in optimizer.state.values():  # momentum may be stored in another memory format than its parameter
            momentum["momentum_buffer"] = momentum["momentum_buffer"].contiguous()
            state["m"] = momentum["momentum_buffer"]
        want, *values = (t.permute(0, 2, 3, 1).contiguous() for t in (net.weight.grad, *state.values()))
        metric, state = codec.optimizers.from_optimizer(optimizer), dict(zip(state, values, strict=True))
        codec.torch.all_reduce(want, spec.bind(metric, **state), op="mean", options=codec.options(algorithm=algorithm))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        assert torch.equal(net.weight.grad.permute(0, 2, 3, 1), want)
        optimizer.step()


def test_channels_last_parameters():
    run_ranks(2, _channels_last)


def _accounted(rank, size, paid):
    """The sum of gradients seen by the optimizer plus the final residuals equals the sum of all gradients."""
    spec = codec.Quantize(2, 8)
    model = wrapped()
    hook = codec.torch.ddp_hook(
        spec, feedback=True, policy=ENCODE_ALL, options=codec.options(algorithm="two_shot")
    ).register(model)
    names = [n for n, _ in model.module.named_parameters()]
    seen, sent = ({n: torch.zeros(p.shape) for n, p in model.module.named_parameters()} for _ in range(2))
    for step in range(7):
        if step == 6 and paid:
            hook.reducer.algorithm = "raw"  # "auto" switches to raw if that is faster; the residuals are then sent, too
        x, y = data(rank, step)
        model.zero_grad()
        with model.no_sync():
            torch.nn.functional.cross_entropy(model(x), y).backward()
        for n, p in model.module.named_parameters():
            seen[n] += p.grad
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        for n, p in model.module.named_parameters():
            sent[n] += p.grad
    for n in names:
        residual = torch.zeros_like(seen[n]).view(-1)
        state = hook.state_dict()
        for role, scale in (("worker", 1 / size), ("server", 1)):
            for key, values in state[role].items():
                name, _, where = str(key).rpartition("[")
                if name == n:
                    start, stop = map(int, where[:-1].split(":"))
                    residual[start:stop] += torch.as_tensor(values) * scale
        mean = seen[n] / size
        dist.all_reduce(residual)
        dist.all_reduce(mean)
        torch.testing.assert_close(sent[n].view(-1) + residual, mean.view(-1), atol=1e-5, rtol=1e-4)
        assert residual.any() == (not paid)
    return sum(len(x) for k, x in hook.state_dict()["server"].items() if k not in ("format", "version", "role"))


def _rounded(rank, size):
    """If bfloat16 values are sent raw, the residual takes up the rounding error of the sums."""
    every = [(torch.arange(70_000) % 251 + r).to(torch.bfloat16) for r in range(size)]
    from codec.torch.reduction import partition, raw

    async def reduced(collective, r):
        result = await raw.two_shot(collective.part(1), r)
        await collective.agree()
        return result.copy()

    line = codec.torch.group.communicator.communicator_of(None)
    r = codec.torch.reduction.arguments.reduction_of(every[rank], codec.Float8(), "mean")
    r.residual = torch.full((70_000,), 0.3).numpy()
    owned = partition.cut(70_000, size, 2, None)[rank]
    begin, end = owned[0].begin, owned[-1].end
    sums = torch.full((end - begin,), 0.2).numpy()
    r.sum_residual = lambda a, b: sums[a - begin : b - begin]
    result = line.run(lambda collective: reduced(collective, r))
    mean = torch.stack([t.float() for t in every]).mean(0) + 0.3 + 0.2
    residual = torch.from_numpy(r.residual.copy())
    dist.all_reduce(residual)
    residual /= size
    residual[begin:end] += torch.from_numpy(sums)
    seen = torch.from_numpy(result.copy()).view(torch.bfloat16).float()
    torch.testing.assert_close((seen + residual)[begin:end], mean[begin:end], atol=1e-4, rtol=0)
    assert residual.any()
    # Sums saturate at the largest number of the dtype; non-finite values have no residual.
    x = torch.full((70_000,), 65_000.0).half()
    x[begin] = torch.inf
    r = codec.torch.reduction.arguments.reduction_of(x, codec.Truncate(2), "mean")
    r.residual = torch.full((70_000,), 600.0).numpy()
    sums = torch.full((end - begin,), 100.0).numpy()
    r.sum_residual = lambda a, b: sums[a - begin : b - begin]
    result = line.run(lambda collective: reduced(collective, r))
    infinite = [partition.cut(70_000, size, 2, None)[i][0].begin for i in range(size)]
    assert set(np.delete(result, infinite)) == {65_504}
    assert set(result[infinite]) == {torch.inf}
    assert set(np.delete(r.residual, begin)) == {64_992 + 600 - 65_504}
    assert set(sums[1:]) == {100}
    assert r.residual[begin] == sums[0] == 0


def test_rounding_of_raw_values_enters_the_residual():
    run_ranks(3, _rounded)


def test_results_and_residuals_add_up_to_the_gradients():
    """Results plus residuals, on workers and on owners of sums, equal the gradients, also after buckets are rebuilt."""
    for paid in (False, True):
        owned = run_ranks(3, _accounted, paid)
        assert sum(owned) == sum(p.numel() for p in net().parameters())


def _joined(rank, size):
    """With join(), ranks without batches send zeros, and raise if other ranks fail."""
    found = []
    for hooked in (False, True):
        model = wrapped(EqualLayers())
        if hooked:
            hook = codec.torch.ddp_hook().register(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with model.join():
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().sum().backward()
                optimizer.step()
        found.append(parameter_bytes(model))
    assert hook.stats().steps == 4
    assert found[0] == found[1]
    model = wrapped(EqualLayers())
    codec.torch.ddp_hook(codec.Float8()).register(model)

    def through():
        with model.join():
            for _ in range(rank):
                model(torch.full((4, 64), torch.nan)).sum().backward()

    with pytest.raises(codec.ArgumentError if rank else codec.PeerError):
        through()


def test_join_with_uneven_batches():
    run_ranks(2, _joined)


def _scaled(rank, size):
    """With a GradScaler, whose scale grows and shrinks, steps equal those of the unscaled loss."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=2)
    models = [wrapped() for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in models]
    sign = codec.Sign(group_size=64)
    hooks = [codec.torch.ddp_hook(sign, grad_scaler=s).register(m) for s, m in zip((scaler, None), models, strict=True)]
    scales = []
    for step in range(9):
        x, y = data(rank, step)
        before, state = parameter_bytes(models[0]), hook_state_bytes(hooks[0])
        scales.append(scaler.get_scale() / 1024)
        if step != 3:
            optimizers[1].zero_grad()
            torch.nn.functional.cross_entropy(models[1](x), y).backward()
            optimizers[1].step()
        elif rank == 1:
            x[3, 4] = float("inf")
        optimizers[0].zero_grad()
        scaler.scale(torch.nn.functional.cross_entropy(models[0](x), y)).backward()
        scaler.step(optimizers[0])
        scaler.update()
        assert (parameter_bytes(models[0]) == before) == (step == 3)
        assert (hook_state_bytes(hooks[0]) == state) == (step == 3)
        assert parameter_bytes(models[0]) == parameter_bytes(models[1])
        assert hook_state_bytes(hooks[0]) == hook_state_bytes(hooks[1])
        if step == 6:
            hooks[0].load_state_dict(pickle.loads(pickle.dumps(hooks[1].state_dict())))
    return parameter_bytes(models[0]), hooks[0].stats().steps, hooks[0].stats().failed_steps, scales


def test_grad_scaler_skips_overflowing_steps_on_all_ranks():
    results = run_ranks(2, _scaled)
    assert results[0] == results[1]
    assert results[0][1:] == (8, 1, [1, 1, 2, 2, 1, 1, 2, 2, 4])


def _continued(rank, size):
    results = []
    for cut in (False, True):
        model = wrapped()
        hook = codec.torch.ddp_hook(codec.Sign(group_size=64), options=codec.options(algorithm="two_shot")).register(
            model
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        train(model, optimizer, rank, 4)
        if cut:
            file = io.BytesIO()
            torch.save([model.module.state_dict(), optimizer.state_dict(), hook.state_dict()], file)
            file.seek(0)
            saved = torch.load(file)
            model = wrapped()
            model.module.load_state_dict(saved[0])
            hook = codec.torch.ddp_hook(
                codec.Sign(group_size=64), options=codec.options(algorithm="two_shot")
            ).register(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            optimizer.load_state_dict(saved[1])
            hook.load_state_dict(saved[2])
            with pytest.raises(codec.StateError):
                hook.load_state_dict({})
        else:  # a new model starts with initial buckets, as after a restart
            model2 = wrapped()
            model2.module.load_state_dict(model.module.state_dict())
            hook.register(model2)
            new = torch.optim.SGD(model2.parameters(), 0.05)
            new.load_state_dict(optimizer.state_dict())
            model, optimizer = model2, new
        train(model, optimizer, rank, 4, 4)
        results.append(parameter_bytes(model))
    assert results[0] == results[1]


def test_training_resumes_bit_identically_from_a_checkpoint():
    run_ranks(2, _continued)


def _many(rank, size, steps):
    model = wrapped()
    codec.torch.ddp_hook(codec.Float8(group_size=128)).register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    train(model, optimizer, rank, steps)
    return parameter_bytes(model)


def test_many_overlapped_steps():
    """Over many steps in which reductions overlap backward, nothing hangs, and replicas are identical."""
    results = run_ranks(4, _many, 60 if NIGHTLY else 15)
    assert len(set(results)) == 1


def _as_documented(rank, size, block):
    """Run the lines for NCCL in docs/guides/torch/gpus.md on the test's group, which uses Gloo."""
    names = []
    here = {"codec": codec, "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel, "net": net()}
    here["dist"] = SimpleNamespace(init_process_group=names.append)
    here["optimizer"] = torch.optim.SGD(here["net"].parameters(), 0.02)
    exec(block, here)
    train(here["model"], here["optimizer"], rank, 3)
    assert here["hook"].stats().steps == 3
    return names, parameter_bytes(here["model"])


def test_documented_lines_for_nccl_train():
    text = (Path(__file__).parents[3] / "docs/guides/torch/gpus.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    found = run_ranks(2, _as_documented, block)
    assert found[0] == found[1]
    assert found[0][0] == ["nccl"]


@pytest.mark.nightly
def test_example_runs():
    script = Path(__file__).parents[3] / "examples/ddp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.9 prints Gloo's log
    assert [line.partition(":")[0] for line in lines] == ["lossless", "near", "balanced", "small"]
    sent = [float(re.search(r"sent ([\d.]+) MB", line)[1]) for line in lines]
    assert sent == sorted(sent, reverse=True)


def _bad_policies(rank, size):
    for bad in ("x", codec.Sign, ["x"]):
        hook = codec.torch.ddp_hook(policy=lambda name, p, bad=bad: bad)
        with pytest.raises(codec.SpecError, match="not a spec"):
            hook.register(wrapped())
    _lossless(rank, size, False)


def test_wrong_policies_are_rejected_before_the_first_gradient():
    run_ranks(2, _bad_policies)
