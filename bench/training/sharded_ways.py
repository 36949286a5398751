"""Ways to send sharded weights from trainer ranks to rollout workers; bench/training/sharded_sync.py measures them."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).parents[1] / "network"))
import netns

import codec
from codec.weight_sync import Publisher, pull

WORKERS = 2
BATCH = 32  # parameters whose changes are gathered together, as in verl


class Spec(NamedTuple):
    """Weight of the model: its shape, and the dimension along which the workers split it; None: each has all of it."""

    shape: tuple[int, ...]
    split: int | None

    def box(self, worker: int) -> tuple[slice, ...]:
        """Return the part of the weight that a worker has."""
        if self.split is None:
            return ()
        n = self.shape[self.split] // WORKERS
        return (*[slice(None)] * self.split, slice(worker * n, (worker + 1) * n))


def specs(values: float) -> dict[str, Spec]:
    """Return the weights of a language model in Llama's architecture with about this number of values."""
    d, vocab = (2048, 32000) if values >= 1e8 else (256, 1024)
    ff = d * 11 // 4
    layer = {
        "self_attn.q_proj": Spec((d, d), 0),
        "self_attn.k_proj": Spec((d // 4, d), 0),
        "self_attn.v_proj": Spec((d // 4, d), 0),
        "self_attn.o_proj": Spec((d, d), 1),
        "mlp.gate_proj": Spec((ff, d), 0),
        "mlp.up_proj": Spec((ff, d), 0),
        "mlp.down_proj": Spec((d, ff), 1),
        "input_layernorm": Spec((d,), None),
        "post_attention_layernorm": Spec((d,), None),
    }
    found = {"model.embed_tokens.weight": Spec((vocab, d), 0)}
    for k in range(max(1, round((values - vocab * d) / (2.5 * d * d + 3 * d * ff)))):
        found |= {f"model.layers.{k}.{name}.weight": spec for name, spec in layer.items()}
    return found


class Side:
    """Trainer rank, or rollout worker: its weights, and its groups of processes."""

    def __init__(self, rank: int, plan: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.tensor import DeviceMesh, DTensor, Shard

        self.rank, self.trainers, self.specs = rank, plan["ranks"], specs(plan["values"])
        self.worker = rank - self.trainers  # negative on trainer ranks
        self.mesh = DeviceMesh("cpu", list(range(self.trainers)))
        self.link = dist.new_group([0, *range(self.trainers, self.trainers + WORKERS)])  # rank 0 and the workers
        self.folder = Path(plan["folder"])
        self.weights: dict[str, Any] = {}  # DTensors on trainer ranks, parts on workers
        shapes = {name: self.part(spec) for name, spec in self.specs.items()}
        numbers = {name: cast(int, torch.Size(shape).numel()) for name, shape in shapes.items()}
        path, size = self.folder / f"weights-{rank}", sum(numbers.values())
        self.values = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
        self.random = torch.Generator().manual_seed(rank)
        if self.worker < 0:
            self.values.normal_(std=0.02, generator=self.random)
        for (name, shape), values in zip(shapes.items(), self.values.split(list(numbers.values())), strict=True):
            part = values.view(shape)
            if self.worker < 0:
                full = torch.empty(self.specs[name].shape, device="meta")
                part = DTensor.from_local(part, self.mesh, [Shard(0)], shape=full.shape, stride=full.stride())
            self.weights[name] = part

    def part(self, spec: Spec) -> tuple[int, ...]:
        """Return the shape of this process's part of a weight."""
        if self.worker < 0:
            begin, end = self.rows(spec)
            return (end - begin, *spec.shape[1:])
        return tuple(n // WORKERS if k == spec.split else n for k, n in enumerate(spec.shape))

    def rows(self, spec: Spec) -> tuple[int, int]:
        """Return the first row of this trainer rank's part of a weight, and the row after the last one."""
        each = -(-spec.shape[0] // self.trainers)
        return min(self.rank * each, spec.shape[0]), min((self.rank + 1) * each, spec.shape[0])

    def offsets(self, name: str) -> tuple[int, ...]:
        """Return the index of the first value of this worker's part of a weight."""
        spec, part = self.specs[name], self.weights[name]
        return tuple(self.worker * n if k == spec.split else 0 for k, n in enumerate(part.shape))

    def step(self) -> None:
        """Move 1% of the values of this trainer rank to a neighboring bfloat16 value."""
        import torch

        bits = self.values.view(torch.int16)
        for begin in range(0, len(bits), 1 << 24):
            some = bits[begin : begin + (1 << 24)]
            at = torch.randint(1, 200, (len(some) // 100 + 1,), generator=self.random).cumsum(0)
            at = at[at < len(some)]
            some[at] += 2 * torch.randint(0, 2, at.shape, generator=self.random, dtype=torch.int16) - 1

    def full(self) -> Iterator[tuple[str, Any]]:
        """Gather the weights one by one on all trainer ranks."""
        for name, x in self.weights.items():
            yield name, x.full_tensor()

    def load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """Copy this worker's parts of full tensors."""
        for name, x in tensors:
            self.weights[name].copy_(x[self.specs[name].box(self.worker)])

    def broadcast(self, x: Any) -> Any:
        """Send the bytes of a tensor from rank 0 to the workers."""
        import torch
        import torch.distributed as dist

        dist.broadcast(x.reshape(-1).view(torch.uint8), 0, self.link)
        return x


class Way(ABC):
    """Way to send the weights; the first synchronization sends all of them."""

    def __init__(self, side: Side) -> None:
        self.side = side

    @abstractmethod
    def send(self) -> None:
        """Send the weights: called on all trainer ranks."""

    @abstractmethod
    def receive(self) -> float:
        """Receive the weights: called on workers. Return the seconds during which the served weights change."""

    def close(self) -> None:  # noqa: B027 - most ways store nothing
        """Free what this way has stored."""


class Broadcast(Way):
    def send(self) -> None:
        for _, x in self.side.full():
            if self.side.rank == 0:
                self.side.broadcast(x)

    def receive(self) -> float:
        import torch

        begin = 0.0
        for name, spec in self.side.specs.items():
            x = self.side.broadcast(torch.empty(spec.shape, dtype=torch.bfloat16))
            begin = begin or time.perf_counter()
            self.side.load(iter([(name, x)]))
        return time.perf_counter() - begin


class Gathered(Way):
    """Rank 0 has the base of the whole model, and so has each worker."""

    def __init__(self, side: Side) -> None:
        import torch

        super().__init__(side)
        self.publisher = self.publish() if side.worker < 0 else None
        self.receiver = codec.WeightReceiver()
        self.number = torch.zeros(1, dtype=torch.int64)

    def publish(self) -> Publisher | None:
        """Return the publisher of this trainer rank."""
        return Publisher(self.side.folder / "gathered", host=netns.Network.address(0)) if self.side.rank == 0 else None

    def send(self) -> None:
        if self.publisher is None:
            for _ in self.side.full():
                pass
            return
        self.number[0] = self.publisher.publish(self.side.full())
        self.announce()

    def announce(self) -> None:
        """Send the number of the version and the address of the store to the workers."""
        source = torch_bytes("" if self.publisher is None else self.publisher.source)
        self.side.broadcast(self.number)
        self.source = self.side.broadcast(source)

    def receive(self) -> float:
        self.announce()
        version = pull(self.receiver, bytes(self.source.numpy()).rstrip(b"\0").decode())  # the worker serves meanwhile
        assert version == self.number.item()
        begin = time.perf_counter()
        self.receiver.reload(names=self.receiver.unloaded, **self.served())
        return time.perf_counter() - begin

    def served(self) -> dict[str, Any]:
        """Return arguments of the receiver for the worker's weights."""
        import torch

        return {"load": self.side.load, "like": torch.empty(0)}

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()


class Sharded(Gathered):
    """Each trainer rank has the base of its shards, and each worker the shards that have values of its part."""

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        if side.worker >= 0:
            self.parts = {name: (part, side.offsets(name)) for name, part in side.weights.items()}
            self.receiver = codec.WeightReceiver(only=self.parts)

    def publish(self) -> Publisher:
        rank = self.side.rank
        host = netns.Network.address(rank)
        return Publisher(self.side.folder / f"sharded-{rank}", group=self.side.mesh.get_group(), host=host)

    def send(self) -> None:
        assert self.publisher is not None
        self.number[0] = self.publisher.publish(self.side.weights)
        if self.side.rank == 0:
            self.announce()

    def served(self) -> dict[str, Any]:
        return {"into": self.parts}


class Pairs(Way):
    """Each trainer rank has a copy of its shard, which it compares with the shard."""

    def __init__(self, side: Side) -> None:
        super().__init__(side)
        self.copy = side.values.clone() if side.worker < 0 else None
        self.first = True

    def batches(self) -> Iterator[list[str]]:
        names = list(self.side.specs)
        for k in range(0, len(names), BATCH):
            yield names[k : k + BATCH]

    def send(self) -> None:
        if self.first:
            Broadcast(self.side).send()
            assert self.copy is not None
            self.copy.copy_(self.side.values)
            self.first = False
            return
        at = 0
        for names in self.batches():
            found = list[Any]()
            for name in names:
                found.append(self.changes(name, at))
                at += self.side.weights[name].to_local().numel()
            self.gather(found)

    def changes(self, name: str, at: int) -> Any:
        """Return positions in the full tensor, and values, of a shard's changes; `at`: its begin in the copy."""
        import torch

        assert self.copy is not None
        new = self.side.weights[name].to_local().reshape(-1)
        old = self.copy[at : at + len(new)]
        spec = self.side.specs[name]
        changed = (new.view(torch.int16) != old.view(torch.int16)).nonzero().view(-1)
        values = new[changed]
        old.copy_(new)
        return (changed + self.side.rows(spec)[0] * torch.Size(spec.shape[1:]).numel()).int(), values

    def gather(self, found: list[Any]) -> None:
        """Gather the changes of some tensors on rank 0, and broadcast them to the workers."""
        import torch
        import torch.distributed as dist

        group, n = self.side.mesh.get_group(), self.side.trainers
        mine = torch.tensor([len(positions) for positions, _ in found])
        counts = torch.empty(n, len(found), dtype=torch.int64)
        dist.all_gather(list(counts), mine, group=group)
        most, columns = int(counts.sum(1).max()), list[Any]()
        for k in range(2):  # positions, values
            padded = torch.cat([pair[k] for pair in found])
            padded = torch.cat((padded, padded.new_zeros(most - len(padded)))).view(torch.uint8)
            each = [torch.empty_like(padded) for _ in range(n)] if self.side.rank == 0 else None
            dist.gather(padded, each, 0, group)
            columns.append(each)
        if self.side.rank:
            return
        rows = [
            [
                part.view(dtype)[:total].split(numbers.tolist())
                for part, total, numbers in zip(each, counts.sum(1), counts, strict=True)
            ]
            for each, dtype in zip(columns, (torch.int32, torch.bfloat16), strict=True)
        ]
        self.side.broadcast(counts.sum(0))
        for some in rows:
            self.side.broadcast(torch.cat([part[k] for k in range(len(found)) for part in some]))

    def receive(self) -> float:
        import torch

        if self.first:
            self.first = False
            return Broadcast(self.side).receive()
        begin = 0.0
        for names in self.batches():
            counts = self.side.broadcast(torch.empty(len(names), dtype=torch.int64))
            total = int(counts.sum())
            positions = self.side.broadcast(torch.empty(total, dtype=torch.int32)).split(counts.tolist())
            values = self.side.broadcast(torch.empty(total, dtype=torch.bfloat16)).split(counts.tolist())
            begin = begin or time.perf_counter()
            for name, at, new in zip(names, positions, values, strict=True):
                self.write(name, at, new)
        return time.perf_counter() - begin

    def write(self, name: str, at: Any, values: Any) -> None:
        """Write those changes that are in this worker's part of a tensor."""
        spec, part = self.side.specs[name], self.side.weights[name]
        if spec.split is not None:
            inner = part[0].numel() if spec.split == 0 else 1
            n = part.shape[spec.split] * inner
            first = self.side.worker * n
            along = at if spec.split == 0 else at % spec.shape[1]
            mine = (along >= first) & (along < first + n)
            at, values, along = at[mine], values[mine], along[mine]
            at = at - first if spec.split == 0 else (at - along) // WORKERS + along - first
        part.view(-1)[at.long()] = values


def torch_bytes(text: str) -> Any:
    """Return a tensor of 256 bytes that begins with a text."""
    import torch

    return torch.frombuffer(bytearray(text.encode().ljust(256, b"\0")), dtype=torch.uint8)


WAYS: dict[str, Callable[[Side], Way]] = {
    "broadcast": Broadcast,
    "gathered": Gathered,
    "pairs": Pairs,
    "sharded": Sharded,
}
