"""State that a training step changes before the optimizer: gradients, buffers of modules, random generators."""

from collections.abc import Iterable

import torch


class Snapshot:
    """Copy of what a step changes, so that a step that failed can be repeated.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        Modules of the stages of this rank.
    devices : iterable of torch.device
        Their devices, whose random generators are restored as well as that of the CPU.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], devices: Iterable[torch.device]) -> None:
        modules = list(modules)
        # A gradient of None needs no copy: call zero_grad() before the step.
        self._gradients = [(p, p.grad, _copy(p.grad)) for m in modules for p in m.parameters()]
        self._buffers = [(b, b.detach().clone()) for m in modules for b in m.buffers()]
        self._cpu = torch.get_rng_state()
        self._devices = [
            (d, torch.get_device_module(d).get_rng_state(d)) for d in dict.fromkeys(devices) if d.type != "cpu"
        ]

    def restore(self) -> None:
        """Restore gradients, buffers and random generators."""
        with torch.no_grad():
            for p, grad, copy in self._gradients:
                if grad is not None and copy is not None:
                    grad.copy_(copy)
                p.grad = grad
            for buffer, copy in self._buffers:
                buffer.copy_(copy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)


def _copy(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach().clone()
