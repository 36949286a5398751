"""All-reduces of torchft: their handles, the names of their values, and the hook that starts them for buckets."""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from codec.errors import ArgumentError
from codec.torch._compat import local
from codec.torch.ddp.buckets import shape_of

Shape = tuple[int, ...]


def taken(
    names: deque[tuple[str, Shape]], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[str, ...], list[tuple[int, Shape]]]:
    """Remove the names of the values of tensors from a queue; return these names, and the offset and shape of each."""
    n, end = sum(t.numel() for t in tensors), 0
    found: list[str] = []
    segments: list[tuple[int, Shape]] = []
    while names and end + prod(names[0][1]) <= n:
        name, shape = names.popleft()
        found.append(name)
        segments.append((end, shape))
        end += prod(shape)
    if not found:
        raise ArgumentError(f"a tensor of {n} values is reduced, but the next name is {next(iter(names), None)}")
    return tuple(found), segments


def future_of(tensor: torch.Tensor) -> Any:
    """Return a new future for a tensor."""
    found: Any = torch.futures.Future(  # pyright: ignore[reportUnknownVariableType]
        devices=[] if tensor.device.type == "cpu" else [tensor.device]
    )
    return found


class TorchftWork(dist.Work):
    """Handle of an all-reduce. Its future is complete once :meth:`wait` has returned, on which torchft relies."""

    def __init__(self, work: Any, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._tensors = work, tensors
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the all-reduce has succeeded; raise the error if it has failed."""
        return self._work.wait(timeout)

    def synchronize(self) -> None:
        """Wait as :meth:`wait` does."""
        self._work.wait()

    def block_current_stream(self) -> None:
        """Wait as :meth:`wait` does."""
        self._work.wait()

    def is_completed(self) -> bool:
        """Return True if the all-reduce has succeeded or failed."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return True if the all-reduce has succeeded."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Return the error if the all-reduce has failed, otherwise None."""
        return self._work.exception()

    def get_future(self) -> Any:
        """Return a future with the list of reduced tensors."""
        if self._future is None and self._work.is_success():
            self._future = future_of(self._tensors[0])
            self._future.set_result(self._tensors)
        elif self._future is None:
            self._future = self._work.get_future()
        return self._future


def in_names(prepare: Callable[[], None], group: Any, prefix: str, module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that starts the all-reduces of a fragment, with the names of its parameters."""

    def prepare_sync() -> None:
        with group.named((prefix + name, local(p).shape) for name, p in module.named_parameters()):
            prepare()

    return prepare_sync


def hook_of_buckets(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a communication hook for a module. At the last bucket of a step, the hook waits for all buckets."""
    names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
    begun: list[tuple[Any, torch.Tensor, Any]] = []

    def reduce(manager: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        if bucket.index() == 0:
            begun.clear()  # buckets of a backward pass that was interrupted
        buffer, parameters = bucket.buffer(), bucket.parameters()
        future = future_of(buffer)
        with manager.group.named((names[p], shape_of(p)) for p in parameters):
            begun.append((manager.allreduce(buffer), buffer, future))
        if bucket.is_last():
            for work, values, reduced in begun:
                work.wait()  # errors are reported to the Manager
                reduced.set_result(values)
            begun.clear()
        return future

    return reduce
