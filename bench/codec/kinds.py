"""Bits per value of Lossless and of the best other compressor, for each kind of tensor that training and serving send.

    python bench/codec/kinds.py                        # about three minutes
    python bench/codec/kinds.py --kinds gradient mask  # kinds whose names contain these texts

Trains the transformer of `bench/support/models.py` and the word model of `bench/support/vocabularies.py` by AdamW for
some steps, and takes gradients, weights, optimizer states, activations, keys and values from them. All compressors get
the same bytes of one tensor, of at most 2^19 values, in one thread; those whose packages are missing are named. `above`
is the size of Lossless above the best other one; negative: below it. Speeds are in GB/s of tensor bytes.
"""

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save_file

import codec
from codec._c.library import ITEMSIZE
from codec.cli.compressors import best, compressors, lmzip, missing

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import models
import vocabularies

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MOST = 1 << 19  # values of a tensor
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Row(NamedTuple):
    """Result of one tensor. Sizes are in bits per value."""

    kind: str
    dtype: str
    raw: int
    ours: float
    peer: str
    best: float
    encode_gbps: float
    decode_gbps: float


class Trained(NamedTuple):
    """Parts of a training, each a matrix in float32."""

    weight: torch.Tensor
    gradient: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


def parts(task: Any, parameter: torch.Tensor, steps: int) -> Trained:
    """Train a task, and return the parts of one parameter; its gradient is that of the last step."""
    for _ in range(steps):
        task.optimizer.zero_grad()
        task.loss(task.model, task.batch()).backward()
        task.optimizer.step()
        task.schedule.step()
    state = task.optimizer.state[parameter]
    assert parameter.grad is not None
    found = (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
    return Trained(*(x.clone() for x in found))


@functools.cache
def transformer(steps: int) -> tuple[Any, Trained]:
    """Return the trained transformer, and the parts of its widest matrix."""
    torch.manual_seed(0)
    task = models.TASKS["text-adamw-wide"](0, steps)
    return task, parts(task, task.model.blocks[0].up.weight, steps)


@functools.cache
def embedding(steps: int) -> Trained:
    """Return the parts of the embedding of the word model, of which a batch uses few rows."""
    torch.manual_seed(0)
    task = vocabularies.TASKS["words"](0, steps)
    table = next(m for m in task.model.modules() if isinstance(m, torch.nn.Embedding))
    return parts(task, table.weight, steps)


@torch.no_grad()
def inside(task: Any) -> dict[str, torch.Tensor]:
    """Return activations of the transformer on held-out text: (tokens, features)."""
    found: dict[str, torch.Tensor] = {}
    block = task.model.blocks[1]
    hooks = [
        block.register_forward_hook(lambda _m, _i, y: found.update({"hidden state": y})),
        block.qkv.register_forward_hook(lambda _m, _i, y: found.update({"keys and values": y.chunk(3, -1)[1]})),
        block.up.register_forward_hook(lambda _m, _i, y: found.update({"after GELU": torch.nn.functional.gelu(y)})),
    ]
    task.model(task.held_out[0][:64])
    for hook in hooks:
        hook.remove()
    return {name: x.flatten(0, -2) for name, x in found.items()}


def scaled(x: torch.Tensor, top: float, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x, scaled such that the largest magnitude of each group is `top`, and the scales."""
    groups = x.reshape(-1, group)
    scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-30) / top
    return (groups / scale).reshape(x.shape), scale.flatten()


def floats(kind: str, x: torch.Tensor, *dtypes: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield a tensor in several floating-point dtypes."""
    for name in dtypes:
        yield kind, name, x.to(FLOATS[name])


def kinds(steps: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (kind, dtype, tensor)."""
    task, wide = transformer(steps)
    rng = np.random.default_rng(0)
    yield from floats("gradient", wide.gradient, "f32", "bf16")
    yield "gradient", "f16", (wide.gradient * 4096).half()
    yield (
        "gradient, scale a tensor",
        "e5m2",
        scaled(wide.gradient, 57344, wide.gradient.numel())[0].to(torch.float8_e5m2),
    )
    yield from floats("weights", wide.weight, "f32", "bf16", "f16")
    row8, scales = scaled(wide.weight, 448, wide.weight.shape[1])
    yield "weights, scale a row", "e4m3", row8.to(torch.float8_e4m3fn)
    yield "weights, scale a row", "int8", scaled(wide.weight, 127, wide.weight.shape[1])[0].round().to(torch.int8)
    four = scaled(wide.weight, 7, 32)[0].round().to(torch.int8).flatten() + 8
    yield "weights, groups of 32, packed", "int4", (four[0::2] | four[1::2] << 4).view(torch.uint8)
    yield "scales of rows", "f32", scales
    yield from floats("Adam's m", wide.m, "f32", "bf16")
    yield from floats("Adam's v", wide.v, "f32", "bf16")
    for kind, x in inside(task).items():
        yield from floats(kind, x, "bf16")
    yield from floats("hidden state", inside(task)["hidden state"], "f32")
    gelu = inside(task)["after GELU"]
    yield "after GELU, scale a tensor", "e4m3", scaled(gelu, 448, gelu.numel())[0].to(torch.float8_e4m3fn)
    table = embedding(steps)
    yield from floats("embedding's gradient", table.gradient, "f32", "bf16")
    experts = wide.gradient.clone().reshape(8, -1)
    experts[[1, 2, 4, 6, 7]] = 0
    yield from floats("8 experts' gradient, 5 without tokens", experts.reshape(wide.gradient.shape), "bf16")
    pruned = wide.weight.clone().reshape(-1, 4)
    pruned.scatter_(1, pruned.abs().topk(2, 1, largest=False).indices, 0)
    yield from floats("weights, 2 of 4 zero", pruned.reshape(wide.weight.shape), "bf16")
    kept = torch.from_numpy(np.where(rng.random(wide.gradient.shape) < 0.1, wide.gradient, 0)).float()
    yield from floats("gradient, 9 of 10 zero", kept, "bf16")
    mask = rng.random(MOST) < 0.1
    yield "mask, 1 of 10 set", "bool", torch.from_numpy(mask)
    yield "mask, packed by np.packbits", "uint8", torch.from_numpy(np.packbits(mask))
    yield "token ids", "i64", vocabularies.words()[: MOST // 2].long()
    indices = np.sort(rng.choice(MOST * 16, MOST // 4, replace=False))
    yield "sorted indices", "i64", torch.from_numpy(indices)
    yield "positions", "i64", torch.arange(MOST // 2)
    yield "one value", "f32", torch.ones(4096)


def measured(kind: str, dtype: str, x: torch.Tensor, seconds: float) -> Row:
    """Compress a tensor by all compressors."""
    x = x[: max(1, MOST // max(1, x[0].numel()))].contiguous()
    view = codec.inspect(codec.encode(x)).dtype
    data: Bytes = x.reshape(-1).view(torch.uint8).numpy()
    one = codec.options(threads=1)
    buffer, restored = np.empty(codec.bound(tuple(x.shape), view), np.uint8), torch.empty_like(x)
    encode, frame = best(lambda: codec.encode(x, out=buffer, options=one), seconds)
    decode, _ = best(lambda: codec.decode(frame, out=restored, options=one), seconds)
    assert restored.reshape(-1).view(torch.uint8).equal(x.reshape(-1).view(torch.uint8))
    sizes: dict[str, int] = {}
    for peer in compressors():
        packed = peer.compress(data, view)
        assert np.frombuffer(peer.decompress(packed, view), np.uint8)[: len(data)].tobytes() == data.tobytes()
        sizes[peer.name] = len(packed)
    sizes.update(_lmzip(data, view, tuple(x.shape)))
    name = min(sizes, key=sizes.__getitem__, default="none")
    bits = 8 / x.numel()
    return Row(
        kind,
        dtype,
        8 * ITEMSIZE[view],
        len(frame) * bits,
        name,
        sizes.get(name, len(data)) * bits,
        len(data) / encode / 1e9,
        len(data) / decode / 1e9,
    )


def _lmzip(data: Bytes, dtype: str, shape: tuple[int, ...]) -> dict[str, int]:
    """Return the size of lmzip, which takes a file of model weights; {} if it is not installed or not for the dtype."""
    names = {"float32": "float32", "float16": "float16"}
    if dtype not in names:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path, packed = f"{folder}/model.safetensors", f"{folder}/model.lmz"
        save_file({"x": data.view(names[dtype]).reshape(shape)}, path)
        calls = lmzip(path, packed, f"{folder}/restored.safetensors")
        if calls is None:
            return {}
        calls[0]()
        return {"lmzip": Path(packed).stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=[], help="only kinds whose names contain one of these texts")
    parser.add_argument("--steps", type=int, default=200, help="steps of the trainings")
    parser.add_argument("--seconds", type=float, default=0.3, help="minimum time of each measurement of speed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if lacking := missing():
        print(f"not installed, and left out: {', '.join(lacking)}", file=sys.stderr)
    rows: list[Row] = []
    for kind, dtype, x in kinds(args.steps):
        if args.kinds and not any(text in kind for text in args.kinds):
            continue
        rows.append(row := measured(kind, dtype, x, args.seconds))
        if not args.json:
            if len(rows) == 1:
                heads = f"{'raw':>4}{'ours':>8}{'best':>8}  {'of':20}{'above':>8}{'enc':>6}{'dec':>6}"
                print(f"{'kind':38}{'dtype':7}{heads}")
            above = f"{row.ours / row.best - 1:+.1%}"
            print(
                f"{row.kind:38}{row.dtype:7}{row.raw:4}{row.ours:8.3f}{row.best:8.3f}  {row.peer:20}{above:>8}"
                f"{row.encode_gbps:6.2f}{row.decode_gbps:6.2f}",
                flush=True,
            )
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
