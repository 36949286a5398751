"""bench/network/ranks.py: measured costs follow the formulas of growth.py, whose values are computed by hand here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/network"))
import growth

NETWORK = Path(__file__).parents[3] / "bench/network"

TERMS = growth.Terms(1e-3, 1e-4, 4e-9, bits=4.0, frame_nbytes=100.0, plain_trips=1.0)


def test_messages_of_ranks_with_a_slice_each():
    # Three terms to other owners, and a sum to three others, in each of two buckets; rank 0 exchanges 3 + 3 in verdicts
    assert growth.messages(16384, 4, buckets=2) == pytest.approx(2 * (3 + 3) + 6 / 4)
    assert growth.messages(16384, 2) == pytest.approx(1 + 1 + 1)


def test_small_buckets_are_joined():
    assert growth.runs(2 << 17, 4, buckets=2) == 2  # 128 KiB a rank
    assert growth.runs(2 << 16, 4, buckets=2) == 1
    assert growth.runs(819_200, 16, buckets=50) == 2


def test_ranks_without_values_send_no_sums():
    assert growth.slices(15_000, 64) == 15
    # Each of 15 owners receives 63 terms, and sends 63 sums; the mean is over 64 ranks
    assert growth.messages(15_000, 64, verdicts=0) == pytest.approx(2 * 63 * 15 / 64)


def test_slices_are_sent_in_chunks():
    assert growth.chunks(2**18 * 4, 4) == 1  # a slice of 1 MiB
    assert growth.chunks(2**20 * 16, 4) == 4  # 16 MiB
    assert growth.messages(2**20 * 16, 4, verdicts=0) == pytest.approx(4 * 2 * 3)


def test_bytes_are_those_of_values_frames_and_headers():
    values, frames = 1024 * 8, 2 * 3 / 4 * 4
    nbytes = 2 * 3 / 4 * values / 2 + frames * TERMS.frame_nbytes
    assert growth.frame_nbytes(TERMS, values, 4) == pytest.approx(nbytes)
    assert growth.sent_nbytes(TERMS, values, 4) == pytest.approx(nbytes + 48 * (frames + 1.5))


@pytest.mark.parametrize(("ranks", "phases"), [(2, 1), (4, 3), (64, 2 * 15 / 64 * 63 / 15)])
def test_auto_sends_small_tensors_of_few_ranks_once(ranks, phases):
    values = 8000 if ranks < 64 else 15_000  # 32 and 60 KB; the limit is 128 KiB / N
    terms = growth.Terms(bits=4.0, frame_nbytes=0.0)
    assert growth.auto_nbytes(terms, values, ranks) == pytest.approx(phases * values / 2)


def test_fit_finds_the_terms_of_its_own_rows():
    rows = []
    for ranks in (2, 4, 16):
        for buckets in (1, 7, 50):
            row = {"ranks": ranks, "buckets": buckets, "values": 819_200, "grain": 128, "verdicts": 1}
            rows.append(row | growth.fitted(TERMS, row))
    found = growth.fit(rows)
    for name in ("bucket_s", "message_s", "value_s", "bits", "frame_nbytes"):
        assert getattr(found, name) == pytest.approx(getattr(TERMS, name)), name
    assert growth.fit([]) == growth.Terms()


def test_fit_has_no_negative_terms():
    rows = [{"ranks": 2, "buckets": b, "values": 1e6, "messages": 1, "codec_s": 1 / b} for b in (1, 2, 4, 8)]
    found = growth.fit(rows)
    assert min(found.bucket_s, found.message_s, found.value_s) >= 0
    assert growth.fit(rows[:3]) == growth.Terms(), "three rows say nothing about three terms"


def test_terms_of_a_file_replace_defaults(tmp_path):
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps({"terms": {"message_s": 1.0}, "parts": {}}))
    assert growth.load_terms(str(path)) == growth.Terms(message_s=1.0)
    path.write_text("[]")
    with pytest.raises(SystemExit, match="not a file that ranks"):
        growth.load_terms(str(path))


# Measurements

WITHOUT_ROOT = f"""
import os
import runpy
import sys

os.geteuid = lambda: 1000
sys.argv = ["ranks.py", *sys.argv[1:]]
sys.path.insert(0, {str(NETWORK)!r})
runpy.run_path({str(NETWORK / "ranks.py")!r}, run_name="__main__")
"""


def test_parts_that_need_root_are_skipped_with_a_message(tmp_path):
    file = tmp_path / "ranks.json"
    given = ["--only", "create", "loss", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOT, *given], check=False, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert [line.split(":")[0].strip() for line in said if "skipped" in line] == ["create", "loss"]
    assert not file.exists()


@pytest.mark.torch
def test_measured_ranks_send_the_messages_of_the_formula(tmp_path):
    file = tmp_path / "ranks.json"
    given = ["--ranks", "3", "--buckets", "2", "--layers", "2", "--steps", "1"]
    given += ["--methods", "small", "--only", "steps", "mesh", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, NETWORK / "ranks.py", *given], check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["parts"]
    [row] = found["steps"]
    assert (row["ranks"], row["buckets"], row["joined"], row["values"]) == (3, 2, 1, 2 * 128**2)
    assert row["messages"] == pytest.approx(growth.fitted(growth.Terms(), row)["messages"])
    assert row["trips"] == growth.round_trips(3)
    headers = row["sent_nbytes"] - row["frame_nbytes"]
    assert headers == pytest.approx(growth.HEADER_NBYTES * row["messages"], rel=0.2)
    assert [row["connections"] for row in found["mesh"]] == [2]
    assert "fit" not in done.stdout, "without the step of local, no CPU time is known"


FAILING = f"""
import sys
import time

sys.path.insert(0, {str(NETWORK)!r})
import forked
import netns

def work(rank, store, emit):
    if rank == 1:
        raise ValueError("bucket of rank 1")
    time.sleep(600)

try:
    forked.run(2, work, timeout=100)
except netns.NetworkError as e:
    print(e)
"""


@pytest.mark.torch
@pytest.mark.nightly
def test_error_of_a_forked_rank_ends_all_ranks():
    done = subprocess.run([sys.executable, "-c", FAILING], check=False, capture_output=True, text=True, timeout=90)
    assert "rank 1 of 2, exit status 1" in done.stdout
    assert "ValueError: bucket of rank 1" in done.stdout
