"""Channel of a group: agreement on each collective's success, freed memory and connections, errors after close."""

import gc
import json
import weakref

import numpy as np
import pytest
import torch

import codec
from codec.torch.group.communicator import communicator_of
from codec.torch.transport import messages
from codec.torch.transport.buffers import Buffers
from codec.torch.transport.channel import Channel
from support.ranks import RankPool, run_ranks

# Tests with one rank


def _closed(rank, size):
    channel = Channel(None, None)
    collective = channel.collective(0)
    collective.arena.reserve(collective.arena.nbytes_of([100]))
    message = collective.arena.allocate(100)
    channel.close()
    channel.close()
    assert channel.closed
    message[:] = 1  # the memory stays valid, since a message in flight may still be written to it
    for call in (
        lambda: channel.collective(1),
        lambda: channel.check_open(),
        lambda: channel.mesh.send(1, 0, 0, 0, 0, [b""]),
        lambda: channel.device.all_gather(torch.ones(4), collective.counters),
    ):
        with pytest.raises(codec.PeerError, match="new group"):
            call()
    with pytest.raises(AssertionError, match="0 are reserved"):
        collective.arena.allocate(1)
    collective.end()


def test_every_call_on_a_closed_channel_raises():
    run_ranks(1, _closed)


def _cancelled(rank, size):
    channel = Channel(None, None)
    collective = channel.collective(0)
    channel.cancel()
    assert channel.cancelled
    assert not channel.closed  # the channel closes only after messages in flight have ended
    with pytest.raises(codec.PeerError, match="cancelled"), channel.writing():
        pass
    with pytest.raises(codec.PeerError, match="cancelled"), collective.storing():
        pass
    with pytest.raises(codec.PeerError, match="new group"):
        channel.collective(1)
    assert channel.closed


def test_a_cancelled_channel_writes_no_tensor_and_begins_no_collective():
    run_ranks(1, _cancelled)


def _dropped(rank, size):
    gc.disable()
    channel = Channel(None, None)
    channel.collective(0).end()
    parts = [weakref.ref(part) for part in (channel, channel.mesh, channel.device)]
    del channel
    assert [part() for part in parts] == [None] * 3


def test_connections_end_with_the_last_reference_to_the_channel():
    """Dropping the last reference to a channel closes its connections, without a garbage collection."""
    run_ranks(1, _dropped)


# Tests of the ranks' agreement on success


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    with RankPool(request.param) as ranks:
        ranks.new_group()
        yield ranks


def collective_of(work):
    """Run work(collective) as a collective of all ranks; return its result, or the text of its PeerError."""
    comm = communicator_of(None)
    try:
        return comm.run(work)
    except codec.PeerError as e:
        return str(e)


def _agreed(rank, size):
    async def work(collective):
        return await collective.agree([rank, -rank, 5])

    assert collective_of(work) == [size - 1, 0, 5]


def test_agreement_returns_the_maximum_of_each_number(ranks):
    ranks.run(_agreed)


def _gathered(rank, size):
    async def work(collective):
        part = collective.part(3)
        found = await part.gather([rank, 10 * rank]), await part.scatter([100 * rank + o for o in range(size)])
        await collective.agree()
        return found

    assert collective_of(work) == ([[o, 10 * o] for o in range(size)], [100 * o + rank for o in range(size)])


def test_integers_are_gathered_and_scattered(ranks):
    ranks.run(_gathered)


def _failed_after_the_data(rank, size):
    """If the last rank fails after the others reported success, no rank succeeds, and the group stays usable."""

    async def work(collective):
        await collective.part(1).gather([rank])
        if rank == size - 1:
            # the other ranks may already have reported success
            raise codec.FrameError("too late")
        return await collective.agree([0])

    for _ in range(20):
        try:
            found = collective_of(work)
        except codec.FrameError as e:
            found = str(e)
        assert found == "too late" if rank == size - 1 else f"rank {size - 1} could not" in found
    assert not communicator_of(None).channel.closed
    _agreed(rank, size)


def test_error_of_a_rank_after_reports_of_others_leaves_connections_open(ranks):
    ranks.run(_failed_after_the_data)


def _failed_twice(rank, size):
    """All ranks fail at the same time, some perhaps because another rank's abort arrived first."""

    async def work(collective):
        await collective.part(1).gather([rank])
        raise codec.ArgumentError(f"reason {rank}")

    for _ in range(5):
        try:
            found = collective_of(work)
        except codec.ArgumentError as e:
            found = str(e)
        assert "reason" in found
    _agreed(rank, size)


def test_errors_of_all_ranks_at_once_leave_connections_open(ranks):
    ranks.run(_failed_twice)


def _differing(rank, size):
    async def work(collective):
        fields = {"collective": "test", "size": str(min(rank, 1)), "op": "sum"}
        await collective.part(hash(min(rank, 1)), fields).gather([rank])

    found = collective_of(work)
    assert "size is 1 there and 0 here" in found if rank == 0 else "size is 0 there and 1 here" in found or size > 2
    assert "op" not in found

    async def work_of_two_parts(collective):  # only the arguments of the first part differ
        first = {"collective": "test", "size": str(min(rank, 1)), "op": "sum"}
        parts = collective.part(hash(min(rank, 1)), first), collective.part(0, first | {"size": "7", "op": "max"})
        for part in reversed(parts):
            await part.gather([rank])

    found = collective_of(work_of_two_parts)
    assert "size is 1 there and 0 here" in found if rank == 0 else "size is 0 there and 1 here" in found or size > 2
    _agreed(rank, size)


def test_ranks_with_other_arguments_learn_which_ones_and_go_on(ranks):
    ranks.run(_differing)


def _interleaved(rank, size):
    """Collectives in flight may end in another order than they began."""
    comm = communicator_of(None)

    async def work(collective, i):
        part = collective.part(i)
        rows = [await part.gather([i, rank]) for _ in range(1 + 3 * (i % 2))]
        await collective.agree()
        return rows[-1]

    works = [comm.submit(lambda collective, i=i: work(collective, i)) for i in range(12)]
    assert [w.result() for w in works] == [[[i, o] for o in range(size)] for i in range(12)]


def test_collectives_in_flight_do_not_mix_their_messages(ranks):
    ranks.run(_interleaved)


# Tests of the texts in abort messages


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 5000, "[]", "5", '{"collective": ' + "9" * 4000 + "}", '"\ud83d"', "NaN"],
    ids=["empty", "cut", "nested", "list", "number", "digits", "surrogate", "NaN"],
)
def test_damaged_arguments_of_another_rank_give_an_error_with_its_number(text):
    error = messages.difference(3, messages.unpack_fields(text), {"collective": "all_gather"})
    assert isinstance(error, codec.PeerError)
    assert "rank 3" in str(error)


def test_texts_of_other_ranks_are_short_and_printable():
    text = "\x1b[31m\u202e\ud800" + "x" * 10_000
    fields = messages.unpack_fields(json.dumps({text: text, **{str(i): i for i in range(100)}}))
    assert len(fields) == 32
    for found in (*fields, *fields.values(), str(messages.Cause(messages.ERROR, 1, text).error())):
        assert found.isprintable()
        assert len(found) < 500


def test_arguments_are_compared_with_those_of_the_same_tensor():
    """A rank compares received arguments with those of the most similar tensor of its collective."""
    weight = {"collective": "all_gather", "spec": "Quantize(4)", "number of values": "4096"}
    bias = {"collective": "all_gather", "spec": "Lossless()", "number of values": "64"}
    step = {"collective": "step of a DDP hook"}
    theirs = weight | {"spec": "Float8()"}
    for parts in ([step, weight, bias], [bias, weight, step]):
        assert messages.nearest(theirs, parts) == weight
    assert messages.nearest(theirs, []) == {}


def test_long_arguments_that_are_equal_are_not_said_to_differ():
    mine = {"collective": "two_shot", "spec": "x" * 500, "op": "sum"}
    theirs = messages.unpack_fields(messages.pack_fields(mine | {"op": "mean"}))
    assert str(messages.difference(1, theirs, mine)).endswith("op is mean there and sum here; nothing was changed")


@pytest.mark.parametrize("status", [messages.OTHER_RANK, messages.ERROR, messages.NONFINITE, messages.DIFFERS])
def test_abort_is_unpacked_as_it_was_packed(status):
    cause = messages.Cause(status, 5, "text")
    assert messages.Cause.unpack(cause.pack()) == cause
    assert len(messages.Cause(status, 5, "ä" * 10_000).pack()) <= 16 + (1 << 12)
    assert messages.Cause.unpack(b"123456789012345").status == 0


def test_integers_are_unpacked_from_memory_at_any_offset():
    body = messages.pack_numbers([1, -2, 1 << 62])
    assert messages.unpack_numbers(body) == [1, -2, 1 << 62]
    moved = np.concatenate([np.zeros(3, np.uint8), body])[3:]
    assert messages.unpack_numbers(moved) == [1, -2, 1 << 62]


def test_buffers_keep_at_most_twice_the_bytes_that_were_in_use_at_once():
    buffers, most = Buffers(), 0
    for i in range(100):
        taken = [buffers.take(nbytes) for nbytes in ((i % 7 + 1) << 17, (i % 5 + 1) << 18)]
        most = max(most, sum(buffer.nbytes for buffer in taken))
        for buffer in taken:
            buffers.give(buffer)
        assert buffers.nbytes <= 2 * most
    assert buffers.take(1 << 17).nbytes <= buffers.nbytes
