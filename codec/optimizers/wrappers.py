"""Wrappers of torch optimizers."""

from typing import Any


def unwrapped(optimizer: Any) -> Any:
    """Return the torch optimizer inside wrappers such as those of Accelerate and Lightning."""
    for _ in range(8):
        inside = getattr(optimizer, "optimizer", None)
        if not hasattr(inside, "param_groups"):
            break
        optimizer = inside
    return optimizer
