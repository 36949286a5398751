"""Save and restore the state that forward and backward change: gradients, module buffers and random generators."""

from collections.abc import Iterable

import torch

from codec.torch import _compat


class ModuleBuffers:
    """Copy of the buffers of modules.

    A module may write to a buffer in place, or assign another tensor to its name. So the copy consists of the names of
    buffers, their tensor objects, and their values.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        Modules, whose submodules are included.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        tables = [_compat.buffers_of(owner) for m in modules for owner in m.modules()]
        self._tables = [(table, dict(table)) for table in tables]
        tensors = [b for _, names in self._tables for b in names.values() if b is not None and _writable(b)]
        self._values = [(b, b.detach().clone()) for b in tensors]

    def restore(self) -> None:
        """Restore names, tensors and values. Buffers that have appeared since are removed."""
        for table, names in self._tables:
            table.clear()
            table.update(names)
        with torch.no_grad():
            for buffer, copy in self._values:
                buffer.copy_(copy)


class Snapshot:
    """Copy of the state that a step changes, so that a failed step can be repeated.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        Modules of the stages of this rank.
    devices : iterable of torch.device
        Devices of the modules. Their random generators and that of the CPU are restored.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], devices: Iterable[torch.device]) -> None:
        modules = list(modules)
        # Gradients that are None, as after zero_grad(), need no copy.
        self._gradients = [(p, p.grad, _copy(p.grad)) for m in modules for p in m.parameters()]
        self._buffers = ModuleBuffers(modules)
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
        self._buffers.restore()
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)


def _copy(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach().clone()


def _writable(buffer: torch.Tensor) -> bool:
    """Return False for a tensor that cannot be written in place: an inference tensor or an expanded one."""
    if buffer.is_inference():
        return False
    if buffer.layout != torch.strided:
        return True
    return not any(n > 1 and stride == 0 for n, stride in zip(buffer.shape, buffer.stride(), strict=True))
