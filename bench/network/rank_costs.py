"""Functions that run on each rank of ranks.py, and measure what the rank spends."""

import gc
import itertools
import logging
import os
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked
import growth
import latency
import torch
import torch._dynamo  # imported here once, as torch's optimizers would import it on each rank
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import codec
import codec.torch
from codec.torch.group.communicator import communicator_of
from codec.torch.network.inbox import Receive
from codec.torch.network.mesh import Mesh
from codec.torch.network.stripe import Stripe

Row = dict[str, Any]
Emit = Callable[[Row], None]
PATIENCE = timedelta(seconds=600)
WIDTH = 128  # values in a row of the model's layers; slices of its gradients begin at rows
SPEC = codec.Quantize(4)


class Group(dist.ProcessGroup):
    """Process group that has a store, and no connections: those of Gloo would be as many as codec's."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._rank, self._size, self._store = rank, size, store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:
        return "none"

    @property
    def _device_types(self) -> list[Any]:
        return []


class Sent:
    """Number and bytes of the messages that this process has passed to connections of meshes."""

    def __init__(self) -> None:
        self.messages, self.nbytes = 0, 0
        lock, put = threading.Lock(), Stripe.put

        def counted(stripe: Stripe, send: Any, *, direct: bool) -> None:
            with lock:
                self.messages += 1
                self.nbytes += sum(part.nbytes for part in send.begin())
            put(stripe, send, direct=direct)

        Stripe.put = counted  # type: ignore[method-assign]


def quiet() -> None:
    """Silence warnings and logs, and take one thread."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def usage() -> Row:
    """Return the CPU seconds, open files, threads, and private and largest memory of this process in MB."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    private = 0
    with suppress(OSError):
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "private_mb": private / 1024,
        "peak_mb": int(status["VmHWM"].split()[0]) / 1024,
    }


def measured(call: Callable[[], Any], group: Any, sent: Sent, count: int) -> Row:
    """Call a function `count` times, and return what one call costs this rank."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak of memory
    stats, cpu, before = codec.torch.group_stats(group), usage()["cpu_s"], (sent.messages, sent.nbytes)
    times = [time.perf_counter()]
    for _ in range(count):
        call()
        times.append(time.perf_counter())
    now, stats = usage(), codec.torch.group_stats(group) - stats
    return now | {
        "cpu_s": (now["cpu_s"] - cpu) / count,
        "step_ms": 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times)),
        "mean_ms": 1e3 * (times[-1] - times[0]) / count,
        "messages": (sent.messages - before[0]) / count,
        "sent_nbytes": (sent.nbytes - before[1]) / count,
        "frame_nbytes": stats.sent_nbytes / count,
        "trips": stats.round_trips / count,
    }


def create(rank: int, store: Any, emit: Emit, ranks: int) -> None:
    """Measure the seconds and resources of a group's connections, without those of the store."""
    quiet()
    group = Group(rank, ranks, PrefixStore("group", store))
    forked.barrier(store, "ready", ranks)
    before, start = usage(), time.perf_counter()
    communicator_of(group, PATIENCE)
    seconds, now = time.perf_counter() - start, usage()
    emit({"seconds": seconds} | {key: now[key] - before[key] for key in before if key != "peak_mb"})
    forked.barrier(store, "created", ranks)


def steps(rank: int, store: Any, emit: Emit, ranks: int, plan: Row) -> None:
    """Train with each method and number of buckets over DistributedDataParallel."""
    quiet()
    sent = Sent()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    for buckets in plan["buckets"]:
        for method in plan["methods"]:
            training = latency.Training(method, plan | {"width": WIDTH, "batch": 4}, buckets)
            for _ in range(training.warmup):
                training.step()
            dist.barrier()
            before = training.hook and training.hook.stats().round_trips
            row = measured(training.step, None, sent, plan["steps"])
            dist.barrier()
            if training.hook:  # the group's counter adds up the round trips of buckets that are in flight together
                row["trips"] = (training.hook.stats().round_trips - before) / plan["steps"]
            more = {"method": method, "buckets": training.buckets(), "values": training.values, "grain": WIDTH}
            if training.hook:  # hooks join small buckets
                more["joined"] = len(training.hook.reducer.state.buckets)
            emit(row | more | {"verdicts": 1})


def uneven(rank: int, store: Any, emit: Emit, ranks: int, plan: Row) -> None:
    """Train with "small" and ``algorithm="auto"``, whose slices follow the rates of links after step 16."""
    quiet()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    for buckets in plan["buckets"]:
        training = latency.Training("small, auto", plan | {"width": WIDTH, "batch": 4}, buckets)
        times = [time.perf_counter()]
        for _ in range(40):
            training.step()
            times.append(time.perf_counter())
        took = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
        row = {"before_ms": statistics.median(took[:15]), "after_ms": statistics.median(took[24:])}
        emit(row | {"buckets": training.buckets(), "weights": training.hook.reducer.state.shares.weights})
        dist.barrier()


def calls(rank: int, store: Any, emit: Emit, ranks: int, plan: Row) -> None:
    """Reduce tensors of the size of buckets by all_reduce, with all buckets of a step in flight, without a model."""
    quiet()
    sent, group = Sent(), Group(rank, ranks, PrefixStore("group", store))
    communicator_of(group, PATIENCE)
    noise = torch.Generator().manual_seed(rank)
    for buckets in plan["buckets"]:
        for algorithm in plan["algorithms"]:
            parts = [torch.randn(plan["values"] // buckets, generator=noise) for _ in range(buckets)]

            def step(parts: Sequence[torch.Tensor] = parts, algorithm: Any = algorithm) -> None:
                with codec.options(algorithm=algorithm):
                    works: list[Any] = [
                        codec.torch.all_reduce(x, SPEC, op="mean", group=group, async_op=True) for x in parts
                    ]
                for work in works:
                    work.wait()

            step()
            name = f"{buckets} {algorithm}"
            forked.barrier(store, f"before {name}", ranks)
            row = measured(step, group, sent, plan["steps"])
            forked.barrier(store, f"after {name}", ranks)
            row["trips"] /= buckets  # all buckets are in flight together
            values = sum(x.numel() for x in parts)
            more = {"method": algorithm, "buckets": buckets, "values": values, "grain": growth.GRAIN}
            emit(row | more | {"verdicts": buckets})


def mesh_calls(connections: int, turns: int) -> Row:
    """Return the microseconds of Mesh.post for a message, of Mesh.end and Mesh.rtt, with a number of connections."""
    import socket

    with socket.create_server((forked.LOOPBACK, 0), backlog=1024) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(connections)]
    mesh = Mesh(0, {rank: [mine] for rank, (mine, _) in enumerate(pairs, 1)})
    spent = dict.fromkeys(("post", "end", "rtt"), 0.0)
    try:
        for number in range(turns):
            mesh.begin(number)
            start = time.thread_time()
            for rank in range(1, connections + 1):
                mesh.post(number, Receive(rank, 0, 0, 0, 64))
            posted = time.thread_time()
            mesh.end(number)
            ended = time.thread_time()
            mesh.rtt(range(1, 1 + connections))
            spent["post"] += (posted - start) / connections
            spent["end"] += ended - posted
            spent["rtt"] += time.thread_time() - ended
    finally:
        mesh.close()
        for _, other in pairs:
            other.close()
    return {"connections": connections} | {f"{key}_us": 1e6 * s / turns for key, s in spent.items()}
