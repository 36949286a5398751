"""torch tensors on a GPU, or emulated ones whose kernels run on the CPU (`support.device`).

torch without CUDA cannot create tensors on a GPU. A DeviceTensor emulates one: its values lie in host memory, and its
`device` is cuda:0. As torch does for a GPU tensor, it rejects conversion to numpy and operations with host tensors.
"""

import contextlib
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from codec.engines.cuda import devices as engine_devices
from codec.torch._compat import timeout_of
from codec.torch.group import communicator
from codec.torch.transport import nccl, streams
from support.device import Emulated, build

NCCL = os.environ.get("CODEC_NCCL") == "1"  # True: ranks that share a GPU communicate by real NCCL
DEVICE = torch.device("cuda", 0)
_CROSS = {"copy_", "to", "cpu", "__get__", "as_subclass", "detach"}  # operations allowed to mix host and device tensors


class _Storage:
    """Stand-in for the storage of a DeviceTensor, on the emulated device."""

    device = DEVICE

    def __init__(self, storage):
        self._storage = storage

    def nbytes(self):
        return self._storage.nbytes()

    def data_ptr(self):
        return self._storage.data_ptr()


class DeviceTensor(torch.Tensor):
    """torch tensor on the emulated GPU, whose values lie in host memory."""

    copied_nbytes = 0  # total bytes copied from the emulated GPU to the host

    @property
    def device(self):
        return DEVICE

    @property
    def is_cuda(self):
        return True

    @property
    def is_cpu(self):
        return False

    def untyped_storage(self):
        return _Storage(super().untyped_storage())

    def cpu(self):
        DeviceTensor.copied_nbytes += self.nbytes
        return host(self).clone()

    def numpy(self):
        raise TypeError("can't convert a tensor on the emulated GPU to numpy: use Tensor.cpu() first")

    def __array__(self, *_):
        return self.numpy()

    def to(self, *args, **how):
        if any(str(arg) == "cpu" for arg in (*args, how.get("device"))):
            return self.cpu()
        args = [arg for arg in args if not _is_device(arg)]
        return super().to(*args, **{k: v for k, v in how.items() if k != "device"}) if args else self

    def copy_(self, values, non_blocking=False):
        host(self).copy_(host(values))
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name not in _CROSS:
            with torch._C.DisableTorchFunctionSubclass():
                there = [isinstance(t, DeviceTensor) for t in _tensors((args, kwargs or {})) if t.dim()]
            assert all(there), f"{name} mixes tensors on the emulated GPU and in host memory"
        return super().__torch_function__(func, types, args, kwargs or {})


def _tensors(x):
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, dict):
        yield from _tensors(list(x.values()))
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _tensors(each)


def _is_device(x):
    return isinstance(x, torch.device | str) and str(x).startswith("cuda")


def on_device(x):
    """Return a tensor on the emulated GPU that shares the memory of a tensor on the host."""
    return x.detach().as_subclass(DeviceTensor)


def host(x):
    """Return a tensor in host memory with the values of x. For an emulated GPU it shares the memory of x."""
    if not isinstance(x, DeviceTensor):
        return x.detach().cpu()
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().as_subclass(torch.Tensor)


@contextlib.contextmanager
def gpu(kind):
    """Yield a function that copies a tensor to a GPU.

    Parameters
    ----------
    kind : {"emulated", "real"}
        "emulated": inside the context, codec.torch finds a GPU, and torch can create tensors on it.
    """
    if kind == "real":
        torch.cuda.set_device(0)
        yield torch.Tensor.cuda
        return
    with emulated_gpu():
        yield lambda x: on_device(x.clone(memory_format=torch.preserve_format))


@contextlib.contextmanager
def emulated_gpu():
    """Emulate a GPU: codec.torch finds it, and torch can create tensors on it."""
    made = {name: getattr(torch, name) for name in ("empty", "zeros", "as_tensor")}
    to, stream = torch.Tensor.to, torch.cuda.current_stream
    before = engine_devices.backend, torch.cuda.current_device

    def making(make):
        def on(*args, device=None, pin_memory=False, **how):
            if _is_device(device):
                return on_device(make(*args, **how))
            return make(*args, **how) if device is None else make(*args, device=device, **how)

        return on

    def moved(x, *args, **how):
        if not isinstance(x, DeviceTensor) and any(_is_device(arg) for arg in (*args, how.get("device"))):
            return on_device(x.clone())
        return to(x, *args, **how)

    try:
        engine_devices.backend = device = Emulated(build())
        for name, make in made.items():
            setattr(torch, name, making(make))
        torch.Tensor.to = moved
        torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
        torch.cuda.current_device = lambda: 0
        streams.engine_is_usable.cache_clear()
        yield device
    finally:
        engine_devices.backend, torch.cuda.current_device = before
        for name, make in made.items():
            setattr(torch, name, make)
        torch.Tensor.to, torch.cuda.current_stream = to, stream
        streams.engine_is_usable.cache_clear()


class GlooBetweenGpus:
    """Backend of torch.distributed that replaces NCCL: it has the same collectives, and sends their bytes by Gloo.

    NCCL before 2.30 does not let ranks share a GPU.
    """

    def __init__(self, group, prefix):
        store = PrefixStore(prefix, group.get_group_store().clone())
        self.pg = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout_of(group))

    def alltoall_base(self, received, rows, received_sizes, sent_sizes):
        assert sum(sent_sizes or [len(rows)]) == len(rows)
        assert sum(received_sizes or [len(received)]) == len(received)
        assert sent_sizes or len(rows) == len(received) == self.pg.size()
        assert rows.is_contiguous()
        assert received.is_contiguous()
        there = host(received)
        return _Arrival(self.pg.alltoall_base(there, host(rows), received_sizes, sent_sizes), there, received)

    def _allgather_base(self, received, row):
        assert received.numel() == self.pg.size() * row.numel()
        assert row.is_contiguous()
        there = host(received)
        return _Arrival(self.pg._allgather_base(there, host(row)), there, received)

    def allreduce(self, tensors):
        [to] = tensors
        there = host(to).clone()
        return _Arrival(self.pg.allreduce([there]), there, to)

    def abort(self):
        self.pg.abort()


class _Arrival:
    """Handle of a collective on host memory; waiting for it copies the result to the GPU."""

    def __init__(self, work, values, to):
        self._work, self._values, self._to = work, values, to

    def is_completed(self):
        return self._work.is_completed()

    def wait(self):
        self._work.wait()
        to = host(self._to) if isinstance(self._to, DeviceTensor) else self._to
        to.copy_(self._values)


def _follow(transfer, work):
    """Block until a collective has ended. NCCL would make the stream wait, but emulated kernels run immediately."""
    transfer._in_flight.append(work)
    transfer._await(work.is_completed)
    work.wait()


def new_group_of_gpus(ranks):
    """Create a group that sends frames between GPUs: by NCCL in ``make gpu-nccl``, otherwise by Gloo in its place."""
    if NCCL:
        versions = ranks.run(_nccl_version)
        assert min(versions) >= (2, 30), f"ranks share a GPU with NCCL 2.30 or later: this is {min(versions)}"
        ranks.new_group("cpu:gloo,cuda:nccl")
    else:
        ranks.run(connect_gpus)
        ranks.new_group()


def _nccl_version(rank, size):
    torch.cuda.set_device(0)
    return torch.cuda.nccl.version()


def connect_gpus(*_):
    """Replace functions of codec.torch so that groups of this process send frames from GPU to GPU."""
    communicator.uses_nccl, nccl.connect_nccl = lambda _: True, GlooBetweenGpus
    nccl.DeviceTransfer._follow = _follow
    nccl.engine_is_usable = lambda: True  # also called outside the context of `gpu`
