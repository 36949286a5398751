"""Types that pyright must infer for calls, and interfaces of engines; `make lint` checks this file, nothing runs it."""

from typing import Any, assert_type

import numpy as np
import torch

import codec
from codec.engines import DeviceEngine, Engine, cuda, native, numba
from codec.tensors.view import Array

Float32Array = np.ndarray[Any, np.dtype[np.float32]]


def check_decode(frame: bytes, tensor: torch.Tensor, array: Float32Array, bound: codec.BoundSpec) -> None:
    assert_type(codec.decode(frame), Array)
    assert_type(codec.decode(frame, bound), Array)
    assert_type(codec.decode(frame, like=tensor), torch.Tensor)
    assert_type(codec.decode(frame, out=array), Float32Array)
    assert_type(codec.decode(frame, bound, out=tensor, options=codec.options(threads=1)), torch.Tensor)
    assert_type(codec.accumulate(frame, tensor, weight=0.5), torch.Tensor)


def check_reduce(frames: list[bytes], tensor: torch.Tensor, bound: codec.BoundSpec) -> None:
    assert_type(codec.reduce(frames), Float32Array)
    assert_type(codec.reduce(frames, bound, op="sum", like=tensor), torch.Tensor)
    assert_type(codec.reduce(frames, out=tensor), torch.Tensor)
    assert_type(codec.sum_codes(frames, like=tensor), tuple[torch.Tensor, float])


def check_many(
    frames: list[bytes], by_name: dict[str, bytes], tensor: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> None:
    assert_type(codec.decode_many(frames), list[Array])
    assert_type(codec.decode_many(by_name), dict[str, Array])
    assert_type(codec.decode_many(frames, like=tensor), list[torch.Tensor])
    assert_type(codec.decode_many(by_name, like=tensor), dict[str, torch.Tensor])
    assert_type(codec.decode_many(frames, out=[tensor, tensor]), list[torch.Tensor])
    assert_type(codec.decode_many(by_name, out=tensors), dict[str, torch.Tensor])
    assert_type(codec.encode_many([tensor]), list[bytes])
    assert_type(codec.encode_many(tensors, "balanced"), dict[str, bytes])


def check_encode(tensor: torch.Tensor, optimizer: codec.optimizers.Optimizer) -> None:
    bound = codec.Truncate().bind(optimizer, theta=tensor)
    assert_type(bound, codec.BoundSpec)
    assert_type(codec.preset("near"), codec.Spec)
    for spec in ("near", codec.Sign(), bound):
        assert_type(codec.encode(tensor, spec), bytes | memoryview)
    with codec.options(threads=1) as options:
        assert_type(options, codec.CallOptions)
    codec.encode(codec.view(tensor, "bfloat16"))


def check_engines() -> tuple[Engine, Engine, DeviceEngine]:
    return native, numba, cuda
