"""Measure how long receivers behind slow links take that pull an update from one trainer, directly and by mirrors.

    sudo python bench/network/fan_out.py --rate 100mbit --megabytes 20 --receivers 1 5 10 25 50

Trainer and receivers are each in a network namespace of their own (bench/network/netns.py), whose link has the given
rate in both directions. The trainer publishes a snapshot of random bytes, which do not compress. All receivers pull the
snapshot at the same moment; with mirrors, each of them serves what it downloads. The printed seconds end when the last
receiver has applied the snapshot. With `--stop 3`, three receivers, which are not counted, are stopped (SIGSTOP) for 30
seconds while they download.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from typing import Any

import netns
import numpy as np

import codec
from codec.weight_sync import Publisher, pull, serve

PORT, START_PORT = 29600, 29601
STOPPED = 30  # seconds for which receivers stop


def trainer(plan: dict[str, Any]) -> None:
    """Publish a snapshot, let all receivers begin, and print the bytes that this link has sent."""
    values = np.random.default_rng(0).integers(0, 256, int(plan["megabytes"] * 1e6), np.uint8)
    host, count = netns.Network.address(0), plan["receivers"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Publisher(folder, host=host, port=PORT) as publisher,
        socket.create_server((host, START_PORT), backlog=count) as listener,
    ):
        publisher.publish({"w": values})
        receivers = [listener.accept()[0] for _ in range(count)]
        before = netns.sent_nbytes()
        for one in receivers:
            one.sendall(b"x")
        for one in receivers:
            assert one.recv(1), "a receiver has failed"
        print(json.dumps({"sent": netns.sent_nbytes() - before}), flush=True)
        for one in receivers:
            one.close()


def receiver(rank: int, plan: dict[str, Any]) -> None:
    """Pull the snapshot, and print the seconds."""
    source = f"http://{netns.Network.address(0)}:{PORT}"
    with netns.connect((netns.Network.address(0), START_PORT), 120) as start:
        mirror = serve(source) if plan["mirrors"] else None
        one = codec.WeightReceiver()
        start.recv(1)
        if rank <= plan["stop"]:
            stop = f"kill -STOP {os.getpid()}; sleep {STOPPED}; kill -CONT {os.getpid()}"
            threading.Timer(0.5, lambda: subprocess.Popen(["sh", "-c", stop])).start()
        begin = time.perf_counter()
        assert pull(one, source if mirror is None else mirror, timeout=600) == 0
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)
        start.sendall(b"x")
        start.recv(1)  # mirrors serve until all receivers are done
        if mirror is not None:
            mirror.close()


def measure(args: argparse.Namespace, receivers: int, mirrors: bool) -> None:
    """Print a row: seconds of the receivers, and bytes that the trainer has sent."""
    plan = {"receivers": receivers, "mirrors": mirrors, "megabytes": args.megabytes, "stop": args.stop}
    command, environment = netns.worker_of(__file__, plan, receivers + 1)
    with netns.Network(receivers + 1, args.rate, both_ways=True) as network:
        [sent], *rows = network.run(command, timeout=args.timeout, environment=environment)
    seconds = [row[0]["seconds"] for row in rows[args.stop :]]
    print(
        f"{receivers:9}  {'mirrors' if mirrors else 'direct':8} {statistics.median(seconds):9.2f} s "
        f"{max(seconds):9.2f} s {sent['sent'] / 1e6 / args.megabytes:12.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", nargs="+", type=int, default=[1, 5, 10, 25, 50])
    parser.add_argument("--rate", default="100mbit", help="rate of each link, in both directions")
    parser.add_argument("--megabytes", type=float, default=20, help="size of the snapshot")
    parser.add_argument("--ways", nargs="+", choices=("direct", "mirrors"), default=["direct", "mirrors"])
    parser.add_argument("--stop", type=int, default=0, help="number of receivers that are stopped for 30 seconds")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        netns.end_on_sigterm()
        rank = int(os.environ["RANK"])
        trainer(args.worker) if rank == 0 else receiver(rank, args.worker)
        return
    with netns.ending(__file__):
        print(f"{args.megabytes:g} MB, links of {netns.shown(args.rate)}/s")
        print("receivers  way       median         last   copies sent by the trainer")
        for count in args.receivers:
            for way in args.ways:
                measure(args, count, way == "mirrors")


if __name__ == "__main__":
    main()
