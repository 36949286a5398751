"""States that differ between ranks survive torch.distributed.checkpoint as a whole, or loading them is an error."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch
from codec.torch import per_rank
from support import ddp_training, local_training
from support.fsdp_training import batch, small_model
from support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch
SPEC = codec.Quantize(4)  # stochastic rounding: results depend on the number of steps, too
OPTIONS = codec.options(algorithm="two_shot")


class WithHook:
    """A model with a DDP hook, whose workers and servers have residuals."""

    def __init__(self, rank, size):
        self.rank = rank
        self.model = ddp_training.wrapped(ddp_training.small_net())
        self.state_of = codec.torch.ddp_hook(SPEC, feedback=True, options=OPTIONS).register(self.model)

    def step(self, number):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * number + self.rank))
        self.model.zero_grad()
        self.model(x).square().mean().backward()
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(p.grad, alpha=0.1)


class WithShards(WithHook):
    """An FSDP2 model, sharded over all ranks or replicated, whose gradients have error feedback."""

    def __init__(self, rank, size, replicas=1):
        self.rank = rank
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=names)
        self.model = small_model()
        fully_shard(self.model, mesh=mesh["shard"])
        if replicas == 1:
            self.state_of = codec.torch.FsdpReduceScatter(SPEC, feedback=True).register(self.model)
        else:
            group = mesh.get_group("replicate")
            self.state_of = codec.torch.FsdpAllReduce(SPEC, group=group, feedback=True, options=OPTIONS)
            self.state_of.register(self.model)

    def step(self, number):
        x = batch(10 * number + self.rank)
        self.model.zero_grad()
        self.model(x).square().mean().backward()
        with torch.no_grad():
            for p in self.model.parameters():
                p.to_local().sub_(p.grad.to_local(), alpha=0.1)


class WithReplicas(WithShards):
    def __init__(self, rank, size):
        super().__init__(rank, size, replicas=2)


class WithFeedback:
    """A tensor that is all-reduced with a Feedback."""

    def __init__(self, rank, size):
        self.rank = rank
        self.model = torch.nn.Linear(50, 20)
        torch.nn.init.zeros_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        self.state_of = codec.torch.Feedback(codec.Quantize(4, rounding="nearest"))

    def step(self, number):
        x = torch.randn(20, 50, generator=torch.Generator().manual_seed(10 * number + self.rank))
        codec.torch.all_reduce(x, op="mean", feedback=self.state_of, options=OPTIONS)
        with torch.no_grad():
            self.model.weight += x


class WithLocalSteps:
    """A model with local steps, whose synchronizations have error feedback."""

    def __init__(self, rank, size):
        self.rank = rank
        self.model = local_training.net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state_of = codec.torch.LocalSteps(self.model, self.optimizer, every=2, spec=SPEC)

    def step(self, number):
        local_training.train(self.model, self.optimizer, self.rank, [number], self.state_of.step)


FORMS = {
    "per_rank": per_rank,
    "per_rank, in order": lambda x: per_rank(x).state_dict(),
    "own": lambda x: x.state_dict(),
    "gathered": lambda x: x.state_dict(gather=True),
}


def _bits(model):
    parameters = (getattr(p, "_local_tensor", p) for p in model.parameters())
    return [p.detach().numpy().tobytes() for p in parameters]


def _model(run, form):
    return FORMS[form](run.model) if form == "per_rank, in order" else run.model.state_dict()


def _resumed(rank, size, kind, form, folder, how):
    """Save after three steps, resume in new objects, and return the parameters after three more steps of both."""
    run, found = kind(rank, size), []
    for number in range(3):
        run.step(number)
    state = {"model": _model(run, form), "codec": FORMS[form](run.state_of)}
    if how == "async":
        future = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    elif how == "frames":
        dcp.save(state, storage_writer=codec.torch.checkpoint_writer(folder))
    else:
        dcp.save(state, checkpoint_id=folder)
    for number in range(3, 6):
        run.step(number)
    found.append(_bits(run.model))
    if how == "async":
        future.result()
    dist.barrier()
    run = kind(rank, size)
    state = {"model": _model(run, form), "codec": FORMS[form](run.state_of)}
    dcp.load(state, storage_reader=codec.torch.checkpoint_reader(folder))  # also reads files of torch's writer
    if form == "per_rank, in order":
        per_rank(run.model).load_state_dict(state["model"])
        per_rank(run.state_of).load_state_dict(state["codec"])
    else:
        run.model.load_state_dict(state["model"])
    if form in ("own", "gathered"):
        run.state_of.load_state_dict(state["codec"])
    for number in range(3, 6):
        run.step(number)
    return [*found, _bits(run.model)]


CASES = [
    (WithHook, "per_rank"),
    (WithHook, "gathered"),
    (WithShards, "own"),
    (WithShards, "gathered"),
    (WithShards, "per_rank"),
    (WithReplicas, "own"),
    (WithFeedback, "per_rank"),
    (WithLocalSteps, "per_rank, in order"),  # its ranks also have different parameters
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_resumed_run_is_bit_identical(tmp_path, kind, form, size):
    for straight, resumed in run_ranks(size, _resumed, kind, form, str(tmp_path), "plain"):
        assert straight == resumed


@pytest.mark.parametrize("kind", [WithHook, WithShards])
def test_resumed_run_is_bit_identical_with_compressed_files(tmp_path, kind):
    for straight, resumed in run_ranks(2, _resumed, kind, "per_rank", str(tmp_path), "frames"):
        assert straight == resumed


@pytest.mark.parametrize("kind", [WithHook, WithShards])
def test_state_that_is_saved_while_training_goes_on_is_that_of_the_call(tmp_path, kind):
    for straight, resumed in run_ranks(2, _resumed, kind, "per_rank", str(tmp_path), "async"):
        assert straight == resumed


def _plain(rank, size, kind, folder, trained):
    """Save and load plain state dicts; return the error of loading."""
    run = kind(rank, size)
    for number in range(3):
        run.step(number)
    dcp.save({"codec": run.state_of.state_dict()}, checkpoint_id=folder)
    if not trained:
        run = kind(rank, size)
    before = run.state_of.state_dict()
    state = {"codec": run.state_of.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    with pytest.raises(codec.StateError, match=r"has entries of several ranks.*per_rank\((hook|feedback)\)|the rank"):
        run.state_of.load_state_dict(state["codec"])
    assert run.state_of.state_dict()["digest"] == before["digest"]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", [WithHook, WithFeedback])
def test_entries_that_ranks_share_or_that_a_new_object_lacks_are_refused(tmp_path, kind, trained):
    run_ranks(4, _plain, kind, str(tmp_path), trained)


def _saved(rank, size, kind, form, folder):
    run = kind(rank, size)
    for number in range(3):
        run.step(number)
    dcp.save({"codec": FORMS[form](run.state_of)}, checkpoint_id=folder)


def _on_other_ranks(rank, size, kind, form, folder):
    """Return the error of loading the state of another number of ranks."""
    run = kind(rank, size)
    state = {"codec": FORMS[form](run.state_of)}
    try:
        dcp.load(state, checkpoint_id=folder)
        run.state_of.load_state_dict(state["codec"])
    except (CheckpointException, codec.StateError) as e:
        return str(e)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_another_number_of_ranks_is_an_error(tmp_path, kind, form, sizes):
    run_ranks(sizes[0], _saved, kind, form, str(tmp_path))
    for error in run_ranks(sizes[1], _on_other_ranks, kind, form, str(tmp_path)):
        assert error is not None
        assert "Missing key in checkpoint state_dict: codec.rank" in error or "ranks, but" in error


def _resharded(rank, size, folder, old):
    """Reshard the states of all ranks, gathered or saved by per_rank(); return the resharded state of this rank."""
    run = WithHook(rank, size)
    gathered = {"codec": run.state_of.state_dict(gather=True)}
    dcp.load(gathered, checkpoint_id=f"{folder}/gathered")
    keys = [f"rank {r} of {old}" for r in range(old)]
    single = {"codec": dict.fromkeys(keys)}
    dcp.load(single, checkpoint_id=f"{folder}/per_rank")
    states = [single["codec"][key][0] for key in keys]
    found = [run.state_of.reshard(given, size)[rank] for given in (gathered["codec"], states)]
    assert found[0]["digest"] == found[1]["digest"]
    run.state_of.load_state_dict(found[0])
    run.step(3)
    return _bits(run.model)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_hook_continues_on_another_number_of_ranks(tmp_path, sizes):
    for form in ("gathered", "per_rank"):
        run_ranks(sizes[0], _saved, WithHook, form, str(tmp_path / form))
    found = run_ranks(sizes[1], _resharded, str(tmp_path), sizes[0])
    assert all(x == found[0] for x in found)


def test_per_rank_refuses_objects_without_a_state_and_states_of_other_ranks():
    with pytest.raises(codec.ArgumentError, match=r"with state_dict\(\) and load_state_dict\(\), got 3"):
        per_rank(3)
    feedback = per_rank(codec.ErrorFeedback(codec.Sign()))
    feedback.load_state_dict(feedback.state_dict())
    for wrong in ({}, None, {"rank 1 of 2": ({},)}, {"rank 0 of 1": {}}):
        with pytest.raises(codec.StateError, match="no state of 'rank 0 of 1'"):
            feedback.load_state_dict(wrong)
