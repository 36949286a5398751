"""Slow links on one machine: network namespaces joined by a bridge, each with a token bucket that limits its rate.

    python bench/network/netns.py                                          # measure the TCP rate of each link
    python bench/network/netns.py --ranks 4 --rate 100mbit --rtt 40 -- python train.py

With a round-trip time, the namespaces are joined by TUN devices instead of a bridge (bench/network/delay.py), since
many kernels have no netem. The link's queue and TCP's windows are then large enough for the bytes of several round
trips, as on hosts that are tuned for long links.

The second form starts the command once per rank, in its own namespace, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
and GLOO_SOCKET_IFNAME set as torchrun sets them on several machines. If one rank fails, the others are killed.

The script needs Linux, root and iproute2. All devices that it creates, including the bridge, are in namespaces whose
names begin with ``codec-``; the machine's own network is unchanged. The namespaces are removed at the end, also after
an error or Ctrl-C. If a run is killed, the next run removes its namespaces.
"""

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import re
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import delay

DEVICE = "eth0"
PORT = 29500
PROBE_PORT, ECHO_PORT = 29400, 29401
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LINKS = ("100mbit", "500mbit", "1gbit", "10gbit", "none")
SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # PATH may lack the folders of the programs ip and tc
SERIAL = itertools.count()
# minimum, default and maximum bytes of TCP's windows on long links: two round trips of 200 ms at 1 Gbit/s
WINDOWS = ("net.ipv4.tcp_rmem=4096 131072 67108864", "net.ipv4.tcp_wmem=4096 16384 67108864")


class NetworkError(RuntimeError):
    """A network cannot be created, or a process in the network failed."""


def bits(rate: str) -> float | None:
    """Return the bits per second of a rate such as "100mbit"; None for "none", a link without a limit."""
    if rate == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        raise NetworkError(f"a rate is a number with kbit, mbit or gbit, such as 100mbit, or none: {rate!r}")
    return float(match[1]) * UNITS[match[2]]


def shown(rate: str) -> str:
    """Return a rate such as "100mbit" as text for people, "100 Mbit"."""
    return "unthrottled" if rate == "none" else re.sub(r"([kmg])bit", lambda m: f" {m[1].upper()}bit", rate)


def tool(*command: str) -> str:
    """Run the program ip or tc with arguments, and return its output."""
    path = shutil.which(command[0], path=SEARCH)
    if path is None:
        raise NetworkError(f"{command[0]} is missing: install iproute2 (apt-get install iproute2)")
    done = subprocess.run([path, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def require() -> None:
    """Raise NetworkError if a requirement is missing, before any namespace is created."""
    if sys.platform != "linux":
        raise NetworkError("network namespaces are Linux's")
    for name in ("ip", "tc"):
        if shutil.which(name, path=SEARCH) is None:
            raise NetworkError(f"{name} is missing: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root: run this with sudo (a container needs --privileged)")


def bucket_nbytes(rate: float) -> int:
    """Return the size in bytes of a link's token bucket.

    After a pause, a sender may send this many bytes faster than the rate, so the bucket should be small: one
    millisecond of the rate. With a smaller bucket, a timer that fires late loses tokens, and the link is slower than
    its rate.
    """
    return max(20_000, int(rate / 8 / 1000))


def shape(rate: str, *namespace: str, device: str = DEVICE) -> None:
    """Limit the rate of a device in this namespace; with the arguments ``"-n", NAME``, in the namespace NAME."""
    speed = bits(rate)
    if "qdisc tbf" in tool("tc", *namespace, "qdisc", "show", "dev", device):
        tool("tc", *namespace, "qdisc", "del", "dev", device, "root")
    # Avoid packets larger than the bucket: tbf splits them, which takes a whole core at 500 Mbit/s.
    largest = 65536 if speed is None else min(65536, bucket_nbytes(speed) * 3 // 4)
    tool("ip", *namespace, "link", "set", device, "gso_max_size", str(largest))
    if speed is not None:
        limits = ("rate", f"{speed:.0f}bit", "burst", str(bucket_nbytes(speed)), "latency", "100ms")
        tool("tc", *namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def sent_nbytes(device: str = DEVICE) -> int:
    """Return the number of bytes that this namespace has sent, including headers and acknowledgements."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()  # /sys is that of the namespace in which it was mounted
    [counts] = [line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{device}:")]
    return int(counts[8])


def sweep() -> None:
    """Remove namespaces left behind by runs of this script that were killed."""
    for line in tool("ip", "netns", "list").splitlines():
        match = re.match(r"(codec-(\d+)-\S+)", line)
        if match and not alive(int(match[2])):
            remove(match[1])


def alive(pid: int) -> bool:
    """Return True if a process runs, unlike a killed process that its parent has not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def remove(name: str) -> None:
    """Kill the processes of a namespace, and remove the namespace with its devices."""
    for pid in tool("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):  # the process may have ended
            os.kill(int(pid), signal.SIGKILL)
    tool("ip", "netns", "del", name)


def cores_of(rank: int, ranks: int) -> set[int] | None:
    """Return a rank's cores if all ranks can have equally many, as MPI launchers bind them; otherwise None.

    Without binding, Linux wakes a process on the core that received a packet, so that two ranks can share one core for
    milliseconds while another core is idle.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= ranks:
        each = len(cores) // ranks
        return set(cores[rank * each : (rank + 1) * each])
    return None if ranks % len(cores) else {cores[rank % len(cores)]}


@contextlib.contextmanager
def on_cores(cores: set[int] | None) -> Iterator[None]:
    """In this context, bind processes that this thread starts to the given cores; None: do not bind."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Network:
    """Context manager that creates a network namespace for each rank, with addresses from 10.77.0.1 on.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    rate : str
        Rate at which each rank may send, such as ``"100mbit"``, or ``"none"`` for no limit.
    both_ways : bool
        Also limit the rate at which each rank receives, in a queue of the bridge, as a switch's port does.
    congestion : str, optional
        TCP's congestion control algorithm; by default the machine's.
    slow_start_after_idle : bool
        False: connections keep their window over pauses (net.ipv4.tcp_slow_start_after_idle=0).
    rtt : float
        Round-trip time in milliseconds that is added to the machine's own.
    loss : float
        Share of the packets that are dropped, on links with a round-trip time.

    Raises
    ------
    NetworkError
        `rate`, `rtt` or `loss` is invalid, or `both_ways` is given with an `rtt`, for which there is no bridge.
    """

    def __init__(
        self,
        ranks: int,
        rate: str = "none",
        *,
        both_ways: bool = False,
        congestion: str | None = None,
        slow_start_after_idle: bool = True,
        rtt: float = 0,
        loss: float = 0.0,
    ) -> None:
        bits(rate)
        if not 0 <= rtt <= 10_000:
            raise NetworkError(f"a round-trip time is a number of milliseconds from 0 to 10,000: {rtt!r}")
        if rtt and both_ways:
            raise NetworkError(
                "links with a round-trip time limit what ranks send, not what they receive: no both_ways"
            )
        if not 0 <= loss < 1 or (loss and not rtt):
            raise NetworkError(f"a loss is a share of packets below 1, on links with a round-trip time: {loss!r}")
        self.rtt, self.loss = rtt, loss
        self.delay: delay.Delay | None = None
        self.rate, self.both_ways, self.congestion, self.restart = rate, both_ways, congestion, slow_start_after_idle
        prefix = f"codec-{os.getpid()}-{next(SERIAL)}"
        self.hub = f"{prefix}-hub"
        self.names = [f"{prefix}-{rank}" for rank in range(ranks)]
        self.made: list[str] = []

    def __enter__(self) -> "Network":
        require()
        sweep()
        try:
            self.make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self) -> None:
        for name in (self.hub, *self.names):
            self.made.append(name)
            tool("ip", "netns", "add", name)
            # disable IPv6, whose automatic addresses Gloo could choose
            if Path("/proc/sys/net/ipv6").exists():
                tool("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        if self.rtt:
            self.join_by_delay()
        else:
            self.join_by_bridge()
        settings = [] if self.congestion is None else [f"net.ipv4.tcp_congestion_control={self.congestion}"]
        settings += [] if self.restart else ["net.ipv4.tcp_slow_start_after_idle=0"]
        settings += WINDOWS if self.rtt else []
        for rank, name in enumerate(self.names):
            tool("ip", "-n", name, "addr", "add", f"{self.address(rank)}/24", "dev", DEVICE)
            tool("ip", "-n", name, "link", "set", "lo", "up")
            tool("ip", "-n", name, "link", "set", DEVICE, "up")
            for setting in settings:
                tool("ip", "netns", "exec", name, "sysctl", "-qw", setting)
            shape(self.rate, "-n", name)
            if self.both_ways:
                shape(self.rate, "-n", self.hub, device=f"port{rank}")

    def join_by_bridge(self) -> None:
        """Give each rank a network device that is a port of the hub's bridge."""
        tool("ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge")
        tool("ip", "-n", self.hub, "link", "set", "bridge", "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            peer = ("peer", "name", DEVICE, "netns", name)
            tool("ip", "-n", self.hub, "link", "add", port, "type", "veth", *peer)
            tool("ip", "-n", self.hub, "link", "set", port, "master", "bridge", "up")

    def join_by_delay(self) -> None:
        """Give each rank a TUN device whose packets arrive after half of the round-trip time."""
        tuns: list[int] = []
        try:
            for name in self.names:
                tuns.append(delay.device(name, DEVICE, segmented=bool(self.loss)))
                tool("ip", "-n", name, "link", "set", DEVICE, "mtu", "1500", "txqueuelen", "10000")
            self.delay = delay.Delay(tuns, self.rtt / 2000, self.loss)
        except OSError as e:
            raise NetworkError(f"a round-trip time needs TUN devices (/dev/net/tun, modprobe tun): {e}") from None
        finally:
            for tun in tuns:
                os.close(tun)

    def close(self) -> None:
        errors: list[str] = []
        if self.delay is not None:
            self.delay.close()
            self.delay = None
        while self.made:
            name = self.made.pop()
            try:
                if (Path("/run/netns") / name).exists():
                    remove(name)
            except NetworkError as e:
                errors.append(str(e))
        if errors:
            raise NetworkError("; ".join(errors))

    @staticmethod
    def address(rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(self.names)),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
        }

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = 600,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[int, str], None] | None = None,
        bind: bool = False,
    ) -> list[list[Any]]:
        """Run a command once for each rank.

        Parameters
        ----------
        command : sequence of str
            Program and arguments, such as ``[sys.executable, "worker.py"]``.
        timeout : float
            Seconds until all ranks must have ended.
        environment : mapping, optional
            Additional environment variables.
        on_line : callable, optional
            Called with rank and text of every line of standard output as soon as it is printed.
        bind : bool
            Bind each rank to separate cores, see :func:`cores_of`.

        Returns
        -------
        list of list
            JSON objects that each rank has printed, one on each line.

        Raises
        ------
        NetworkError
            A rank has failed, or the timeout has expired. The message ends with the last output of failed ranks. All
            ranks have been stopped.
        """
        ranks: list[Rank] = []
        ip = shutil.which("ip", path=SEARCH) or "ip"
        try:
            for rank, name in enumerate(self.names):
                env = {**os.environ, **self.environment(rank), **(environment or {})}
                with on_cores(cores_of(rank, len(self.names)) if bind else None):
                    ranks.append(Rank(rank, [ip, "netns", "exec", name, *command], env))
            follow(ranks, time.monotonic() + timeout, on_line or (lambda rank, line: None))
        except BaseException:
            for r in ranks:
                r.kill()
            raise
        finally:
            for r in ranks:
                r.close()
        return [r.found for r in ranks]


class Rank:
    """Process of a rank in its namespace, with the process's output."""

    def __init__(self, rank: int, command: list[str], env: dict[str, str]) -> None:
        self.rank, self.found = rank, []
        self.partial = b""
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        # a separate session: Ctrl-C reaches only the parent, which then ends all processes of the rank
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )

    def read(self, on_line: Callable[[int, str], None]) -> bool:
        """Read the rank's available output, and call on_line for each line; return False at the end of the output."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self.partial = (self.partial + data).split(b"\n")
        if not data and self.partial:
            lines, self.partial = [self.partial], b""
        for raw in lines:
            line = raw.decode(errors="replace")
            if line.startswith("{"):
                with contextlib.suppress(ValueError):  # a line that begins with "{" need not be JSON
                    self.found.append(json.loads(line))
            on_line(self.rank, line)
        return bool(data)

    def said(self, most: int = 4000) -> str:
        """Return the last `most` characters of the rank's standard error."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-most:].strip()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


def follow(ranks: list[Rank], deadline: float, on_line: Callable[[int, str], None]) -> None:
    """Read the output of ranks until all have succeeded; raise as soon as one fails."""
    with selectors.DefaultSelector() as selector:
        for r in ranks:
            selector.register(r.process.stdout, selectors.EVENT_READ, r)  # type: ignore[arg-type]
        while selector.get_map():
            for key, _ in selector.select(0.2):
                if not key.data.read(on_line):
                    selector.unregister(key.fileobj)
            if any(r.process.poll() for r in ranks):
                # wait to report all failed ranks: a rank that failed only because its peer failed may be seen first
                time.sleep(0.5)
                failed = [r for r in ranks if r.process.poll()]
                said = "\n".join(f"rank {r.rank}, exit status {r.process.returncode}:\n{r.said()}" for r in failed)
                raise NetworkError(f"{len(failed)} of {len(ranks)} ranks failed\n{said}")
            if time.monotonic() > deadline:
                said = "\n".join(f"rank {r.rank}: {r.said(600)}" for r in ranks if r.process.poll() is None)
                raise NetworkError(f"the ranks took too long and were ended\n{said}")
    for r in ranks:
        if r.process.wait():
            raise NetworkError(f"rank {r.rank}, exit status {r.process.returncode}:\n{r.said()}")


def tcp_rate(rank: int, world: int, seconds: float = 1) -> float:
    """Measure the rate in bits per second at which this rank receives while each rank sends to the next one.

    Each rank uses one connection. The first fifth of the time, with the token bucket's contents and TCP's slow start,
    is excluded.
    """
    with socket.create_server(("0.0.0.0", PROBE_PORT), backlog=1) as server:
        out = connect((Network.address((rank + 1) % world), PROBE_PORT))
        received, _ = server.accept()
    start = time.perf_counter()
    sender = threading.Thread(target=flood, args=(out, start + seconds))
    sender.start()
    room, samples = bytearray(1 << 18), [(start, 0)]
    with received:
        while n := received.recv_into(room):
            samples.append((time.perf_counter(), samples[-1][1] + n))
    sender.join()
    inside = [s for s in samples if start + 0.2 * seconds < s[0] < start + seconds] or samples[-2:]
    (t0, n0), (t1, n1) = inside[0], inside[-1]
    return 8 * (n1 - n0) / max(t1 - t0, 1e-9)


def tcp_round_trip(rank: int, trips: int = 5) -> float:
    """Return the median seconds between sending a byte to another rank and receiving its answer.

    Rank 0 measures and rank 1 answers; both must call this. On other ranks the result is NaN.
    """
    if rank > 1:
        return math.nan
    if rank == 1:
        with socket.create_server(("0.0.0.0", ECHO_PORT), backlog=1) as server, server.accept()[0] as peer:
            while data := peer.recv(1):
                peer.sendall(data)
        return math.nan
    times: list[float] = []
    with connect((Network.address(1), ECHO_PORT)) as out:
        for _ in range(trips):
            start = time.perf_counter()
            out.sendall(b"x")
            out.recv(1)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def connect(address: tuple[str, int], patience: float = 20) -> socket.socket:
    """Connect to a rank; retry for `patience` seconds while the rank does not listen yet."""
    end = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(address, timeout=patience)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def flood(out: socket.socket, end: float) -> None:
    data = memoryview(bytes(1 << 18))
    with out:
        while time.perf_counter() < end:
            out.sendall(data)


def probe(links: Sequence[str]) -> None:
    """Measure all links, as one rank, and print a JSON line for each link."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for link in links:
        shape(link)
        before = sent_nbytes()
        rate = tcp_rate(rank, world)
        print(json.dumps({"link": link, "rate": rate, "sent": sent_nbytes() - before}), flush=True)
        time.sleep(0.3)  # wait until queues are empty and all ranks have finished


def report_rates(ranks: Sequence[int], links: Sequence[str], **how: Any) -> None:
    """Print the nominal and the measured rate of each link, for each number of ranks."""
    here = [sys.executable, __file__, "--probe", "--links", *links]
    print(f"{'ranks':>5}  {'link':12} {'TCP payload, Mbit/s a rank':>28} {'of nominal':>11}")
    for count in ranks:
        with Network(count, **how) as network:
            found = network.run(here, timeout=60)
        for i, link in enumerate(links):
            rates = [rows[i]["rate"] for rows in found]
            nominal = bits(link)
            share = "" if nominal is None else f"{100 * sum(rates) / len(rates) / nominal:.1f}%"
            span = f"{min(rates) / 1e6:,.1f} - {max(rates) / 1e6:,.1f}"
            print(f"{count:5}  {shown(link):12} {span:>28} {share:>11}")


def end_on_sigterm() -> None:
    """Raise an exception on SIGTERM, so that namespaces are removed before the process ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@contextlib.contextmanager
def ending(script: str) -> Iterator[None]:
    """In the block, exit on SIGTERM and Ctrl-C, and with the message of a NetworkError."""
    end_on_sigterm()
    try:
        yield
    except NetworkError as e:
        raise SystemExit(f"{Path(script).name}: {e}") from None
    except KeyboardInterrupt:
        sys.exit(130)


def worker_of(script: str, plan: dict[str, Any], ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the command ``script --worker PLAN``, and the environment that gives each rank its share of the cores."""
    plan["threads"] = plan.get("threads") or max(1, len(os.sched_getaffinity(0)) // ranks)
    environment = {k: str(plan["threads"]) for k in ("OMP_NUM_THREADS", "CODEC_NUM_THREADS")}
    return [sys.executable, script, "--worker", json.dumps(plan)], environment


def join(threads: int, seconds: float) -> tuple[int, float]:
    """Join the process group of all ranks, without warnings; return the rank, and the round-trip time in seconds."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rtt = tcp_round_trip(rank)
    dist.init_process_group("gloo", "env://", timedelta(seconds=seconds), world, rank)
    return rank, rtt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", nargs="+", type=int, help="numbers of ranks (2 and 4; with a command a single number, 2)"
    )
    parser.add_argument("--links", nargs="+", default=list(LINKS), help="rates to measure: 100mbit, 1gbit, none")
    parser.add_argument("--rate", default="none", help="limit of what each rank sends while the command runs (none)")
    parser.add_argument("--rtt", type=float, default=0, help="added round-trip time in milliseconds (0)")
    parser.add_argument("--both-ways", action="store_true", help="also limit what each rank receives")
    parser.add_argument("--congestion", help="TCP's congestion control: cubic, bbr, reno")
    parser.add_argument("--no-restart", action="store_true", help="net.ipv4.tcp_slow_start_after_idle=0")
    parser.add_argument("--timeout", type=float, default=3600, help="maximum seconds of the command (3,600)")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="after --: command that each rank runs")
    args = parser.parse_args()
    if args.probe:
        end_on_sigterm()
        probe(args.links)
        return
    how: dict[str, Any] = {"both_ways": args.both_ways, "congestion": args.congestion, "rtt": args.rtt}
    how["slow_start_after_idle"] = not args.no_restart
    with ending(__file__):
        if not args.command:
            report_rates(args.ranks or [2, 4], args.links, **how)
            return
        with Network((args.ranks or [2])[0], args.rate, **how) as network:
            network.run(args.command, timeout=args.timeout, on_line=lambda rank, line: print(f"[{rank}] {line}"))


if __name__ == "__main__":
    main()
