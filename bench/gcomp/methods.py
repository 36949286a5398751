"""Methods that GComp's figures compare: codec's specs, and DistributedDataParallel hooks of other compressors.

A method is a spec as Python text, such as ``Truncate()``, or a name of :data:`BASELINES`.
"""

# `from __future__ import annotations` would turn annotations into text, but torch checks the annotations of hooks

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import runs
import torch
import torch.distributed as dist
from models import Task
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

LOSSLESS = "Lossless()"
PLANE = 'Truncate(level_coding="plane")'
NEAR = "Truncate()"
BY_BIT = 'Truncate(level_coding="shared", granularity="bit")'
FP16, TOP_K, RANDOM_K, POWER_SGD, ZLIB, ZSTD = "fp16", "Top-k 1%", "Random-k 1%", "PowerSGD rank 2", "zlib", "zstd"
BASELINES = (FP16, TOP_K, RANDOM_K, POWER_SGD, ZLIB, ZSTD)
LABELS = {NEAR: "near", PLANE: "near, plane", BY_BIT: "near, shared, by bit", LOSSLESS: "lossless"}

FRACTION = 0.01  # fraction of values that Top-k and Random-k send
RANK = 2  # rank of PowerSGD's factors
POWER_START = 10  # first step that PowerSGD compresses
LEAST_RATE = 2  # PowerSGD compresses a matrix only if that makes it smaller by at least this factor
ZLIB_LEVEL, ZSTD_LEVEL = 1, 1

Future = torch.futures.Future
Bucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]
Coder = Callable[[bytes], bytes]


def label(method: str) -> str:
    """Return a method's name in tables and plots."""
    return LABELS.get(method, method)


def byte_coder(name: str) -> tuple[Coder, Coder]:
    """Return the functions that compress and decompress bytes."""
    if name == ZLIB:
        return lambda data: zlib.compress(data, ZLIB_LEVEL), zlib.decompress
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(ZSTD_LEVEL), zstandard.ZstdDecompressor()
    return compressor.compress, decompressor.decompress


def kept(n: int) -> int:
    """Return the number of values, out of n, that Top-k and Random-k send."""
    return max(1, round(FRACTION * n))


def power_sgd_values(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the number of values that PowerSGD sends for parameters of these shapes, by the rule of torch's hook."""
    total = 0
    for shape in shapes:
        n = math.prod(shape)
        factors = (shape[0] + n // shape[0]) * min(RANK, shape[0], n // shape[0]) if len(shape) > 1 else n
        total += factors if len(shape) > 1 and factors * LEAST_RATE < n else n
    return total


class Baseline:
    """Communication hook of another method, with the statistics of codec's hooks.

    Attributes
    ----------
    sent_nbytes : float
        Bytes that this rank has sent. With N ranks, an all-reduce of B bytes sends 2 (N - 1) / N B bytes, an all-gather
        (N - 1) B.
    residual_ratio : float
        NaN: residuals of baselines are not measured.
    """

    residual_ratio = math.nan

    def __init__(self) -> None:
        self.sent_nbytes = 0.0

    def stats(self) -> "Baseline":
        return self

    def add_all_reduce(self, nbytes: float) -> None:
        world = dist.get_world_size()
        self.sent_nbytes += 2 * (world - 1) / world * nbytes

    def reduce(self, state: object, bucket: Bucket) -> Future[torch.Tensor]:
        raise NotImplementedError


def finished(tensor: torch.Tensor) -> Future[torch.Tensor]:
    """Return a completed future with a tensor as its value."""
    done: Future[torch.Tensor] = Future()
    done.set_result(tensor)
    return done


class Half(Baseline):
    """All-reduce in float16 by torch's hook."""

    def reduce(self, state: object, bucket: Bucket) -> Future[torch.Tensor]:
        self.add_all_reduce(2 * bucket.buffer().numel())
        return default_hooks.fp16_compress_hook(None, bucket)  # pyright: ignore[reportArgumentType]


class PowerSGD(Baseline):
    """All-reduce of low-rank factors, with error feedback and warm start, by torch's hook."""

    def __init__(self) -> None:
        super().__init__()
        self.power = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=POWER_START, min_compression_rate=LEAST_RATE
        )

    def reduce(self, state: object, bucket: Bucket) -> Future[torch.Tensor]:
        if not bucket.is_last():
            raise RuntimeError("torch's PowerSGD hook can hang on Gloo with two buckets: use a model below 1 MiB")
        before, whole = self.power.total_numel_after_compression, self.power.iter < POWER_START
        done = powerSGD_hook.powerSGD_hook(self.power, bucket)
        compressed = self.power.total_numel_after_compression - before
        self.add_all_reduce(4 * (bucket.buffer().numel() if whole else compressed))
        return done


class Sparse(Baseline):
    """Top-k or Random-k with error feedback: sends each rank's largest values, or values at common random indices."""

    def __init__(self, random: bool) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0) if random else None
        self.residuals: dict[torch.Tensor, torch.Tensor] = {}

    def reduce(self, state: object, bucket: Bucket) -> Future[torch.Tensor]:
        total = bucket.buffer().clone()
        parts = list(zip(bucket.parameters(), total.split([p.numel() for p in bucket.parameters()]), strict=True))
        for p, part in parts:
            if p in self.residuals:
                part.add_(self.residuals[p])
        n, k, world = total.numel(), kept(total.numel()), dist.get_world_size()
        if self.generator is None:
            indices = total.abs().topk(k, sorted=False).indices
        else:
            indices = torch.randperm(n, generator=self.generator)[:k]
        values = total[indices]
        total[indices] = 0
        for p, part in parts:
            self.residuals[p] = part.clone()
        mean = torch.zeros_like(total)
        if self.generator is not None:
            dist.all_reduce(values)
            self.add_all_reduce(4 * k)
            mean[indices] = values / world
            return finished(mean)
        of_all = [torch.empty_like(values) for _ in range(world)]
        places = [torch.empty(k, dtype=torch.int32) for _ in range(world)]
        dist.all_gather(of_all, values)
        dist.all_gather(places, indices.int())
        self.sent_nbytes += (world - 1) * 8 * k
        for place, found in zip(places, of_all, strict=True):  # adding in rank order gives the same bits on all ranks
            mean.index_add_(0, place, found)
        return finished(mean / world)


class Bytes(Baseline):
    """Two-shot all-reduce in float32 whose messages are compressed by a byte compressor."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.compress, self.decompress = byte_coder(name)

    def reduce(self, state: object, bucket: Bucket) -> Future[torch.Tensor]:
        from codec.torch import all_to_all_bytes

        mine, rank, world = bucket.buffer().numpy(), dist.get_rank(), dist.get_world_size()
        frames = [self.compress(part.tobytes()) for part in np.array_split(mine, world)]
        total, *others = [np.frombuffer(self.decompress(data), np.float32).copy() for data in all_to_all_bytes(frames)]
        for other in others:
            total += other
        frame = self.compress((total / np.float32(world)).tobytes())
        self.sent_nbytes += sum(map(len, frames)) - len(frames[rank]) + (world - 1) * len(frame)
        found = [np.frombuffer(self.decompress(data), np.float32) for data in all_to_all_bytes([frame] * world)]
        return finished(torch.from_numpy(np.concatenate(found)))


def baseline(name: str) -> Baseline:
    """Return a new hook, given its name in BASELINES."""
    if name in (ZLIB, ZSTD):
        return Bytes(name)
    return {FP16: Half, POWER_SGD: PowerSGD}[name]() if name in (FP16, POWER_SGD) else Sparse(name == RANDOM_K)


def add_hook(job: runs.Job, task: Task, model: DistributedDataParallel) -> Any:
    """Register the hook of a job's method and return it, or return None for references without compression."""
    if job.codec not in BASELINES:
        return runs.add_hook(job, task, model)
    hook = baseline(job.codec)
    model.register_comm_hook(None, hook.reduce)
    return hook
