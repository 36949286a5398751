"""Measure how long receivers take that pull updates from one server at the same moment.

    python bench/network/pull.py --receivers 50

A trainer serves a store over loopback: a snapshot of bfloat16 weights, and updates in which one weight in a hundred
changes. Each receiver is a process of its own. All of them first pull the snapshot, one after the other. Then they wait
for the same barrier, and pull all updates. `--queue 5` gives the server the queue of connections that Python's servers
have by default.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import codec
from codec.weight_sync import Publisher, pull
from codec.weight_sync.http.handler import Server


def overflows() -> int:
    """Return how often a connection did not fit into the queue of a listening socket of this machine."""
    names, values = (
        line.split() for line in Path("/proc/net/netstat").read_text().splitlines() if line.startswith("TcpExt:")
    )
    return int(dict(zip(names, values, strict=True))["ListenOverflows"])


def receive(source: str, ready: Any, start: Any, results: Any) -> None:
    """Pull the snapshot, wait for all other receivers, pull the updates, and report the seconds."""
    receiver = codec.WeightReceiver()
    with ready:
        pull(receiver, source)
    start.wait()
    begin = time.perf_counter()
    version = pull(receiver, source)
    results.put((time.perf_counter() - begin, version))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, default=50)
    parser.add_argument("--updates", type=int, default=1, help="number of updates that each receiver pulls")
    parser.add_argument("--values", type=float, default=1e5, help="number of weights")
    parser.add_argument("--queue", type=int, default=1024, help="length of the queue of connections")
    args = parser.parse_args()
    Server.request_queue_size = args.queue
    rng, context = np.random.default_rng(0), multiprocessing.get_context("fork")
    weights = rng.standard_normal(int(args.values)).astype(ml_dtypes.bfloat16)
    with tempfile.TemporaryDirectory() as folder, Publisher(folder, host="127.0.0.1") as publisher:
        publisher.publish({"w": weights})
        ready, start, results = context.Lock(), context.Barrier(args.receivers + 1), context.Queue()
        processes = [
            context.Process(target=receive, args=(publisher.source, ready, start, results))
            for _ in range(args.receivers)
        ]
        for process in processes:
            process.start()
        while start.n_waiting < args.receivers:
            time.sleep(0.01)
        version = 0
        for _ in range(args.updates):
            weights.view(np.uint16)[rng.random(len(weights)) < 0.01] ^= 1
            version = publisher.publish({"w": weights})
        before = overflows()
        start.wait()
        seconds, versions = zip(*(results.get() for _ in processes), strict=True)
        assert set(versions) == {version}
        for process in processes:
            process.join()
        print(
            f"{args.receivers} receivers, {args.updates} updates, queue of {args.queue}: median "
            f"{statistics.median(seconds):.2f} s, slowest {max(seconds):.2f} s, {overflows() - before} overflows"
        )


if __name__ == "__main__":
    main()
