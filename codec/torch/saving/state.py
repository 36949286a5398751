"""Convert state dicts to ones whose tensors are frames, for ``torch.save`` and ``torch.load(weights_only=True)``."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

import codec
from codec import ArgumentError, FrameError
from codec.errors import CodecError
from codec.spec_config import self_contained
from codec.specs import Lossless, SpecLike
from codec.torch._compat import is_plain

_KEY = "codec.frame"  # the only key of a dict that replaces a tensor
_HOST = torch.empty(0, dtype=torch.uint8, device="cpu")  # frames are decoded to tensors in host memory, like this one
_SMALL = 1024  # bytes; smaller tensors are not encoded

Path = tuple[object, ...]


def pack_state(state: Any, spec: SpecLike = "lossless") -> Any:
    """Replace the tensors of a state dict by frames, for ``torch.save``.

    ``torch.load`` reads the file even with ``weights_only=True``, and :func:`unpack_state` restores the tensors.
    Restored tensors share memory if the originals shared all of it, as tied weights do. Tensors that overlap only
    partly become separate.

    Parameters
    ----------
    state : dict, list, tuple or tensor
        State dict of a model, of an optimizer, or any nesting of dicts, lists and tuples. It is not changed.
    spec : Spec or name of a preset
        Spec of floating-point tensors; :class:`codec.Lossless` by default. Tensors of integers and bools are encoded
        losslessly.

    Returns
    -------
    dict, list, tuple or tensor
        Copy of the structure, with the types and keys of `state`. ``{"codec.frame": tensor of uint8}``, in host memory,
        replaces a tensor of 1,024 bytes or more. Smaller tensors, parameters, sparse tensors, tensors of subclasses
        such as DTensor, and tensors of dtypes that cannot be encoded stay unchanged.

    Raises
    ------
    ArgumentError
        A tensor holds NaN or Inf, and the codec is lossy; the message names the tensor. Or a dict in `state` already
        has the key ``"codec.frame"``.
    SpecError
        `spec` needs an optimizer or a base.

    Examples
    --------
    >>> model = torch.nn.Linear(100, 100)
    >>> packed = codec.torch.pack_state(model.state_dict())
    >>> model.load_state_dict(codec.torch.unpack_state(packed))
    <All keys matched successfully>
    """
    chosen, packed = self_contained(spec), dict[Any, dict[str, torch.Tensor]]()

    def pack(path: Path, x: torch.Tensor) -> Any:
        if not is_plain(x) or x.nbytes < _SMALL:
            return x
        key = x.data_ptr(), x.device, x.dtype, x.shape, x.stride()
        if key not in packed:
            packed[key] = {_KEY: _frame_of(path, x, chosen if x.is_floating_point() else Lossless())}
        return packed[key]

    def keep(path: Path, x: Mapping[Any, Any]) -> None:
        if _KEY in x:
            raise ArgumentError(
                f"{_shown(path)} has the key {_KEY!r} of a packed tensor: the state is already packed, and is packed "
                "only once"
            )

    return _mapped(state, (), pack, keep)


def _frame_of(path: Path, x: torch.Tensor, spec: codec.Spec) -> torch.Tensor:
    values = x.detach().to("cpu")
    try:
        frame = codec.encode(values, spec if x.dtype.itemsize > 1 else Lossless())
    except CodecError as e:
        e.of(_shown(path))
        raise
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def unpack_state(state: Any, *, max_nbytes: int | None = None) -> Any:
    """Restore the tensors of a state dict that :func:`pack_state` returned, in host memory.

    Parameters
    ----------
    state : dict, list, tuple or tensor
        Return value of ``torch.load``. It is not changed.
    max_nbytes : int, optional
        Upper bound of the bytes of each tensor, as in :func:`codec.decode`. Set it for files that you do not trust, or
        if a tensor of more than 1 GiB is nearly constant.

    Returns
    -------
    dict, list, tuple or tensor
        Copy of the structure, in which tensors replace the frames.

    Raises
    ------
    FrameError
        A frame is damaged, or declares a tensor that is too large; the message names the tensor.

    Examples
    --------
    >>> packed = codec.torch.pack_state({"step": 3, "mean": torch.ones(1000)})
    >>> codec.torch.unpack_state(packed)["mean"].sum()
    tensor(1000.)
    """
    unpacked = dict[int, torch.Tensor]()

    def unpack(path: Path, x: Mapping[Any, Any]) -> torch.Tensor | None:
        if _KEY not in x:
            return None
        frame = x[_KEY]
        if len(x) != 1 or not isinstance(frame, torch.Tensor) or frame.dtype != torch.uint8 or frame.dim() != 1:
            raise FrameError(f"{_KEY!r} of {_shown(path)} must be a tensor with the bytes of a frame")
        if frame.data_ptr() not in unpacked:
            try:
                tensor = codec.decode(frame.cpu(), like=_HOST, max_nbytes=max_nbytes)
            except CodecError as e:
                e.of(_shown(path))
                raise
            unpacked[frame.data_ptr()] = tensor
        return unpacked[frame.data_ptr()]

    return _mapped(state, (), lambda _, x: x, unpack)


def _shown(path: Path) -> str:
    return ".".join(map(str, path)) or "the state"


def _mapped(
    x: Any, path: Path, tensor: Callable[[Path, torch.Tensor], Any], mapping: Callable[[Path, Mapping[Any, Any]], Any]
) -> Any:
    """Copy a structure. tensor(path, x) replaces each tensor x; mapping(path, x), if not None, replaces a dict x."""
    if isinstance(x, torch.Tensor):
        return tensor(path, x)
    if isinstance(x, dict):
        given = cast(dict[Any, Any], x)
        if (found := mapping(path, given)) is not None:
            return found
        result = copy.copy(given)  # also copies attributes of an OrderedDict, such as `_metadata` with module versions
        for key, value in given.items():
            result[key] = _mapped(value, (*path, key), tensor, mapping)
        return result
    if type(x) in (list, tuple):
        items = cast(list[Any], x)
        return type(items)(_mapped(value, (*path, i), tensor, mapping) for i, value in enumerate(items))
    return x
