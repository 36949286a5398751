"""States of DDP hooks are checked against rank and model, gathered into one file, resharded, and resumed exactly."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.stateful.schema import signed
from codec.torch.feedback.checkpoint import packed, unpacked
from support import flatcall
from support.ddp_training import (
    ENCODE_ALL,
    parameter_bytes,
    separate_buckets,
    small_forward,
    small_net,
    take_step,
    train_small_net,
)
from support.ranks import run_ranks
from support.states import through_a_file

SIGN = codec.Sign(group_size=1024)


def hooked(model=None, spec=SIGN, cap=25, **how):
    if cap < 1:
        separate_buckets()
    model = DistributedDataParallel(model or small_net(), bucket_cap_mb=cap)
    return model, flatcall.ddp_hook(spec, **({"algorithm": "two_shot"} | how)).register(model)


def _checked(rank, size):
    """Every wrong state raises StateError, in load_state_dict() or register(), and leaves the hook unchanged."""
    model, hook = hooked()
    for _ in range(2):
        take_step(model, rank, small_forward)
    state = through_a_file(hook.state_dict())
    everyones = through_a_file(hook.state_dict(gather=True))
    assert packed(everyones["ranks"][rank]) == packed(state)
    before = packed(state)

    other = everyones["ranks"][(rank + 1) % size]
    three = hook.reshard(everyones, 3)
    key = next(key for key in state["worker"] if "[" in key)
    renamed = {**state["worker"], "9.weight[0:8]": torch.ones(8), "8.weight[0:8]": torch.ones(8)}
    longer = {**state["worker"], key.replace(key.partition("[")[2], "8192:8200]"): torch.ones(8)}
    for wrong, match in [
        (other, rf"to rank {(rank + 1) % size} of {size}.*this is rank {rank} of {size}.*reshard"),
        (three[0], r"reshard"),
        (everyones | {"ranks": three}, r"3 ranks, but the group has 2.*reshard"),
        ({**state, "worker": renamed}, r"model lacks: 8\.weight, 9\.weight"),
        ({**state, "worker": longer}, r"has \d+ values"),
        ({**state, "rank": 2}, r"damaged: it names rank 2 of 2 ranks"),
        ({k: v for k, v in state.items() if k != "server"}, r"lacks \['server'\]"),
        ({**state, "refresher": {}}, r"the unexpected \['refresher'\]"),
    ]:
        with pytest.raises(codec.StateError, match=match):
            hook.load_state_dict(wrong if "ranks" in wrong else signed(wrong))
        assert packed(hook.state_dict()) == before
    with pytest.raises(codec.StateError, match="incomplete or damaged"):
        hook.load_state_dict({**state, "worker": renamed})
    hook.load_state_dict(everyones)
    assert packed(hook.state_dict()) == before

    for wrong in (other, {**state, "worker": renamed}):
        late = codec.torch.ddp_hook(SIGN)
        late.load_state_dict(signed(wrong))
        with pytest.raises(codec.StateError, match=r"reshard|the model lacks"):
            late.register(model)
    with pytest.raises(codec.StateError, match="register it before"):
        codec.torch.ddp_hook(SIGN).load_state_dict(everyones)
    with pytest.raises(codec.StateError, match="register it before"):
        codec.torch.ddp_hook(SIGN).state_dict(gather=True)


def test_state_of_another_rank_or_model_is_refused():
    run_ranks(2, _checked)


def _renamed(rank, size):
    """A hook's state names parameters as in the unwrapped model."""
    model, hook = hooked()
    take_step(model, rank, small_forward)
    take_step(model, rank, small_forward)
    state = hook.state_dict()
    found = []
    for again in (small_net(), torch.compile(small_net(), backend="eager"), nn.Sequential(small_net())):
        model, hook = hooked(again)
        try:
            hook.load_state_dict(state)
        except codec.StateError:
            found.append(None)
            continue
        take_step(model, rank, small_forward)
        found.append(packed(hook.state_dict()))
    assert found[0] == found[1]
    assert found[2] is None  # refused: the module has other parameter names


def test_state_is_taken_up_under_the_names_of_a_compiled_model():
    run_ranks(2, _renamed)


RESUMED = [
    (SIGN, {}),
    (codec.Quantize(4), {"feedback": True}),
    (codec.Quantize(4), {}),
    (codec.Ternary(), {}),
    (codec.Float4(rounding="stochastic"), {"policy": codec.torch.Policy(start_step=6)}),
]


def _resumed(rank, size):
    for spec, how in RESUMED:
        make = partial(hooked, spec=spec, cap=0.05, **how)  # bucket cap in MB: two buckets from the second step on
        assert train_small_net(make, rank, 8)[:2] == train_small_net(make, rank, 8, pause=4)[:2], spec


def test_resumed_training_is_the_uninterrupted_one_to_the_bit():
    """Resumed training is bit-identical: random streams, residuals, warm-up and lossless parameters continue."""
    run_ranks(2, _resumed)


def _sent(hook, model, rank, step):
    before = hook.stats().sent_nbytes
    take_step(model, 10 * step + rank, small_forward)
    return hook.stats().sent_nbytes - before


def _changed(rank, size):
    """Check the bytes sent in steps before and after each change of the hook's settings."""
    full = sum(p.numel() for p in small_net().parameters()) * 4 * (size - 1)
    model, hook = hooked(spec=codec.Lossless(), algorithm="all_gather")
    sizes = [_sent(hook, model, rank, step) for step in range(3)]
    hook.set_spec(codec.Float8(group_size=128))
    sizes += [_sent(hook, model, rank, step) for step in range(3, 5)]
    assert min(sizes[:3]) > 0.7 * full
    assert max(sizes[3:]) < 0.4 * full
    with pytest.raises(AttributeError):
        hook.spec = codec.Lossless()
    for wrong, match in ((codec.Truncate(), "optimizer="), ("x", "not a spec")):
        with pytest.raises(codec.SpecError, match=match):
            hook.set_spec(wrong)
    assert _sent(hook, model, rank, 5) < 0.4 * full

    now = {"spec": codec.Lossless()}
    model, hook = hooked(spec=codec.Float8(group_size=128), policy=lambda n, p: now["spec"], algorithm="all_gather")
    sizes = [_sent(hook, model, rank, 0)]
    now["spec"] = None
    sizes += [_sent(hook, model, rank, 1)]
    assert sizes[0] > 0.7 * full
    assert sizes[1] < 0.4 * full
    now["spec"] = "x"
    with pytest.raises(codec.SpecError, match="not a spec"):
        _sent(hook, model, rank, 2)
    now["spec"] = None
    assert _sent(hook, model, rank, 3) < 0.4 * full  # the step failed on all ranks; the group stays usable

    model, hook = hooked(
        spec=codec.Float8(group_size=128), policy=codec.torch.Policy(start_step=2), algorithm="all_gather"
    )
    sizes = [_sent(hook, model, rank, step) for step in range(4)]
    assert min(sizes[:2]) > 0.7 * full
    assert max(sizes[2:]) < 0.4 * full


def test_spec_policy_and_warm_up_take_effect_at_the_next_step():
    run_ranks(2, _changed)


def _settled(rank, size):
    """If a spec without error feedback replaces one with it, the residuals are added to the next gradients."""
    model, hook = hooked(spec=codec.Quantize(2, 8), feedback=True, policy=ENCODE_ALL)
    means, sent = 0, 0
    for step in range(4):
        if step == 2:
            assert hook.reducer.state.residuals.ranges()
            hook.set_spec(codec.Lossless())
        with model.no_sync():
            want = [g.clone() for g in take_step(model, 10 * step + rank, small_forward)]
        for g in want:
            codec.torch.all_reduce(g, op="mean")
        means = means + torch.cat([g.flatten() for g in want])
        sent = sent + torch.cat([g.flatten() for g in take_step(model, 10 * step + rank, small_forward)])
    assert not hook.reducer.state.residuals.ranges()
    torch.testing.assert_close(sent, means, atol=1e-5, rtol=1e-4)


def test_residuals_are_sent_when_a_codec_without_feedback_takes_over():
    run_ranks(2, _settled)


def _as_documented(rank, world_size, path, blocks, steps):
    """Run the lines of docs/guides/torch.md that save a checkpoint, and the lines that load it."""
    here = {"rank": rank, "world_size": world_size, "path": path, "torch": torch, "codec": codec}
    here["net"] = small_net()
    model, here["hook"] = hooked(here["net"])
    here["optimizer"] = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if steps:
        for step in range(steps):
            take_step(model, 10 * step + rank, small_forward, here["optimizer"])
        exec(blocks[0], here)
    else:
        exec(blocks[1], here)
        assert here["hook"].reducer.state.residuals.ranges()
        assert here["hook"].reducer.state.count == 3
    take_step(model, rank, small_forward, here["optimizer"])
    return parameter_bytes(model)


def test_documented_lines_save_and_load_checkpoints(tmp_path):
    text = (Path(__file__).parents[3] / "docs/guides/torch.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text[text.index("## Checkpoints") :], re.DOTALL)[:2]
    path = str(tmp_path / "checkpoint.pt")
    saved = run_ranks(3, _as_documented, path, blocks, 3)
    assert run_ranks(3, _as_documented, path, blocks, 0) == saved
    assert len(set(run_ranks(2, _as_documented, path, blocks, 0))) == 1


def test_reshard_refuses_incomplete_states():
    hook = codec.torch.ddp_hook(SIGN)
    state = hook.state_dict()
    assert len(hook.reshard([state], 3)) == 3
    for bad in ([], "x", None, {"version": 1, "ranks": []}):
        with pytest.raises(codec.StateError):
            hook.reshard(bad, 2)
    of = [signed({**state, "rank": rank, "world_size": 3}) for rank in range(3)]
    assert [s["rank"] for s in hook.reshard(of, 2)] == [0, 1]
    for bad in (of[:2], of[::-1]):
        with pytest.raises(codec.StateError, match="pass the states of all"):
            hook.reshard(bad, 2)
    for bad in (0, True, 1 << 62):
        with pytest.raises(codec.ArgumentError, match="world_size"):
            hook.reshard(of, bad)


def test_packed_states_survive_and_damaged_ones_are_refused():
    state = {"version": 1, "sparse": "", "worker": {"w[0:3]": torch.arange(3.0), "role": "worker"}, "server": {}}
    data = packed({**state, "refresher": {"counts": np.arange(4)}})
    again = unpacked(data)
    assert packed(again) == packed({**state, "refresher": {"counts": np.arange(4)}} | {})
    for end in range(len(data)):
        with pytest.raises(codec.StateError):
            unpacked(data[:end])
    for bad in (b"", b"\xff" * 40, (2).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"[[]]"):
        if bad[8:] != b"{}":
            with pytest.raises(codec.StateError):
                unpacked(bad)
