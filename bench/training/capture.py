"""Train small models on data from installed packages, and record the gradients of one step.

There are four training runs:

=====================  =======================================================  ================================
file                   model and data                                           gradients
=====================  =======================================================  ================================
cnn_float32            residual CNN on scikit-learn's handwritten digits,       pure float32
                       SGD with momentum
transformer_autocast   causal transformer on the source of Python's standard    float32, computed in bfloat16 but
                       library, bfloat16 autocast, AdamW                        biases and norms
transformer_bfloat16   the same with bfloat16 parameters                        bfloat16
cnn_adamw              the CNN under AdamW: two parameters, with the            pure float32
                       optimizer's state before the step
=====================  =======================================================  ================================

A file has gradients of whole parameters in the order of a DDP bucket, last parameter first. The third file has only the
gradients of the last block, to limit its size.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from models import Language, cnn_model, digits, text

DATA = Path(__file__).parents[1] / "data"


def bucket(model: nn.Module, skip: tuple[str, ...] = ()) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the gradients as one flat tensor, last parameter first, and their shapes."""
    parameters = [p for name, p in model.named_parameters() if not name.startswith(skip or ("?",))][::-1]
    return torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]), [
        list(p.shape) for p in parameters
    ]


def cnn_adamw(steps: int) -> dict[str, Any]:
    """Train the CNN by AdamW; return the gradient of the last step, and the parameters and moments before that step."""
    images, labels = digits()
    model = cnn_model()
    how = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    loss = torch.zeros(())
    for step in range(steps):
        i = torch.randint(len(images), (128,))
        loss = F.cross_entropy(model(images[i]), labels[i])
        optimizer.zero_grad()
        loss.backward()
        if step < steps - 1:
            optimizer.step()
    kept = [p for name, p in model.named_parameters() if name in ("0.b.weight", "1.short.weight")][::-1]

    def flat(arrays: list[torch.Tensor]) -> np.ndarray[Any, Any]:
        return torch.cat([a.detach().reshape(-1) for a in arrays]).numpy()

    print(f"cnn_adamw: {sum(p.numel() for p in kept)} values, loss {loss.item():.3f}")
    return {
        "grad": flat([p.grad for p in kept if p.grad is not None]),
        "param": flat([p for p in kept]),
        **{key: flat([optimizer.state[p][key] for p in kept]) for key in ("exp_avg", "exp_avg_sq")},
        "shapes": str([list(p.shape) for p in kept]),
        "step": steps,
        **{key: np.array(value) for key, value in how.items()},
    }


def cnn(steps: int) -> dict[str, Any]:
    images, labels = digits()
    model = cnn_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    loss = torch.zeros(())
    for _ in range(steps):
        i = torch.randint(len(images), (128,))
        loss = F.cross_entropy(model(images[i]), labels[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    grad, shapes = bucket(model)
    print(f"cnn_float32: {grad.numel()} values, loss {loss.item():.3f}")
    return {"grad": grad.numpy(), "shapes": str(shapes)}


def transformer(steps: int, half: bool) -> dict[str, Any]:
    data, context, width = text(), 64, 128
    model = Language(width, 2, context)
    if half:
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    loss = torch.zeros(())
    for _ in range(steps):
        at = torch.randint(len(data) - context - 1, (16,))
        rows = torch.stack([data[i : i + context + 1] for i in at]).long()
        with torch.autocast("cpu", torch.bfloat16, enabled=not half):
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    grad, shapes = bucket(model, ("token", "place", "blocks.0") if half else ("token", "place"))
    print(f"transformer {'bfloat16' if half else 'autocast'}: {grad.numel()} values, loss {loss.item():.3f}")
    if half:
        return {"grad_bits": grad.view(torch.uint16).numpy(), "shapes": str(shapes)}
    return {"grad": grad.numpy(), "shapes": str(shapes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=300, help="training steps of the transformers; a third of them for the CNN (300)"
    )
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--only", help="name of one file, without .npz")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    for name, train in (
        ("cnn_float32", lambda: cnn(args.steps // 3)),
        ("transformer_autocast", lambda: transformer(args.steps, half=False)),
        ("transformer_bfloat16", lambda: transformer(args.steps, half=True)),
        ("cnn_adamw", lambda: cnn_adamw(args.steps // 3)),
    ):
        if args.only not in (None, name):
            continue
        np.savez_compressed(args.out / f"{name}.npz", **train())
        print(f"  {args.out / name}.npz: {(args.out / f'{name}.npz').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
