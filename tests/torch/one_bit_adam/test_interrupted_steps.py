"""An error at any line of a step leaves equal ranks, or is an error on all ranks in the next steps."""

import copy
import hashlib
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch._compat import local
from codec.torch.group.communicator import close_communicator
from codec.torch.one_bit_adam import arithmetic
from support.ddp_training import parameter_bytes
from support.ranks import run_ranks
from support.tiers import every

SIGN = codec.Sign(group_size=32)
ZERO_ONE = codec.torch.VarianceSchedule(2, refreshes=1, double_every=1, max_interval=4)
STEPS = 12  # steps of a run; the last one sends gradients or momenta
FINISH = 7  # step before which a run of 0/1 Adam calls finish()


class Interruption(Exception):
    """Error that is no error of the library."""


class Lines:
    """Context manager that raises an error at the first run of the `point`-th line of the optimizer's modules."""

    def __init__(self, point, error):
        self.seen, self._point, self._error = set(), point, error

    def _trace(self, frame, event, _):
        if "codec/torch/one_bit_adam/" not in frame.f_code.co_filename:
            return None
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in self.seen:
            self.seen.add(place)
            if len(self.seen) == self._point:
                raise self._error("interrupted")
        return self._trace

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)


def trained(model, optimizer, replica, fault):
    """Take all steps, some of them again; `fault`: step, Lines, and True to repeat only the interrupted call.

    Returns the names of errors of the library and of torch, and a digest of the rank's values.
    """
    errors, sharded = [], isinstance(model, FSDPModule)  # ranks must take all passes of an FSDP2 model
    for attempt in range(STEPS + 2):
        if (step := optimizer._phase.steps + 1) > STEPS and not sharded:
            break
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * attempt + replica))
        calls = [lambda x=x: model(x).square().mean().backward(), optimizer.step]
        if optimizer.schedule and step == FINISH:
            calls.insert(0, optimizer.finish)  # nothing happens if the step is repeated
        optimizer.zero_grad()
        for call in calls:
            done = False  # True if the calls that follow would fail
            try:
                if fault[0] == step:
                    with fault[1]:
                        call()
                else:
                    call()
            except (Interruption, KeyboardInterrupt):
                done = True
                if fault[2] and call is not calls[-2]:  # a second backward pass would add to the gradients
                    try:
                        call()
                        done = False
                    except (codec.CodecError, RuntimeError) as e:
                        errors.append(type(e).__name__)
            except (codec.CodecError, RuntimeError) as e:  # after an error in a hook, torch raises RuntimeError
                errors.append(type(e).__name__)
                done = True
            if done and not sharded:
                break
    sha = hashlib.sha256()
    for p in model.parameters():
        for x in (p, *(x for x in optimizer.state[p].values() if isinstance(x, torch.Tensor))):
            sha.update(local(x).detach().numpy().tobytes())
    return errors, sha.hexdigest()


def made(kind, size, rank):
    """Return a model, its optimizer, the number of this rank's replica, and the group of replicas."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    how = {"freeze_step": 2 if kind in ("DDP", "module") else ZERO_ONE, "spec": SIGN, "weight_decay": 0.1}
    group = dist.new_group()
    if kind == "HSDP":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        group = mesh.get_group("replicate")
    elif "DDP" in kind:
        model = DistributedDataParallel(model, process_group=group)
    optimizer = codec.torch.OneBitAdam(model.parameters(), 1e-2, **how)
    policy = codec.torch.Policy(lossless_small=False)
    optimizer.register(model, group=group, policy=policy, options=codec.options(algorithm="two_shot", timeout=10))
    return model, optimizer, rank if kind != "HSDP" else rank // 2, group


def _interrupted(rank, size, kind, step, points, error, repeat):
    """Interrupt a step of rank 0 at each point; return the number of lines, and each outcome."""
    found = []
    for point in points:
        model, optimizer, replica, group = made(kind, size, rank)
        lines = Lines(point if rank == 0 else 0, error)
        found.append(trained(model, optimizer, replica, (step, lines, repeat)))
        close_communicator(group, cancel=True)  # ranks that still wait for this one need not wait for their timeout
    return len(lines.seen), found


CASES = [("DDP", 2), ("DDP", 4), ("0/1 Adam", 2), ("0/1 Adam", 6), ("0/1 Adam", 7), ("0/1 Adam, DDP", 8)]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize(("kind", "step"), CASES)
@pytest.mark.filterwarnings("ignore:second moments")
def test_error_at_any_line_is_an_error_on_all_ranks_or_changes_nothing(kind, step, repeat):
    n_lines = run_ranks(2, _interrupted, kind, step, [0], Interruption, repeat)[0][0]
    assert n_lines > 50
    points = every(61, range(1, n_lines + 1))
    for error in (Interruption, KeyboardInterrupt):
        outcomes = [found for _, found in run_ranks(2, _interrupted, kind, step, points, error, repeat)]
        for point, *ranks in zip(points, *outcomes, strict=True):
            equal = len({digest for _, digest in ranks}) == 1
            failed = all(errors for errors, _ in ranks)
            assert equal or failed, (point, error, ranks)


@pytest.mark.parametrize("step", [2, 6])
@pytest.mark.filterwarnings("ignore:second moments")
def test_error_of_a_shard_is_an_error_on_all_ranks_of_all_replicas(step):
    n_lines = run_ranks(4, _interrupted, "HSDP", step, [0], Interruption, False, fresh=True)[0][0]
    points = every(61, range(n_lines // 2, n_lines + 1))
    how = "HSDP", step, points, Interruption, False
    outcomes = [found for _, found in run_ranks(4, _interrupted, *how, fresh=True)]
    for point, *ranks in zip(points, *outcomes, strict=True):
        equal = [digest for _, digest in ranks[:2]] == [digest for _, digest in ranks[2:]]
        assert equal or all(errors for errors, _ in ranks), (point, ranks)


def _loaded(rank, size, kind):
    """Interrupt the update of rank 0, load an earlier state on all ranks, and repeat the steps since then."""
    model, optimizer, *_ = made(kind, size, rank)
    inner = getattr(model, "module", model)

    def take(step):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def load():
        inner.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch's optimizers update the loaded tensors

    for step in range(4):
        take(step)
    saved = copy.deepcopy([inner.state_dict(), optimizer.state_dict()])
    take(4)
    expected = hashlib.sha256(parameter_bytes(inner)).hexdigest()
    load()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(arithmetic, "update", lambda *_: exec("raise MemoryError"))
        with pytest.raises(MemoryError) if rank == 0 else nullcontext():
            take(4)
    if rank == 0:
        with pytest.raises(codec.StateError, match=r"interrupted this rank .* Load the model"):
            optimizer.state_dict()
    with pytest.raises(codec.StateError if rank == 0 else codec.PeerError, match="interrupted this rank"):
        take(5)
    load()
    take(4)
    return hashlib.sha256(parameter_bytes(inner)).hexdigest() == expected


@pytest.mark.parametrize("kind", ["DDP", "module"])
@pytest.mark.filterwarnings("ignore:second moments")
def test_ranks_go_on_after_they_have_loaded_a_state(kind):
    assert run_ranks(2, _loaded, kind) == [True, True]
