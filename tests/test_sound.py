"""Whatever happens around a call, and inside it: right results or one of our errors, and nobody's memory harmed.

What could crash or hang runs in a process of its own, which must come to its end and print that it did.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

import codec

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
        timeout=60,
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
from codec import pool
assert len(pool._workers) < THREADS and len(os.listdir("/proc/self/task")) < others + THREADS
print("the end")
"""
    )


def test_interrupts_are_prompt():
    """What was not begun when a signal came is left, by this thread and by the others."""
    run(
        """
from codec import pool

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
how = {"metric": codec.metrics.SGD(0.1), "state": {"theta": small[::-1].copy()}, "spec": codec.Truncate(guard=0)}
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

class Metric(codec.metrics.SGD):
    __slots__ = ()
    def terms(self, state):
        codec.accumulate(codec.encode(big), np.zeros_like(big), threads=2)
        return codec.metrics.SGD.terms(self, state)

x, theta = normal(2_000), normal(2_000)
for levels in ("coded", "shared"):
    spec = codec.Truncate(levels=levels, guard=0)
    plain = {"metric": codec.metrics.SGD(0.1), "state": {"theta": theta}}
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
theta, spec, sgd = {"theta": x[::-1].copy()}, codec.Truncate(guard=0), codec.metrics.SGD(0.1)
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
from codec import pool

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
from codec import pool

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


X = np.linspace(-1, 1, 9_000, dtype=np.float32)
HUGE = 10**5000  # more digits than Python prints


def refused(error=codec.SpecError, match=None):
    return pytest.raises(error, match=match)


def test_threads_of_a_wrong_kind():
    """Threads are an int of at least 1, everywhere."""
    frame = codec.encode(X)
    for value in (0, -1, 1.0, "2", True, int, np.arange(2), -HUGE):
        for call in (
            lambda n: codec.encode(X, threads=n),
            lambda n: codec.decode(frame, threads=n),
            lambda n: codec.accumulate(frame, X.copy(), threads=n),
            lambda n: codec.reduce([frame], threads=n),
        ):
            with refused(match="threads must be an int of at least 1"):
                call(value)


def test_threads_of_other_kinds():
    """Any integer will do; what the environment says may be any text."""
    assert codec.encode(X, threads=np.int64(2)) == codec.encode(X, threads=HUGE) == codec.encode(X)
    for text in ("9" * 5000, "0", "-3", "many", "", "١٢"):
        run('assert codec.encode(normal(1 << 20))\nprint("the end")', CODEC_NUM_THREADS=text)


def test_numbers_of_metrics():
    """A metric's numbers are finite, betas below 1, and a step is the one about to be taken."""
    metrics = codec.metrics
    for metric in (metrics.Adam, metrics.AdamW, metrics.AdaGrad):
        with refused(match="step about to be taken, from 1 on"):
            metric(1e-3, step=0)
    for metric in (metrics.Adam, metrics.AdamW):
        for beta in ({"beta1": 1}, {"beta2": 1.0}, {"beta1": 1.5}):
            with refused(match="must be below 1"):
                metric(1e-3, **beta)
    for bad in (10**400, HUGE, float("inf"), float("nan"), -1, "0.1", None):
        with refused(match="lr must be a finite number"):
            metrics.SGD(bad)
        with refused(match="step must be a finite number"):
            metrics.Adam(1e-3, step=bad)
    state = {"theta": X, "m": X, "v": X * X}
    for metric in (
        metrics.Adam(1e300, step=10**300),
        metrics.AdamW(0, step=1, beta1=0, beta2=0),
        metrics.Adam(5e-324, eps=1e308),
        metrics.Momentum(0.1, dampening=1, momentum=1e308),
        metrics.AdaGrad(1e-300, lr_decay=1e308, step=10**300),
        metrics.RMSProp(10**300, alpha=1e300),
    ):
        for levels in ("coded", "shared"):
            frame = codec.encode(X, codec.Truncate(levels=levels), metric=metric, state=state)
            assert codec.decode(frame, metric=metric, state=state).shape == X.shape


def test_arguments_that_are_no_numbers():
    """What does not fit is a SpecError that says what would."""
    frame, sgd, truncate = codec.encode(X), codec.metrics.SGD(0.1), codec.Truncate()
    for most in (-1, 1 << 64, "1", 1.5, -HUGE):
        with refused(match="max_nbytes must be an int from 0"):
            codec.decode(frame, max_nbytes=most)
        with refused(match="max_nbytes must be an int from 0"):
            codec.reduce([frame], max_nbytes=most)
    for most in (0, 35_999):
        with refused(codec.LimitError):
            codec.decode(frame, max_nbytes=most)
    for stream in (-1, 1 << 64, "1", 1.5, None, HUGE):
        with refused(match="stream must be an int from 0"):
            codec.encode(X, stream=stream)
    for shape in (1 << 64, (3, 1 << 60), -1, (2, -1), "ab", 1.5, (1,) * 9, (2, HUGE), None):
        with refused():
            codec.bound(shape, "float32")
    assert codec.bound(np.int64(9_000), "float32") == codec.bound([9_000], np.float32) >= len(frame)
    for weight in ("1", None, 1j, 1e39, -HUGE):
        with refused(match="weight must be a number"):
            codec.accumulate(frame, X.copy(), weight)
    for weight in (2, np.float32(2), np.array(2)):
        assert (codec.accumulate(frame, X.copy(), weight) == 3 * X).all()
    for segments in (5, [5], [(1,)], [(0, 5)], [(0, (5,), 7)], [(None, (5,))], [(0, ("a",))], [(0, (HUGE,))], "ab"):
        with refused(match="segments are pairs"):
            codec.encode(X, segments=segments)
        with refused(match="segments are pairs"):
            codec.Codebook.from_tensors(X, segments=segments)
    for groups in (
        [], [sgd], [(0, sgd, 1)], [(1, sgd)], [(0, sgd), (0, sgd)], [(0, 7)], [(0, sgd), (1 << 64, sgd)],
        [(-1, sgd)], [(0.5, sgd)], [("0", sgd)], "metric", object(),
    ):  # fmt: skip
        with refused():
            codec.encode(X, truncate, metric=groups, state={"theta": X})
    for state in (5, {"theta": X, 5: X}, {"theta": X, "w": X}, [X]):
        with refused(match="state"):
            codec.encode(X, truncate, metric=sgd, state=state)
    for spec in (codec.Sign, [], None, "sign", {}):
        with refused(match="not a spec"):
            codec.encode(X, spec)
    book = codec.Codebook.from_tensors(X)
    for books in (5, [5], "ab", [book, None]):
        with refused(match="not codebooks"):
            codec.decode(frame, codebooks=books)
    for one in ([book], 5):
        with refused(match="not codebooks"):
            codec.encode(X, codebook=one)
    for op in (["sum"], "product", None):
        with refused(match="op must be"):
            codec.reduce([frame], op)
    with refused(match="no such dtype"):
        codec.encode(X, dtype=["float32"])


def test_scales():
    """A scale that float32, or the tensor's dtype, rounds to 0 or Inf is refused, never taken for none."""
    for bad in (1e-46, 1e39, 0, -1, float("nan"), float("inf"), HUGE):
        with refused(match="scale must be positive and finite as float32"):
            codec.Ternary(scale=bad)
        with refused(match="clip must be positive and finite as float32"):
            codec.Ternary(clip=bad)
        with refused(match="scale must be positive and finite as float32"):
            codec.Float8(scale=bad)
    for bad in ("1", 1j, [1]):
        with refused(match="must be a positive number or None"):
            codec.Ternary(scale=bad)
    tiny, wide = np.zeros(5, np.float16), np.zeros(5, np.uint16)
    for x, dtype, scales, good in (
        (tiny, None, (1e-8, 2.98e-8, 65520, 1e5), (2.99e-8, 6e-8, 65519, 1)),
        (wide, "bfloat16", (1e-45, 4.59e-41, 3.3961776e38), (4.6e-41, 1e-40, 3.3961e38, 1)),
    ):
        for scale in scales:
            with refused(match="scale .* is (0.0|inf) in"):
                codec.encode(x, codec.Ternary(scale=scale), dtype=dtype)
        for scale in good:
            assert not codec.decode(codec.encode(x, codec.Ternary(scale=scale), dtype=dtype)).any()


def test_memory_that_is_shared():
    """What is written lies apart from what is read, or is just the same values."""
    memory = np.zeros(40_000, np.float32)
    memory[:9_000] = X
    x = memory[:9_000]
    for r in (memory[1:9_001], memory[8_999:17_999]):
        with refused(match="residual= shares memory with x without being x itself"):
            codec.encode(x, codec.Sign(), residual=r)
    with refused(match="residual= shares memory with x"):
        codec.encode(memory.view(np.uint16)[:9_000], codec.Sign(), dtype="bfloat16", residual=x)
    for out in (memory.view(np.uint8), memory.view(np.uint8)[35_999:]):
        with refused(match="out= shares memory with x"):
            codec.encode(x, out=out)
    left = memory[20_000:29_000]
    with refused(match="out= shares memory with residual="):
        codec.encode(x, codec.Sign(), residual=left, out=memory.view(np.uint8)[115_000:])
    theta = {"theta": memory[10_000:19_000]}
    with refused(match="out= shares memory with state's theta"):
        codec.encode(x, codec.Truncate(), metric=codec.metrics.SGD(1), state=theta, out=memory.view(np.uint8)[40_000:])
    with refused(match="residual= shares memory with state's theta"):
        codec.encode(x, codec.Truncate(), metric=codec.metrics.SGD(1), state=theta, residual=memory[10_000:19_000])
    assert (x == X).all()
    frame = codec.encode(X)
    at = memory.view(np.uint8)[36_000 - len(frame) :][: len(frame)]
    at[:] = np.frombuffer(frame, np.uint8)
    for call in (
        lambda: codec.decode(at, out=x),
        lambda: codec.accumulate(at, x),
        lambda: codec.reduce([frame, at], out=x),
    ):
        with refused(match="out= shares memory with a frame"):
            call()
    assert bytes(at) == frame
    assert (codec.decode(at, out=memory[9_000:18_000]) == X).all()
    state = {"theta": X.copy()}
    frame = codec.encode(X, codec.Truncate(levels="shared"), metric=codec.metrics.SGD(1), state=state)
    with refused(match="out= shares memory with state's theta without being"):
        wide = np.concatenate([state["theta"], X])
        codec.accumulate(frame, wide[1:9_001], metric=codec.metrics.SGD(1), state={"theta": wide[:9_000]})
    expected = X + codec.decode(frame, metric=codec.metrics.SGD(1), state=state)
    assert (codec.accumulate(frame, state["theta"], metric=codec.metrics.SGD(1), state=state) == expected).all()
