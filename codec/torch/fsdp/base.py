"""Base classes of the FSDP2 collectives: codec, random streams, statistics, residuals and state dicts."""

import math
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from codec import ArgumentError, CallOptions, StateError
from codec._options import settings_of
from codec.arguments import decay_of
from codec.specs import Preset, Spec, check_contraction, require_feedback
from codec.stateful.schema import REST, Schema, mapping, number, read_fields, row
from codec.torch.feedback.checkpoint import packed, unpacked
from codec.torch.feedback.pair import ResidualPair
from codec.torch.fsdp.passes import Pass
from codec.torch.fsdp.stats import FsdpStats
from codec.torch.group.communicator import Communicator, start
from codec.torch.group.exchange import all_to_all_bytes
from codec.torch.group.levels import LeveledGroup, all_ranks, group_of
from codec.torch.group.work import Work
from codec.torch.reduction.arguments import plain_spec
from codec.torch.reduction.host import Reduction
from codec.torch.transport.collective import Collective
from codec.torch.transport.counters import Counters
from codec.torch.transport.levels import Levels

_STREAM = 1 << 32  # offset between the random streams of two collectives; larger than the number of frames in one
_RANK = {"calls": number(0, _STREAM - 1), "residuals": mapping()}
_STATE = Schema(
    "FSDP2 collective", {"world_size": number(1, 1 << 30)}, (re.compile("rank ([0-9]{1,9})"), row(mapping()))
)


class ModuleCollective:
    """Base class of the three FSDP2 collectives: stores codec and options, and counts calls and bytes."""

    def __init__(self, spec: Spec | Preset, group: Any, options: CallOptions | None) -> None:
        self._spec, self._settings = plain_spec(spec), settings_of(options)
        self._group = None if group is None else group_of(group)  # argument group=
        self._calls = 0  # number of collectives so far; equal on all ranks of a group
        self._stats = FsdpStats()
        self._counting = threading.Lock()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate an input or output tensor; FSDP2 calls this."""
        return torch.empty(*size, dtype=dtype, device=device)

    def stats(self) -> FsdpStats:
        """Return the totals so far, on this rank.

        Returns
        -------
        FsdpStats
            A copy, which later collectives do not change.
        """
        with self._counting:
            return replace(self._stats, waited_s=self._stats.waited_s.copy())

    def _count(self, counters: Counters, uncompressed_nbytes: int = 0) -> None:
        with self._counting:
            self._stats.add(counters)
            self._stats.uncompressed_nbytes += uncompressed_nbytes

    def _stays_in_machine(self, group: Any) -> bool:
        """Return True if `group` has the ranks of this rank's machine: FSDP2 has resharded the parameters to them."""
        if not isinstance(self._group, LeveledGroup):
            return False
        return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(self._group.within)

    def _in_levels(self, group: Any) -> Any:
        """Return the argument ``group=`` in place of FSDP2's group of shards, whose ranks it must have."""
        if self._group is None:
            return group
        theirs, mine = (dist.get_process_group_ranks(all_ranks(each)) for each in (group, self._group))
        if theirs != mine:
            raise ArgumentError(
                f"group= has the ranks {mine}, but FSDP2 shards the parameters over the ranks {theirs}: pass the "
                "levels of these ranks, in this order"
            )
        return self._group

    def _run(
        self,
        name: str,
        group: Any,
        tensor: torch.Tensor,
        copies: Callable[[Levels], float],
        work: Callable[[Communicator, Collective, int], Awaitable[None]],
        output: torch.Tensor,
        async_op: bool,
    ) -> Work | None:
        """Run work(comm, collective, stream) in the communication thread of `group`; add its traffic to the totals.

        Without compression, this rank would send copies(levels of the group) times the bytes of `tensor`.
        """
        if tensor.device.type not in ("cpu", "cuda"):  # on CUDA, the communication thread orders the streams instead
            torch.accelerator.current_stream(tensor.device).synchronize()
        self._calls += 1
        stream = self._calls * _STREAM

        async def counted(comm: Communicator, collective: Collective) -> list[torch.Tensor]:
            before = comm.channel.totals()
            await work(comm, collective, stream)
            counters, since = collective.counters.copy(), comm.channel.totals() - before
            counters.wire_s, counters.waited_s, counters.cpu_s = since.wire_s, since.waited_s, since.cpu_s
            self._count(counters, round(tensor.nbytes * copies(comm.channel.levels)))
            return [output]

        started = start(name, group, self._settings, async_op, counted)
        return started if isinstance(started, Work) else None

    def _count_plain(self) -> None:
        """Count a collective that torch.distributed runs because codecs do not support the dtype."""
        self._count(Counters(raw_collectives=1))


class GradientCollective(ModuleCollective):
    """Base class of the collectives that reduce gradients, with or without error feedback."""

    def __init__(self, spec: Spec | Preset, group: Any, feedback: bool | float, options: CallOptions | None) -> None:
        super().__init__(spec, group, options)
        if feedback:
            check_contraction(self._spec)
        else:
            require_feedback(self._spec, "pass feedback=True, or its decay, such as feedback=0.95")
        decay = decay_of(1.0 if feedback is True else feedback) if feedback else 1.0
        self._residuals = ResidualPair(self._spec, decay) if feedback else None
        self._names: list[str] = []  # names of the registered modules

    def stats(self) -> FsdpStats:
        """Return the totals so far, on this rank.

        Returns
        -------
        FsdpStats
            A copy, which later collectives do not change.
        """
        stats = super().stats()
        norms = {} if self._residuals is None else self._residuals.norms()
        stats.residual_norm = math.hypot(*norms.values())
        return stats

    def _feed(
        self, r: Reduction, now: Pass, name: str | None, owned: tuple[int, int], levels: Levels, begin: int = 0
    ) -> None:
        """If error feedback is on, add the residuals of module `name` to a reduction of its gradients.

        The reduction has the module's values from `begin` on. `owned` is that of :meth:`ResidualPair.feed`.
        """
        now.check()
        if self._residuals is None:
            return
        if name is None:
            raise ArgumentError(
                "error feedback keeps a residual for each module, by its name: call register(model), or pass "
                "feedback=False"
            )
        pair, layout = now.changed(self._residuals), ((name, begin, begin + r.n),)
        for piece, _ in pair.worker.pieces():
            if piece[0] == name and piece != layout[0]:
                raise ArgumentError(
                    f"module {name!r} reduces {r.n} values, but its residual has {piece[2] - piece[1]}, because "
                    "parameters have no gradients, or the sharding or group= has changed: call "
                    "set_reduce_scatter_unused_params(True), and load only states that were saved with the same "
                    "sharding and group="
                )
        held = begin + owned[0], begin + owned[1]
        moved = any(piece[0] == name and piece[1:] != held for piece, _ in pair.server.pieces())
        if layout in pair.worker.state.pending:  # the module is reduced twice in this backward pass
            pair.commit()
            for store in (pair.worker, pair.server):  # a failure returns to these arrays, so they must not be reused
                store.state = store.state._replace(spare={})
        pair.feed(r, layout, owned, levels.between.size, moved=moved)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the residuals and the number of calls, so that a resumed run continues bit-identically.

        Parameters
        ----------
        gather : bool
            True: return the state of all ranks on each rank, to be saved as one file; every rank must call this.

        Returns
        -------
        dict
            ``format``, ``version``, ``world_size``, and an entry ``"rank <r>"`` for this rank, or for each rank. The
            entry is a tuple of one dict: of ``calls``, the number of calls, and ``residuals``. Residuals are those
            after the last successful backward pass, as state dicts of :class:`codec.ErrorFeedback` by role, whose keys
            are module names and ranges. torch.distributed.checkpoint saves the entry of each rank, and loads a tuple as
            a whole.
        """
        kept = {} if self._residuals is None else self._residuals.state_dict()
        rank, size, mine = dist.get_rank(), dist.get_world_size(), {"calls": self._calls, "residuals": kept}
        found: dict[int, dict[str, Any]] = {rank: mine}
        if gather:
            none: dict[str, Any] = {"residuals": {}}  # empty dicts are not sent
            found = dict(enumerate(none | unpacked(each) for each in all_to_all_bytes([packed(mine)] * size)))
        return _STATE.save({"world_size": size} | {f"rank {r}": (each,) for r, each in found.items()})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned. Call :meth:`register` first.

        Parameters
        ----------
        state_dict : mapping
            State of this rank, or of all ranks from ``state_dict(gather=True)``.

        Raises
        ------
        StateError
            The mapping is not a state of this class, or belongs to another rank, number of ranks, version or model.
            This object is unchanged.
        """
        fields, rank, size = _STATE.read(state_dict), dist.get_rank(), dist.get_world_size()
        if (saved := fields["world_size"]) != size:
            raise StateError(
                f"the state is of {saved} ranks, but this job has {size}, and residuals of shards cannot be resharded: "
                "continue without this state"
            )
        ranks = {int(name[1]): item for name, (item,) in fields[REST]}
        if rank not in ranks:
            raise StateError(
                f"the state has no entry 'rank {rank}', only those of the ranks {sorted(ranks)}: load the state that "
                "this rank saved, or one of state_dict(gather=True)"
            )
        mine = read_fields(f"'rank {rank}' of the state", "load a state that state_dict() returned", _RANK, ranks[rank])
        if mine["residuals"] and self._residuals is None:
            raise StateError("the state has residuals, but error feedback is off: pass feedback=True")
        if self._residuals is not None:
            loaded = ResidualPair(self._residuals.spec, self._residuals.decay)
            if mine["residuals"]:
                loaded.load_state_dict(mine["residuals"])
            if unknown := [key for key, _, _ in loaded.ranges() if key not in self._names]:
                raise StateError(
                    f"the state has a residual of {unknown[0]!r}, but the registered modules are {self._names}"
                )
            self._residuals.adopt(loaded)
        self._calls = mine["calls"]


def modules_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the FSDP2 modules in a model by name; names do not contain the prefixes of torch.compile."""
    # Imported here because it takes one second, and users of DDP do not need it.
    from torch.distributed.fsdp import FSDPModule

    named = cast(Iterator[tuple[str, torch.nn.Module]], model.named_modules())
    found = {name.replace("_orig_mod.", ""): m for name, m in named if isinstance(m, FSDPModule)}
    if not found:
        raise ArgumentError("the model has no FSDP2 module: call torch.distributed.fsdp.fully_shard(model) first")
    return found
