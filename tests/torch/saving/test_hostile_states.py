"""Every object with a saved state rejects wrong states with StateError, and is unchanged then."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch
from codec.stateful.schema import DIGEST, signed
from codec.torch.pipelining import checkpoint
from codec.torch.pipelining.end import End
from codec.torch.pipelining.settings import Specs
from support.ddp_training import ENCODE_ALL
from support.ranks import run_ranks
from support.states import parts_of
from support.tiers import N_EXAMPLES

OPTIONS = codec.options(algorithm="two_shot")
SIGN = codec.Sign(group_size=20)


def model_and_step(optimizer=torch.optim.Adam, **how):
    model = nn.Sequential(nn.Linear(8, 20), nn.Linear(20, 3))
    return model, optimizer(model.parameters(), 1e-2, **how)


def take_steps(model, optimizer, after=lambda: None):
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        after()


def error_feedback():
    feedback = codec.ErrorFeedback(SIGN)
    feedback.encode("w", np.arange(40, dtype=np.float32))
    return feedback


def refresher():
    made = codec.CodebookRefresher(interval=8, delay=2)
    made.count(np.arange(1000, dtype=np.float32))
    made.propose(8, made.counts())
    return made


def delta():
    made = codec.ActivationDelta(dtype="8bit", edge=3)
    made.encode(np.ones((2, 30), np.float32), [4, 7])
    made.commit()
    return made


class Stage:
    """The edges of a pipeline stage."""

    def __init__(self):
        deltas = codec.torch.pipelining.Deltas()
        self.ends = [End(0, "receiver", Specs(codec.Quantize(4), codec.Quantize(8), deltas), None) for _ in range(1)]
        self.ends[0].delta(0).load_state_dict(delta_of_edge(0))

    def state_dict(self):
        return checkpoint.save(self.ends)

    def load_state_dict(self, state):
        checkpoint.load(self.ends, state)


def delta_of_edge(edge):
    made = codec.ActivationDelta(edge=edge)
    made.encode(np.ones((2, 30), np.float32), [4, 7])
    made.commit()
    return made.state_dict()


def feedback():
    made = codec.torch.Feedback(SIGN)
    for _ in range(2):
        codec.torch.all_reduce(codec.view(torch.arange(40.0), segments={"w": (40,)}), feedback=made, options=OPTIONS)
    return made


def hook():
    model, optimizer = model_and_step()
    model = nn.parallel.DistributedDataParallel(model)
    made = codec.torch.ddp_hook(SIGN, policy=ENCODE_ALL, options=OPTIONS).register(model)
    take_steps(model, optimizer)
    return made


def local_steps():
    model, optimizer = model_and_step()
    outer = lambda parameters: torch.optim.SGD(parameters, 0.7, momentum=0.9)
    made = codec.torch.LocalSteps(model, optimizer, every=2, fragments=2, delay=1, outer=outer)
    take_steps(model, optimizer, made.step)
    return made


def one_bit_adam():
    model, optimizer = model_and_step(codec.torch.OneBitAdam, freeze_step=3, spec=SIGN)
    optimizer.register(model, policy=codec.torch.Policy(lossless_small=False), options=OPTIONS)
    take_steps(model, optimizer)
    return optimizer


def reduce_scatter():
    model = fully_shard(nn.Sequential(nn.Linear(8, 20), nn.Linear(20, 3)))
    made = codec.torch.FsdpReduceScatter(SIGN, feedback=True).register(model)
    take_steps(model, torch.optim.Adam(model.parameters()))
    return made


KINDS = [error_feedback, refresher, delta, Stage, feedback, hook, local_steps, one_bit_adam, reduce_scatter]

ODD = [None, True, -1, 2**70, 10**5000, 1.5, math.nan, math.inf, "", "x", "[[1, []]]", "[" * 10**5, b"", b"x" * 9]
ODD += [
    b"\xff" * 40,
    [],
    [1],
    (),
    ({},),
    {},
    {"x": 1},
    {1: {}},
    1j,
    object(),
    torch.tensor(5.0),
    torch.tensor(math.nan),
]
ODD += [torch.ones(2), torch.ones(0), torch.ones(2, 3), torch.ones(40).double(), torch.full((40,), math.nan)]
ODD += [torch.ones(2).to_sparse(), torch.ones(2, device="meta"), np.ones(3), np.array(["x"]), np.array([None])]


def changed(data, state):
    """Return a copy of a state in which an entry is missing, added or another value."""
    state = copy.deepcopy(state)
    places = [(place, key) for place, key in parts_of(state) if not isinstance(place, tuple)]
    place, key = places[data.draw(st.integers(0, len(places) - 1))]
    odd = ODD[data.draw(st.integers(0, len(ODD) - 1))]
    if data.draw(st.sampled_from(["replace", "replace", "drop", "add"])) == "drop":
        del place[key]
    elif isinstance(place, dict) and data.draw(st.booleans()):
        place[data.draw(st.sampled_from(["x", "w[0:2]", "book[5]", "rank 7 of 9", 5, None, (1, 2)]))] = odd
    else:
        place[key] = odd
    if data.draw(st.booleans()):  # as if the state had been saved so
        for each in [part[name] for part, name in [*parts_of(state)][::-1]] + [state]:
            if isinstance(each, dict) and DIGEST in each:
                try:
                    each[DIGEST] = signed(each)[DIGEST]
                except Exception:
                    continue
    return state


def plain(state):
    """Return a state with its arrays as bytes, so that states can be compared with ==."""
    if isinstance(state, dict):
        return {k: plain(v) for k, v in state.items()}
    if isinstance(state, list | tuple):
        return [plain(v) for v in state]
    return (str(state.dtype), bytes(np.asarray(state))) if hasattr(state, "dtype") else state


def _hostile(rank, size, number, examples):
    made = KINDS[number]()
    good = made.state_dict()
    before = plain(good)
    made.load_state_dict(copy.deepcopy(good))
    assert plain(made.state_dict()) == before
    found = {"refused": 0, "taken": 0}

    # a child process does not have the settings of conftest.py
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        state = changed(data, good)
        try:
            made.load_state_dict(state)
        except codec.StateError:
            found["refused"] += 1
            assert plain(made.state_dict()) == before
        else:
            found["taken"] += 1
            made.state_dict()
            made.load_state_dict(copy.deepcopy(good))
            assert plain(made.state_dict()) == before

    check()
    for other in (None, 5, "x", [], {}, torch.ones(2), object(), *ODD):
        with pytest.raises(codec.StateError):
            made.load_state_dict(other)
    for head in ({"version": 99}, {"format": "x"}):
        if "version" in good:
            with pytest.raises(codec.StateError, match=r"'(version|format)' of the .* must be .*, got .*: load one"):
                made.load_state_dict(good | head)
    assert plain(made.state_dict()) == before
    assert found["refused"] > found["taken"] / 2
    dist.barrier()


@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda i: KINDS[i].__name__)
def test_wrong_states_are_refused_and_change_nothing(number):
    run_ranks(1, _hostile, number, 2 * N_EXAMPLES)
