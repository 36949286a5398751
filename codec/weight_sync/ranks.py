"""Agreements between the ranks that publish together, and the assignment of shards to ranks."""

import base64
import hashlib
import importlib
import json
import sys
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from codec._c.library import DTYPES
from codec.errors import ArgumentError, CodecError, PeerError
from codec.weight_sync.updates.kinds import TensorKind
from codec.weight_sync.updates.shards import Name, Shard, check_layouts, layouts

Held = dict[Shard, TensorKind]

_MOST_NBYTES = 1 << 30  # maximum size of the description of a rank's shards, in bytes


class PublishingRanks:
    """Ranks of a process group of torch.distributed, which exchange small descriptions, never values.

    Parameters
    ----------
    group : ProcessGroup
        The group.

    Raises
    ------
    ArgumentError
        This process is not a rank of the group.
    """

    def __init__(self, group: Any) -> None:
        self._exchange: Any = importlib.import_module("codec.torch").all_to_all_bytes  # by name: a higher layer
        distributed: Any = sys.modules["torch.distributed"]
        self._group, self._told = group, True
        self.rank, self.size = int(distributed.get_rank(group)), int(distributed.get_world_size(group))
        if self.rank < 0:
            raise ArgumentError("this process is not a rank of group=: create a Publisher on the ranks of the group")

    @contextmanager
    def call(self) -> Generator[None]:
        """Context of a call that all ranks make: if it fails on this rank, it fails on all ranks."""
        self._told = False
        try:
            yield
        except BaseException as e:
            if not self._told:
                with suppress(CodecError):  # the group may be lost, too
                    self._gather({"error": str(e) or type(e).__name__})
            raise

    def agree(self, name: str, step: Callable[[], Any], *, last: bool = False) -> list[Any]:
        """Run a step of a call on each rank, and return the results of all ranks, JSON values.

        Parameters
        ----------
        name : str
            Name of the step. Ranks in different steps, as after an interrupt, get an error.
        step : callable
            Function of this rank.
        last : bool
            True: other ranks do not wait for this rank any more in this call.

        Raises
        ------
        PeerError
            The call has failed on another rank. The errors of this rank's step are raised themselves.
        """
        answers = self._gather({"step": name, "result": step()})
        failed = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
        failed += [f"rank {rank} makes another call" for rank, a in enumerate(answers) if a.get("step", name) != name]
        self._told = last or bool(failed)
        if failed:
            raise PeerError(f"publishing has failed on {len(failed)} of {self.size} ranks: {failed[0]}")
        return [a["result"] for a in answers]

    def _gather(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        data = json.dumps(answer).encode()
        self._told = True  # the exchange itself reports its errors to all ranks
        found: list[bytes] = self._exchange([data] * self.size, group=self._group)
        self._told = False
        return [json.loads(each) for each in found]


def described(held: Held) -> str:
    """Return a description of the shards that a rank holds."""
    rows = [[*key, DTYPES[kind.dtype], kind.shape] for key, kind in sorted(held.items())]
    return base64.b64encode(zlib.compress(json.dumps(rows).encode(), 1)).decode()


def held_in(description: str) -> Held:
    """Return the shards that :func:`described` has described."""
    names = {number: dtype for dtype, number in DTYPES.items()}
    rows: list[Any] = json.loads(zlib.decompressobj().decompress(base64.b64decode(description), _MOST_NBYTES))
    return {Shard(name, tuple(a), tuple(b)): TensorKind(names[dtype], tuple(c)) for name, a, b, dtype, c in rows}


def plan_of(descriptions: Sequence[str]) -> str:
    """Return the identity of an assignment, from the digests of the descriptions of all ranks."""
    return hashlib.blake2b("\n".join(descriptions).encode(), digest_size=16).hexdigest()


def assigned(held: Sequence[Held]) -> list[list[Shard]]:
    """Assign each shard to one of the ranks that hold it, so that all ranks send about the same number of bytes.

    Parameters
    ----------
    held : sequence of dict
        Shards of each rank, with dtype and shape. All ranks get the same result.

    Raises
    ------
    ArgumentError
        Shards of a tensor differ in dtype, have values in common, or do not cover the tensor.
    """
    holders: dict[Shard, list[int]] = {}
    kinds: dict[Name, TensorKind] = {}
    dtypes: dict[str, str] = {}
    for rank, shards in enumerate(held):
        for key, kind in shards.items():
            holders.setdefault(key, []).append(rank)
            if kinds.setdefault(key, kind) != kind or dtypes.setdefault(key.name, kind.dtype) != kind.dtype:
                raise ArgumentError(f"rank {rank} holds {key!r} as {kind}, other ranks in another dtype or shape")
    try:
        check_layouts(layouts({key: kind.shape for key, kind in kinds.items()}))
    except ValueError as e:
        raise ArgumentError(f"the shards of the ranks do not fit together: {e}") from None
    loads = [0] * len(held)
    chosen: list[list[Shard]] = [[] for _ in held]
    for key in sorted(holders, key=lambda key: (-kinds[key].nbytes, key)):
        rank = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[rank] += kinds[key].nbytes
        chosen[rank].append(key)
    return [sorted(keys) for keys in chosen]
