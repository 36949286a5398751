"""Communication hook of a DistributedDataParallel, and a check that gradients stay unchanged after a backward pass."""

# No `from __future__ import annotations`: torch checks that the annotations of a hook are types, not strings.

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from codec import ArgumentError, StateError
from codec.torch._compat import (
    BackwardEnd,
    backward_pass,
    call_after_backward,
    count_parameters,
    finalizes_manually,
    joins,
    place_of,
)
from codec.torch.ddp.buckets import gradients_in
from codec.torch.ddp.hook import Hook
from codec.torch.one_bit_adam.schedule import Kind

_SAMPLED = 64  # approximate number of values that are compared in each gradient

_Bucket = dist.GradBucket  # pyright: ignore[reportPrivateImportUsage]
_Future = torch.futures.Future[torch.Tensor]
_Reduced = tuple[list[torch.nn.Parameter], _Future]  # parameters of a bucket, and future of its mean


class Guard:
    """Detects changes of a model's gradients after the backward pass that averaged them.

    After the freeze, DistributedDataParallel's gradients hold averaged momenta. Code that changes gradients between
    backward() and step(), such as clip_grad_norm_, would change the momenta. Such changes raise an error in all steps,
    so that a run fails in its first step and not at the freeze. Version counters of tensors detect the writes of
    torch's operations, but not those of a GradScaler, so some values are also compared.
    """

    def __init__(self) -> None:
        # For each parameter: itself, its gradient, the gradient's version, and a sample of its values.
        self._gradients: list[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]] = []
        self.recorded = False  # True if a backward pass has averaged gradients since the last step

    def record(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the gradients after a successful backward pass."""
        given = [(p, p.grad) for p in parameters if p.grad is not None]
        self._gradients = [(p, g, g._version, _sample(g).clone()) for p, g in given]
        self.recorded = True

    def clear(self) -> None:
        """Drop the record, after a step or after gradients were reset."""
        self._gradients.clear()
        self.recorded = False

    def check_first(self) -> None:
        """Raise StateError if a backward pass would add gradients to averaged momenta that no step has used yet."""
        if any(p.grad is gradient for p, gradient, _, _ in self._gradients):
            raise StateError(
                "a second backward pass before step() would add gradients to averaged momenta: call "
                "optimizer.zero_grad() first, or accumulate gradients under no_sync()"
            )

    def check_unchanged(self, scaled: bool) -> None:
        """Check that gradients are unchanged since the backward pass.

        Parameters
        ----------
        scaled : bool
            True if the registered GradScaler has unscaled the gradients, so that values are not compared.

        Raises
        ------
        StateError
            There was no backward pass, or gradients were changed after it.
        """
        if not self.recorded:
            raise StateError(
                "step() needs a backward pass that has averaged gradients, or momenta after the freeze: there was none "
                "since the last step, it failed, or it ran under no_sync()"
            )
        for p, gradient, version, values in self._gradients:
            same = p.grad is gradient and gradient._version == version
            if not same or not (scaled or torch.allclose(_sample(gradient), values, 0, 0, equal_nan=True)):
                raise StateError(
                    "gradients were changed between backward() and step(): after the freeze they hold averaged "
                    "momenta, so this is refused in all steps. Remove clip_grad_norm_ and the like; to clip gradients, "
                    "use register(max_grad_norm=). With a GradScaler, pass register(grad_scaler=)"
                )


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Return evenly spaced values of a gradient, as a view if possible."""
    return gradient.detach().reshape(-1)[:: max(1, gradient.numel() // _SAMPLED)]


class Backward:
    """Communication hook that sends the buckets of a backward pass through the hook for gradients or for momenta.

    Parameters
    ----------
    ddp : DistributedDataParallel
        The model. Copies of the model by pickle or deepcopy have no connection to an optimizer.
    hook_of : callable
        Returns the hook that sends tensors of a given kind; None for local steps.
    kind_of_step : callable
        Returns the kind of tensors that the next step sends.
    moves : callable
        Returns True if steps update a given parameter.
    clip_factor : callable or None
        Returns the factor that clips this rank's gradients, given a list of all buckets' buffers. Buckets are then
        sent only after the last one is complete. None: gradients are not clipped.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        hook_of: Callable[[Kind], Hook | None],
        kind_of_step: Callable[[], Kind],
        moves: Callable[[torch.Tensor], bool],
        clip_factor: Callable[[list[torch.Tensor]], float] | None,
    ) -> None:
        self.guard = Guard()
        self.reduced: set[torch.nn.Parameter] = set()  # parameters whose gradients the last backward pass has averaged
        self._ddp, self._hook_of, self._kind_of_step = ddp, hook_of, kind_of_step
        self._moves, self._clip_factor = moves, clip_factor
        self._n_parameters = count_parameters(ddp)
        self._before = 0  # step count of the hook at the start of this backward pass
        # Buckets that are delayed until the norm of all gradients is known.
        self._held: list[tuple[_Bucket, _Future]] = []
        self._buckets: list[_Reduced] = []  # buckets that this backward pass reduces
        self.__name__ = self.__qualname__ = "codec.torch.OneBitAdam"  # torch reads both attributes of a hook

    def __getstate__(self) -> dict[str, Any]:
        """Return only the name, because a copy of the model has no optimizer."""
        return {"__name__": self.__name__, "__qualname__": self.__qualname__}

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # pyright: ignore[reportPrivateImportUsage]
        """Reduce a bucket; in a local step, return it unchanged."""
        if "_ddp" not in self.__dict__:
            raise ArgumentError("this model is a copy, which no OneBitAdam serves: call optimizer.register(model)")
        kind, place = self._kind_of_step(), place_of(self._ddp, bucket, self._n_parameters)
        if place[0] == 0:
            self._begin(kind)
        future = self._send(kind, bucket) if self._clip_factor is None else self._hold(kind, bucket, *place)
        self._buckets.append((cast(list[torch.nn.Parameter], bucket.parameters()), future))
        if place[1] and backward_pass() is not None:
            call_after_backward(lambda: self._end(kind))
        return future

    def _begin(self, kind: Kind) -> None:
        """Begin a backward pass.

        Raises
        ------
        ArgumentError
            The pass runs within join(). Ranks that have joined take no steps, so their momenta would be outdated. Or
            the model requires finalize_backward(), which stores gradients after the end of the pass.
        StateError
            The pass would add gradients to the momenta of the previous pass.
        """
        if joins(self._ddp):
            raise ArgumentError(
                "OneBitAdam does not support model.join(), whose joined ranks take no steps: give all ranks the same "
                "number of batches, or use join(throw_on_early_termination=True)"
            )
        if finalizes_manually(self._ddp):
            raise ArgumentError(
                "OneBitAdam does not support require_manual_backward_finalization: it compares gradients with those at "
                "the end of backward(), before finalize_backward() stores them. Set it to False"
            )
        if kind != "gradients":
            self.guard.check_first()
        self.guard.clear()
        self.reduced, self._held, self._buckets = set(), [], []
        hook = self._hook_of(kind)
        self._before = 0 if hook is None else hook.reducer.state.count

    def _send(self, kind: Kind, bucket: _Bucket) -> _Future:
        """Begin to reduce a bucket; in a local step, return it unchanged."""
        hook = self._hook_of(kind)
        if hook is not None:
            return hook.reduce(bucket)
        future: _Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _hold(self, kind: Kind, bucket: _Bucket, index: int, last: bool) -> _Future:
        """Delay a bucket until the last one is complete; then clip all buckets, and begin to reduce them."""
        future: _Future = torch.futures.Future()
        hook = self._hook_of(kind)
        if index == 0 and hook is not None and backward_pass() is not None:
            # If the backward pass fails on this rank, cancel the step, so that other ranks fail before their timeout.
            call_after_backward(BackwardEnd(None, hook.reducer.cancel))
        self._held.append((bucket, future))
        if last:
            held, self._held = self._held, []
            assert self._clip_factor is not None
            factor = self._clip_factor([each.buffer() for each, _ in held if not each.buffer().is_sparse])
            for each, promised in held:
                if factor < 1:
                    each.buffer().mul_(factor)
                sent = self._send(kind, each)
                sent.add_done_callback(lambda done, promised=promised: promised.set_result(done.wait()))
        return future

    def _end(self, kind: Kind) -> None:
        """Record the averaged gradients, which torch has stored by now, unless the step has failed."""
        buckets, self._buckets = self._buckets, []
        hook = self._hook_of(kind)
        if hook is not None and hook.reducer.state.count == self._before:
            return
        self.reduced = {p for parameters, _ in buckets for p in parameters}
        ddp: Any = self._ddp  # torch does not type its attributes
        if kind == "momenta" and (ddp.find_unused_parameters or ddp.static_graph):
            self._store(buckets)
        self.guard.record(self.reduced)

    def _store(self, buckets: list[_Reduced]) -> None:
        """Store averaged momenta in ``p.grad``. Torch does not store them for parameters that no rank has used."""
        for parameters, future in buckets:
            for p, momentum in zip(parameters, gradients_in(future.wait(), parameters), strict=True):
                if self._moves(p) and p.grad is None:
                    p.grad = momentum.clone()
                elif self._moves(p) and p.grad is not None:
                    p.grad.copy_(momentum)
