"""Shared code of codec.integrations that can be tested without a framework."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.integrations import attach
from support.ddp_training import small_forward, small_net, take_step
from support.ranks import run_ranks


def test_missing_framework_is_named_with_the_way_to_get_it():
    with pytest.raises(ImportError, match=r"codec\.integrations\.no_such needs no_such, .*: pip install no_such"):
        attach.host("no_such.pytorch", "no_such_too")
    assert attach.host("no_such.pytorch", "torch.nn") is torch.nn


def test_arguments_of_the_framework_are_defaults_of_a_hook():
    optimizer = torch.optim.SGD(small_net().parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    other = torch.optim.AdamW(small_net().parameters())
    assert attach.hook_of("near", {}, [optimizer, other], scaler).optimizers == (optimizer, other)
    assert attach.hook_of("near", {"optimizer": optimizer}, [other], None).optimizers == (optimizer,)
    with pytest.raises(codec.SpecError, match="pass optimizer="):
        attach.hook_of("near", {})
    off = torch.amp.GradScaler("cpu", enabled=False)
    for given, kept in ((scaler, scaler), (off, None), (None, None)):
        assert attach.hook_of("small", {}, (), given).reducer._scaler is kept
    made = codec.torch.ddp_hook("small")
    assert attach.hook_of(made, {}, [optimizer], scaler) is made
    for hook in (made, *codec.torch.ddp.lifetime._hooks):
        hook.called = True


def _wrapped_again(rank, size):
    net = small_net()
    first = DistributedDataParallel(net)
    hook = codec.torch.ddp_hook("small")
    assert attach.wrapper_of(net) is first
    assert attach.attach(hook, first, size)
    assert attach.attach(hook, first, size)  # attaching the same hook again is a no-op
    second = DistributedDataParallel(net)
    assert attach.wrapper_of(net) is second
    assert attach.attach(hook, attach.wrapper_of(net), size)
    take_step(second, rank, small_forward)
    other = torch.nn.Linear(3, 3)
    assert attach.wrapper_of(other) is other
    with pytest.raises(codec.ArgumentError, match="got Linear"):
        attach.attach(hook, other, size)
    fresh = codec.torch.ddp_hook("small")
    assert not attach.attach(fresh, other, 1)
    assert attach.state_of(fresh) == {}
    attach.restore(fresh, attach.state_of(hook))  # ignored: the hook is not registered
    return hook.stats().steps


def test_hook_follows_a_module_that_is_wrapped_again():
    assert run_ranks(2, _wrapped_again) == [1, 1]


def _restored(rank, size, states):
    model = DistributedDataParallel(small_net())
    hook = codec.torch.ddp_hook("small", feedback=True).register(model)
    attach.restore(hook, states or {})
    take_step(model, rank, small_forward)
    return attach.state_of(hook)


def test_state_is_restored_for_another_number_of_ranks():
    (states, _) = run_ranks(2, _restored, None)
    (more, *_) = run_ranks(3, _restored, states)
    assert [len(s["ranks"]) for s in (states, more)] == [2, 3]
    assert [s["ranks"][0]["steps"] for s in (states, more)] == [1, 2]
