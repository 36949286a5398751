"""Lossy codecs that benchmarks iterate over, the bytes that each reads and writes, and recorded optimizer states."""

from pathlib import Path
from typing import Any

import numpy as np

import codec
from codec import optimizers
from codec._c.traits import is_lossless
from codec.specs import CODECS

FAMILY: dict[str, codec.Spec] = {
    "Sign, tensor": codec.Sign(),
    "Sign, groups of 1,024": codec.Sign(group_size=1024),
    "Ternary 2bit": codec.Ternary(),
    "Ternary base3": codec.Ternary("base3"),
    "Ternary entropy": codec.Ternary("entropy"),
    "Quantize 2": codec.Quantize(2),
    "Quantize 4": codec.Quantize(),
    "Quantize 4 nearest": codec.Quantize(rounding="nearest"),
    "Quantize 4 zero point": codec.Quantize(rounding="nearest", zero_point=True),
    "Quantize 8": codec.Quantize(8),
    "Float4 mxfp4": codec.Float4("mxfp4"),
    "Float4 nvfp4": codec.Float4(),
    "Float8 e4m3fn": codec.Float8(),
    "Float8 e4m3fn stochastic": codec.Float8(rounding="stochastic"),
    "Float8 e4m3fn entropy": codec.Float8(entropy=True),
    "Float8 e5m2": codec.Float8("e5m2"),
    "Float8 groups of 128": codec.Float8(group_size=128),
    "Float8 mxfp8_e4m3": codec.Float8("mxfp8_e4m3"),
    "Float8 mxfp8_e4m3 rceil": codec.Float8("mxfp8_e4m3", scale="rceil"),
    "Float8 mxfp8_e5m2": codec.Float8("mxfp8_e5m2"),
}
SPARSE: dict[str, codec.Spec] = {"TopK 1/64, 2 bits": codec.TopK(), "TopK 1/64, 1 bit": codec.TopK(bits=1)}
TRUNCATE: dict[str, codec.Truncate] = {
    "Truncate near, plane": codec.Truncate(level_coding="plane"),
    "Truncate near, coded": codec.Truncate(),
    "Truncate near, shared": codec.Truncate(level_coding="shared"),
    "Truncate near, by bit": codec.Truncate(level_coding="shared", granularity="bit"),
    "Truncate exact, coded": codec.Truncate(guard="exact"),
    "Truncate exact, shared": codec.Truncate(level_coding="shared", guard="exact"),
    "Truncate exact, by bit": codec.Truncate(level_coding="shared", granularity="bit", guard="exact"),
}
# a codec without a row above is measured with its default parameters
_listed = {type(spec) for spec in [*FAMILY.values(), *SPARSE.values(), *TRUNCATE.values()]}
FAMILY |= {kind.__name__: kind() for kind in CODECS if kind not in _listed and not is_lossless(kind())}


def whole_scale(spec: codec.Spec, residual: bool) -> bool:
    """Return True if the whole tensor must be read before the first code or residual can be written."""
    if isinstance(spec, codec.Sign):
        return residual and spec.group_size is None
    if isinstance(spec, codec.Ternary):
        return spec.scale is None
    return isinstance(spec, codec.Float4) and spec.format == "nvfp4"


def moved(spec: codec.Spec, tensor_nbytes: int, frame_nbytes: int, residual: int = 0) -> tuple[int, int]:
    """Return the least bytes, read plus written, for encoding and for decoding; an optimizer's state is not counted."""
    tensors = 1 + whole_scale(spec, residual > 0)
    return tensor_nbytes * tensors + frame_nbytes + residual, frame_nbytes + tensor_nbytes


def optimizer_state(path: Path, n: int) -> tuple[optimizers.Optimizer, dict[str, np.ndarray[Any, Any]]] | None:
    """Return the optimizer that a file records, and the state of its first n values; None if the file has no state."""
    with np.load(path) as f:
        if "param" not in f.files or f["param"].size < n:
            return None
        lr, decay = float(f["lr"]), float(f["weight_decay"])
        state = {"theta": f["param"][:n]}
        if "exp_avg" in f.files:
            state |= {"m": f["exp_avg"][:n], "v": f["exp_avg_sq"][:n]}
            beta1, beta2 = (float(b) for b in f["betas"])
            step = int(f["step"]) - ("few" not in f.files)  # files with "few" count steps from 0, others from 1
            adamw = optimizers.AdamW(lr, weight_decay=decay, step=step, betas=(beta1, beta2), eps=float(f["eps"]))
            return adamw, state
        return optimizers.SGD(lr, weight_decay=decay, momentum=float(f["momentum"])), state | {
            "m": f["momentum_buffer"][:n]
        }


def step_of(metric: optimizers.Optimizer, g: Any, state: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Run an optimizer step of torch with gradient g, and return the new float32 parameters."""
    import torch

    theta = torch.nn.Parameter(torch.from_numpy(state["theta"].copy()))
    theta.grad = torch.from_numpy(np.ascontiguousarray(g))
    if isinstance(metric, optimizers.AdamW):
        optimizer: Any = torch.optim.AdamW([theta], metric.lr, metric.betas, metric.eps, metric.weight_decay)
        names = {"exp_avg": "m", "exp_avg_sq": "v"}
        optimizer.state[theta]["step"] = torch.tensor(float(metric.step))
    else:
        assert isinstance(metric, optimizers.SGD)
        optimizer = torch.optim.SGD([theta], metric.lr, metric.momentum, weight_decay=metric.weight_decay)
        names = {"momentum_buffer": "m"}
    for theirs, ours in names.items():
        optimizer.state[theta][theirs] = torch.from_numpy(state[ours].copy())
    optimizer.step()
    return theta.detach().numpy()
