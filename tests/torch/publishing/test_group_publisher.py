"""Publishers of several ranks: no gather, one version over all shards, and no version without all ranks."""

import pytest
import torch

import codec
from codec.weight_sync import pull
from support.faults import KILLED
from support.group_publishing import is_version, publish, publish_layout, refused, serve_folders
from support.ranks import RankPool, run_ranks
from support.tiers import NIGHTLY, nightly


@pytest.mark.parametrize("layout", ["tensor_parallel", nightly("fsdp"), nightly("hsdp")])
def test_receivers_get_the_weights_of_sharded_models_bit_for_bit(tmp_path, layout):
    assert run_ranks(4, publish_layout, str(tmp_path), layout, fresh=True) == [[]] * 4


def found(receiver, folder):
    """Return the version that a receiver pulls, after checking its tensors."""
    version = pull(receiver, folder / "store")
    assert is_version(dict(receiver.tensors(like=torch.empty(0))), version)
    return version


def points(count):
    """Return the numbers of lines at which a fault is tried, of lines that are executed without faults."""
    return range(count) if NIGHTLY else [count // 3]


def test_rank_killed_at_any_point_leaves_a_version_of_all_ranks(tmp_path):
    """Receivers get the old or the new version. After a restart, they follow the next one."""
    with RankPool(2) as ranks, codec.WeightReceiver(folder=tmp_path / "receiver") as follower:
        ranks.new_group()
        ranks.run(publish, str(tmp_path), 0)
        counts, version = [count for _, _, count in ranks.run(publish, str(tmp_path), 1)], 1
        for faulty, point in ((k, point) for k in (0, 1) for point in points(counts[k])):
            ranks.start(publish, str(tmp_path), version + 1, faulty, point)
            results = ranks.results()
            assert results[faulty] is KILLED, (faulty, point)
            now = found(follower, tmp_path)
            assert now in (version, version + 1), (faulty, point)
            assert found(codec.WeightReceiver(), tmp_path) == now
            assert now > version or results[1 - faulty][1][0].startswith("PeerError"), (faulty, point, results)
            ranks.replace(faulty)
            ranks.new_group()
            version = now + 1
            assert [r[:2] for r in ranks.run(publish, str(tmp_path), version)] == [(version, [])] * 2, (faulty, point)
            assert found(follower, tmp_path) == version


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", nightly("OSError")])
def test_publisher_goes_on_after_an_error_at_any_point_of_a_rank(tmp_path, kind):
    """An error on one rank is an error on all ranks. The next version has the values of all ranks."""
    with codec.WeightReceiver() as follower:
        (_, _, count), _ = run_ranks(2, publish, str(tmp_path), 0)
        for number, point in enumerate(points(count)):
            results = run_ranks(2, publish, str(tmp_path), number + 1, number % 2, point, kind)
            versions, errors, _ = zip(*results, strict=True)
            assert errors[number % 2][0].startswith(kind), (point, errors)
            assert all(e.startswith("PeerError") for e in (*errors[1 - number % 2], *errors[number % 2][1:])), errors
            assert versions[0] == versions[1] == pull(follower, tmp_path / "store"), (point, errors)
            assert is_version(dict(follower.tensors(like=torch.empty(0))), number + 1), (point, errors)
            late = codec.WeightReceiver()
            pull(late, tmp_path / "store")
            assert late.digest == follower.digest


def test_ranks_serve_folders_of_their_own(tmp_path):
    """With host=, ranks share no folder: receivers get each part from its rank, with token and signature."""
    assert run_ranks(2, serve_folders, str(tmp_path)) == [None] * 2


def test_other_number_of_ranks_begins_with_a_snapshot(tmp_path):
    follower = codec.WeightReceiver()
    for version, size in enumerate((2, 3, 2)):
        results = run_ranks(size, publish, str(tmp_path), version)
        assert [r[:2] for r in results] == [(version, [])] * size
        assert found(follower, tmp_path) == version


def test_weights_that_do_not_fit_together_are_errors_on_all_ranks(tmp_path):
    assert run_ranks(2, refused, str(tmp_path)) == [[]] * 2
