"""Calls from several threads, the thread pool on which calls run, and references that calls must not keep."""

from support.processes import run


def test_tracebacks_hold_no_memoryview_with_exports():
    """CPython would crash when it collects a memoryview whose buffer another object still uses."""
    run(
        """
import gc
frame = codec.encode(small)

def fail():
    given = memoryview(bytearray(frame[:-1]))
    rest = memoryview(np.frombuffer(bytearray(small.tobytes()), np.float32))
    caught = []
    many = lambda x: codec.decode_many([x])
    for call in (codec.decode, codec.inspect, codec.verify, lambda x: codec.reduce([x, x]), many):
        try:
            call(given)
        except codec.FrameError as e:
            caught.append(e)
    for call in (
        lambda: codec.encode(rest, out=given[:3]),
        lambda: codec.encode(rest, codec.Sign(), residual=rest[1:]),
        lambda: codec.decode(given, out=rest),
        lambda: codec.accumulate(given, rest),
    ):
        try:
            call()
        except codec.CodecError as e:
            caught.append(e)
    caught.append(caught)
    return len(caught)

for _ in range(300):
    n = fail()
    assert n == 9, n
gc.collect()
print("the end")
"""
    )


def test_calls_from_16_threads_are_independent():
    """Each thread's calls return or raise the same as in a single thread, for valid and damaged frames."""
    run(
        """
specs = [codec.Lossless(), ternary, codec.Float8(), codec.Quantize(), codec.Truncate(1)]
jobs = []
for i in range(40):
    x = normal((700, 20_000, 70_000)[i % 3])
    frame = bytearray(codec.encode(x, specs[i % 5]))
    if i % 2:
        frame[random.randrange(len(frame))] ^= 1 << random.randrange(8)
    jobs.append((x, specs[i % 5], bytes(frame)))

def outcome(job, threads):
    x, spec, frame = job
    out = np.full(x.shape, 7, np.float32)
    try:
        codec.decode(frame, out=out, options=codec.options(threads=threads))
    except codec.FrameError as e:
        assert (out == 7).all()
        return type(e), codec.encode(x, spec, options=codec.options(threads=threads))
    except codec.ArgumentError as e:
        return type(e), codec.encode(x, spec, options=codec.options(threads=threads))
    return out.tobytes(), codec.encode(x, spec, options=codec.options(threads=threads))

expected = [outcome(job, 1) for job in jobs]
wrong = []

def work(k):
    mine = random.Random(k)
    for _ in range(60):
        i = mine.randrange(len(jobs))
        if outcome(jobs[i], mine.choice((None, 1, 2, 3))) != expected[i]:
            wrong.append(i)

threads = [threading.Thread(target=work, args=(k,)) for k in range(16)]
for t in threads:
    t.start()
for t in threads:
    t.join()
assert not wrong
print("the end")
"""
    )


def test_pool_runs_all_tasks_and_raises_the_first_error():
    """The pool returns results in order, runs at most `threads` tasks at once, and none after an error was raised."""
    run(
        """
from codec._c import pool

for count, threads in itertools.product((1, 2, 5, 40), (1, 2, 3, 9)):
    busy, most = set(), min(count, threads)

    def task(i, w):
        assert 0 <= w < most and w not in busy
        busy.add(w)
        time.sleep(random.random() * 1e-4)
        busy.discard(w)
        return i * i

    assert pool.run(task, count, threads) == [i * i for i in range(count)]
assert len(pool._workers) <= 8

for first in (0, 3, 17):  # the first error in order, and nothing runs afterwards
    running = 0

    def task(i, w):
        global running
        running += 1
        try:
            time.sleep(0.001 * (i == first))
            if i >= first:
                raise ValueError(i)
        finally:
            running -= 1

    try:
        pool.run(task, 40, 4)
    except ValueError as e:
        assert e.args == (first,) and running == 0
    else:
        raise SystemExit("no error")

gate, got = threading.Event(), []  # one caller whose tasks take long does not hold up another
slow = threading.Thread(target=lambda: got.append(pool.run(lambda i, w: gate.wait(), 9, 9)))
slow.start()
time.sleep(0.05)
assert pool.run(lambda i, w: i, 20, 9) == list(range(20))
gate.set()
slow.join()
assert got == [[True] * 9]

assert pool.run(lambda i, w: pool.run(lambda j, w: i * j, 5, 3), 5, 3) == [[i * j for j in range(5)] for i in range(5)]

begin = time.monotonic()
assert codec.encode(big, options=codec.options(threads=10**30)) == codec.encode(big, options=codec.options(threads=1))
assert (codec.decode(codec.encode(big), options=codec.options(threads=10**30)) == big).all()
assert time.monotonic() - begin < 1 and len(pool._workers) < 20
print("the end")
"""
    )


def test_calls_keep_no_references_to_arguments():
    """The pool's queue, its threads and reference cycles keep no argument alive."""
    run(
        """
import weakref
from codec._c import pool

class Tensor(np.ndarray):
    pass

def dead(ref):
    deadline = time.monotonic() + 5
    while ref() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return ref() is None

for threads in (1, 4):
    x = big.copy().view(Tensor)
    frame, ref = codec.encode(x, options=codec.options(threads=threads)), weakref.ref(x)
    del x
    assert dead(ref)
    out = np.empty_like(big).view(Tensor)
    ref = weakref.ref(codec.decode(frame, out=out, options=codec.options(threads=threads)))
    del out
    assert dead(ref)

def fail(*_, x):
    raise ValueError

gc.disable()
x = big.copy().view(Tensor)
ref = weakref.ref(x)
try:
    pool.run(functools.partial(fail, x=x), 20, 4)
except ValueError:
    pass
del x
assert dead(ref)
print("the end")
"""
    )
