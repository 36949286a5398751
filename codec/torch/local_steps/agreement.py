"""Agreement of all ranks: equal arguments, and equal parameters at the beginning."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from codec import CodecError, FrameError, PeerError, StateError
from codec.arguments import shown
from codec.torch.local_steps.ranks import Ranks
from codec.torch.transport.messages import Array

_CHUNK = 1 << 26  # bytes of a message with parameters


@dataclass(frozen=True)
class Position:
    """How far a rank is: optimizer steps, synchronizations, and the digest of the values that all ranks share."""

    steps: int
    rounds: int
    digest: str


def refuse(ranks: Ranks, error: Exception) -> None:
    """Report to the other ranks, which wait in :func:`agree`, that this rank cannot take part."""
    try:
        ranks.exchange({"error": str(error)})
    except CodecError:
        return  # `error` is raised anyway


def agree(ranks: Ranks, arguments: Mapping[str, Any], position: Position) -> list[Position]:
    """Compare the arguments of all ranks, and return the position of each.

    Parameters
    ----------
    ranks : Ranks
        The ranks, which all call this.
    arguments : dict
        Values that JSON can hold, which must be the same on all ranks.
    position : Position
        Position of this rank.

    Raises
    ------
    PeerError
        A rank has other arguments, has an error, or is lost.
    """
    heads = ranks.exchange({"arguments": arguments, "position": list(vars(position).values())})
    for rank, head in enumerate(heads):
        if "error" in head:
            raise PeerError(f"rank {rank} cannot use LocalSteps: {shown(head['error'])}")
    first = _arguments(0, heads[0])
    for rank, head in enumerate(heads):
        theirs = _arguments(rank, head)
        for name in first.keys() | theirs.keys():
            if theirs.get(name) != first.get(name):
                raise PeerError(
                    f"rank {rank} has {_difference(name, theirs.get(name), first.get(name))} of rank 0: pass the same "
                    "arguments, and the same model, on all ranks"
                )
    return [_position(rank, head.get("position")) for rank, head in enumerate(heads)]


def source_of(positions: Sequence[Position]) -> int:
    """Return the rank whose values all ranks take: the first of those that are furthest."""
    return max(range(len(positions)), key=lambda rank: (positions[rank].rounds, positions[rank].steps, -rank))


def check_equal(positions: Sequence[Position]) -> None:
    """Raise PeerError unless all ranks are at the same position."""
    for rank, theirs in enumerate(positions):
        if theirs != positions[0]:
            raise PeerError(
                f"rank {rank} has taken {theirs.steps} steps and {theirs.rounds} synchronizations, rank 0 "
                f"{positions[0].steps} and {positions[0].rounds}, or they were synchronized to other parameters: load "
                "states that were saved together"
            )


def send_tensors(
    ranks: Ranks, source: int, receivers: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Send tensors from one rank to others; all ranks call this with tensors of the same shapes and dtypes.

    Returns
    -------
    list of tensor
        Copies of the values of `source`, on a receiver; else `tensors`.
    """
    receives = ranks.rank in receivers
    found = [torch.empty_like(x, device="cpu").contiguous() for x in tensors] if receives else list(tensors)
    for mine, place in zip(tensors, found, strict=True):
        values = _bytes_of(place if receives else mine.detach().cpu())
        for begin in range(0, len(values), _CHUNK):
            part = values[begin : begin + _CHUNK]
            sent = [part if ranks.rank == source and rank in receivers else b"" for rank in range(ranks.size)]
            data = ranks.exchange_bytes(sent)[source]
            if receives:
                if len(data) != len(part):
                    raise FrameError(f"rank {source} has sent {len(data)} bytes of parameters, not {len(part)}")
                part[:] = memoryview(data)
    return found


def send_state(ranks: Ranks, source: int, receivers: Sequence[int], state: Mapping[str, Any]) -> dict[str, Any]:
    """Send the state dict of an optimizer from one rank to others; return it on a receiver, else `state`."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    sent = [file.getvalue() if ranks.rank == source and rank in receivers else b"" for rank in range(ranks.size)]
    data = ranks.exchange_bytes(sent)[source]
    if ranks.rank not in receivers:
        return dict(state)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as e:  # torch names no errors of damaged files
        raise StateError(f"rank {source} has sent no state of an outer optimizer: {shown(e)}") from e


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of the bits of tensors."""
    found = hashlib.blake2b(digest_size=16)
    for x in tensors:
        found.update(_bytes_of(x.detach().cpu()).data)
    return found.hexdigest()


def _bytes_of(x: torch.Tensor) -> Array:
    """Return the bytes of a tensor in host memory, which are those of the tensor itself if it is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy()


def _arguments(rank: int, head: Mapping[str, Any]) -> dict[str, Any]:
    found = head.get("arguments")
    if not isinstance(found, dict):
        raise PeerError(f"rank {rank} has sent no arguments of LocalSteps: use the same version on all ranks")
    return cast(dict[str, Any], found)


def _position(rank: int, found: Any) -> Position:
    numbers = cast(list[Any], found if isinstance(found, list) else [])
    if [type(x) for x in numbers] != [int, int, str]:
        raise PeerError(f"rank {rank} has sent no position of LocalSteps: use the same version on all ranks")
    return Position(*numbers)


def _difference(name: str, theirs: Any, first: Any) -> str:
    """Return the text of a difference; lists, such as parameters, differ in their first unequal item."""
    if not isinstance(theirs, list) or not isinstance(first, list):
        return f"{name}={_text(theirs)}, not the {name}={_text(first)}"
    mine, other = cast(list[Any], theirs), cast(list[Any], first)
    for a, b in zip(mine, other, strict=False):
        if a != b:
            return f"other {name}: {_text(a)} in place of {_text(b)}"
    return f"{len(mine)} {name}, not the {len(other)}"


def _text(value: Any) -> str:
    """Return an argument of another rank, maybe a text already, for a message."""
    return shown(cast(object, value))
