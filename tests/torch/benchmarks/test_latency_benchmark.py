"""bench/network: links have the requested round-trip time, and the model of a step follows its documentation."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench/network"))
import latency
import netns

pytestmark = pytest.mark.nightly
PROBE = f"""
import json, os, sys
sys.path.insert(0, {str(Path(netns.__file__).parent)!r})
import netns
rank = int(os.environ["RANK"])
rtt = netns.tcp_round_trip(rank)
print(json.dumps({{"rtt": rtt, "rate": netns.tcp_rate(rank, 2)}}))
"""


def test_links_have_the_round_trip_time_and_the_rate():
    if os.geteuid():
        pytest.skip("network namespaces need root")
    try:
        network = netns.Network(2, "50mbit", rtt=40).__enter__()
    except netns.NetworkError as e:
        pytest.skip(f"no namespaces or no TUN devices: {e}")
    try:
        (found,), (other,) = network.run([sys.executable, "-c", PROBE], timeout=60)
    finally:
        network.close()
    assert 0.040 <= found["rtt"] < 0.120, "half of the round-trip time each way, and scheduling"
    assert 10e6 < min(found["rate"], other["rate"]) <= 50e6
    assert network.delay is None


@pytest.mark.parametrize("how", [{"rtt": -1}, {"rtt": float("nan")}, {"rtt": 1e5}, {"rtt": 10, "both_ways": True}])
def test_wrong_round_trip_times_are_refused(how):
    with pytest.raises(netns.NetworkError, match="round-trip time"):
        netns.Network(2, "1gbit", **how)


@pytest.mark.parametrize("how", [{"loss": 0.1}, {"loss": 1.0, "rtt": 10}, {"loss": float("nan"), "rtt": 10}])
def test_wrong_losses_are_refused(how):
    with pytest.raises(netns.NetworkError, match="a loss is a share"):
        netns.Network(2, "1gbit", **how)


def test_model_of_a_step():
    def row(method, rtt, step, cpu, sent):
        cell = {"rate": "100mbit", "rtt": rtt, "wanted_buckets": 7, "method": method}
        return cell | {"step_ms": step, "cpu_ms": cpu, "sent": sent}

    rows = [row("local", rtt, 50.0, 40.0, 0) for rtt in (0, 100)]
    rows += [row("float32", 0, 120.0, 45.0, 1_000_000), row("float32", 100, 820.0, 45.0, 1_000_000)]
    rows += [row("small", 0, 60.0, 60.0, 125_000), row("small", 100, 205.0, 60.0, 125_000)]
    latency.models(rows)
    of = {(r["method"], r["rtt"]): r for r in rows}
    assert of["local", 100]["model_ms"] == 50
    # 80 ms: 8 Mbit at 100 Mbit/s; 5 ms: CPU time beyond the local step's
    assert of["float32", 0]["model_ms"] == pytest.approx(80 + 5)
    assert of["float32", 100]["model_ms"] == pytest.approx(80 + 100 + 5)
    # The local step (50 ms) takes longer than sending (10 ms)
    assert of["small", 0]["model_ms"] == pytest.approx(50 + 20)
    assert of["float32", 100]["trips"] == pytest.approx(7)
    assert of["small", 100]["speed"] == pytest.approx(4)
    assert "trips" not in of["small", 0]
    assert json.loads(json.dumps(rows)) == rows
