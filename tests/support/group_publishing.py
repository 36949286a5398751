"""Ranks that publish the shards of a model, and a receiver that checks what they have published."""

import builtins
import contextlib

import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.weight_sync import Publisher, pull
from support.fault_lines import at_line, raising
from support.faults import die

FILES = ("weight_sync/group_publisher.py", "weight_sync/ranks.py", "weight_sync/store/update_store.py:publish")


def bits(tensors):
    """Return dtype, shape and bytes of tensors by name."""
    return {
        name: (
            str(x.dtype),
            tuple(x.shape),
            x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, x in tensors.items()
    }


def whole(model):
    """Return the bits of a model's whole tensors, which all ranks gather."""
    return bits({name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()})


def loaded(receiver, source, **how):
    """Pull the last version, and return the bits of all its tensors."""
    pull(receiver, source, **how)
    return bits(dict(receiver.tensors(like=torch.empty(0))))


def step(model, seed):
    """Change some local values of a model, equally on all replicas."""
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            local = p.to_local() if hasattr(p, "to_local") else p
            chosen = torch.arange(local.numel()).reshape(local.shape) % 7 == seed % 7
            local.add_(torch.where(chosen, 0.01 * (k + 1), 0.0).to(local.dtype))


class Model(torch.nn.Module):
    """Layers whose rows no number of ranks divides, one with fewer rows than ranks, a frozen one, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(9, 10), torch.nn.Linear(10, 3)
        self.norm = torch.nn.LayerNorm(3).to(torch.bfloat16)
        self.register_buffer("steps", torch.arange(5))

    def forward(self, x):
        return self.norm(self.down(self.up(x)).to(torch.bfloat16))


def fsdp(size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
    return model


def hsdp(size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    return model


def tensor_parallel(size):
    """Return a model with tensor parallelism and FSDP2: rows of `up` are sharded by both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    model = Model()
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh["data"])
    return model


LAYOUTS = {"fsdp": fsdp, "hsdp": hsdp, "tensor_parallel": tensor_parallel}


def publish_layout(rank, size, folder, layout):
    """Publish versions of a model; return the versions of which a receiver on rank 0 gets other values."""
    model, wrong = LAYOUTS[layout](size), []
    with Publisher(folder, group=dist.group.WORLD, snapshot_every=1) as publisher, codec.WeightReceiver() as receiver:
        for version in range(3):
            step(model, version)
            update = publisher.stage(model)
            assert publisher.commit() == publisher.version == version
            want = whole(model)
            if rank == 0:
                wrong += [version] * (loaded(receiver, publisher.source) != want)
                sent = sum(part.total.nbytes for part in update.parts.parts)
                assert sent == sum(len(x) for _, _, x in want.values())  # no replica is sent twice
            dist.barrier()
    return wrong


class Sharded:
    """Weights of this rank: rows of a matrix, a replicated vector, and a tensor that only the last rank holds."""

    def __init__(self, rank, size):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (size,))
        self.weights = {
            "matrix": distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)]),
            "vector": torch.randn(300).to(torch.bfloat16),
        }
        if rank == size - 1:
            self.weights["last"] = torch.arange(7)

    def at(self, version):
        """Return the weights of a version."""
        for x in self.weights.values():
            local = x.to_local() if hasattr(x, "to_local") else x
            local.fill_(version)
        return self.weights


def is_version(tensors, version):
    """Return True if tensors have the values of :meth:`Sharded.at`."""
    return all((x == version).all() for x in tensors.values())


def publish(rank, size, folder, version, faulty=-1, point=-1, kind="die"):
    """Publish a version, with a fault on a rank; return the published version, the errors, and the lines executed."""
    model = Sharded(rank, size)
    fault = die if kind == "die" else raising(getattr(builtins, kind))
    publisher, errors = None, []
    with at_line(point if rank == faulty else -1, fault, *FILES) as lines:
        while len(errors) < 4:  # after an interrupt, the next calls complete or repeat what was interrupted
            try:
                if publisher is None:
                    publisher = Publisher(f"{folder}/store", group=dist.group.WORLD, base=f"{folder}/base")
                publisher.publish(model.at(version))
                break
            except (codec.CodecError, KeyboardInterrupt, OSError) as e:
                errors.append(f"{type(e).__name__}: {e}")
                if kind == "die":
                    break
    if publisher is not None:
        publisher.close()
    return None if publisher is None else publisher.version, errors, lines.count


def serve_folders(rank, size, folder):
    """Publish from folders of the ranks, and pull over HTTP: in whole tensors, and in halves of rows."""
    own, model, key = f"{folder}/{rank}", Sharded(rank, size), b"0123456789abcdef"
    how = {"host": "127.0.0.1", "token": "secret-of-the-group", "sign": key, "base": f"{own}/base", "snapshot_every": 2}
    with Publisher(f"{own}/store", group=dist.group.WORLD, **how) as publisher:
        half = {"matrix": (torch.zeros(2, 4), (3, 0)), "last": torch.zeros(7, dtype=torch.int64)}
        receiver, box = codec.WeightReceiver(verify=key), codec.WeightReceiver(verify=key, only=half)
        for version in range(4):
            publisher.publish(model.at(version))
            assert pull(receiver, publisher.source, token="secret-of-the-group") == version
            assert is_version(dict(receiver.tensors(like=torch.empty(0))), version)
            pull(box, publisher.source, token="secret-of-the-group", into=half)
            assert (half["matrix"][0] == version).all()
            assert (half["last"] == version).all()
            dist.barrier()
        assert box.digest == receiver.digest
        with raises(codec.ArgumentError, "requires a token"):
            pull(codec.WeightReceiver(verify=key), publisher.source)
        with raises(codec.FrameError, "does not match"):
            pull(codec.WeightReceiver(verify=key[::-1]), publisher.source, token="secret-of-the-group")
        dist.barrier()


@contextlib.contextmanager
def raises(error, message):
    """Check that a block raises an error whose message contains `message`."""
    try:
        yield
    except error as e:
        assert message in str(e), e  # noqa: PT017 - for processes without pytest
    else:
        raise AssertionError(f"no {error.__name__}: {message}")


def refused(rank, size, folder):
    """Publish weights that do not fit; return those that were accepted, or whose error says something else."""
    from codec.weight_sync.updates.shards import Shard

    x, wrong = torch.zeros(2, 3), []
    cases = {
        "do not cover": {Shard("w", (6, 3), (2 * rank, 0)): x},
        "in common": {Shard("w", (3, 3), (rank, 0)): x},
        "in another dtype or shape": {Shard("w", (2, 3), (0, 0)): x.to([x.dtype, torch.int32][rank])},
        "name the shapes": {Shard("w", (4 + rank, 3), (2 * rank, 0)): x},
        "no box of its tensor": {Shard("w", (2, 3), (rank, 0)): x},
        "must be a str": {rank: x} if rank else {"w": x},
        "read twice": iter([("w", x)]) if rank else {"w": x},
    }
    with Publisher(folder, group=dist.group.WORLD) as publisher:
        for message, weights in cases.items():
            try:
                publisher.publish(weights)
                wrong.append(message)
            except (codec.ArgumentError, codec.PeerError) as e:
                if message not in str(e) and not (rank == 0 and isinstance(e, codec.PeerError)):
                    wrong.append(f"{message}: {e}")
        with raises(codec.StateError, "no update is staged"):
            publisher.commit()
        assert publisher.publish({"w": x}) == 0
    return wrong


def publish_saved(rank, size, folder, paths):
    """Publish each file of whole weights as a version, of which each rank sends rows; return the last version."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    with Publisher(folder, group=dist.group.WORLD) as publisher:
        for path in paths:
            weights = torch.load(path)
            publisher.publish({name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in weights.items()})
        return publisher.version
