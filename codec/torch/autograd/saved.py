"""Compress the activations that autograd saves for the backward pass, as frames in memory."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import codec
from codec import ArgumentError
from codec.errors import Status
from codec.readable import Rounded, share
from codec.spec_config import self_contained
from codec.specs import Lossless, SpecLike, require_feedback
from codec.torch._compat import is_plain, uncompiled

_FROM_PARAMETER = 8  # maximum operations, such as casts and views, between a parameter and a tensor derived from it


@dataclass(frozen=True, slots=True, repr=False)
class SavedStats(Rounded):
    """Statistics of the tensors that :class:`saved_tensors` has encoded, from its ``stats()``.

    Attributes
    ----------
    tensors : int
        Number of tensors encoded.
    raw_nbytes, frame_nbytes : int
        Total size of these tensors and of their frames, in bytes.
    held_nbytes, peak_nbytes : int
        Size of all frames that exist now, and the maximum of that size so far, in bytes.
    """

    tensors: int = 0
    raw_nbytes: int = 0
    frame_nbytes: int = 0
    held_nbytes: int = 0
    peak_nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.tensors} tensors: {share(self.frame_nbytes, self.raw_nbytes).replace('sent', 'kept')}"


class _Packed:
    """Frame of a tensor, with the device, dtype, shape and strides that :meth:`restore` gives the decoded tensor."""

    __slots__ = ("__weakref__", "device", "dtype", "frame", "shape", "storage", "stride")

    def __init__(self, x: torch.Tensor, spec: codec.Spec) -> None:
        self.device, self.dtype, self.shape, self.stride = x.device, x.dtype, x.shape, x.stride()
        self.storage: Any = None
        values = _in_memory_order(x.detach())
        floats = x.is_floating_point() and x.dtype.itemsize in (2, 4)
        try:
            self.frame = codec.encode(values, spec if floats else Lossless())
        except ArgumentError as e:
            if e.code != Status.NONFINITE:
                raise
            self.frame = codec.encode(values)  # lossless, for tensors with Inf such as masked attention scores

    def restore(self) -> torch.Tensor:
        x = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        dense = _in_memory_order(x, copy=False)
        if dense.is_contiguous():
            codec.decode(self.frame, out=dense)
        else:
            dense.copy_(codec.decode(self.frame, like=x))
        return x


def _in_memory_order(x: torch.Tensor, copy: bool = True) -> torch.Tensor:
    """Return a tensor without its expanded dimensions, and with dimensions sorted by descending stride."""
    for i, step in enumerate(x.stride()):
        if step == 0 and x.shape[i] > 1:  # expanded: all items share memory
            x = x.narrow(i, 0, 1)
    order = sorted(range(x.dim()), key=lambda i: (-x.stride(i), -x.shape[i]))
    x = x.permute(order)
    return x.contiguous() if copy else x


def _overlaps(x: torch.Tensor) -> bool:
    """Return True if items may share memory, as in ``Tensor.unfold``. Expanded dimensions do not count."""
    reach = 0
    for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if step and n > 1:
            if step <= reach:
                return True
            reach += step * (n - 1)
    return False


def _is_held_elsewhere(x: torch.Tensor) -> bool:
    """Return True if encoding would save no memory because the values exist anyway.

    This holds for leaves that require gradients, views of them, and tensors computed from a single parameter.
    """
    owner = x if x._base is None else x._base
    if owner.is_leaf and owner.requires_grad:
        return True
    node = x.grad_fn
    for _ in range(_FROM_PARAMETER):
        if node is None or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            return True
    return False


class saved_tensors(torch.autograd.graph.saved_tensors_hooks):
    """Context manager for a forward pass in which autograd saves activations as frames.

    Provisional: may change in any version.

    The backward pass, which may run outside of the context, decodes the frames. A tensor that several operations save
    is encoded once. The following are not encoded: parameters, tensors computed from a single parameter, leaves that
    require gradients and views of them, tensors whose items overlap, sparse tensors, tensors of subclasses or of more
    than 8 dimensions, and tensors smaller than `min_nbytes`.

    The context manager can be used with ``torch.utils.checkpoint``, where it encodes the tensors that are stored
    between forward and backward pass, and around calls of compiled functions. If a compiled function uses it,
    ``torch.compile`` runs it uncompiled.

    Parameters
    ----------
    spec : Spec or name of a preset
        Codec for float32, bfloat16 and float16. With :class:`codec.Lossless`, the default, gradients are bit-identical.
        Tensors of other dtypes, and tensors with NaN or Inf, are encoded losslessly.
    min_nbytes : int
        Size in bytes of the smallest tensor that is encoded.

    Raises
    ------
    SpecError
        `spec` needs an optimizer, a base or error feedback.

    Examples
    --------
    >>> net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    >>> with codec.torch.saved_tensors("balanced") as saved:
    ...     loss = net(torch.randn(256, 512)).square().mean()
    >>> loss.backward()
    >>> saved.stats().tensors
    3
    """

    def __init__(self, spec: SpecLike = "lossless", *, min_nbytes: int = 1 << 14) -> None:
        self._spec = self_contained(spec)
        require_feedback(self._spec, "use another spec")
        if type(min_nbytes) is not int or min_nbytes < 0:
            raise ArgumentError(f"min_nbytes must be an int of at least 0, got {min_nbytes!r}")
        self._min_nbytes = min_nbytes
        self._known: weakref.WeakValueDictionary[Any, _Packed] = weakref.WeakValueDictionary()
        self._tensors = self._raw = self._encoded = self._held = self._peak = 0
        super().__init__(uncompiled(self._pack), uncompiled(self._unpack))

    def __enter__(self) -> "saved_tensors":  # pyright: ignore[reportIncompatibleMethodOverride] - the base returns None
        super().__enter__()
        return self

    def stats(self) -> SavedStats:
        """Return statistics of the tensors encoded since the context manager was created."""
        return SavedStats(self._tensors, self._raw, self._encoded, self._held, self._peak)

    def _pack(self, x: torch.Tensor) -> Any:
        if not is_plain(x) or x.device.type not in ("cpu", "cuda") or x.nbytes < self._min_nbytes or x.is_inference():
            return x
        if _is_held_elsewhere(x) or _overlaps(x):
            return x
        # As long as this weak reference exists, no new storage can have the same id (cdata).
        storage: Any = StorageWeakRef(x.untyped_storage())
        key = storage.cdata, x._version, x.storage_offset(), x.dtype, x.shape, x.stride()
        packed = self._known.get(key)
        if packed is None or packed.storage.expired():
            packed = _Packed(x, self._spec)
            packed.storage = storage
            self._known[key] = packed
            self._count(x.nbytes, packed)
        return packed

    def _count(self, nbytes: int, packed: _Packed) -> None:
        size = len(packed.frame)
        self._tensors += 1
        self._raw += nbytes
        self._encoded += size
        self._held += size
        self._peak = max(self._peak, self._held)
        weakref.finalize(packed, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self._held -= size

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        return packed.restore() if isinstance(packed, _Packed) else packed
