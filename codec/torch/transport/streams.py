"""Tensors on GPUs: which ones the CUDA engine reads in place, and the stream in which collectives use them."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from codec import CallOptions, EngineError
from codec.engines import choose
from codec.torch.transport.messages import Array

logger = logging.getLogger("codec.torch")

T = TypeVar("T")


def encodes_in_place(tensor: torch.Tensor, settings: CallOptions) -> bool:
    """Return True if the CUDA engine encodes a tensor where it lies; False if it is encoded in host memory."""
    return tensor.device.type == "cuda" and settings.engine in (None, "cuda") and engine_is_usable()


@functools.cache
def engine_is_usable() -> bool:
    """Return True if the CUDA engine can be used on this machine; log the reason if it cannot."""
    try:
        choose("cuda", "a tensor", "cuda")
    except EngineError as e:
        logger.info("tensors on GPUs are copied to host memory and encoded there: %s", e)
        return False
    return True


def host_memory(nbytes: int, *, pinned: bool) -> Array:
    """Return new memory on the host; `pinned`: page-locked, so that GPUs copy to and from it at full speed."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    return np.empty(nbytes, np.uint8)


def in_stream_order(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function for another thread, whose work on GPUs follows what this thread has submitted so far.

    The function runs in a stream of its own on this thread's current GPU, beside the work that this thread submits
    later, and returns when the GPU has completed that work. Without GPUs it is `function` itself.
    """
    if not torch.cuda.is_initialized():
        return function
    device = torch.cuda.current_device()
    submitted = torch.cuda.current_stream(device).record_event()

    def run() -> T:
        stream = _side_stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_event(submitted)
            try:
                return function()
            finally:
                stream.synchronize()

    return run


@functools.cache
def _side_stream(device: int) -> Any:
    """Return the stream of all collectives on a GPU."""
    return torch.cuda.Stream(device)


def settle(tensor: torch.Tensor) -> None:
    """Wait for all work on a tensor's GPU, unless it is the current one, whose work is ordered by streams."""
    if tensor.device.type == "cuda" and tensor.device.index not in (None, torch.cuda.current_device()):
        torch.cuda.synchronize(tensor.device)
