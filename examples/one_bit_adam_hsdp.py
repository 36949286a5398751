"""Train a sharded model (FSDP2) with 1-bit Adam between its replicas (HSDP).

    torchrun --nproc-per-node 4 examples/one_bit_adam_hsdp.py
    torchrun --nproc-per-node 2 examples/one_bit_adam_hsdp.py --shards 1

Within a replica, FSDP2 averages gradients; between replicas, momenta are sent as signs after the freeze. The program
saves a checkpoint by torch.distributed.checkpoint, loads it, and continues training.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import codec
import codec.torch

FREEZE_STEP = 50


def build(mesh: DeviceMesh) -> tuple[torch.nn.Module, codec.torch.OneBitAdam]:
    """Return the model and its optimizer, registered to each other."""
    torch.manual_seed(0)  # replicas begin with the same parameters
    layers = torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 8))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = codec.torch.OneBitAdam(
        model.parameters(),
        lr=3e-3,
        betas=(0.9, 0.97),
        freeze_step=FREEZE_STEP,
        spec=codec.Sign(group_size=1024),
        warmup=codec.Quantize(4),
    )
    # "auto" would send everything uncompressed, which is faster within one machine
    options = codec.options(algorithm="two_shot")
    return model, optimizer.register(model, group=mesh.get_group("replicate"), max_grad_norm=1.0, options=options)


def train(model: torch.nn.Module, optimizer: codec.torch.OneBitAdam, generator: torch.Generator, steps: int) -> float:
    """Take steps, and return the last loss of this rank."""
    value = 0.0
    for _ in range(steps):
        x = torch.randn(256, 32, generator=generator)
        classes = (x.norm(dim=1) * 2 - 7).clamp(0, 7).long()  # 8 rings around the origin
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), classes)
        loss.backward()
        optimizer.step()
        value = loss.item()
    optimizer.zero_grad()
    return value


def state_of(model: torch.nn.Module, optimizer: codec.torch.OneBitAdam) -> dict[str, object]:
    """Return the state dict to save in a checkpoint, or to load a checkpoint into."""
    return {
        "model": states.get_model_state_dict(model),
        "optimizer": states.get_optimizer_state_dict(model, optimizer),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2, help="ranks of a replica (2)")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    shape = dist.get_world_size() // args.shards, args.shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(mesh)
    generator = torch.Generator().manual_seed(dist.get_rank())
    first = train(model, optimizer, generator, 1)
    train(model, optimizer, generator, args.steps // 2 - 1)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder[0])  # pyright: ignore[reportPrivateImportUsage]
    model, optimizer = build(mesh)
    loaded: dict[str, object] = state_of(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder[0])  # pyright: ignore[reportPrivateImportUsage]
    states.set_model_state_dict(model, loaded["model"])  # pyright: ignore[reportArgumentType]
    states.set_optimizer_state_dict(model, optimizer, loaded["optimizer"])  # pyright: ignore[reportArgumentType]
    last = train(model, optimizer, generator, args.steps // 2)
    stats = optimizer.stats()
    if dist.get_rank() == 0:
        print(f"{shape[0]} replicas of {shape[1]} shards: loss {first:.3f} -> {last:.3f}, frozen: {optimizer.frozen}")
        print(f"between replicas, after the checkpoint: {stats}")
    if last > first:
        raise SystemExit("the loss has not fallen")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
