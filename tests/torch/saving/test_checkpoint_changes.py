"""Checkpoints that store changes of earlier ones: exact on any number of ranks, found by digest, never half deleted."""

import logging
import shutil
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import codec.torch
from codec.checkpoints.chain import Checkpoint
from support.checkpoints import bits, blank, check, depths, failure, loaded, save, series, state_of
from support.fsdp_training import batch, small_model
from support.ranks import run_ranks
from support.tiers import nightly

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*async_save:UserWarning"),
]


@pytest.mark.parametrize("how", [{}, {"base_in_memory": False}, {"thread_count": 2}], ids=str)
def test_chains_restore_every_bit(how, tmp_path):
    series(tmp_path, 5, **how)
    assert depths(tmp_path) == [0, 1, 2, 0, 1]
    for step in range(5):
        check(tmp_path, step)
    items = {item.title: item for item in Checkpoint(tmp_path / "1").items.values()}
    assert items["constant"].changes
    assert items["constant"].length < 800
    assert items["big"].length < 0.1 * items["big"].nbytes
    full = sum(item.length for item in Checkpoint(tmp_path / "0").items.values())
    assert sum(item.length for item in items.values()) < 0.3 * full


def test_states_without_relation_are_stored_in_full(tmp_path):
    writer = codec.torch.checkpoint_writer(tmp_path, full_every=3)
    for step in range(2):
        save(writer, tmp_path, step, {"w": torch.randn(100_000, generator=torch.Generator().manual_seed(step))})
    assert depths(tmp_path) == [0, 0], "no item has changes, so the checkpoint needs no base"
    sizes = [sum(item.length for item in Checkpoint(tmp_path / str(k)).items.values()) for k in range(2)]
    assert sizes[1] < 1.01 * sizes[0]


def test_full_checkpoints_are_read_by_the_extension_alone(tmp_path):
    """Checkpoints without changes have the format of earlier versions of this library."""
    from torch.distributed.checkpoint._extension import ExtensionRegistry
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from codec.torch.saving.stream import FrameStream

    series(tmp_path, 2)
    registry = ExtensionRegistry()
    registry.register(FrameStream)
    state = blank(state_of(0))
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "0", _extension_registry=registry), no_dist=True)
    assert bits(state) == bits(state_of(0))
    with pytest.raises(CheckpointException, match=r"load it by codec\.torch\.checkpoint_reader"):
        dcp.load(state, storage_reader=FileSystemReader(tmp_path / "1", _extension_registry=registry), no_dist=True)


def test_longest_chain_is_loaded(tmp_path):
    writer = codec.torch.checkpoint_writer(tmp_path, full_every=100, sync_files=False)
    weight = torch.arange(4000.0)
    for step in range(100):
        weight[step] = -1
        save(writer, tmp_path, step, {"w": weight})
    assert Checkpoint(tmp_path / "99").head.depth == 99
    assert bits(loaded(tmp_path / "99", {"w": weight})) == bits({"w": weight})


def test_resumed_training_continues_the_chain(tmp_path):
    series(tmp_path, 1)
    writer = codec.torch.checkpoint_writer(tmp_path, full_every=3, base=tmp_path / "0")
    for step in (1, 2, 3):
        save(writer, tmp_path, step)
        check(tmp_path, step)
    assert depths(tmp_path) == [0, 1, 2, 0]
    with pytest.raises(codec.ArgumentError, match="no complete checkpoint"):
        codec.torch.checkpoint_writer(tmp_path, full_every=3, base=tmp_path / "9")
    with pytest.raises(codec.ArgumentError, match="full_every= of at least 2"):
        codec.torch.checkpoint_writer(tmp_path, base=tmp_path / "0")


def test_saving_over_a_checkpoint_that_others_may_need_is_an_error(tmp_path):
    writer = series(tmp_path, 2)
    with pytest.raises(CheckpointException, match="save to another folder"):
        save(writer, tmp_path, 0, state_of(9))
    check(tmp_path, 1)
    save(writer, tmp_path, 2)
    check(tmp_path, 2)
    assert depths(tmp_path) == [0, 1, 2], "an error before the plan was made costs no full checkpoint"


def test_bases_are_found_by_digest(tmp_path):
    series(tmp_path, 3)
    (tmp_path / "0").rename(tmp_path / "renamed")
    check(tmp_path, 2)
    other = tmp_path / "other"
    other.mkdir()
    series(other, 1)
    shutil.rmtree(tmp_path / "renamed")
    save(codec.torch.checkpoint_writer(tmp_path), tmp_path, 0, state_of(7))
    for why in ("has the digest", "is missing"):
        message = failure(tmp_path / "2")
        assert f"needs its base {tmp_path / '0'} of digest" in message
        assert why in message
        shutil.rmtree(tmp_path / "0", ignore_errors=True)
    (other / "0").rename(tmp_path / "again")  # equal values, saved by another writer
    check(tmp_path, 2)


def test_base_that_vanishes_before_a_save_makes_the_next_checkpoint_full(tmp_path, caplog):
    writer = series(tmp_path, 2)
    shutil.rmtree(tmp_path / "1")
    with caplog.at_level(logging.WARNING, "codec.torch"):
        save(writer, tmp_path, 2)
    assert "full one" in caplog.text
    check(tmp_path, 2)
    assert Checkpoint(tmp_path / "2").head.depth == 0


def test_base_that_vanishes_during_a_save_is_an_error(tmp_path, monkeypatch):
    writer = series(tmp_path, 2)
    write = type(writer).write_data

    def write_data(self, *args):
        done = write(self, *args)
        shutil.rmtree(tmp_path / "1")
        return done

    monkeypatch.setattr(type(writer), "write_data", write_data)
    with pytest.raises(CheckpointException, match=r"was deleted or replaced while"):
        save(writer, tmp_path, 2)
    monkeypatch.undo()
    assert not (tmp_path / "2" / ".metadata").exists()
    save(writer, tmp_path, 2)
    check(tmp_path, 2)


def _async(rank, size, folder):
    group = dist.new_group(backend="gloo")
    writer = codec.torch.checkpoint_writer(folder, full_every=4)
    weights = {f"w{i}": torch.randn(50_000, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    expected, futures = [], []
    for step in range(4):
        state = {"model": weights, "step": step}
        expected.append(bits(state))
        future = dcp.async_save(state, checkpoint_id=f"{folder}/{step}", storage_writer=writer, process_group=group)
        for w in weights.values():
            w[::10] += 1e-4  # the training goes on while the checkpoint is written
        if step != 2 or size > 1:
            future.result()  # of one rank, the saves of steps 2 and 3 run at the same time
        futures.append(future)
    for future in futures:
        future.result()
    for step in range(4):
        state = {"model": {key: torch.zeros(50_000) for key in weights}, "step": -1}
        dcp.load(state, storage_reader=codec.torch.checkpoint_reader(f"{folder}/{step}"), process_group=group)
        assert bits(state) == expected[step]
    return threading.active_count()


@pytest.mark.parametrize("ranks", [1, nightly(2)])
def test_asynchronous_saves_hold_the_values_of_their_step(ranks, tmp_path):
    run_ranks(ranks, _async, str(tmp_path))
    assert Checkpoint(tmp_path / "1").head.depth == 1


def test_staging_memory_is_used_again_only_after_the_save():
    writer = codec.torch.checkpoint_writer("unused", full_every=2)
    state = {"w": torch.ones(1000), "n": [torch.zeros(())]}
    first = writer.stage(state)
    second = writer.stage(state)
    addresses = first["w"].data_ptr(), second["w"].data_ptr()
    assert addresses[0] != addresses[1]
    del second
    state["w"] += 1
    third = writer.stage(state)
    assert third["w"].data_ptr() == addresses[1]
    assert (first["w"][0], third["w"][0]) == (1, 2)
    del third
    for other in (torch.ones(1), torch.ones(1000).double()):
        assert bits(writer.stage(state | {"w": other})["w"]) == bits(other), "another shape or dtype"


def test_writers_of_chains_refuse_processes(tmp_path):
    import pickle

    pickle.loads(pickle.dumps(codec.torch.checkpoint_writer(tmp_path)))
    with pytest.raises(codec.ArgumentError, match="THREAD"):
        pickle.dumps(codec.torch.checkpoint_writer(tmp_path, full_every=2))


def test_plans_that_a_planner_has_cached_are_written_in_full(tmp_path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    writer = codec.torch.checkpoint_writer(tmp_path, full_every=3)
    for step in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = state_of(step) | {"object": {"step": step}}
        dcp.save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer, planner=planner, no_dist=True)
        assert bits(loaded(tmp_path / str(step), state)) == bits(state)


def test_plans_that_a_planner_has_cached_for_another_writer_have_no_base(tmp_path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    for name in "ab":
        writer = codec.torch.checkpoint_writer(tmp_path, full_every=5)
        for step in range(2):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            state = {"w": torch.arange(5000.0) + (torch.arange(5000) == step)}
            folder = tmp_path / name / str(step)
            dcp.save(state, checkpoint_id=folder, storage_writer=writer, planner=planner, no_dist=True)
            assert bits(loaded(folder, state)) == bits(state)
    assert not any(item.changes for item in Checkpoint(tmp_path / "b" / "0").items.values())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_error_in_a_thread_of_the_writer_is_an_error(tmp_path):
    """The writer of torch ignores such errors, and completes a checkpoint that lacks items."""
    writer = codec.torch.checkpoint_writer(tmp_path, full_every=3, thread_count=2)
    create = writer.fs.create_stream

    def create_stream(path, mode):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return create(path, mode)

    save(writer, tmp_path, 0)
    writer.fs.create_stream = create_stream
    state = {str(k): torch.arange(1000.0) for k in range(200)}

    def save_all():
        for step in range(1, 50):  # until a thread takes a file from the queue
            save(writer, tmp_path, step, state)

    with pytest.raises(CheckpointException, match="items were written"):
        save_all()
    writer.fs.create_stream = create
    save(writer, tmp_path, 50)
    check(tmp_path, 50)


def test_damaged_base_in_files_makes_one_save_fail_and_the_next_one_full(tmp_path):
    writer = series(tmp_path, 2, base_in_memory=False)
    path = next((tmp_path / "1").glob("*.distcp"))
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(CheckpointException, match="too short"):
        save(writer, tmp_path, 2)
    save(writer, tmp_path, 2)
    check(tmp_path, 2)
    assert Checkpoint(tmp_path / "2").head.depth == 0


def _train(rank, folder, first, steps, base):
    """Train a sharded model, and save it after each step."""
    net = small_model()
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    writer = codec.torch.checkpoint_writer(folder, full_every=4, base=base)
    if first:
        net(batch(rank)).square().mean().backward()
        optimizer.step()  # creates the optimizer's state
        _load_into(net, optimizer, f"{folder}/{first - 1}")
    for step in range(first, first + steps):
        net(batch(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model, state = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=f"{folder}/{step}", storage_writer=writer)
    return _whole(net, optimizer)


def _load_into(net, optimizer, folder):
    model, state = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": state}, storage_reader=codec.torch.checkpoint_reader(folder))
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)


def _whole(net, optimizer):
    found = [p.full_tensor().detach() for p in net.parameters()]
    return found + [
        optimizer.state[p][key].full_tensor() for p in net.parameters() for key in ("exp_avg", "exp_avg_sq")
    ]


def _save_sharded(rank, size, folder, first, steps, base):
    return _train(rank, folder, first, steps, base)


def _load_sharded(rank, size, folder, step):
    net = small_model()
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    net(batch(rank)).square().mean().backward()
    optimizer.step()
    _load_into(net, optimizer, f"{folder}/{step}")
    return _whole(net, optimizer)


@pytest.mark.parametrize("sizes", [(2, 1), nightly((1, 2)), nightly((2, 3)), nightly((3, 2))])
def test_another_number_of_ranks_loads_a_chain_and_continues_it(sizes, tmp_path):
    before, after = sizes
    saved = run_ranks(before, _save_sharded, str(tmp_path), 0, 2, None)[0]
    assert Checkpoint(tmp_path / "1").head.depth == 1
    for tensors in run_ranks(after, _load_sharded, str(tmp_path), 1):
        assert all(torch.equal(a, b) for a, b in zip(tensors, saved, strict=True))
    saved = run_ranks(after, _save_sharded, str(tmp_path), 2, 2, str(tmp_path / "1"))[0]
    for tensors in run_ranks(before, _load_sharded, str(tmp_path), 3):
        assert all(torch.equal(a, b) for a, b in zip(tensors, saved, strict=True))


def _fail_on_one_rank(rank, size, folder):
    writer = codec.torch.checkpoint_writer(folder, full_every=4)
    weights = {f"w{i}": torch.randn(20_000, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    errors = []
    for step in range(4):
        if step == 2 and rank == 1:
            writer.fs.create_stream = None  # calling it is an error
        try:
            dcp.save({"model": weights}, checkpoint_id=f"{folder}/{step}", storage_writer=writer)
        except CheckpointException:
            errors.append(step)
            writer.fs = type(writer.fs)()
        expected = bits(weights)
        for w in weights.values():
            w[::10] += 1e-4
    state = {"model": {key: torch.zeros(20_000) for key in weights}}
    dcp.load(state, storage_reader=codec.torch.checkpoint_reader(f"{folder}/3"))
    return errors, bits(state["model"]) == expected


def test_error_on_one_rank_leaves_the_chain_whole(tmp_path):
    assert run_ranks(2, _fail_on_one_rank, str(tmp_path)) == [([2], True)] * 2
    assert [Checkpoint(tmp_path / name).head.depth for name in "013"] == [0, 1, 0]
