"""The scheduler of collectives: coroutines, the objects that they await, and the worker thread, without ranks."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest

import codec
from codec.torch.group.tasks import Task, Together
from codec.torch.group.work import Work
from codec.torch.group.worker import Worker
from codec.torch.network.waits import Turns, Wait
from codec.torch.reduction import execution
from codec.torch.transport.levels import Levels
from codec.torch.transport.streams import StreamOrder

SECONDS = 20


def of_rank(source, timeouts=1):
    wait = Wait()
    wait.source, wait.timeouts = source, timeouts
    return wait


def started(coroutine):
    """Start a coroutine; return it, and the first object that it awaits."""
    return coroutine, coroutine.send(None)


def result_of(coroutine):
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


# Tests of Wait


def test_wait_ends_once_and_wakes_each_caller_once():
    wait, woken = Wait(), []
    assert wait.call_when_done(lambda: woken.append(1))
    assert wait.call_when_done(lambda: woken.append(2))
    wait.complete()
    wait.complete(ValueError("too late"))
    assert woken == [1, 2]
    assert not wait.call_when_done(lambda: woken.append(3))
    assert woken == [1, 2]


def test_error_of_a_wait_is_raised_in_the_coroutine():
    wait = Wait()

    async def work():
        await wait

    coroutine, found = started(work())
    assert found is wait
    wait.complete(codec.PeerError("lost"))
    with pytest.raises(codec.PeerError, match="lost"):
        coroutine.send(None)


def test_turns_pass_in_the_order_in_which_they_were_asked_for():
    turns, passed = Turns(), []

    async def work(i, before, after):
        if before is not None:
            await before
        passed.append(i)
        after.complete()

    asked = [turns.ask() for _ in range(3)]
    assert asked[0][0] is None
    last, _ = started(work(2, *asked[2]))
    middle, _ = started(work(1, *asked[1]))
    result_of(work(0, *asked[0]))
    result_of(middle)
    result_of(last)
    assert passed == [0, 1, 2]


# Tests of Together, which runs coroutines concurrently


def test_together_goes_on_with_one_coroutine_while_others_wait():
    waits, steps = [Wait(), Wait()], []

    async def work(i):
        steps.append((i, "begins"))
        await waits[i]
        steps.append((i, "ends"))
        return 10 * i

    async def both():
        return await Together([work(0), work(1)])

    coroutine, awaited = started(both())
    assert steps == [(0, "begins"), (1, "begins")]
    waits[1].complete()
    assert awaited.done
    awaited = coroutine.send(None)
    assert steps[2:] == [(1, "ends")]
    assert not awaited.done
    waits[0].complete()
    assert awaited.done
    assert result_of(coroutine) == [0, 10]


def test_together_passes_the_error_of_a_late_rank_to_the_coroutine_that_waits_for_it():
    waits, seen = [Wait(), of_rank(3, timeouts=2)], []

    async def work(i):
        try:
            await waits[i]
        except codec.PeerError as e:
            seen.append((i, str(e)))
            raise

    async def both():
        await Together([work(0), work(1)])

    coroutine, awaited = started(both())
    assert (awaited.source, awaited.timeouts) == (3, 2)
    awaited.complete(codec.PeerError("too late"))
    with pytest.raises(codec.PeerError, match="too late"):
        coroutine.send(None)
    assert seen == [(1, "too late")]


def test_together_needs_no_wait_for_coroutines_that_do_not_wait():
    async def work(i):
        return i

    async def all_of_them():
        return await Together([work(i) for i in range(3)])

    assert result_of(all_of_them()) == [0, 1, 2]


def test_error_of_one_coroutine_closes_the_others():
    waits, closed = [Wait(), Wait(), Wait()], []

    async def work(i):
        try:
            await waits[i]
        except GeneratorExit:
            closed.append(i)
            raise

    async def all_of_them():
        await Together([work(i) for i in range(3)])

    coroutine, awaited = started(all_of_them())
    waits[1].complete(codec.FrameError("wrong"))
    assert awaited.done
    with pytest.raises(codec.FrameError, match="wrong"):
        coroutine.send(None)
    assert 2 in closed


@pytest.mark.parametrize(("connected", "order"), [(True, ["0", "0", "1", "1"]), (False, ["0", "1", "1", "0"])])
def test_reductions_of_a_bucket_follow_each_other_only_between_gpus(monkeypatch, connected, order):
    waits, seen = [Wait(), Wait()], []

    async def run(collective, algorithm, r, members, requested, item):
        seen.append(algorithm)
        if not (connected and algorithm == "1"):
            await waits[int(algorithm)]
        seen.append(algorithm)

    monkeypatch.setattr(execution, "_run", run)
    collective = SimpleNamespace(device=SimpleNamespace(connected=connected), levels=Levels(2, 0))
    work = execution.run_several(collective, "auto", [(None, "0"), (None, "1")])
    waits[1].complete()
    coroutine, _ = started(work)
    waits[0].complete()
    result_of(coroutine)
    assert seen == order


# Tests of tasks


def task_of(wait):
    async def work():
        await wait
        return "result"

    order = StreamOrder(None, None)
    return Task(Work(lambda: None), work, order, alone=False, of_callback=False)


def test_deadline_moves_with_the_progress_of_the_awaited_rank():
    class Progressing(Wait):
        progress = 0.0

    wait = Progressing()
    wait.source, wait.timeouts = 1, 2
    task = task_of(wait)
    begin = time.monotonic()
    assert not task.step()
    assert begin + 10 <= task.deadline(5) <= time.monotonic() + 10
    Progressing.progress = begin + 1000
    assert task.deadline(5) == begin + 1010
    task.expire()
    assert task.step()
    with pytest.raises(codec.PeerError, match="rank 1 is gone or does not answer within the timeout"):
        task.work.result()


def test_wait_ends_if_another_thread_receives_the_interrupt():
    """The kernel delivers SIGINT to any thread, if the process was stopped; this does not wake the main thread."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
        work, begin = task_of(Wait()).work, time.monotonic()

        def wait():
            timer.start()
            work.wait(timeout=SECONDS)

        with pytest.raises(KeyboardInterrupt):  # also if the interrupt precedes the wait, on a busy machine
            wait()
        assert time.monotonic() - begin < SECONDS / 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_task_that_waits_for_no_rank_has_no_deadline():
    task = task_of(Wait())
    assert not task.step()
    assert task.deadline(5) == float("inf")
    assert not task.waits_for_a_rank


# Tests of the worker thread


@pytest.fixture
def worker():
    worker = Worker("test")
    yield worker
    worker.end()


def test_coroutines_in_flight_end_in_any_order_and_their_callbacks_run_in_that_of_submission(worker):
    waits, begun, ended, over = [of_rank(1) for _ in range(3)], [], [], threading.Event()

    async def work(number, i):
        begun.append(number)
        await waits[i]

    works = [worker.submit_collective(lambda number, i=i: work(number, i)) for i in range(3)]
    for each in works:
        each.overlaps = True
    for i, each in enumerate(works):
        each.get_future().add_done_callback(lambda _, i=i: (ended.append(i), i == 2 and over.set()))
    waits[2].complete()
    works[2].wait()
    assert begun == [0, 1, 2]
    assert ended == []
    assert not works[0].is_completed()
    waits[0].complete()
    waits[1].complete()
    assert over.wait(SECONDS)
    assert ended == [0, 1, 2]


def test_function_that_is_no_collective_waits_for_those_before_and_holds_those_after(worker):
    wait, order = of_rank(1), []

    async def first():
        await wait
        order.append("first")

    async def last():
        order.append("last")

    worker.submit_collective(lambda _: first())
    alone = worker.submit(lambda: order.append("alone"))
    after = worker.submit_collective(lambda _: last())
    wait.complete()
    after.wait()
    assert alone.is_completed()
    assert order == ["first", "alone", "last"]


def test_late_rank_ends_the_wait_and_the_channel_is_told(worker):
    told = threading.Event()
    worker.timeout, worker.on_timeout = 0.05, told.set

    async def work():
        await of_rank(3)

    with pytest.raises(codec.PeerError, match="rank 3"):
        worker.submit_collective(lambda _: work()).wait()
    assert told.wait(SECONDS)


@pytest.mark.parametrize("late", [False, True])
def test_collectives_of_callbacks_begin_before_later_ones_whenever_those_are_submitted(worker, late):
    """Collectives of callbacks begin before later ones, so that numbers of collectives are equal on all ranks."""
    gate, numbers, over = of_rank(1), {}, threading.Event()

    async def work(name, number, wait=None):
        numbers[name] = number
        if wait is not None:
            await wait

    def submit(name, wait=None):
        return worker.submit_collective(lambda number: work(name, number, wait))

    def callback(_):
        submit("of callback 1")
        submit("of callback 2")
        over.set()

    first = submit("first", gate)
    first.get_future().add_done_callback(callback)
    if late:
        gate.complete()
        first.wait()
        submit("later").wait()
    else:
        later = submit("later")
        gate.complete()
        later.wait()
    assert over.wait(SECONDS)
    assert numbers == {"first": 0, "of callback 1": 1, "of callback 2": 2, "later": 3}
