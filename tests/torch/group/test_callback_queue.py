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
    (callbacks, ended), begun, gate, threads = callbacks, threading.Event(), threading.Event(), {}

    def note(name):
        threads[name] = threading.get_ident()

    def wait():
        note("first")
        begun.set()
        assert gate.wait(SECONDS)

    first = Batch(None, wait)
    others = [Batch(None, lambda name=name: note(name)) for name in ("second", "third")]
    for batch in [first, *others]:
        callbacks.add(batch)
    assert begun.wait(SECONDS)  # the worker is asked to release a batch by its callbacks, which have begun
    callbacks.release(first)
    for batch in others:
        assert ended.get(timeout=SECONDS) is batch
        callbacks.release(batch)
    assert callbacks.idle
    gate.set()
    assert ended.get(timeout=SECONDS) is first
    callbacks.release(first)  # a second release has no effect
    assert threads["first"] != threads["second"] == threads["third"]


def test_batch_that_takes_long_is_released(callbacks):
    (callbacks, ended), begun, gate, second = callbacks, threading.Event(), threading.Event(), Batch(None, lambda: None)
    callbacks.add(Batch(None, lambda: (begun.set(), gate.wait(SECONDS))))
    callbacks.add(second)
    assert begun.wait(SECONDS)
    callbacks.deadline = time.monotonic() + SECONDS
    callbacks.expire()
    assert ended.empty()
    callbacks.deadline = time.monotonic()
    callbacks.expire()
    assert ended.get(timeout=SECONDS) is second
    gate.set()


def test_batch_is_not_overtaken_while_its_thread_does_not_start(callbacks, monkeypatch):
    (callbacks, ended), threads, order = callbacks, [], []
    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", lambda thread: threads.append(thread))
        batches = [Batch(None, lambda i=i: order.append(i)) for i in range(2)]
        for batch in batches:
            callbacks.add(batch)
        callbacks.deadline = now = time.monotonic()
        callbacks.expire()
        assert callbacks.deadline > now
        assert len(threads) == 1
    threads[0].start()
    for batch in batches:
        assert ended.get(timeout=SECONDS) is batch
        callbacks.release(batch)
    assert order == [0, 1]


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
