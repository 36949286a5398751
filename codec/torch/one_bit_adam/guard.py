"""Detection of gradients that were changed after the backward pass of a DistributedDataParallel."""

from collections.abc import Iterable

import torch

from codec import StateError

_SAMPLED = 64  # values of each gradient that are compared


class Guard:
    """Gradients of a model after a backward pass that has averaged them.

    After the freeze, DistributedDataParallel's gradients hold averaged momenta. Whatever changes gradients between
    backward() and step(), such as clip_grad_norm_, would change the momentum instead. It is refused in all steps, so
    that a training fails in its first step and not at the freeze. Versions count the writes of torch's operations, but
    not those of a GradScaler, so some values are compared, too.
    """

    def __init__(self) -> None:
        self._gradients: list[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]] = []
        self.recorded = False  # a backward pass has averaged gradients since the last step

    def record(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the gradients of a backward pass that has succeeded."""
        given = [(p, p.grad) for p in parameters if p.grad is not None]
        self._gradients = [(p, g, g._version, _sample(g).clone()) for p, g in given]
        self.recorded = True

    def clear(self) -> None:
        """Forget the gradients, after a step or after they were set to zero."""
        self._gradients.clear()
        self.recorded = False

    def check_first(self) -> None:
        """Raise StateError if a backward pass would add gradients to momenta that no step has used."""
        if any(p.grad is gradient for p, gradient, _, _ in self._gradients):
            raise StateError(
                "a second backward pass before step() would add gradients to averaged momenta: call "
                "optimizer.zero_grad() first, or accumulate gradients under no_sync()"
            )

    def check_unchanged(self, scaled: bool) -> None:
        """Check that gradients are as the backward pass left them.

        Parameters
        ----------
        scaled : bool
            True if a known GradScaler has unscaled the gradients.

        Raises
        ------
        StateError
            There was no backward pass, or gradients were changed since.
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
    """Return some values of a gradient, as a view if its memory allows."""
    return gradient.detach().reshape(-1)[:: max(1, gradient.numel() // _SAMPLED)]
