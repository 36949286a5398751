"""Cost by the number of ranks: bytes, messages, round trips, CPU time, open files, memory, group creation.

    sudo python bench/network/ranks.py --json ranks.json                      # 2 to 64 ranks: up to 20 minutes
    python bench/network/ranks.py --ranks 2 4 --only steps mesh               # without root, a minute
    sudo python bench/network/ranks.py --only links --ranks 2 4 --json links.json

Ranks are forked processes of this machine. Parts (`--only`):

steps       2 to 16 ranks on the loopback interface train a stack of equal layers with DistributedDataParallel:
            "small", float32 without hook, and without communication ("local")
calls       more ranks reduce tensors of the size of the buckets by codec.torch.all_reduce, all of a step in flight,
            without models and without Gloo
auto        bytes of frames that a rank sends for a tensor of 60 KB with ``algorithm="auto"``, and by all-gather
mesh        CPU time of Mesh.post, Mesh.end and Mesh.rtt with N - 1 connections, in one process
create      seconds to connect a group over links with the round-trip time, and open files, threads and memory
links       step time over links with the rate and the round-trip time, with a slept computation, for regions.py --check
loss        step time of two ranks with "small" in 7 buckets if a share of the packets is lost, with TCP's congestion
            controls reno and bbr
uneven      step time of "small" while the last rank's link has a quarter of the rate: before and after slices follow
            the rates of links

The last four need root, iproute2 and TUN devices (bench/network/netns.py), and are skipped without.

frames      kB of frames that a rank sends in a step: mean over ranks
headers     kB that its messages have besides these
messages    number of messages that it sends, and beside it that of the formula (bench/network/growth.py)
trips       round trips for which a step waits
cpu         CPU milliseconds of a rank and step (getrusage) that communication takes: those beyond the step of "local";
            beside it the fit, a sum of terms for buckets, messages and values, and its error
files, MB   open files of a rank, and its largest memory during the steps, shared pages included: maxima over ranks

CPU times depend on the other load of the machine; numbers of bytes, messages, trips and files do not.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Forked ranks cannot use threads of their parent. Its store would log that hosts of namespaces have no names.
os.environ |= {"OMP_NUM_THREADS": "1", "CODEC_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

import forked
import growth
import netns

PARTS = ("steps", "calls", "auto", "mesh", "create", "links", "loss", "uneven")
RANKS, BUCKETS = (2, 4, 8, 16, 32, 64), (1, 7, 50)
MOST_TRAINING = 16  # number of ranks above which models are left out
METHODS = ("local", "float32", "small")
AUTO_VALUES = 15_000  # values of a float32 tensor of 60 KB
CONTROLS = ("reno", "bbr")
PAUSE = 200.0  # milliseconds of a step that are slept on links, as if a GPU computed
_MEANS = ("cpu_s", "messages", "sent_nbytes", "frame_nbytes", "private_mb")

Row = dict[str, Any]


def progress(text: str) -> None:
    """Replace the line of progress on standard error."""
    print(f"\r{text:70}", end="" if text else "\r", file=sys.stderr, flush=True)


def joined(found: Sequence[Sequence[Row]]) -> list[Row]:
    """Combine the rows of all ranks: means of what a rank sends and computes, maxima of the rest."""
    rows: list[Row] = []
    for each in zip(*found, strict=True):
        row = dict(each[0])
        for key, value in row.items():
            if isinstance(value, float | int):
                values = [r[key] for r in each]
                row[key] = statistics.mean(values) if key in _MEANS else max(values)
        rows.append(row | {"ranks": len(found)})
    return rows


def run(name: str, ranks: int, work: Any, network: netns.Network | None = None) -> list[Row]:
    """Run a part on forked ranks, and return its rows."""
    progress(f"{name}: {ranks} ranks")
    return joined(forked.run(ranks, work, network=network, timeout=900))


def beyond_local(rows: Sequence[Row]) -> None:
    """Add to each row of a training the CPU seconds beyond those of the training without communication."""
    local = {(r["ranks"], r["buckets"]): r["cpu_s"] for r in rows if r["method"] == "local"}
    for row in rows:
        base = local.get((row["ranks"], row["buckets"]))
        if base is not None and row["method"] != "local":
            row["plain_s" if row["method"] == "float32" else "codec_s"] = row["cpu_s"] - base


def steps(args: argparse.Namespace) -> list[Row]:
    import rank_costs

    plan = {"buckets": args.buckets, "methods": args.methods, "layers": args.layers, "pause": 0, "steps": args.steps}
    rows: list[Row] = []
    for ranks in args.ranks:
        if ranks <= MOST_TRAINING:
            rows += run("steps", ranks, partial(rank_costs.steps, ranks=ranks, plan=plan))
    beyond_local(rows)
    return rows


def calls(args: argparse.Namespace) -> list[Row]:
    import rank_costs

    plan = {"buckets": args.buckets, "algorithms": ["two_shot"], "steps": min(2, args.steps)}
    plan["values"] = args.layers * rank_costs.WIDTH**2
    rows: list[Row] = []
    for ranks in args.ranks:
        if ranks > MOST_TRAINING:
            rows += run("calls", ranks, partial(rank_costs.calls, ranks=ranks, plan=plan))
    return [row | {"codec_s": row["cpu_s"]} for row in rows]


def auto(args: argparse.Namespace) -> list[Row]:
    import rank_costs

    plan = {"buckets": [1], "algorithms": ["auto", "all_gather"], "steps": 2, "values": AUTO_VALUES}
    return [
        row for ranks in args.ranks for row in run("auto", ranks, partial(rank_costs.calls, ranks=ranks, plan=plan))
    ]


def mesh(args: argparse.Namespace) -> list[Row]:
    import rank_costs

    def work(_rank: int, _store: Any, emit: Any, connections: int) -> None:
        emit(rank_costs.mesh_calls(connections, 20))

    return [row for ranks in args.ranks for row in run("mesh", 1, partial(work, connections=ranks - 1))]


def create(args: argparse.Namespace) -> list[Row]:
    import rank_costs

    rows: list[Row] = []
    for ranks in args.ranks:
        progress(f"create: {ranks} namespaces")
        with netns.Network(ranks, "1gbit", rtt=args.rtt) as network:
            rows += run("create", ranks, partial(rank_costs.create, ranks=ranks), network)
    return [row | {"rtt": args.rtt} for row in rows]


def links(args: argparse.Namespace) -> list[Row]:
    import rank_costs

    plan = {"buckets": args.buckets, "methods": args.methods, "layers": args.layers, "pause": PAUSE, "steps": 6}
    rows: list[Row] = []
    for ranks in args.ranks:
        if ranks <= 8:
            with netns.Network(ranks, args.rate, rtt=args.rtt) as network:
                rows += run("links", ranks, partial(rank_costs.steps, ranks=ranks, plan=plan), network)
    cores = len(os.sched_getaffinity(0))
    rows = [row | {"rate": netns.bits(args.rate), "rtt": args.rtt, "cores": cores} for row in rows]
    beyond_local(rows)
    return rows


def loss(args: argparse.Namespace) -> list[Row]:
    import rank_costs

    plan = {"buckets": [7], "methods": ["small"], "layers": args.layers, "pause": PAUSE, "steps": 8}
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    rows: list[Row] = []
    for control in CONTROLS:
        if control not in known:
            progress("")
            print(f"loss: skipped {control}, which this kernel lacks (modprobe tcp_{control})", file=sys.stderr)
            continue
        os.environ["CODEC_TCP_CONGESTION"] = control  # forked ranks inherit the variable
        try:
            with netns.Network(2, args.rate, rtt=args.rtt, loss=args.loss, congestion=control) as network:
                found = run(f"loss, {control}", 2, partial(rank_costs.steps, ranks=2, plan=plan), network)
        finally:
            del os.environ["CODEC_TCP_CONGESTION"]
        rows += [row | {"control": control, "loss": args.loss, "rtt": args.rtt} for row in found]
    return rows


def uneven(args: argparse.Namespace) -> list[Row]:
    import rank_costs

    plan = {"buckets": args.buckets, "layers": args.layers, "pause": 0}
    slow = f"{(netns.bits(args.rate) or 1e9) / 4e3:.0f}kbit"
    rows: list[Row] = []
    for ranks in args.ranks:
        if 3 <= ranks <= 8:
            with netns.Network(ranks, args.rate, rtt=args.rtt) as network:
                netns.shape(slow, "-n", network.names[-1])
                rows += run("uneven", ranks, partial(rank_costs.uneven, ranks=ranks, plan=plan), network)
    return [row | {"rate": args.rate, "slow": slow, "rtt": args.rtt} for row in rows]


# Tables


def show(found: dict[str, list[Row]], terms: growth.Terms) -> None:
    """Print the tables of all parts that were run."""
    rows = [row for row in [*found.get("steps", []), *found.get("calls", [])] if "codec_s" in row]
    if rows:
        heads = ["frames kB", "headers", "messages", "formula", "trips", "cpu ms", "fit", "error", "files", "MB"]
        print(f"{'ranks':>5} {'buckets':>7} " + "".join(f"{head:>10}" for head in heads))
        for row in rows:
            model = growth.fitted(terms, row)
            cells = [f"{row['frame_nbytes'] / 1e3:.0f}", f"{(row['sent_nbytes'] - row['frame_nbytes']) / 1e3:.1f}"]
            cells += [f"{row['messages']:,.1f}", f"{model['messages']:,.1f}", f"{row['trips']:g}"]
            cells += [f"{1e3 * s:.1f}" for s in (row["codec_s"], model["codec_s"])]
            cells += [error(model["codec_s"], row["codec_s"]), f"{row['descriptors']}", f"{row['peak_mb']:.0f}"]
            print(f"{row['ranks']:5} {row['buckets']:7} " + "".join(f"{cell:>10}" for cell in cells))
        print()
    plain = [row for row in found.get("steps", []) if row["method"] == "float32" and "plain_s" in row]
    if plain:
        cells = [f"{r['ranks']} ranks, {r['buckets']} buckets: {1e3 * r['plain_s']:.1f}" for r in plain]
        print("float32, cpu ms beyond local: " + "; ".join(cells) + "\n")
    for row in found.get("auto", []):
        formula = growth.auto_nbytes(terms, row["values"], row["ranks"])
        beside = f", formula {formula / 1e3:.1f}" if row["method"] == "auto" else ""
        print(f"60 KB, {row['ranks']:3} ranks, {row['method']:10}: {row['frame_nbytes'] / 1e3:7.1f} kB{beside}")
    for row in found.get("mesh", []):
        each = ", ".join(f"{key} {row[f'{key}_us']:.1f}" for key in ("post", "end", "rtt"))
        print(f"{row['connections']:4} connections, CPU microseconds of a call: {each}")
    for row in found.get("create", []):
        model = growth.create_seconds(row["rtt"] / 1e3)
        print(
            f"create {row['ranks']:3} ranks, round trip {row['rtt']:g} ms: {row['seconds']:.2f} s (trips alone "
            f"{model:.2f}), {1e3 * row['cpu_s']:.0f} ms of CPU, {row['descriptors']} files (formula "
            f"{growth.descriptors(row['ranks'])}), {row['threads']} threads, {row['private_mb']:.1f} MB"
        )
    for row in found.get("links", []):
        print(
            f"{row['ranks']} ranks, {row['rate'] / 1e6:g} Mbit/s, {row['rtt']:g} ms, {row['buckets']:2} buckets, "
            f"{row['method']:8}: {row['step_ms']:8.0f} ms"
        )
    for row in found.get("loss", []):
        where = f"loss {row['loss']:.1%}, round trip {row['rtt']:g} ms"
        print(f"2 ranks, {where}, {row['control']:5} {row['method']:8}: mean {row['mean_ms']:8,.0f} ms")
    for row in found.get("uneven", []):
        print(
            f"{row['ranks']} ranks, {row['rate']}, one {row['slow']}, {row['rtt']:g} ms, {row['buckets']} buckets: "
            f"{row['before_ms']:,.0f} ms in steps 1-15, {row['after_ms']:,.0f} in 25-40, slices {row['weights']}"
        )


def error(model: float, measured: float) -> str:
    """Return the relative error of a model, as text."""
    return f"{model / measured - 1:+.0%}"


def show_terms(found: dict[str, list[Row]], terms: growth.Terms) -> None:
    """Print the fitted terms, and the errors of the fit over all rows."""
    rows = [row for row in [*found.get("steps", []), *found.get("calls", [])] if row.get("codec_s", 0) > 0]
    if len(rows) < growth.LEAST_ROWS:
        return
    print(
        f"fit: {1e3 * terms.bucket_s:.2f} ms of CPU a bucket, {1e6 * terms.message_s:.0f} us a message, "
        f"{1e9 * terms.value_s:.2f} ms a million values; {terms.bits:.2f} bits a value, "
        f"{terms.frame_nbytes:.0f} bytes a frame"
    )
    for key in ("messages", "frame_nbytes", "codec_s"):
        errors = [growth.fitted(terms, row)[key] / row[key] - 1 for row in rows]
        most, mean = max(errors, key=abs), statistics.mean(map(abs, errors))
        print(f"error of the fit, {key:12}: mean {mean:.1%}, largest {most:+.1%}, {len(rows)} rows")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="numbers of ranks (2 to 64)")
    parser.add_argument("--buckets", nargs="+", type=int, default=list(BUCKETS), help="gradient buckets (1 7 50)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="of steps and links")
    parser.add_argument("--layers", type=int, default=50, help="layers of 128 x 128 values (50)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a row (5)")
    parser.add_argument("--rate", default="20mbit", help="rate of links, loss and uneven (20mbit)")
    parser.add_argument("--rtt", type=float, default=100, help="milliseconds of a round trip (100)")
    parser.add_argument("--loss", type=float, default=0.01, help="share of lost packets (0.01)")
    parser.add_argument("--json", metavar="FILE", help="write rows and terms; parts of an earlier run are kept")
    args = parser.parse_args()
    if min(args.ranks) < 2:
        parser.error(f"--ranks {min(args.ranks)}: give numbers from 2 on")
    if min(args.buckets) < 1 or max(args.buckets) > args.layers:
        parser.error(f"--buckets {max(args.buckets)}: give a number from 1 to that of --layers, {args.layers}")
    return args


def main() -> None:
    args = arguments()
    parts = {"steps": steps, "calls": calls, "auto": auto, "mesh": mesh, "create": create, "links": links, "loss": loss}
    parts["uneven"] = uneven
    found: dict[str, list[Row]] = {}
    file = Path(args.json) if args.json else None
    if file and file.exists():
        found = growth.load(args.json)["parts"]
    terms = growth.Terms()
    with netns.ending(__file__):
        for name in args.only:
            if name in ("create", "links", "loss", "uneven"):
                try:
                    netns.require()
                except netns.NetworkError as e:
                    print(f"{name}: skipped, {e}", file=sys.stderr)
                    continue
            found[name] = parts[name](args)
            rows = [*found.get("steps", []), *found.get("calls", [])]
            terms = growth.fit(rows)
            if file:  # written after each part, so that an interruption loses no complete part
                fitted = {name: getattr(terms, name) for name in growth.FITTED if len(rows) >= growth.LEAST_ROWS}
                file.write_text(json.dumps({"terms": fitted, "parts": found}, indent=1))
    progress("")
    show(found, terms)
    show_terms(found, terms)


if __name__ == "__main__":
    main()
