"""Argument ``group=`` of all adapters: a process group, or ranks in two levels, as a DeviceMesh or a pair of groups."""

import os
import weakref
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from codec import ArgumentError
from codec.arguments import shown
from codec.torch._compat import group_identity
from codec.torch.transport.levels import Levels

NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER  # value that new_group gives to ranks outside of the new group

_ACCEPTED = "a ProcessGroup, a DeviceMesh of two dimensions, a pair (between, within) of process groups, or None"


class LeveledGroup:
    """Process group whose ranks are in two levels: several machines (or sites), with several ranks each.

    Parameters
    ----------
    group : ProcessGroup
        All ranks.
    levels : Levels
        Levels of these ranks.
    within : ProcessGroup
        Ranks of this rank's machine.
    """

    def __init__(self, group: Any, levels: Levels, within: Any) -> None:
        self.levels, self.within = levels, within
        self._group = weakref.ref(group)

    @property
    def group(self) -> Any:
        """Process group of all ranks; None after it was destroyed."""
        return self._group()

    def rank(self) -> int:
        """Return this rank in the group of all ranks."""
        return self.levels.all.rank

    def size(self) -> int:
        """Return the number of all ranks."""
        return self.levels.all.size


# LeveledGroup by process group of all ranks, and by the names of the groups of both levels. Names differ for new groups
# of the same ranks, which are therefore connected anew after an error. A LeveledGroup is the key of its communicator.
_leveled_groups: "weakref.WeakKeyDictionary[Any, dict[tuple[str, str], LeveledGroup]]" = weakref.WeakKeyDictionary()


def group_of(group: Any, *, one_site: bool = False) -> Any:
    """Return the ProcessGroup or LeveledGroup that an argument ``group=`` names; NON_MEMBER unchanged.

    The ranks of a single machine are a flat group, unless `one_site`: then they hold copies or shards of one replica.

    Raises
    ------
    ArgumentError
        The argument has another type, the dimensions of a mesh or the ranks of a pair do not form two levels, or
        torch.distributed is not initialized.
    """
    if group is NON_MEMBER or isinstance(group, dist.ProcessGroup | LeveledGroup):
        return cast(Any, group)
    world = dist.group.WORLD
    if world is None:
        raise ArgumentError("torch.distributed is not initialized: call init_process_group first")
    if group is None:
        return world
    if isinstance(group, DeviceMesh):
        return _of_mesh(group, world, one_site)
    given = cast(tuple[Any, ...], group) if isinstance(group, tuple) else (group,)
    if len(given) == 2:
        return _of_pair(given[0], given[1], world, one_site)
    raise ArgumentError(f"group must be {_ACCEPTED}, got {shown(cast(Any, group))}")


def _of_mesh(mesh: DeviceMesh, world: Any, one_site: bool) -> Any:
    """Return the group of a mesh whose first dimension is between machines, and whose second is within them."""
    if mesh.get_coordinate() is None:
        return NON_MEMBER
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.ndim != 2:
        raise ArgumentError(
            f"group=: the mesh has {mesh.ndim} dimensions; pass the two of the replicas, between machines and within "
            'them, such as mesh["dp_replicate", "dp_shard"]'
        )
    between, within = mesh.get_group(0), mesh.get_group(1)
    if within.size() == 1:
        return between
    if between.size() == 1 and not one_site:
        return within
    if mesh.size() == world.size():
        return _leveled(world, between, within)
    if mesh.mesh_dim_names is None:
        raise ArgumentError(
            "group=: a mesh of some of the ranks needs names of its dimensions: pass init_device_mesh("
            'mesh_dim_names=("between", "within")), or a slice of a mesh with names'
        )
    return _leveled(mesh._flatten().get_group(), between, within)  # pyright: ignore[reportPrivateUsage]


def _of_pair(between: Any, within: Any, world: Any, one_site: bool) -> Any:
    """Return the group of all ranks; the ranks of `within` are on this rank's machine."""
    if not isinstance(between, dist.ProcessGroup) or not isinstance(within, dist.ProcessGroup):
        raise ArgumentError(
            f"group=: the pair (between, within) must be two process groups, got {shown((between, within))}"
        )
    if between.size() * within.size() != world.size():
        raise ArgumentError(
            f"group=: the pair has groups of {between.size()} and {within.size()} ranks, but there are {world.size()} "
            "ranks in all: pass a two-dimensional DeviceMesh if only some ranks take part"
        )
    if within.size() == 1:
        return between
    return within if between.size() == 1 and not one_site else _leveled(world, between, within)


def _leveled(whole: Any, between: Any, within: Any) -> LeveledGroup:
    """Return the group of all ranks in two levels."""

    def ranks_of(group: Any) -> list[int]:
        return [dist.get_group_rank(whole, rank) for rank in dist.get_process_group_ranks(group)]

    levels = Levels(whole.size(), whole.rank(), ranks_of(between), ranks_of(within))
    known = _leveled_groups.setdefault(whole, {})
    key = group_identity(between), group_identity(within)
    return known.setdefault(key, LeveledGroup(whole, levels, within))


def proposal(group: Any) -> str:
    """Return the advice to pass two levels as ``group=``, if `group` is a flat group of all ranks of torchrun, or "".

    Ranks are in two levels if torchrun has started several on each of several machines.
    """
    size, ranks = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if isinstance(group, LeveledGroup) or not size.isdecimal() or not ranks.isdecimal() or int(size) != group.size():
        return ""
    machines, rest = divmod(int(size), max(1, int(ranks)))
    if rest or machines < 2 or int(ranks) < 2:
        return ""
    return (
        f"the {ranks} ranks of each of {machines} machines send frames to all other machines: pass "
        f'group=torch.distributed.init_device_mesh("cpu", ({machines}, {ranks})), or start codec.run with '
        "--machines, so that they reduce their values within the machine first"
    )


def all_ranks(group: Any) -> Any:
    """Return the ProcessGroup of all ranks of an argument ``group=``, without its levels."""
    found = group_of(group)
    return found.group if isinstance(found, LeveledGroup) else found
