"""Count host waits, copies, launches and allocations in collectives of CUDA tensors. Needs no GPU.

    python bench/gpu/waits.py                       # 2 ranks, 2^20 values; --ranks, --values, --json for programs
    python bench/gpu/waits.py --only Quantize

Ranks are processes with the emulated GPU of the tests (tests/support/); the dependencies of the tests must be
installed. Frames are copied to host memory ("host") or stay on GPUs ("nccl", with Gloo in place of NCCL). A line has
the maximum of each count over ranks.

first       counts in the first call of a process, which creates plans and buffers
steady      counts in the third call
waits       waits of the host until the GPU has done all work submitted so far: synchronization, blocking copies, values
            that the host reads. Waits for an idle GPU and waits for other ranks over TCP are not counted
copies      between host and GPU, and within the GPU
launches    kernels of the engine, of torch, and of NCCL
allocations by the engine and by torch, whose allocator mostly reuses cached memory
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import codec
import codec.torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.cuda_tensors import connect_gpus, host, on_device
from support.gpu_traffic import NAMES, counted_gpu
from support.ranks import RankPool

SPECS = {
    "Lossless": codec.Lossless(),
    "Quantize(4)": codec.Quantize(4),
    "Float8": codec.Float8(group_size=1024),
    "Sign": codec.Sign(group_size=1024),
    "Sign, one scale": codec.Sign(),
    "Ternary": codec.Ternary(),
    "Truncate(1)": codec.Truncate(1),
    "TopK": codec.TopK(),
}
CALLS = 3


def measure(rank: int, size: int, n: int, specs: list[str]) -> list[dict[str, Any]]:
    """Run all collectives on this rank, and return the counts of waits, copies, launches and allocations."""
    found: list[dict[str, Any]] = []
    with counted_gpu() as (_, traffic):
        for name in specs:
            for what, call in (*_reductions(rank, n, name), *_buckets(rank, n, name)):
                for i in range(CALLS):
                    traffic.clear()
                    call()
                    if i in (0, CALLS - 1):
                        counts = {each: traffic[each] for each in NAMES}
                        found.append({"codec": name, "call": what, "step": "steady" if i else "first"} | counts)
    return found


def _reductions(rank: int, n: int, name: str) -> Any:
    """Yield the name of each all-reduce, and the function that runs it."""
    feedback: Any = False if name == "TopK" else None
    x = on_device(torch.randn(n, generator=torch.Generator().manual_seed(rank)) / 100)
    two_shot, all_gather = codec.options(algorithm="two_shot"), codec.options(algorithm="all_gather")
    out = on_device(torch.empty(n))
    for call, options, to in (
        ("two_shot", two_shot, None),
        ("two_shot, out=", two_shot, out),
        ("all_gather", all_gather, None),
    ):
        how: Any = {"op": "mean", "feedback": feedback, "out": to, "options": options}
        there = on_device(host(x).clone())
        yield f"all_reduce, {call}", lambda t=there, how=how: codec.torch.all_reduce(t, SPECS[name], **how)


def _buckets(rank: int, n: int, name: str) -> Any:
    """Yield the name of each kind of hook, and a function that runs a training step with four buckets on the GPU."""
    width = max(64, int((n / 4) ** 0.5) // 64 * 64)
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(rank))
    whole = codec.torch.Policy(lossless_small=False, uneven=None)
    parts = codec.torch.Policy(_spec_by_name, lossless_small=False, uneven=None)
    for what, policy, layer in (
        ("4 buckets", whole, lambda: [torch.nn.Linear(width, width, bias=False)]),
        ("4 x 3 parts", parts, lambda: [torch.nn.Linear(width, width), torch.nn.LayerNorm(width)]),
    ):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[module for _ in range(4) for module in layer()])
        model = torch.nn.parallel.DistributedDataParallel(
            net, bucket_cap_mb=3e-6 * width * width, gradient_as_bucket_view=True
        )
        hook = codec.torch.ddp_hook(
            SPECS[name],
            feedback=False if name in ("TopK", "Ternary") else None,
            policy=policy,
            options=codec.options(algorithm="two_shot"),
        )
        model.register_comm_hook(hook, _reduce_on_gpu)
        yield f"DDP step, {what}", lambda model=model: model(x).square().mean().backward()


def _spec_by_name(name: str, _: torch.nn.Parameter) -> codec.Spec | None:
    """Policy: layer norms lossless, biases of linear layers in 8 bits, other parameters by the hook's spec."""
    if int(name.partition(".")[0]) % 2:
        return codec.Lossless()
    return codec.Quantize(8) if name.endswith("bias") else None


def _reduce_on_gpu(hook: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """Reduce a bucket by a hook, with the bucket's buffer on the emulated GPU."""
    there = SimpleNamespace(
        buffer=lambda: on_device(bucket.buffer()),
        parameters=bucket.parameters,
        index=bucket.index,
        is_last=bucket.is_last,
        gradients=bucket.gradients,
    )
    return hook.reduce(there).then(lambda done: host(done.value()))


def main() -> None:
    """Measure on all ranks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--values", type=int, default=20, help="log2 of the number of values (20)")
    parser.add_argument("--only", default="", help="codecs whose names begin so")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    specs = [name for name in SPECS if name.startswith(args.only)]
    if not args.json:
        print(f"{'codec':16} {'frames':6} {'call':26} {'':7}" + "".join(f"{name:>12}" for name in NAMES))
    for way in ("host", "nccl"):
        with RankPool(args.ranks) as ranks:
            if way == "nccl":
                ranks.run(connect_gpus)
            ranks.new_group()
            for rows in zip(*ranks.run(measure, 1 << args.values, specs), strict=True):
                row: dict[str, Any] = dict(rows[0]) | {name: max(each[name] for each in rows) for name in NAMES}
                if args.json:
                    print(json.dumps(row | {"frames": way}), flush=True)
                    continue
                counts = "".join(f"{row[name]:12}" for name in NAMES)
                print(f"{row['codec']:16} {way:6} {row['call']:26} {row['step']:7}{counts}", flush=True)


if __name__ == "__main__":
    main()
