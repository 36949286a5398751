"""Send the weights of a model that two ranks have sharded by FSDP2 to a rollout process. No rank gathers a tensor.

    python examples/weight_sync_shards.py

Each rank encodes the difference of its shards, rounded to bfloat16, from those of the last version, and serves it. The
rollout process reads the parts of both ranks, validates them, and writes the changed values into its model.
"""

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import codec
from codec.weight_sync import Publisher, pull

RANKS = 2


def new_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))


def train(rank: int, folder: str, steps: int, rollout: Connection | None) -> None:
    """Train with FSDP2, and publish a version after each step; rank 0 tells the rollout process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    model = new_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    torch.manual_seed(rank)
    with Publisher(f"{folder}/rank-{rank}", group=dist.group.WORLD, host="127.0.0.1") as publisher:
        for step in range(steps + 1):
            begin = time.perf_counter()
            weights = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
            update = publisher.stage(weights)
            publisher.commit()
            if rollout is not None:
                rollout.send((publisher.source, update.digest))
                rollout.recv()  # the rollout process serves this version
                seconds, size = time.perf_counter() - begin, update.nbytes / update.total.nbytes
                kind = "update  " if step else "snapshot"
                print(f"{kind} {update.version}: {update.nbytes:9,} bytes, {size:6.2%} of the weights, {seconds:.2f} s")
            x = torch.randn(16, 1024)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()  # the rollout process has read the parts of all ranks
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    served, receiver = new_model().bfloat16(), codec.WeightReceiver()
    with tempfile.TemporaryDirectory() as folder:
        trainer, far = context.Pipe()
        arguments = [(rank, folder, args.steps, far if rank == 0 else None) for rank in range(RANKS)]
        ranks = [context.Process(target=train, args=each) for each in arguments]
        for process in ranks:
            process.start()
        far.close()
        for _ in range(args.steps + 1):
            source, digest = trainer.recv()
            pull(receiver, source, into=served)
            assert receiver.digest == digest  # the weights are bit-identical to those of the ranks
            trainer.send("loaded")
        for process in ranks:
            process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
