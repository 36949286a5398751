"""Whatever happens around a call, and inside it: right results or one of our errors, and nobody's memory harmed.

What could crash or hang runs in a process of its own, which must come to its end and print that it did.
"""

import os
import subprocess
import sys

import pytest
from conftest import HANG

PRELUDE = """
import atexit, functools, gc, itertools, os, random, resource, signal, sys, threading, time
import numpy as np
import codec

rng = np.random.default_rng(0)
random.seed(0)

def normal(n):
    return rng.standard_normal(n).astype(np.float32)

big = normal(300_000)  # 19 blocks
small = normal(700)
ternary = codec.Ternary("base3", seed=3)
"""


def run(code, noise: tuple[str, ...] = (), **environment):
    """Run code in a child; it must print "the end", and nothing on stderr but lines that begin like `noise`."""
    child = subprocess.run(
        [sys.executable, "-P", "-X", "faulthandler", "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
        env={**os.environ, "CODEC_NUM_THREADS": "4", **environment},
    )
    assert child.returncode == 0, (child.returncode, child.stdout[-1000:], child.stderr[-3000:])
    assert child.stdout.endswith("the end\n"), child.stdout[-1000:]
    assert all(line.startswith(noise) for line in child.stderr.splitlines()), child.stderr[-3000:]


STORM = """
class Stop(Exception):
    pass

left = count = 0

def handler(*_):
    global left, count
    if left:
        left -= 1
        count += 1
        raise Stop

signal.signal(signal.SIGALRM, handler)

def interrupt(call, *args, **kw):
    "True if the call was left by an exception; one, two or three are raised, anywhere in it."
    global left
    left = random.randrange(1, 4)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 1.5e-3), 5e-5)
            call(*args, **kw)
        finally:
            left = 0
    except Stop:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False
"""


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_interrupts(threads):
    """An exception of a signal handler ends a call with all its threads: nothing is written after it."""
    run(
        f"THREADS = {threads}"
        + STORM
        + """
frame, lossy, total = codec.encode(big), codec.encode(big, ternary), big + codec.decode(codec.encode(big, ternary))
mean = codec.reduce([lossy, lossy])

def encoding(out):
    return codec.encode(big, out=out.view(np.uint8), threads=THREADS)

def decoding(out):
    return codec.decode(frame, out=out[: big.size], threads=THREADS)

def accumulating(out):
    return codec.accumulate(lossy, out[: big.size], threads=THREADS)

def reducing(out):
    return codec.reduce([lossy, lossy], out=out[: big.size], threads=THREADS)

others = len(os.listdir("/proc/self/task"))
calls = [encoding, decoding, accumulating, reducing]
calls += [
    lambda out: codec.encode(big, threads=THREADS),
    lambda out: codec.encode(big, ternary, residual=out[: big.size], threads=THREADS),
    lambda out: codec.decode(frame, threads=THREADS),
    lambda out: codec.reduce([lossy, lossy], threads=THREADS),
]
before = None
n = 0
while n < 1200:
    call = random.choice(calls)
    out = np.zeros(320_000, np.float32)
    raised = interrupt(call, out)
    if before is not None:
        assert before[0].tobytes() == before[1], "written to after the exception"
    before = (out, out.tobytes()) if raised else None
    n += raised
    if n % 50 == 0:
        out = np.zeros(320_000, np.float32)
        assert encoding(out) == frame and codec.encode(big, threads=THREADS) == frame
        assert codec.encode(big, ternary, threads=THREADS) == lossy
        assert (decoding(out) == big).all() and (accumulating(out)[: big.size] == total).all()
        assert (reducing(out) == mean).all()
assert count > 1200
from codec._c import pool
assert len(pool._workers) < THREADS and len(os.listdir("/proc/self/task")) < others + THREADS
print("the end")
"""
    )


def test_errors_that_hold_what_was_given():
    """CPython crashes when it collects a memoryview whose buffer another object uses: no traceback may hold one."""
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


def test_interrupts_are_prompt():
    """What was not begun when a signal came is left, by this thread and by the others."""
    run(
        """
from codec._c import pool

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, stop)
done = []

def task(*i):
    done.append(i)
    time.sleep(0.01)

signal.setitimer(signal.ITIMER_REAL, 0.1)
begin = time.monotonic()
try:
    pool.run(task, 100_000, 3)
except KeyboardInterrupt:
    assert time.monotonic() - begin < 5
    n = len(done)
    time.sleep(0.1)
    assert n == len(done) < 1000
    print("the end")
"""
    )


def test_a_call_inside_a_call_of_a_signal_handler():
    """A signal handler that encodes and decodes harms neither its own frames nor the call that it came into."""
    run(
        """
other = normal(5_000)
frames = {(i, t): codec.encode(x, s, threads=t) for i, (x, s) in enumerate(((small, codec.Lossless()), (big, ternary)))
          for t in (1, 3)}
mine = codec.encode(other, codec.Sign())
value = codec.decode(mine)
came = 0

def handler(*_):
    global came
    came += 1
    assert codec.encode(other, codec.Sign()) == mine
    assert (codec.decode(mine) == value).all()
    if came % 20 == 0:
        assert codec.encode(big, ternary, threads=3) == frames[1, 1]

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 3e-4, 3e-4)
for i in range(15_000):
    assert codec.encode(small) == frames[0, 1]
    assert (codec.decode(frames[0, 1]) == small).all()
    if i % 100 == 0:
        assert codec.encode(big, ternary, threads=3) == frames[1, 1]
        assert (codec.decode(frames[1, 1], threads=3) == codec.decode(frames[1, 1], threads=1)).all()
signal.setitimer(signal.ITIMER_REAL, 0)
assert came > 200
print("the end")
"""
    )


def test_a_call_inside_a_call_of_a_finalizer():
    """So does a finalizer, which the collector of garbage may call at any point."""
    run(
        """
other = normal(3_000)
mine = codec.encode(other, codec.Float8())
wrong = ended = 0

class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        global wrong, ended
        ended += 1
        wrong += codec.encode(other, codec.Float8()) != mine

frame, book = codec.encode(small), codec.Codebook.from_tensors(big)
how = {"metric": codec.optimizers.SGD(0.1), "state": {"theta": small[::-1].copy()}, "spec": codec.Truncate(guard=0)}
cut = codec.encode(small, **how)
info = codec.inspect(frame)
room = codec.bound(small.shape, "float32")
for i in range(12_000):
    gc.set_threshold(1 + i % 40)
    Cycle()
    wrong += codec.encode(small) != frame
    Cycle()
    wrong += (codec.decode(frame) != small).any()
    Cycle()
    wrong += codec.encode(small, **how) != cut
    Cycle()
    wrong += codec.inspect(frame) != info or codec.bound(small.shape, "float32") != room
    if i % 500 == 0:
        wrong += codec.Codebook.from_tensors(big) != book
assert ended > 10_000 and not wrong, (wrong, ended)
print("the end")
"""
    )


def test_a_call_inside_a_call_of_lazy_arguments():
    """State that is decoded when it is asked for, metrics and tensors that use the library themselves."""
    run(
        """
class Lazy:
    "A tensor that comes out of a frame."
    def __init__(self, x):
        self.frame = codec.encode(x)
    def __dlpack_device__(self):
        return (1, 0)
    def __dlpack__(self, **kw):
        codec.encode(big, codec.Sign(), residual=np.empty_like(big))
        return codec.decode(self.frame).__dlpack__()

class Mapping(dict):
    def items(self):
        return [(name, codec.decode(codec.encode(x))) for name, x in super().items()]

class Metric(codec.optimizers.SGD):
    __slots__ = ()
    def terms(self, state):
        codec.accumulate(codec.encode(big), np.zeros_like(big), threads=2)
        return codec.optimizers.SGD.terms(self, state)

x, theta = normal(2_000), normal(2_000)
for levels in ("coded", "shared"):
    spec = codec.Truncate(level_coding=levels, guard=0)
    plain = {"metric": codec.optimizers.SGD(0.1), "state": {"theta": theta}}
    left = np.empty_like(x)
    frame = codec.encode(x, spec, residual=left, **plain)
    value = codec.decode(frame, **plain)
    for metric in (plain["metric"], Metric(0.1)):
        for state in ({"theta": Lazy(theta)}, Mapping(theta=theta)):
            mine = np.full(4_000, 7, np.float32)
            assert codec.encode(Lazy(x), spec, metric=metric, state=state, residual=mine[1_000:3_000]) == frame
            assert (mine[1_000:3_000] == left).all() and (mine[:1_000] == 7).all() and (mine[3_000:] == 7).all()
            assert (codec.decode(frame, metric=metric, state=state) == value).all()
            out = np.zeros_like(x)
            assert (codec.accumulate(frame, out, metric=metric, state=state) == value).all()
            assert (codec.reduce([frame], metric=metric, state=state) == value).all()
print("the end")
"""
    )


def test_threads_that_do_not_start():
    """Fewer threads than were asked for, or none, do the same work."""
    run(
        """
import _thread
real = _thread.start_new_thread
allowed = 0

def start(*args, **kw):
    global allowed
    if allowed == 0:
        raise RuntimeError("can't start new thread")
    allowed -= 1
    return real(*args, **kw)

_thread.start_new_thread = threading._start_new_thread = threading._start_joinable_thread = start
frame, lossy = codec.encode(big, threads=1), codec.encode(big, ternary, threads=1)
for allowed in (0, 0, 1, 0, 2, 5):
    for threads in (2, 3, 7):
        for _ in range(5):
            left = np.empty_like(big)
            assert codec.encode(big, threads=threads) == frame
            assert codec.encode(big, ternary, threads=threads, residual=left) == lossy
            assert (codec.decode(frame, threads=threads) == big).all()
            assert (codec.reduce([lossy, lossy], threads=threads) == codec.decode(lossy)).all()
            assert np.allclose(left + codec.decode(lossy), big, atol=1e-6)
print("the end")
"""
    )


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_memory_that_runs_out(threads):
    """MemoryError or success, and after the error everything is as it was."""
    run(
        f"THREADS = {threads}"
        + """
x = normal(1 << 19)
before, frame, lossy = x.copy(), codec.encode(x, threads=1), codec.encode(x, ternary, threads=1)
value = codec.decode(lossy, threads=1)
theta, spec, sgd = {"theta": x[::-1].copy()}, codec.Truncate(guard=0), codec.optimizers.SGD(0.1)
cut = codec.encode(x, spec, metric=sgd, state=theta, threads=1)
room = np.empty(codec.bound(x.shape, "float32"), np.uint8)
calls = [
    lambda out: codec.encode(x, threads=THREADS) == frame,
    lambda out: codec.encode(x, out=room, threads=THREADS) == frame,
    lambda out: codec.encode(x, ternary, residual=out, threads=THREADS) == lossy,
    lambda out: codec.encode(x, spec, metric=sgd, state=theta, residual=out, threads=THREADS) == cut,
    lambda out: codec.decode(frame, threads=THREADS).tobytes() == before.tobytes(),
    lambda out: codec.decode(frame, out=out, threads=THREADS)[-1] == x[-1],
    lambda out: codec.accumulate(lossy, out, threads=THREADS)[-1] == value[-1] + 7,
    lambda out: codec.reduce([lossy, lossy], out=out, threads=THREADS)[-1] == value[-1],
]

def child(call, step):
    "In a process that may have so many bytes more than it has: 0 if the call succeeded, 1 if it raised MemoryError."
    out = np.full(x.size, 7, np.float32)
    have = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (have + step, hard))
    try:
        status = 0 if call(out) else 8
    except MemoryError:
        status = 1
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    assert status != 1 or (out == 7).all(), "written to"
    assert (x == before).all()
    assert codec.encode(x, threads=3) == frame
    return status

seen = set()
for step in (*range(0, 1 << 20, 1 << 17), *range(1 << 20, 12 << 20, 3 << 18), 64 << 20, 1 << 30):
    for call in calls:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            try:
                os._exit(child(call, step))
            finally:
                os._exit(9)
        seen.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert seen == {0, 1}, seen
print("the end")
""",
        # CPython's, of a thread without memory for its first call; it is as if it had not been started
        noise=("Exception ignored in thread started by", "MemoryError:"),
    )


def test_a_frame_that_cannot_be_allocated():
    """MemoryError, and not a word from finalizers."""
    run(
        """
x = np.zeros(1 << 24, np.uint8)
have = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (have + (4 << 20),) * 2)
for threads in (1, 3):
    try:
        codec.encode(x, threads=threads)
    except MemoryError:
        continue
    raise SystemExit("there was memory")
gc.collect()
print("the end")
"""
    )


def test_fork_while_threads_encode():
    """A child has threads of its own, whatever the parent's were doing."""
    run(
        """
frame, stop = codec.encode(big), False

def encode():
    while not stop:
        assert codec.encode(big, threads=2) == frame

threads = [threading.Thread(target=encode) for _ in range(3)]
for t in threads:
    t.start()
for _ in range(25):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if codec.encode(big, threads=3) == frame and (codec.decode(frame, threads=2) == big).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
stop = True
for t in threads:
    t.join()
print("the end")
""",
        PYTHONWARNINGS="ignore",
    )


def test_the_end_of_the_interpreter():
    """Handlers of atexit and threads that outlive the main one get their results, of large tensors too."""
    run(
        """
huge = normal(1 << 20)
frame = codec.encode(huge) if WARM else codec.encode(huge, threads=1)

def right(when):
    assert codec.encode(huge) == frame and (codec.decode(frame) == huge).all()
    assert codec.encode(huge, threads=3) == frame
    sys.stdout.write(f"{when}\\n")

def late():
    threading.main_thread().join()
    time.sleep(0.05)
    right("late")

def last():
    right("atexit")
    print("the end")

atexit.register(last)
threading.Thread(target=late).start()
""".replace("WARM", "True")
    )
    run(
        """
huge = normal(1 << 20)
frame = codec.encode(huge, threads=1)

@atexit.register
def last():
    assert codec.encode(huge) == frame
    print("the end")
"""
    )


def test_the_end_of_the_interpreter_in_the_midst_of_a_call():
    """Daemon threads that are encoding and decoding when the process ends do no harm."""
    for _ in range(10):
        run(
            """
huge = normal(1 << 20)
frame = codec.encode(huge)

def forever():
    while True:
        codec.decode(codec.encode(huge, threads=2), threads=2)

for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(random.random() * 0.02)
print("the end")
"""
        )


def test_threads_of_the_caller():
    """16 threads with good and damaged frames get what one would."""
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
        codec.decode(frame, out=out, threads=threads)
    except codec.FrameError as e:
        assert (out == 7).all()
        return type(e), codec.encode(x, spec, threads=threads)
    except codec.SpecError as e:
        return type(e), codec.encode(x, spec, threads=threads)
    return out.tobytes(), codec.encode(x, spec, threads=threads)

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


def test_pool():
    """What `run` promises, of any task."""
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
assert codec.encode(big, threads=10**30) == codec.encode(big, threads=1)
assert (codec.decode(codec.encode(big), threads=10**30) == big).all()
assert time.monotonic() - begin < 1 and len(pool._workers) < 20
print("the end")
"""
    )


def test_memory_is_given_back():
    """Neither the queue, nor a thread of the pool, nor a cycle holds what a call was given."""
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
    frame, ref = codec.encode(x, threads=threads), weakref.ref(x)
    del x
    assert dead(ref)
    out = np.empty_like(big).view(Tensor)
    ref = weakref.ref(codec.decode(frame, out=out, threads=threads))
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


def test_near_the_limit_of_recursion():
    """However deep the stack is, a call succeeds or leaves nothing running."""
    run(
        """
frame = codec.encode(big, threads=3)

def at(depth):
    if depth:
        return at(depth - 1)
    return codec.encode(big, threads=3)

sys.setrecursionlimit(200)
ended = 0
for depth in range(120, 200):
    try:
        assert at(depth) == frame
        ended += 1
    except RecursionError:
        pass
assert 10 < ended < 80
assert codec.encode(big, threads=3) == frame
print("the end")
"""
    )
