"""State dicts whose tensors are frames, for ``torch.save`` and ``torch.load(weights_only=True)``."""

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

_KEY = "codec.frame"  # the only key of a dict that stands for a tensor
_HOST = torch.empty(0, dtype=torch.uint8, device="cpu")  # the kind of tensors that frames are decoded to
_SMALL = 1024  # bytes; smaller tensors are not encoded

Path = tuple[object, ...]


def pack_state(state: Any, spec: SpecLike = "lossless") -> Any:
    """Replace the tensors of a state dict by frames, for ``torch.save``.

    ``torch.load`` reads the file also with ``weights_only=True``, and :func:`unpack_state` restores the tensors.
    Tensors that share all their memory, such as tied weights, share it afterwards; those that share a part do not.

    Parameters
    ----------
    state : dict, list, tuple or tensor
        State dict of a model, of an optimizer, or any nesting of dicts, lists and tuples. It is not changed.
    spec : Spec or name of a preset
        Spec of tensors of floats; :class:`codec.Lossless` by default. Other tensors are encoded losslessly.

    Returns
    -------
    dict, list, tuple or tensor
        Copy of the structure, with types and keys of `state`. A tensor of 1,024 bytes or more is ``{"codec.frame":
        tensor of uint8}``, in host memory. Unchanged are smaller tensors, parameters, sparse tensors, tensors of other
        classes such as DTensor, and those of dtypes that cannot be encoded.

    Raises
    ------
    ArgumentError
        A tensor holds NaN or Inf, which lossy codecs refuse; the message names it. Or `state` has a key
        ``"codec.frame"``.
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
            raise ArgumentError(f"{_shown(path)} has a key {_KEY!r}, as packed tensors have: pack a state once")

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
        What ``torch.load`` returned. It is not changed.
    max_nbytes : int, optional
        Upper bound of the size of each tensor, as in :func:`codec.decode`. Set it for files that you do not trust, and
        where a tensor of more than 1 GiB is nearly constant.

    Returns
    -------
    dict, list, tuple or tensor
        Copy of the structure with tensors in the place of frames.

    Raises
    ------
    FrameError
        A frame is damaged, or declares a tensor that is too large; the message names it.

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
            raise FrameError(f"{_shown(path)} has a key {_KEY!r} that is not a frame")
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
    """Return a copy of a structure: each tensor replaced by `tensor`, each mapping by `mapping` unless that is None."""
    if isinstance(x, torch.Tensor):
        return tensor(path, x)
    if isinstance(x, dict):
        given = cast(dict[Any, Any], x)
        if (found := mapping(path, given)) is not None:
            return found
        result = copy.copy(given)  # keep the attributes of an OrderedDict, such as the versions of modules
        for key, value in given.items():
            result[key] = _mapped(value, (*path, key), tensor, mapping)
        return result
    if type(x) in (list, tuple):
        items = cast(list[Any], x)
        return type(items)(_mapped(value, (*path, i), tensor, mapping) for i, value in enumerate(items))
    return x
