"""bench/network/regions.py: the simulation follows its documentation, an earlier one, and measured steps."""

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/network"))
import growth
import regions

TERMS = growth.Terms(1e-3, 1e-4, 4e-9, bits=4.0, frame_nbytes=100.0, plain_trips=1.0)
# Nothing overlaps with the computation, so that all communication counts
JOB = regions.Job(values=8e6, buckets=2, compute=1.0, overlap=0.0, every=10, delay=0)


def far(count, ranks):
    """Return regions with uplinks of 80 Mbit/s, 10 MB each second without TCP's headers, and no links within."""
    return regions.Sites(count, ranks, 80e6 * regions.TCP, rtt=0.1, rate=math.inf, near_rtt=0.0)


def test_float32_leaves_each_region_once_whatever_its_ranks():
    for ranks in (4, 64):
        cost = regions.float32(JOB, far(4, ranks), TERMS)
        assert cost.far_nbytes == pytest.approx(2 * 32e6 * (ranks - 1) / ranks)
    # 4 ranks: 48 MB at 10 MB/s; 6 steps of half a round trip in each of two buckets
    assert regions.float32(JOB, far(4, 4), TERMS).seconds(far(4, 4)) == pytest.approx(4.8 + 2 * 0.3)


def test_two_shot_sends_frames_to_all_ranks_of_other_regions():
    free = growth.Terms(0, 0, 0, bits=4.0, frame_nbytes=0.0)
    job = regions.Job(values=8e8, buckets=1, compute=1.0, overlap=0.0)  # so that headers of messages are negligible
    # Each of 16 ranks of a region sends 2 / 64 of 400 MB to each of 48 ranks
    assert regions.two_shot(job, far(4, 64), free).far_nbytes == pytest.approx(16 * 48 * 2 * 4e8 / 64, rel=1e-3)
    # Two levels: 16 times less, in all to 3 other regions
    assert regions.two_levels(job, far(4, 64), free).far_nbytes == pytest.approx(2 * 4e8 * 3 / 4, rel=1e-3)


def test_steps_wait_for_the_larger_of_communication_and_cpu_time():
    sites = far(2, 2)
    cost = regions.Cost(far_nbytes=1e6, near_nbytes=1e6, wait_s=0.15, cpu_s=0.2)
    assert cost.seconds(sites) == pytest.approx(0.1 + 0.15)
    assert regions.Cost(1e6, 1e6, 0.15, cpu_s=0.4).seconds(sites) == pytest.approx(0.4)
    assert regions.step_seconds(JOB, 0.25) == pytest.approx(1.25)
    assert regions.step_seconds(regions.Job(compute=3.0, overlap=0.5), 1.0) == 3.0


def test_delayed_synchronizations_hide_behind_steps():
    sites, slow = far(4, 4), growth.Terms(0, 0, 0, bits=4.0, frame_nbytes=0.0)
    now = regions.local_seconds(JOB, sites, slow, 0)
    seconds = 2 * 4e6 * 3 / 4 / 10e6 + 0.2  # 6 MB and two round trips
    assert now == pytest.approx(1 + seconds / JOB.every, rel=1e-3)
    assert regions.local_seconds(JOB, sites, slow, 1) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("count", "ranks", "algorithm", "seconds"),
    [(4, 8, "float32", 9.9), (4, 64, "two_shot", 10.9), (4, 64, "two levels", 1.78), (32, 512, "two_shot", 14.0)],
)
def test_simulation_is_near_an_earlier_one(count, ranks, algorithm, seconds):
    row = regions.simulated(regions.Job(), regions.Sites(count, ranks), growth.Terms())
    assert row["steps"][algorithm] == pytest.approx(seconds, rel=regions.WANTED)


def test_check_is_near_a_measured_step_of_four_ranks():
    """Measured: 4 ranks, 20 Mbit/s, round trips of 100 ms, 819,200 values in 7 buckets."""
    common = {"ranks": 4, "buckets": 7, "values": 819_200, "rate": 20e6, "rtt": 100.0, "cores": 4}
    rows = [common | {"method": m, "step_ms": ms} for m, ms in (("local", 294), ("float32", 3543), ("small", 700))]
    found = {row["method"]: row for row in regions.checked(rows, growth.Terms())}
    assert set(found) == {"float32", "small"}
    for row in found.values():
        assert abs(row["error"]) < regions.WANTED, row


def test_table_and_plot_have_all_regions(tmp_path, monkeypatch, capsys):
    picture, rows = tmp_path / "scale.svg", tmp_path / "rows.json"
    given = ["--regions", "1", "4", "--ranks", "8", "64", "--plot", str(picture), "--json", str(rows)]
    monkeypatch.setattr(sys, "argv", ["regions.py", *given])
    regions.main()
    assert [(r["regions"], r["ranks"]) for r in json.loads(rows.read_text())] == [(1, 8), (1, 64), (4, 8), (4, 64)]
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    first = picture.read_bytes()
    regions.main()
    assert picture.read_bytes() == first, "the plot depends on nothing but the rows"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--ranks", "7", "--regions", "4"], "multiple"),
        (["--uplink", "1 furlong"], "--uplink"),
        (["--ranks", "8", "1"], "--ranks 1: give a number from 2 on"),
    ],
)
def test_wrong_arguments_are_refused(given, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["regions.py", *given])
    with pytest.raises(SystemExit) as error:
        regions.main()
    assert message in f"{error.value} {capsys.readouterr().err}"
