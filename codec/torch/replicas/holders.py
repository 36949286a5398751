"""Ranks that hold the same values of a tensor: all ranks of a site, or those with the same shard of a DTensor."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from codec import ArgumentError
from codec.torch.group.levels import LeveledGroup, all_ranks, group_of
from codec.torch.network.version import hash64
from codec.torch.transport.levels import Levels, Members


@dataclass(frozen=True)
class HeldTensors:
    """Tensors of which the same ranks of this site hold the same values."""

    names: frozenset[str]
    holders: Members  # ranks of this site, this one included


class Holders:
    """Ranks that hold the same values of each tensor of a model.

    Parameters
    ----------
    names : sequence of str
        Names of the tensors.
    shards : sequence of sequence of int
        By rank, for each tensor, the return value of :func:`shard_of` there.
    sites : sequence of int
        By rank, the first rank of its site.
    levels : Levels
        Levels of the group.

    Attributes
    ----------
    groups : list of HeldTensors
        All tensors. Ranks of all sites have the same groups in the same order.
    twins : Members
        Ranks of this site that hold the same values of all tensors.
    """

    def __init__(
        self, names: Sequence[str], shards: Sequence[Sequence[int]], sites: Sequence[int], levels: Levels
    ) -> None:
        self._shards, self._sites, self._levels = shards, sites, levels
        self._places = {name: i for i, name in enumerate(names)}
        self.flat = levels.flat
        found: dict[tuple[int, ...], list[str]] = {}
        for i, name in enumerate(names):
            here = [shards[rank][i] for rank in levels.within.ranks]
            found.setdefault(tuple(map(here.index, here)), []).append(name)
        self.groups = [HeldTensors(frozenset(some), self._members(some)) for some in found.values()]
        self.twins = self._members(names)

    def _members(self, names: Iterable[str]) -> Members:
        """Return the ranks of this site that hold the same values of some tensors as this rank."""
        me, few = self._levels.all.rank, [self._places[name] for name in names]
        ranks = [rank for rank in self._levels.within.ranks if self._equal(rank, me, few)]
        return self._levels.within if len(ranks) == self._levels.within.size else Members(ranks, me)

    def _equal(self, a: int, b: int, few: Iterable[int]) -> bool:
        return all(self._shards[a][i] == self._shards[b][i] for i in few)

    def source(self, rank: int, names: Iterable[str], site: int | None = None) -> int:
        """Return the first rank that holds the same values of some tensors as `rank`, in the site of rank `site`.

        Default: in all sites.
        """
        few = [self._places[name] for name in names]
        return next(
            other
            for other in self._levels.all.ranks
            if (site is None or self._sites[other] == self._sites[site]) and self._equal(other, rank, few)
        )

    def error(self) -> ArgumentError | None:
        """Return the error of a rank at the place of this one in another site that holds another shard, or None."""
        for rank in self._levels.between.ranks:
            for name, i in self._places.items():
                if not self._equal(rank, self._levels.all.rank, [i]):
                    return ArgumentError(
                        f"rank {rank} holds another shard of {name!r} than rank {self._levels.all.rank}, with which "
                        "it synchronizes: pass group= a DeviceMesh whose first dimension is between sites, and whose "
                        "second is that of fully_shard"
                    )
        return None


def shard_of(x: torch.Tensor) -> int:
    """Return a number for the place of this rank's shard in a DTensor; 0 if the tensor is whole on this rank."""
    place: Any = x
    if not is_sharded(x):
        return 0
    where = zip(place.placements, place.device_mesh.get_coordinate(), place.device_mesh.shape, strict=True)
    some = [f"{placement} {i} of {n}" for placement, i, n in where if n > 1 and not placement.is_replicate()]
    return hash64(" ".join(some)) if some else 0


def is_sharded(x: torch.Tensor) -> bool:
    """Return True if a tensor is a DTensor."""
    return any(kind.__name__ == "DTensor" for kind in type(x).__mro__)


def like(shard: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor as a DTensor, if `p`, which has the same shards, is one."""
    if not is_sharded(p):
        return shard
    from torch.distributed.tensor import DTensor  # slow to import, and imported already if there is a DTensor

    place: Any = p
    return DTensor.from_local(
        shard, place.device_mesh, place.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def sites_group(group: Any, module: Any) -> Any:
    """Return the group of all ranks of all sites, for an argument ``group=`` of LocalSteps.

    For a model whose parameters FSDP2 shards, the argument may be the group of the ranks that hold the same shard.

    Raises
    ------
    ArgumentError
        The argument is no group; or parameters are sharded over ranks of several sites, or the group is missing.
    """
    module = getattr(module, "_orig_mod", module)
    named: Any = module.named_parameters() if isinstance(module, torch.nn.Module) else ()
    meshes: dict[str, Any] = {name: p.device_mesh for name, p in named if is_sharded(p)}
    sharded = next(((name, mesh) for name, mesh in meshes.items() if mesh.size() > 1), None)
    found = group_of(group, one_site=True)
    if sharded is None or found is dist.GroupMember.NON_GROUP_MEMBER:
        return found
    name, mesh = sharded
    if not isinstance(found, LeveledGroup):
        if group is None:
            raise ArgumentError(
                f"parameter {name!r} is sharded over {mesh.size()} ranks: pass group= a DeviceMesh of two dimensions, "
                "between sites and within them, whose second dimension is that of fully_shard"
            )
        found = group_of((found, _group_of_mesh(mesh)), one_site=True)
    whole = all_ranks(found)
    site = {dist.get_global_rank(whole, rank) for rank in found.levels.within.ranks}
    if not set(mesh.mesh.flatten().tolist()) <= site:
        raise ArgumentError(
            f"parameter {name!r} is sharded over ranks of several sites, {mesh}, which average gradients in every "
            'step: pass fully_shard the mesh of one site, such as mesh["within"]'
        )
    return found


def _group_of_mesh(mesh: DeviceMesh) -> Any:
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()  # pyright: ignore[reportPrivateUsage]
