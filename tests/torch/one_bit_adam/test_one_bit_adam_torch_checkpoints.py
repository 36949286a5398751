"""OneBitAdam resumes bit for bit from torch.distributed.checkpoint, or refuses the state."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import codec
import codec.torch
from support.ddp_training import net, parameter_bytes, wrapped
from support.one_bit_adam import FREEZE, OPTIONS, STEPS, optimizer_of, plain, residuals_of, take_steps
from support.ranks import run_ranks


def _by_torch(rank, size, folder, make, schedule):
    """Training resumes bit for bit from states in memory and in files, in both phases."""
    model = make()
    optimizer = optimizer_of(model, freeze_step=schedule).register(model, options=OPTIONS)
    saved = {}
    for step in range(STEPS):
        take_steps(model, optimizer, rank, step, step + 1)
        if step + 1 in (2, 6):
            both = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
            saved[step + 1] = state = copy.deepcopy(dict(zip(("model", "optimizer"), both, strict=True)))
            dcp.save(state, checkpoint_id=f"{folder}/{step + 1}")
    expected = parameter_bytes(model), plain(optimizer.state_dict())
    for at, from_file in ((2, True), (6, False), (6, True)):
        model = make()
        optimizer = optimizer_of(model, freeze_step=schedule).register(model, options=OPTIONS)
        state = saved[at]
        if from_file:
            template = get_optimizer_state_dict(model, optimizer)
            state = {"model": get_model_state_dict(model), "optimizer": template}
            dcp.load(state, checkpoint_id=f"{folder}/{at}")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert optimizer.frozen == (at >= FREEZE)
        take_steps(model, optimizer, rank, at, STEPS)
        assert parameter_bytes(model) == expected[0], (at, from_file)
        assert plain(optimizer.state_dict()) == expected[1], (at, from_file)


ZERO_ONE = codec.torch.VarianceSchedule(FREEZE, refreshes=1, max_interval=1)
LONG = [pytest.param(net, FREEZE, marks=pytest.mark.nightly), pytest.param(net, ZERO_ONE, marks=pytest.mark.nightly)]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # warnings of torch.distributed.checkpoint
@pytest.mark.parametrize(("make", "schedule"), [(wrapped, FREEZE), (wrapped, ZERO_ONE), *LONG])
def test_torch_distributed_checkpoint_resumes_to_the_bit(tmp_path, make, schedule):
    run_ranks(2, _by_torch, str(tmp_path), make, schedule)


def _templates(rank, size, folder):
    """Templates without residuals or of an unregistered optimizer, and flattened states, raise errors."""
    model = wrapped()
    optimizer = optimizer_of(model).register(model, options=OPTIONS)
    take_steps(model, optimizer, rank, 0, 6)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    optimizer.zero_grad()
    with pytest.raises(codec.StateError, match=r"call optimizer\.register\(model\)"):
        get_optimizer_state_dict(model, optimizer_of(model))
    converted = f"{folder}/{rank}.pt"
    dcp_to_torch_save(folder, converted)  # converts to one file, with the residuals of all ranks
    state = torch.load(converted)["optimizer"]
    assert sorted(residuals_of(state)) == [0, 1]
    expected = plain(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert plain(optimizer.state_dict()) == expected
    model = wrapped()
    fresh = optimizer_of(model).register(model, options=OPTIONS)
    template = get_optimizer_state_dict(model, fresh)
    del template["param_groups"][0]["one_bit"][f"rank {rank} of 2"]
    dcp.load({"optimizer": template}, checkpoint_id=folder)
    before = parameter_bytes(model), plain(fresh.state_dict())
    with pytest.raises(codec.StateError, match=r"has residuals of 0 of 2 ranks.*call optimizer\.register"):
        set_optimizer_state_dict(model, fresh, template)
    with pytest.raises(codec.StateError, match="has the phase and the residuals"):
        set_optimizer_state_dict(model, fresh, flat)
    assert (parameter_bytes(model), plain(fresh.state_dict())) == before
    assert fresh._phase.steps == 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_templates_that_lose_residuals_are_refused(tmp_path):
    run_ranks(2, _templates, str(tmp_path))
