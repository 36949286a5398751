"""Simulated time of a training step over regions: algorithms, regions, ranks, links, computing, buckets and bits.

    python bench/network/regions.py                                     # 8 to 4,096 ranks in 1, 4 and 32 regions
    python bench/network/regions.py --regions 4 --ranks 64 --uplink 10gbit --rtt 20 --terms ranks.json
    python bench/network/regions.py --check ranks.json                  # errors at the points that ranks.py measured
    python bench/network/regions.py --plot docs/benchmarks/scale.svg    # needs matplotlib

A region has an uplink that all of its ranks share. Ranks of a region are joined by faster links, one for each rank. A
step takes max(compute, compute x (1 - overlap) + max(communication, CPU time of communication)); communication is the
bytes that leave a region over its uplink, or those that leave a rank over its link, plus waits for round trips. The
formulas of bytes, messages and round trips are those of bench/network/growth.py; seconds of CPU are its defaults, or
with `--terms` those that ranks.py has fitted on this machine.

float32     plain all-reduce around a ring ordered by region, or over a tree where that waits less, as NCCL chooses
two_shot    frames between all pairs of ranks: codec.torch's default above two ranks
ring        frames around a ring: ``algorithm="ring"``
two levels  plain float32 sums within a region, and frames of one P-th between regions for each of its P ranks. A single
            region is split into about as many groups as each has ranks
local       plain sums within a region in each step, and frames between regions every `--every` steps: LocalSteps. A
            single region has no sums within
delayed     the same, where a synchronization may take `--delay` steps
server      a parameter server in each region, to which all ranks send frames and which sends frames of the means

`--check` compares steps of two_shot and float32 that ranks.py has measured over links with a model of these links, in
which each rank is a region of its own; wanted is an error within 15%.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import growth
import netns
from growth import Terms

RANKS, REGIONS = (8, 64, 512, 4096), (1, 4, 32)
WANTED = 0.15  # largest wanted error of the model
TCP = 1500 / 1448  # bytes of a packet, and of its payload
# CPU time for a value, relative to that in two_shot
RING_VALUES = 1.4  # in a ring of frames, where each rank decodes and encodes it
SERVER_VALUES = 0.5  # on a server, which decodes and adds the value of each worker

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Training that is simulated.

    Parameters
    ----------
    values, buckets : float, int
        Number of gradients, and of their buckets.
    compute : float
        Seconds of a step without communication.
    overlap : float
        Share of these during which gradients can be sent.
    every, delay : int
        Steps between two synchronizations of local steps, and steps that one may take.
    """

    values: float = 1e8
    buckets: int = 16
    compute: float = 1.0
    overlap: float = 2 / 3
    every: int = 50
    delay: int = 10


@dataclass(frozen=True)
class Sites:
    """Ranks and links: `ranks` ranks in all, evenly in `regions` regions.

    Parameters
    ----------
    uplink, rate : float
        Bits per second of a region's uplink, and of a rank's link within its region.
    rtt, near_rtt : float
        Seconds of a round trip between regions, and within one.
    cpu_share : float
        Ranks for each core, which multiply all CPU times; 1: each rank has a core.
    """

    regions: int
    ranks: int
    uplink: float = 1e9
    rtt: float = 0.1
    rate: float = 10e9
    near_rtt: float = 2e-4
    cpu_share: float = 1.0

    @property
    def each(self) -> int:
        """Number of ranks in a region."""
        return self.ranks // self.regions

    @property
    def farthest(self) -> float:
        """Seconds of the longest round trip between two ranks."""
        return self.rtt if self.regions > 1 else self.near_rtt

    def ring_wait(self) -> float:
        """Return the seconds in which a value goes twice around a ring of all ranks, without the time for bytes."""
        far = self.regions if self.regions > 1 else 0
        return (self.ranks - 1) / self.ranks * (far * self.rtt + (self.ranks - far) * self.near_rtt)

    def plain_wait(self) -> float:
        """Return the seconds for which a plain all-reduce waits: around a ring, or up and down a tree if less."""
        tree = math.log2(self.regions) * self.rtt + math.log2(self.each) * self.near_rtt
        return min(self.ring_wait(), 2 * tree)


@dataclass(frozen=True)
class Cost:
    """Cost of the communication of a step.

    Parameters
    ----------
    far_nbytes, near_nbytes : float
        Bytes that leave a region, and that a rank sends within its region or to its uplink.
    wait_s, cpu_s, inner_s : float
        Seconds of round trips, of CPU time of a rank, and of sums within a region before and after.
    """

    far_nbytes: float
    near_nbytes: float
    wait_s: float
    cpu_s: float = 0.0
    inner_s: float = 0.0

    def seconds(self, sites: Sites) -> float:
        """Return the seconds in which the communication ends, if nothing else runs."""
        far = self.far_nbytes * 8 * TCP / sites.uplink if sites.regions > 1 else 0.0
        wire = max(far, self.near_nbytes * 8 * TCP / sites.rate)
        return max(self.inner_s + wire + self.wait_s, self.cpu_s * sites.cpu_share)


def step_seconds(job: Job, communication: float) -> float:
    """Return the seconds of a step whose communication takes some seconds."""
    return max(job.compute, job.compute * (1 - job.overlap) + communication)


# Algorithms: each returns the cost of one step, or of one synchronization


def float32(job: Job, sites: Sites, terms: Terms) -> Cost:
    nbytes = 2 * 4 * job.values * (sites.ranks - 1) / sites.ranks
    waits = terms.plain_trips * job.buckets * sites.plain_wait()
    return Cost(nbytes, nbytes, waits)


def two_shot(job: Job, sites: Sites, terms: Terms) -> Cost:
    n, all_ranks = job.values, sites.ranks
    runs = growth.runs(n, all_ranks, job.buckets)
    sent = growth.sent_nbytes(terms, n, all_ranks, runs)
    far = sites.each * sent * (all_ranks - sites.each) / max(1, all_ranks - 1)
    messages = growth.messages(n, all_ranks, runs)
    cpu = growth.cpu_seconds(terms, n, job.buckets, messages)
    return Cost(far, sent, growth.round_trips(all_ranks) * sites.farthest, cpu)


def ring(job: Job, sites: Sites, terms: Terms) -> Cost:
    runs = growth.runs(job.values, sites.ranks, job.buckets)
    sent = growth.sent_nbytes(terms, job.values, sites.ranks, runs)
    messages = growth.messages(job.values, sites.ranks, runs)
    cpu = growth.cpu_seconds(terms, RING_VALUES * job.values, job.buckets, messages)
    return Cost(sent, sent, sites.ring_wait() + sites.farthest, cpu)


def _inner(job: Job, sites: Sites, terms: Terms, ranks: int) -> float:
    """Return the seconds of a plain reduce-scatter and all-gather among some ranks of a region."""
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    waits = terms.plain_trips * job.buckets * replace(sites, regions=1, ranks=ranks).plain_wait()
    return 2 * 4 * job.values * share * 8 * TCP / sites.rate + waits


def two_levels(job: Job, sites: Sites, terms: Terms) -> Cost:
    inner = sites.each
    if sites.regions == 1:
        inner = max(i for i in range(1, math.isqrt(sites.ranks) + 1) if not sites.ranks % i)
    groups = sites.ranks // inner
    n = job.values / inner  # a rank sends frames of one P-th of a bucket
    runs = growth.runs(n, groups, job.buckets)
    sent = growth.sent_nbytes(terms, n, groups, runs)
    messages = growth.messages(n, groups, runs)
    cpu = growth.cpu_seconds(terms, n, job.buckets, messages)
    waits = growth.round_trips(groups) * sites.farthest
    return Cost(inner * sent, sent, waits, cpu, _inner(job, sites, terms, inner))


def server(job: Job, sites: Sites, terms: Terms) -> Cost:
    workers = sites.ranks / sites.regions  # for each server, on average
    of_rank = job.values * terms.bits / 8
    both = 2 * workers * of_rank  # frames of gradients arrive, then frames of the means leave
    cpu = workers * job.values * SERVER_VALUES * terms.value_s
    return Cost(both, both, 2 * sites.farthest, cpu)


def local_seconds(job: Job, sites: Sites, terms: Terms, delay: int) -> float:
    """Return the mean seconds of a step of LocalSteps."""
    one = Job(job.values, 1, job.compute, job.overlap)
    cost = two_levels(one, sites, terms)
    inner = job.compute
    if sites.regions > 1:  # the sums within a region are those of each step, not of the synchronization
        cost = Cost(cost.far_nbytes, cost.near_nbytes, cost.wait_s, cost.cpu_s)
        inner = step_seconds(job, _inner(job, sites, terms, sites.each))
    return inner + max(0.0, cost.seconds(sites) - delay * inner) / job.every


COSTS: dict[str, Callable[[Job, Sites, Terms], Cost]] = {
    "float32": float32,
    "two_shot": two_shot,
    "ring": ring,
    "two levels": two_levels,
    "server": server,
}


def simulated(job: Job, sites: Sites, terms: Terms) -> Row:
    """Return the seconds of a step by algorithm, and the bytes and CPU seconds behind them."""
    costs = {name: cost(job, sites, terms) for name, cost in COSTS.items()}
    steps = {name: step_seconds(job, cost.seconds(sites)) for name, cost in costs.items()}
    steps["local"] = local_seconds(job, sites, terms, 0)
    steps["delayed"] = local_seconds(job, sites, terms, job.delay)
    more = {name: {"far_nbytes": c.far_nbytes, "cpu_s": c.cpu_s, "wait_s": c.wait_s} for name, c in costs.items()}
    return {"regions": sites.regions, "ranks": sites.ranks, "steps": steps, "costs": more}


# Comparison with measured steps


def checked(rows: Sequence[Row], terms: Terms) -> list[Row]:
    """Return, for each step measured over links, the seconds of the model and its relative error."""
    local = {(r["ranks"], r["buckets"]): r["step_ms"] / 1e3 for r in rows if r["method"] == "local"}
    found: list[Row] = []
    for row in rows:
        compute = local.get((row["ranks"], row["buckets"]))
        if compute is None or row["method"] == "local" or not row["rate"]:
            continue
        share = max(1.0, row["ranks"] / row["cores"])
        # The computation is slept before the backward pass, so that nothing overlaps with it.
        job = Job(row["values"], row["buckets"], compute, overlap=0.0)
        sites = Sites(row["ranks"], row["ranks"], row["rate"], row["rtt"] / 1e3, math.inf, cpu_share=share)
        cost = (float32 if row["method"] == "float32" else two_shot)(job, sites, terms)
        model = step_seconds(job, cost.seconds(sites))
        key = {k: row[k] for k in ("ranks", "buckets", "method", "rate", "rtt")}
        measured = row["step_ms"] / 1e3
        found.append(key | {"measured_s": measured, "model_s": model, "error": model / measured - 1})
    return found


def show_check(rows: Sequence[Row]) -> None:
    print(f"{'ranks':>5} {'buckets':>7} {'link':>22} {'method':>9} {'measured ms':>12} {'model ms':>9} {'error':>6}")
    for r in rows:
        link = f"{r['rate'] / 1e6:g} Mbit/s, {r['rtt']:g} ms"
        times = f"{1e3 * r['measured_s']:12,.0f} {1e3 * r['model_s']:9,.0f} {r['error']:+6.0%}"
        print(f"{r['ranks']:5} {r['buckets']:7} {link:>22} {r['method']:>9} {times}")
    for method in dict.fromkeys(r["method"] for r in rows):
        errors = [abs(r["error"]) for r in rows if r["method"] == method]
        print(f"{method}: {sum(e <= WANTED for e in errors)} of {len(errors)} within {WANTED:.0%}")


# Table and plot


def show(rows: Sequence[Row]) -> None:
    print("seconds of a step")
    print(f"{'regions':>7} {'ranks':>6}" + "".join(f"{name:>12}" for name in rows[0]["steps"]))
    for row in rows:
        times = "".join(f"{text(seconds):>12}" for seconds in row["steps"].values())
        print(f"{row['regions']:7} {row['ranks']:6}{times}")


def text(seconds: float) -> str:
    """Return seconds as text with about three digits."""
    return f"{seconds:,.{2 if seconds < 10 else 1 if seconds < 100 else 0}f}"


def plot(rows: Sequence[Row], path: str) -> None:
    """Plot the seconds of a step over the number of ranks, with a panel for each number of regions."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.hashsalt": "regions", "svg.fonttype": "none"}  # the same rows give the same file
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    regions = list(dict.fromkeys(row["regions"] for row in rows))
    figure, panels = plt.subplots(1, len(regions), figsize=(9, 3.6), sharey=True, squeeze=False, layout="constrained")
    for ax, count in zip(panels[0], regions, strict=True):
        some = [row for row in rows if row["regions"] == count]
        for name in rows[0]["steps"]:
            style = "k-" if name == "float32" else "o-"
            ax.loglog([r["ranks"] for r in some], [r["steps"][name] for r in some], style, markersize=3, label=name)
        ax.set_title(f"{count} region{'s' if count > 1 else ''}")
        ax.set_xlabel("ranks")
        counts = [row["ranks"] for row in some]
        ax.set_xticks(counts, [f"{ranks:,}" for ranks in counts])
        ax.xaxis.set_minor_locator(ticker.NullLocator())
        ax.grid(alpha=0.3)
    panels[0][0].set_ylabel("seconds of a step")
    panels[0][-1].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None, dpi=110)
    plt.close(figure)
    if path.endswith(".svg"):
        lines = Path(path).read_text().splitlines()
        Path(path).write_text("".join(f"{line.rstrip()}\n" for line in lines))  # as `make style` wants text files


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regions", nargs="+", type=int, default=list(REGIONS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="ranks in all regions together")
    parser.add_argument("--uplink", default="1gbit", help="rate of a region's uplink (1gbit)")
    parser.add_argument("--rtt", type=float, default=100, help="milliseconds of a round trip between regions (100)")
    parser.add_argument("--rate", default="10gbit", help="rate of a rank's link within its region (10gbit)")
    parser.add_argument("--near-rtt", type=float, default=0.2, help="milliseconds of a round trip in a region (0.2)")
    parser.add_argument("--values", type=float, default=1e8, help="number of gradients (1e8)")
    parser.add_argument("--buckets", type=int, default=16, help="number of their buckets (16)")
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of a step without communication (1)")
    parser.add_argument("--bits", type=float, help="bits of a frame for each value (those of the terms)")
    parser.add_argument("--every", type=int, default=50, help="steps between synchronizations of local steps (50)")
    parser.add_argument("--delay", type=int, default=10, help="steps that a delayed synchronization may take (10)")
    parser.add_argument("--terms", metavar="FILE", help="JSON of ranks.py with fitted terms (the defaults)")
    parser.add_argument("--check", metavar="FILE", help="JSON of ranks.py with measured links: compare, no table")
    parser.add_argument("--plot", metavar="FILE", help="draw the table, as .svg or .png")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    args = parser.parse_args()
    for name in ("uplink", "rate"):
        try:
            value = netns.bits(getattr(args, name))
        except netns.NetworkError as e:
            parser.error(f"--{name}: {e}")
        setattr(args, name, math.inf if value is None else value)
    least = {"regions": 1, "ranks": 2, "values": 1, "buckets": 1, "compute": 0, "every": 1, "delay": 0}
    for name, bound in least.items():
        given = getattr(args, name)
        value = min(given) if isinstance(given, list) else given
        if value < bound:
            parser.error(f"--{name} {value:g}: give a number from {bound} on")
    return args


def main() -> None:
    args = arguments()
    if args.check:
        measured = growth.load(args.check)["parts"].get("links", [])
        if not measured:
            raise SystemExit(f"{args.check}: no links: run ranks.py --only links --json {args.check}")
        rows = checked(measured, growth.load_terms(args.terms or args.check))
        show_check(rows)
    else:
        terms = growth.load_terms(args.terms)
        if args.bits is not None:
            terms = growth.Terms(**(vars(terms) | {"bits": args.bits}))
        job = Job(args.values, args.buckets, args.compute, every=args.every, delay=args.delay)
        links = {"uplink": args.uplink, "rtt": args.rtt / 1e3, "rate": args.rate, "near_rtt": args.near_rtt / 1e3}
        pairs = [(regions, ranks) for regions in args.regions for ranks in args.ranks if not ranks % regions]
        if not pairs:
            raise SystemExit("no number of --ranks is a multiple of one of --regions")
        rows = [simulated(job, Sites(regions, ranks, **links), terms) for regions, ranks in pairs]
        show(rows)
        if args.plot:
            plot(rows, args.plot)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
