"""Calls whose types pyright must infer, and engine interfaces. `make lint` type-checks this file; it is never run."""

# pyright: reportUnnecessaryTypeIgnoreComment=true
# A comment `pyright: ignore` below marks a mistake that pyright must report.

from typing import Any, assert_type

import numpy as np
import torch

import codec
from codec.engines import DeviceEngine, Engine, cuda, native, numba
from codec.tensors.view import Array
from codec.torch.ddp.stats import HookStats
from codec.weight_sync import Publisher

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
        assert_type(codec.encode(tensor, spec), bytes)
        assert_type(codec.encode(tensor, spec, out=bytearray(9000)), memoryview)
    with codec.options(threads=1) as options:
        assert_type(options, codec.CallOptions)
    codec.encode(codec.view(tensor, "bfloat16"))


def check_engines() -> tuple[Engine, Engine, DeviceEngine]:
    return native, numba, cuda


def check_encode_to_memory(tensor: torch.Tensor, out: bytearray) -> None:
    frame: bytes = codec.encode(tensor)
    assert_type(codec.encode(tensor, "small", out=out), memoryview)
    feedback = codec.ErrorFeedback("smallest")
    assert_type(feedback.encode("weight", tensor), bytes)
    assert_type(feedback.encode("weight", tensor, out=out), memoryview)
    codec.decode(frame)


def check_names(tensor: torch.Tensor, frames: list[bytes]) -> None:
    codec.encode(tensor, "tiny")  # pyright: ignore[reportArgumentType]
    codec.bound(5, "float32", "tiny")  # pyright: ignore[reportArgumentType]
    codec.options(algorithm="twoshot")  # pyright: ignore[reportArgumentType]
    codec.options(engine="gpu")  # pyright: ignore[reportArgumentType]
    codec.reduce(frames, op="average")  # pyright: ignore[reportArgumentType]
    codec.torch.all_reduce(tensor, "balanced", op="mean", options=codec.options(algorithm="ring"))
    codec.torch.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    codec.torch.all_reduce(tensor, op="average")  # pyright: ignore[reportArgumentType]
    codec.torch.ddp_hook("tiny")  # pyright: ignore[reportArgumentType]
    codec.torch.ddp_hook("small").set_spec("large")  # pyright: ignore[reportArgumentType]
    codec.torch.BackendOptions("small", algorithm="two_shots")  # pyright: ignore[reportArgumentType]
    codec.torch.no_such_name()  # pyright: ignore[reportAttributeAccessIssue]
    codec.no_such_name()  # pyright: ignore[reportAttributeAccessIssue]


def check_hooks(model: torch.nn.parallel.DistributedDataParallel) -> None:
    hook = codec.torch.ddp_hook("small").register(model)
    assert_type(hook, codec.torch.Hook)
    assert_type(hook.stats(), HookStats)
    assert_type(hook.stats().ratio, float)


def check_weights(model: torch.nn.Module, sender: codec.WeightSender, publisher: Publisher) -> None:
    """Every source of weights that the documentation names is accepted: modules, mappings, pairs."""
    for receiver in (codec.WeightReceiver(model), codec.WeightReceiver(dict(model.named_parameters()))):
        update = sender.diff(model)
        receiver.apply(update.data, into=model)
    assert_type(codec.WeightSender(model).diff(model.named_parameters(), full=True), codec.Update)
    assert_type(publisher.publish(model), int)
    publisher.stage(model, full=True)
    codec.WeightSender([torch.zeros(3)])  # pyright: ignore[reportArgumentType]
