"""GradientChoice predicts steps of groups in two levels from the connections between machines."""

from types import SimpleNamespace

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.advisor.cost_model import Cost, LinkModel, predict_seconds
from codec.torch.auto.gradients import GradientChoice
from codec.torch.auto.quality import quality_of
from codec.torch.group.autotune import TIMES
from codec.torch.transport.counters import Counters
from codec.torch.transport.levels import Levels
from support.ddp_training import parameter_bytes, small_forward, small_net, take_step
from support.ranks import run_ranks

LINK = LinkModel(1e8, rtt=0.02)
SENT = Cost(1e6, 1e6, encode=0.01, encode_sum=0.01, reduce=0.01, decode=0.01)


def choice_of(levels, link):
    """Return a choice that has begun a step in a group, and the ranks whose connections it reads."""
    read = []
    choice = GradientChoice(quality_of("small"), link, raw=True, options=codec.options(threads=1))
    mesh = SimpleNamespace(connections=lambda ranks: read.append(ranks) or [], rtt=lambda ranks: 0.0)
    peers = tuple(levels.between.ranks[o] for o in levels.between.others)
    choice.begin(SimpleNamespace(rank=0, levels=levels, peers=peers, mesh=mesh, counters=Counters()))
    choice.measurements.nbytes, choice.measurements.costs = 8_000_000, [SENT]
    return choice, read


@pytest.mark.parametrize(("machines", "algorithm"), [(2, "all_gather"), (3, "two_shot")])
def test_two_levels_send_a_part_of_the_gradients_on_a_part_of_the_link(machines, algorithm):
    ranks = 4
    levels = Levels(machines * ranks, 0, between=range(0, machines * ranks, ranks), within=range(ranks))
    measured, read = choice_of(levels, None)
    assert read == [tuple(ranks * i for i in range(1, machines))], "connections within the machine are not measured"
    raw, frames = measured._predicted(LINK)
    part = Cost(2e6, 2e6), SENT * 0.25
    assert raw == predict_seconds(part[0], LINK, machines)
    assert frames == predict_seconds(part[1], LINK, machines, algorithm=algorithm)
    stated, _ = choice_of(levels, LINK)
    slower = LinkModel(0.25e8, rtt=0.02)  # the machine's four ranks share the stated rate
    expected = [
        predict_seconds(part[0], slower, machines),
        predict_seconds(part[1], slower, machines, algorithm=algorithm),
    ]
    assert stated._predicted(LINK) == expected


@pytest.mark.parametrize(("quality", "computing", "lines"), [(None, 0.2, 1), (None, 0.4, 0), ("small", 0.2, 0)])
def test_lossless_choice_logs_once_that_the_wire_takes_most_of_each_step(quality, computing, lines, caplog):
    link = LinkModel(64e6, rtt=0.0)
    choice = GradientChoice(quality_of(quality), link, raw=True, options=codec.options(threads=1))
    mesh = SimpleNamespace(connections=lambda ranks: [], rtt=lambda ranks: 0.0)
    choice.begin(SimpleNamespace(rank=0, levels=Levels(2, 0), peers=(1,), mesh=mesh, counters=Counters()))
    found = choice.measurements
    found.sizes, found.nbytes, found.costs = {"weight": 2_000_000}, 8_000_000, [Cost(8e6, 8e6)] * 4
    choice._count = 1  # no gradients are measured
    wire = choice._predicted(link)[0]
    assert wire == pytest.approx(1.0)
    with caplog.at_level("INFO", "codec.torch"):
        for _ in range(10):
            choice.learn(0, "values", [0] * TIMES + [round(1e6 * (wire + computing)), -1, -1])
    assert sum('Auto("small")' in line for line in caplog.messages) == lines


def _chosen(rank, size):
    """Train a few steps with a mesh of 2 x 2 ranks; return the choices, the parameters and the bytes sent."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    model = DistributedDataParallel(small_net())
    auto = codec.torch.Auto("small", LinkModel(1e6, rtt=0.0))
    hook = codec.torch.ddp_hook(auto).register(model, group=mesh)
    for _ in range(4):
        take_step(model, rank, small_forward)
    stats = hook.stats()
    return stats.choices, parameter_bytes(model), stats.sent_nbytes, stats.local_nbytes


def test_auto_chooses_alike_on_the_ranks_of_two_machines():
    found = run_ranks(4, _chosen)
    assert all(each[:2] == found[0][:2] for each in found)
    assert found[0][0] == {"Lossless()": 1, "Quantize()": 3}
    assert all(0 < sent < local for _, _, sent, local in found)
