"""Train a LoRA adapter, publish it after each step, and measure the bytes of its updates.

    python bench/training/adapter_sync.py                    # half a minute on two cores
    python bench/training/adapter_sync.py --steps 200 --rank 8

Each linear layer of a small language model over bytes, whose other weights are frozen, gets an adapter, which AdamW
trains on Python's standard library. A receiver writes each version in PEFT's format.

Columns:

file       bytes of adapter_model.safetensors
snapshot   bytes of a snapshot of the last version, relative to `file`
update     mean bytes of the updates after the first step, relative to `file`
publish    mean seconds to encode and publish an update
pull       mean seconds to apply an update and to write the adapter's files
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from codec.integrations.peft import AdapterPublisher, AdapterReceiver

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from architectures import LoRA
from models import Language, text

CONTEXT, BATCH = 32, 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def adapted(width: int, layers: int, rank: int) -> tuple[nn.Module, dict[str, LoRA]]:
    """Return a frozen model, and the adapters of its linear layers by name."""
    torch.manual_seed(0)
    model = Language(width, layers, CONTEXT).requires_grad_(False)
    adapters = dict[str, LoRA]()
    for name, linear in [(n, m) for n, m in model.blocks.named_modules() if isinstance(m, nn.Linear)]:
        adapters[name] = LoRA(linear, rank, 2 * rank)
        nn.init.kaiming_uniform_(adapters[name].a, 5**0.5)  # as PEFT begins
        parent, _, attribute = name.rpartition(".")
        setattr(model.blocks.get_submodule(parent), attribute, adapters[name])
    return model, adapters


def tensors_of(adapters: dict[str, LoRA], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of all adapters under PEFT's names."""
    pairs = {f"{name}.lora_{k}": p for name, lora in adapters.items() for k, p in (("A", lora.a), ("B", lora.b))}
    return {f"base_model.model.blocks.{name}.weight": p.detach().to(dtype) for name, p in pairs.items()}


def measure(args: argparse.Namespace, dtype: torch.dtype, lr: float) -> str:
    """Train and publish; return a row of the table."""
    model, adapters = adapted(args.width, args.layers, args.rank)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr, weight_decay=0)
    source, generator = text(), torch.Generator().manual_seed(0)
    config = {"peft_type": "LORA", "r": args.rank, "target_modules": list({n.rpartition(".")[2] for n in adapters})}
    updates, published, pulled = list[int](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder, AdapterPublisher(f"{folder}/store") as publisher:
        receiver = AdapterReceiver(f"{folder}/adapters")
        for _ in range(args.steps):
            starts = torch.randint(len(source) - CONTEXT - 1, (BATCH,), generator=generator)
            rows = source[starts[:, None] + torch.arange(CONTEXT + 1)].long()
            nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            begin = time.perf_counter()
            update = publisher.stage({"policy": (config, tensors_of(adapters, dtype))})
            publisher.commit()
            published.append(time.perf_counter() - begin)
            receiver.pull(publisher.source)
            pulled.append(time.perf_counter() - begin - published[-1])
            updates.append(update.nbytes)
        snapshot = publisher.stage({"policy": (config, tensors_of(adapters, dtype))}, full=True).nbytes
        [path] = receiver.paths.values()
        file = Path(path, "adapter_model.safetensors").stat().st_size
    sent = statistics.mean(updates[1:])
    times = f"{statistics.mean(published[1:]):6.3f} s {statistics.mean(pulled[1:]):6.3f} s"
    return f"{file / 1e3:7.1f} kB {snapshot / file:9.1%} {sent / file:7.1%} {times}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'dtype':8} {'lr':>7} {'file':>10} {'snapshot':>9} {'update':>7} {'publish':>8} {'pull':>8}")
    for name, dtype in DTYPES.items():
        for lr in (1e-4, 1e-5, 1e-6):
            print(f"{name:8} {lr:7g} {measure(args, dtype, lr)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
