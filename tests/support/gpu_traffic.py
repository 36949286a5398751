"""Count the host's calls of the emulated GPU (`support.cuda_tensors`): waits, copies, launches and allocations."""

from collections import Counter
from contextlib import contextmanager

import torch

from codec.torch.transport import nccl, streams
from support.cuda_tensors import DeviceTensor, emulated_gpu
from support.device import Emulated

NAMES = "waits", "copies", "launches", "allocations"
_READ = {"item", "tolist", "__bool__", "__float__", "__int__"}
_ENGINE = {"launch": "launches", "upload": "copies", "copy": "copies", "clear": "launches", "read_back": "copies"}
_MADE = {"allocate": "allocations", "empty": "allocations"}  # Emulated.new_bytes calls empty


def _launched(name, result, args):
    """Return True if an operation computed values, in place or into new memory; False if it returned a view."""
    if name in ("copy_", "to"):  # counted as copies elsewhere
        return False
    with torch._C.DisableTorchFunctionSubclass():
        where = result.untyped_storage().data_ptr()
        given = [x for x in args if isinstance(x, torch.Tensor)]
        return (name.endswith("_") and name[0] != "_") or all(x.untyped_storage().data_ptr() != where for x in given)


class Traffic(Counter):
    """Counts by kind of call. A wait is counted only if the GPU received work since the last wait."""

    def __init__(self):
        super().__init__()
        self._works = False

    def add(self, name):
        """Count a call that gives the GPU work, or an allocation."""
        self[name] += 1
        self._works |= name != "allocations"

    def wait(self):
        """Count a wait of the host for the GPU."""
        self["waits"] += self._works
        self._works = False


@contextmanager
def counted_gpu():
    """Make codec.torch find an emulated GPU (`emulated_gpu`); yield it with the counts of this process."""
    traffic, restore = Traffic(), []

    def around(owner, name, before):
        if (call := getattr(owner, name, None)) is None:
            return

        def counted(*args, **how):
            before(*args, **how)
            return call(*args, **how)

        restore.append((owner, name, vars(owner)[name]))
        setattr(owner, name, counted)

    def copied_and_read(*_, **__):
        traffic.add("copies")
        traffic.wait()

    def crosses(to, values, *_, **how):  # the host waits for a copy from pageable memory
        traffic.add("copies" if not isinstance(values, DeviceTensor) else "launches")
        if not isinstance(values, DeviceTensor) and not how.get("non_blocking"):
            traffic.wait()

    def moved(x, *args, **how):
        if not isinstance(x, DeviceTensor) and any(str(arg).startswith("cuda") for arg in (*args, how.get("device"))):
            copied_and_read()

    def made(*args, device=None, **how):
        if str(device).startswith("cuda"):
            traffic.add("allocations")

    function = DeviceTensor.__torch_function__.__func__

    def torch_function(cls, func, types, args=(), kwargs=None):
        name, result = getattr(func, "__name__", ""), function(cls, func, types, args, kwargs)
        if name in _READ:
            copied_and_read()
        elif name in ("__setitem__",) or (isinstance(result, DeviceTensor) and _launched(name, result, args)):
            traffic.add("launches")
        return result

    with emulated_gpu() as device:
        for name, kind in (_ENGINE | _MADE).items():
            around(Emulated, name, lambda *_, kind=kind, **__: traffic.add(kind))
        around(Emulated, "download", lambda *_: (traffic.add("copies"), traffic.wait()))
        around(Emulated, "wait", lambda *_: traffic.wait())
        around(DeviceTensor, "cpu", copied_and_read)
        around(DeviceTensor, "copy_", crosses)
        around(torch.Tensor, "to", moved)
        for name in ("empty", "zeros", "as_tensor"):
            around(torch, name, made)
        around(nccl.DeviceTransfer, "all_to_all", lambda *_: traffic.add("launches"))
        around(nccl.DeviceTransfer, "scatter", lambda *_: traffic.add("launches"))
        around(nccl.DeviceTransfer, "all_gather", lambda *_: traffic.add("launches"))
        around(nccl.DeviceTransfer, "settle", lambda transfer: transfer._in_flight and traffic.wait())
        around(streams.StreamOrder, "finish", lambda *_: traffic.wait())
        DeviceTensor.__torch_function__ = classmethod(torch_function)
        try:
            yield device, traffic
        finally:
            DeviceTensor.__torch_function__ = classmethod(function)
            for owner, name, call in reversed(restore):
                setattr(owner, name, call)
