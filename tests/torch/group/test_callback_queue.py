"""Order of callbacks, without a worker and ranks."""

import threading
import time
from queue import SimpleQueue

import pytest

from codec.torch.group.callbacks import Batch, CallbackQueue, running

SECONDS = 20


@pytest.fixture
def callbacks():
    """Queue of callbacks, and the list of batches that have run, which the test must release."""
    ended = SimpleQueue()
    callbacks = CallbackQueue("test", ended.put)
    yield callbacks, ended
    callbacks.stop()


def is_set_when_idle(callbacks):
    event = threading.Event()
    callbacks.watch(event)
    return event


def test_batches_run_in_order_and_then_the_queue_is_idle(callbacks):
    (callbacks, ended), found, me = callbacks, [], object()
    assert callbacks.idle
    assert is_set_when_idle(callbacks).is_set()
    batches = [Batch(me, lambda i=i: found.append((i, running.batch.owner is me))) for i in range(3)]
    for batch in batches:
        callbacks.add(batch)
    idle = is_set_when_idle(callbacks)
    for batch in batches:
        assert not idle.is_set()
        assert ended.get(timeout=SECONDS) is batch
        callbacks.release(batch)
    assert idle.is_set()
    assert callbacks.idle
    assert found == [(0, True), (1, True), (2, True)]
    assert running.batch is None


def test_batch_that_waits_keeps_its_thread_and_later_ones_run_in_a_new_one(callbacks):
    (callbacks, ended), gate, threads = callbacks, threading.Event(), []

    def wait():
        threads.append(threading.get_ident())
        assert gate.wait(SECONDS)

    first = Batch(None, wait)
    others = [Batch(None, lambda: threads.append(threading.get_ident())) for _ in range(2)]
    for batch in [first, *others]:
        callbacks.add(batch)
    callbacks.release(first)
    for batch in others:
        assert ended.get(timeout=SECONDS) is batch
        callbacks.release(batch)
    assert callbacks.idle
    gate.set()
    assert ended.get(timeout=SECONDS) is first
    callbacks.release(first)  # a second release has no effect
    assert threads[0] != threads[1] == threads[2]


def test_batch_that_takes_long_is_released(callbacks, monkeypatch):
    monkeypatch.setattr("codec.torch.group.callbacks.TIMEOUT", 0.02)
    (callbacks, ended), gate, second = callbacks, threading.Event(), Batch(None, lambda: None)
    callbacks.add(Batch(None, lambda: gate.wait(SECONDS)))
    callbacks.add(second)
    callbacks.expire()
    assert ended.empty()
    time.sleep(0.03)
    callbacks.expire()
    assert ended.get(timeout=SECONDS) is second
    gate.set()


def test_batches_run_in_the_calling_thread_if_no_thread_can_be_started(callbacks, monkeypatch):
    (callbacks, ended), threads = callbacks, []

    def fail(*args, **options):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2):
        callbacks.add(Batch(None, lambda: threads.append(threading.get_ident())))
        callbacks.release(ended.get(timeout=SECONDS))
    assert threads == [threading.get_ident()] * 2
    assert callbacks.idle


def test_stop_runs_the_batches_that_are_left(callbacks):
    (callbacks, _), gate, over = callbacks, threading.Event(), threading.Event()
    callbacks.add(Batch(None, lambda: gate.wait(SECONDS)))
    callbacks.add(Batch(None, over.set))
    callbacks.stop()
    gate.set()
    assert over.wait(SECONDS)
