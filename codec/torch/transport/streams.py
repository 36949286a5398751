"""GPU helpers: check for the CUDA engine, allocate host memory, and order the work of collectives on streams."""

import functools
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from codec import CallOptions, EngineError
from codec.engines import choose
from codec.torch.transport.messages import Array

logger = logging.getLogger("codec.torch")


def encodes_in_place(tensor: torch.Tensor, settings: CallOptions) -> bool:
    """Return True if the CUDA engine can encode a tensor on its GPU; False if it is encoded in host memory."""
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


def host_array(x: torch.Tensor) -> Array:
    """Return a flat tensor as an array in host memory, bfloat16 as uint16."""
    x = x.detach().cpu()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


class StreamOrder:
    """Runs the GPU work of a function, in another thread, after all work that this thread has submitted so far.

    The function runs in a separate stream on this thread's current GPU, concurrently with work that this thread submits
    later. Without GPUs, this class does nothing.

    Parameters
    ----------
    device : int or None
        GPU; None: there is none.
    submitted : torch.cuda.Event or None
        Event recorded after the work that must run first.
    """

    def __init__(self, device: int | None, submitted: Any) -> None:
        self._device, self._submitted = device, submitted

    @staticmethod
    def of_this_thread() -> "StreamOrder":
        """Return the order for a function that follows the work that this thread has submitted.

        Raises
        ------
        EngineError
            The current stream is captured in a CUDA graph.
        """
        if not torch.cuda.is_initialized():
            return _NO_ORDER
        if torch.cuda.is_current_stream_capturing():
            raise EngineError(
                "collectives of codec.torch cannot be captured in a CUDA graph, since the host takes part in them: "
                "capture forward and backward pass without them, such as under no_sync(), and reduce gradients outside"
            )
        device = torch.cuda.current_device()
        return StreamOrder(device, torch.cuda.current_stream(device).record_event())

    @contextmanager
    def step(self) -> Generator[None]:
        """Return a context manager for one step of the function; GPU work inside goes to the stream of collectives."""
        if self._device is None:
            yield
            return
        stream = _side_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            if self._submitted is not None:
                stream.wait_event(self._submitted)
                self._submitted = None
            yield

    def finish(self) -> None:
        """Wait until the GPU has completed the work of the function."""
        if self._device is not None:
            _side_stream(self._device).synchronize()


_NO_ORDER = StreamOrder(None, None)


@functools.cache
def _side_stream(device: int) -> Any:
    """Return the stream of all collectives on a GPU."""
    return torch.cuda.Stream(device)


def passed_by_gpu() -> Callable[[], bool]:
    """Return a function that returns True once the GPU has done all work submitted to the current stream so far."""
    if not torch.cuda.is_initialized():
        return lambda: True
    event = torch.cuda.current_stream().record_event()
    return lambda: bool(event.query())


def order_after() -> Callable[[], None]:
    """Return a function that makes the current stream wait for all work submitted to this current stream so far."""
    if not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    event = torch.cuda.current_stream(device).record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(event)


def settle(tensor: torch.Tensor) -> None:
    """Wait for all work on a tensor's GPU, unless it is the current GPU, whose work is ordered by streams."""
    if tensor.device.type == "cuda" and tensor.device.index not in (None, torch.cuda.current_device()):
        torch.cuda.synchronize(tensor.device)
