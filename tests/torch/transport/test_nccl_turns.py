"""Collectives in flight over two levels send values within a machine by NCCL in the order in which they have begun."""

from datetime import timedelta
from types import SimpleNamespace

from codec.torch.transport.nccl import DeviceTransfer


def waits(coroutine):
    """Run a coroutine until it waits; return False if it has ended instead."""
    try:
        coroutine.send(None)
    except StopIteration:
        return False
    return True


def test_turn_comes_when_all_earlier_collectives_have_passed_theirs():
    transfer = DeviceTransfer(SimpleNamespace(), [1], timedelta(seconds=1), lambda *_: None, within=True)
    for number in range(4):
        transfer.begin(number)
    assert not waits(transfer.turn(0))
    third = transfer.turn(2)
    assert waits(third)
    transfer.pass_turn(1)  # before its turn, as a collective without values on GPUs
    assert waits(transfer.turn(2))
    transfer.pass_turn(0)
    transfer.pass_turn(0)  # the end of a collective passes again
    assert not waits(third)
    last = transfer.turn(3)
    assert waits(last)
    transfer.pass_turn(2)
    assert not waits(last)
