"""Agreement of all ranks: they compare arguments and exchange a few numbers, or fail together with one cause."""

from collections.abc import Mapping, Sequence
from typing import Any

from codec import CallOptions, CodecError
from codec._options import settings_of
from codec.torch.group.communicator import Communicator, start
from codec.torch.network.version import hash64
from codec.torch.transport.collective import Collective


def agreed(
    name: str,
    fields: Mapping[str, str],
    numbers: Sequence[int] = (),
    *,
    group: Any = None,
    options: CallOptions | None = None,
    error: Exception | None = None,
) -> list[list[int]]:
    """Compare arguments over the ranks of a group, and return the numbers of each rank, on all ranks or on none.

    Parameters
    ----------
    name : str
        Name of this collective, which ranks in another collective report.
    fields : dict of str to str
        Arguments by name, which must be equal on all ranks; up to 31.
    numbers : sequence of int
        Integers of 64 bits. Their count must be equal on ranks with equal `fields`.
    group, options
        As for :func:`codec.torch.all_reduce`; only the timeout of the options is used.
    error : Exception, optional
        Reason why this rank cannot take part. This rank raises it, and the other ranks raise PeerError with its text.

    Raises
    ------
    PeerError
        Another rank has other arguments, which the message names, has an error, is in another collective, or is lost.
    """

    async def work(_: Communicator, collective: Collective) -> list[list[int]]:
        if error is not None:
            raise error
        named = {"collective": name, **fields}
        found = await collective.part(hash64(*named.items()), named).gather(numbers)
        collective.counters.round_trips += 0.5 * (collective.size > 1)
        await collective.agree()
        return found

    try:
        return start(name, group, settings_of(options), False, work) or []
    except CodecError as e:
        if error is None or e is error:
            raise
        raise error from e  # such as a lost rank, which does not matter any more
