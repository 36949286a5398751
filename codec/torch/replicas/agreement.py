"""Agreement of all ranks on arguments, and transfer of parameters to ranks that differ."""

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from codec import CodecError, FrameError, PeerError, StateError
from codec.arguments import shown
from codec.torch.replicas.ranks import Ranks
from codec.torch.transport.messages import Array

_CHUNK = 1 << 26  # maximum bytes of a message with parameters


@dataclass(frozen=True)
class Position:
    """Progress of a rank and digest of its shared values, for comparison with the other ranks."""

    steps: int  # number of optimizer steps so far
    rounds: int  # number of synchronizations so far
    start: int  # step after which the current round of the schedule began
    length: int  # number of steps of this round
    digest: str  # digest of the values that must be equal on all ranks: anchors, and the outer optimizer's state


def refuse(ranks: Ranks, error: Exception) -> None:
    """Report an error of this rank to the other ranks, which wait in :func:`agree`; they raise PeerError."""
    try:
        ranks.exchange({"error": str(error)})
    except CodecError:
        return  # the caller raises `error` in any case


def agree(ranks: Ranks, arguments: Mapping[str, Any], position: Position) -> list[Position]:
    """Compare the arguments of all ranks, and return the position of each.

    Parameters
    ----------
    ranks : Ranks
        The ranks; all of them must call this.
    arguments : dict
        Values in types that JSON supports, which must be the same on all ranks.
    position : Position
        Position of this rank.

    Raises
    ------
    PeerError
        A rank has different arguments, has raised an error, or is lost.
    """
    heads = ranks.exchange({"arguments": arguments, "position": list(vars(position).values())})
    for rank, head in enumerate(heads):
        if "error" in head:
            raise PeerError(f"rank {rank} cannot use LocalSteps: {shown(head['error'])}")
    first = _arguments(0, heads[0])
    for rank, head in enumerate(heads):
        theirs = _arguments(rank, head)
        for name in first | theirs:
            if theirs.get(name) != first.get(name):
                raise PeerError(
                    f"rank {rank} has {_difference(name, theirs.get(name), first.get(name))} of rank 0: pass the same "
                    "arguments, and the same model, on all ranks"
                )
    return [_position(rank, head.get("position")) for rank, head in enumerate(heads)]


def source_of(positions: Sequence[Position]) -> int:
    """Return the rank whose values all ranks adopt: most synchronizations, then most steps, then the lowest rank."""
    return max(range(len(positions)), key=lambda rank: (positions[rank].rounds, positions[rank].steps, -rank))


def check_equal(positions: Sequence[Position]) -> None:
    """Raise PeerError unless steps, synchronizations and digests are equal on all ranks."""
    for rank, theirs in enumerate(positions):
        if theirs != positions[0]:
            raise PeerError(
                f"rank {rank} is at step {theirs.steps}, synchronization {theirs.rounds}, and rank 0 at step "
                f"{positions[0].steps}, synchronization {positions[0].rounds}; if these are equal, the synchronized "
                "parameters differ, or the schedule. Load states that all ranks saved at the same step"
            )


def send_tensors(
    ranks: Ranks, source: int, receivers: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Send tensors from rank `source` to `receivers`. All ranks must pass tensors of the same shapes and dtypes.

    Returns
    -------
    list of tensor
        On a receiver: copies of the tensors of `source`, in host memory. On other ranks: `tensors`.
    """
    receives, sends = ranks.rank in receivers, ranks.rank == source
    found = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors] if receives else list(tensors)
    for batch in _batches([x.nbytes for x in tensors]):
        data = b"".join(_bytes_of(tensors[i])[begin:end].tobytes() for i, begin, end in batch) if sends else b""
        sent = [data if rank in receivers else b"" for rank in range(ranks.size)]
        theirs = memoryview(ranks.exchange_bytes(sent)[source])
        if not receives:
            continue
        expected = sum(end - begin for _, begin, end in batch)
        if len(theirs) != expected:
            raise FrameError(f"rank {source} has sent {len(theirs)} bytes of parameters, but {expected} are expected")
        for i, begin, end in batch:
            _bytes_of(found[i])[begin:end] = theirs[: end - begin]
            theirs = theirs[end - begin :]
    return found


def _batches(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Divide tensors of the given sizes in bytes into messages: lists of (index of a tensor, first byte, end)."""
    batches: list[list[tuple[int, int, int]]] = []
    room = 0
    for i, nbytes in enumerate(sizes):
        begin = 0
        while begin < nbytes:
            if not room:
                batches.append([])
                room = _CHUNK
            end = min(nbytes, begin + room)
            batches[-1].append((i, begin, end))
            room, begin = room - (end - begin), end
    return batches


def send_state(ranks: Ranks, source: int, receivers: Sequence[int], state: Mapping[str, Any]) -> dict[str, Any]:
    """Send the state dict of an optimizer from rank `source` to `receivers`; on other ranks, return `state`."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    sent = [file.getvalue() if ranks.rank == source and rank in receivers else b"" for rank in range(ranks.size)]
    data = ranks.exchange_bytes(sent)[source]
    if ranks.rank not in receivers:
        return dict(state)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as e:  # torch does not document which errors damaged files raise
        raise StateError(
            f"the state of the outer optimizer that rank {source} has sent cannot be read: {shown(e)}"
        ) from e


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bits of tensors."""
    found = hashlib.blake2b(digest_size=16)
    for x in tensors:
        found.update(_bytes_of(x).data)
    return found.hexdigest()


def _bytes_of(x: torch.Tensor) -> Array:
    """Return the bytes of a tensor: a view if the tensor is contiguous and in host memory, else of a copy."""
    plain = x.detach().resolve_conj().resolve_neg()
    return plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _arguments(rank: int, head: Mapping[str, Any]) -> dict[str, Any]:
    found = head.get("arguments")
    if not isinstance(found, dict):
        raise PeerError(f"rank {rank} has sent no arguments of LocalSteps: use the same version on all ranks")
    return cast(dict[str, Any], found)


def _position(rank: int, found: Any) -> Position:
    numbers = cast(list[Any], found if isinstance(found, list) else [])
    if [type(x) for x in numbers] != [int, int, int, int, str]:
        raise PeerError(f"rank {rank} has sent no position of LocalSteps: use the same version on all ranks")
    return Position(*numbers)


def _difference(name: str, theirs: Any, first: Any) -> str:
    """Describe how an argument differs between two ranks; for lists, describe the first items that differ."""
    if not isinstance(theirs, list) or not isinstance(first, list):
        return f"{name}={_text(theirs)}, not the {name}={_text(first)}"
    mine, other = cast(list[Any], theirs), cast(list[Any], first)
    for a, b in zip(mine, other, strict=False):
        if a != b:
            return f"other {name}: {_text(a)} in place of {_text(b)}"
    return f"{len(mine)} {name}, not the {len(other)}"


def _text(value: Any) -> str:
    """Return the text of another rank's argument for an error message."""
    return shown(cast(object, value))
