"""Collectives of equal shards over several machines: plain values within a machine, frames between machines."""

from collections.abc import Callable
from dataclasses import replace

from codec import ArgumentError
from codec.tensors.segments import Records
from codec.torch.group.communicator import Communicator
from codec.torch.network.version import hash64
from codec.torch.reduction.arguments import check_finite
from codec.torch.reduction.execution import placed, run_several, settle
from codec.torch.reduction.host import Reduction, Values
from codec.torch.reduction.raw import reduce_terms
from codec.torch.reduction.table import GATHER, REDUCE_SCATTER, Algorithm
from codec.torch.transport.collective import Collective, CollectivePart
from codec.torch.transport.levels import Levels

Store = Callable[[Values, Reduction], None]


class Machines:
    """Reduce-scatter or all-gather of equal shards, one for each rank of a group.

    Rank i of a machine exchanges frames with rank i of every other machine, and plain values with the other ranks of
    its machine. With one rank a machine, only frames are exchanged.

    Parameters
    ----------
    comm, collective : Communicator, Collective
        Communicator of the group, and the collective in flight.

    Raises
    ------
    ArgumentError
        The ranks of a machine are not consecutive.
    """

    def __init__(self, comm: Communicator, collective: Collective) -> None:
        self._channel, self._collective, self._levels = comm.channel, collective, collective.levels
        _check_consecutive(self._levels)

    @property
    def count(self) -> int:
        """Number of machines."""
        return self._levels.between.size

    async def reduce_scatter(
        self, whole: Reduction, segments: Records | None, feed: Callable[[Reduction], None], store: Store
    ) -> None:
        """Run a reduce-scatter.

        Parameters
        ----------
        whole : Reduction
            Gradients of all shards on this rank, in rank order.
        segments : Records or None
            Shapes of parameters in one shard for each machine, one after another.
        feed : callable
            feed(r) sets the residuals of the reduction that sends frames, which has one shard for each machine.
        store : callable
            store(result, r) stores the reduced shard of this rank, after all ranks have succeeded.
        """
        r = await self._scattered(whole, segments)
        feed(r)
        await self._end(whole, r, await self._exchange(r, REDUCE_SCATTER), store)

    async def all_gather(self, shard: Reduction, store: Store) -> None:
        """Run an all-gather of the `shard` of each rank; `store` is called with the shards of all ranks."""
        r = shard if self._levels.flat else shard.on_host()
        await self._end(shard, r, await self._gathered(r, await self._exchange(r, GATHER)), store)

    async def _exchange(self, r: Reduction, algorithm: Algorithm) -> Values:
        """Run an algorithm between machines."""
        [result] = await run_several(self._collective, "", [(r, placed(algorithm, r, self._channel))])
        return result

    async def _end(self, given: Reduction, r: Reduction, result: Values, store: Store) -> None:
        """Agree on the outcome, count the collective, and store the result."""
        collective = self._collective
        await settle(collective, r)
        await collective.agree()
        collective.counters.raw_nbytes += given.x.nbytes
        collective.counters.frame_collectives += 1
        with collective.storing():
            store(result, r)

    async def _scattered(self, whole: Reduction, segments: Records | None) -> Reduction:
        """Reduce the shards of this rank's place in each machine over the ranks of this machine.

        As in an all-reduce within a machine, the results are rounded to the dtype of the gradients.
        """
        if self._levels.flat:
            whole.segments = segments
            return whole
        r = whole.on_host()
        check_finite(r, r.x)
        part, n = self._part("reduce-scatter", r), r.n // self._levels.all.size
        nbytes = n * self.count * r.x.itemsize
        part.arena.reserve(part.arena.nbytes_of([nbytes] * len(part.others)))
        terms = {o: part.arena.allocate(nbytes).view(r.x.dtype) for o in part.others}
        incoming = [part.receive_values(x, o) for o in part.others for x in terms[o].reshape(self.count, n)]
        shards = r.x.reshape(self.count, part.size, n)
        for o in part.others:
            for shard in shards[:, o]:
                part.send_values(shard, o)
        for each in incoming:
            await part.frame(each)
        terms[part.rank] = shards[:, part.rank].reshape(-1)
        if r.settings.max_norm is not None:
            for rank, values in terms.items():
                r.check_values(part, rank, r.as_float32(values))
        total = part.arena.result_buffer(n * self.count, r.x.dtype)
        with part.clock.during("decode_s"):
            total[:] = r.rounded(reduce_terms([terms[place] for place in range(part.size)], r, total))
        await part.sent()
        return replace(r, x=total, segments=segments, summed=r.ranks_in_sum(part.size))

    async def _gathered(self, r: Reduction, shards: Values) -> Values:
        """Return the shards of all ranks, given those of this rank's place in each machine."""
        if self._levels.flat:
            return shards
        part, n = self._part("all-gather", r), r.n
        out = part.arena.result_buffer(n * self._levels.all.size, r.x.dtype).reshape(self.count, part.size, n)
        out[:, part.rank] = shards.reshape(self.count, n)
        incoming = [part.receive_values(place, o) for o in part.others for place in out[:, o]]
        for o in part.others:
            for shard in out[:, part.rank]:
                part.send_values(shard, o)
        for each in incoming:
            await part.frame(each)
        if r.settings.max_norm is not None:
            for rank in part.others:
                r.check_values(part, rank, r.as_float32(out[:, rank].copy().reshape(-1)))
        await part.sent()
        return out.reshape(-1)

    def _part(self, name: str, r: Reduction) -> CollectivePart:
        """Begin the part of the collective among the ranks of this machine."""
        fields = {"collective": f"{name} within a machine", "values": f"{r.n} of {r.dtype}", "op": r.op}
        fields["levels"] = str(self._levels)
        return self._collective.part(hash64(*fields.items()), fields, self._levels.within)


def _check_consecutive(levels: Levels) -> None:
    """Raise ArgumentError unless the ranks of a machine are consecutive, so that shard m P + i is at place i of m."""
    size, place = levels.within.size, levels.within.rank
    first = levels.between.rank * size
    within, between = (*range(first, first + size),), (*range(place, levels.all.size, size),)
    if (levels.within.ranks, levels.between.ranks) != (within, between):
        raise ArgumentError(
            f"group=: a machine must have consecutive ranks, but the machine of rank {levels.all.rank} has the ranks "
            f"{levels.within.ranks}: pass a mesh of init_device_mesh, whose first dimension is between machines"
        )
