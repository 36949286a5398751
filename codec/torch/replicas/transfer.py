"""Send tensors and states to the ranks that differ, and compute the digests by which ranks compare them."""

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from codec import FrameError, StateError
from codec.arguments import shown
from codec.torch.replicas.fragment import split
from codec.torch.replicas.ranks import Ranks
from codec.torch.transport.messages import Array

_BATCH_NBYTES = 1 << 26  # bytes after which a message with tensors ends


def send_tensors(ranks: Ranks, sources: Mapping[int, int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send tensors to each rank that has an item in `sources`, from the rank that the item names.

    All ranks pass the same `sources`. A rank and its source have tensors of the same shapes and dtypes.

    Returns
    -------
    list of tensor
        On a receiver: copies of the tensors of its source, in host memory. On other ranks: `tensors`.
    """
    found: list[torch.Tensor] = []
    batches = _batches(tensors)
    counts = ranks.agreed("a transfer", {}, [len(batches)])  # shards of ranks may have different sizes
    batches += [[] for _ in range(max(count for [count] in counts) - len(batches))]
    for batch in batches:
        data = b"".join(_bytes_of(x).data for x in batch) if ranks.rank in sources.values() else b""
        theirs = ranks.send(data, sources)
        if ranks.rank not in sources:
            continue
        sizes = [x.nbytes for x in batch]
        if len(theirs) != sum(sizes):
            raise FrameError(
                f"rank {sources[ranks.rank]} has sent {len(theirs)} bytes of parameters, but {sum(sizes)} are expected"
            )
        if not theirs:
            found += [x.detach().to("cpu", copy=True) for x in batch]
            continue
        parts = split(torch.frombuffer(bytearray(theirs), dtype=torch.uint8), [(n,) for n in sizes])
        found += [part.clone().view(x.dtype).view(x.shape) for x, part in zip(batch, parts, strict=True)]
    return found if ranks.rank in sources else list(tensors)


def _batches(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide tensors, in their order, into messages of at least _BATCH_NBYTES, except for the last one."""
    batches: list[list[torch.Tensor]] = []
    nbytes = _BATCH_NBYTES
    for x in tensors:
        if nbytes >= _BATCH_NBYTES:
            batches.append([])
            nbytes = 0
        batches[-1].append(x)
        nbytes += x.nbytes
    return batches


def send_state(ranks: Ranks, sources: Mapping[int, int], state: Mapping[str, Any]) -> dict[str, Any]:
    """Send the state dict of an optimizer, as :func:`send_tensors` sends tensors; on other ranks, return `state`."""
    data = ranks.send(_saved(state), sources)
    return _loaded(data, sources[ranks.rank]) if ranks.rank in sources else dict(state)


def exchange_states(ranks: Ranks, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send a state to all ranks of this site, and return the states of all of them; all ranks call this."""
    site = ranks.levels.within.ranks
    return [_loaded(data, rank) for rank, data in zip(site, ranks.exchange(_saved(state)), strict=True)]


def _saved(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def _loaded(data: bytes, source: int) -> dict[str, Any]:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as e:  # torch does not document which errors damaged files raise
        raise StateError(f"a state that rank {source} has sent cannot be read: {shown(e)}") from e


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
