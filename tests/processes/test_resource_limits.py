"""Without enough threads, memory or stack, a call returns the same result or raises and changes nothing."""

import pytest

from support.processes import run
from support.tiers import nightly


def test_calls_succeed_when_threads_cannot_start():
    """If worker threads cannot start, the threads that did start, or the calling thread alone, do all the work."""
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
one = codec.options(threads=1)
frame, lossy = codec.encode(big, options=one), codec.encode(big, ternary, options=one)
for allowed in (0, 0, 1, 0, 2, 5):
    for threads in (2, 3, 7):
        for _ in range(5):
            left = np.empty_like(big)
            assert codec.encode(big, options=codec.options(threads=threads)) == frame
            assert codec.encode(big, ternary, residual=left, options=codec.options(threads=threads)) == lossy
            assert (codec.decode(frame, options=codec.options(threads=threads)) == big).all()
            assert (codec.reduce([lossy, lossy], options=codec.options(threads=threads)) == codec.decode(lossy)).all()
            assert np.allclose(left + codec.decode(lossy), big, atol=1e-6)
print("the end")
"""
    )


@pytest.mark.parametrize("threads", [1, nightly(2), 6])
def test_memory_error_leaves_arguments_unchanged(threads):
    """A call either succeeds or raises MemoryError and changes nothing."""
    run(
        f"THREADS = {threads}"
        + """
x = normal(1 << 19)
one = codec.options(threads=1)
before, frame, lossy = x.copy(), codec.encode(x, options=one), codec.encode(x, ternary, options=one)
value = codec.decode(lossy, options=one)
theta, spec, sgd = {"theta": x[::-1].copy()}, codec.Truncate(guard=0), codec.optimizers.SGD(0.1)
cut = codec.encode(x, spec.bind(sgd, **theta), options=one)
room = np.empty(codec.bound(x.shape, "float32"), np.uint8)
calls = [
    lambda out: codec.encode(x, options=codec.options(threads=THREADS)) == frame,
    lambda out: codec.encode(x, out=room, options=codec.options(threads=THREADS)) == frame,
    lambda out: codec.encode(x, ternary, residual=out, options=codec.options(threads=THREADS)) == lossy,
    lambda out: codec.encode(x, spec.bind(sgd, **theta), residual=out, options=codec.options(threads=THREADS)) == cut,
    lambda out: codec.decode(frame, options=codec.options(threads=THREADS)).tobytes() == before.tobytes(),
    lambda out: codec.decode(frame, out=out, options=codec.options(threads=THREADS))[-1] == x[-1],
    lambda out: codec.accumulate(lossy, out, options=codec.options(threads=THREADS))[-1] == value[-1] + 7,
    lambda out: codec.reduce([lossy, lossy], out=out, options=codec.options(threads=THREADS))[-1] == value[-1],
]

def child(call, step):
    "Run a call with `step` more bytes of address space; return 0 for success, 1 for MemoryError."
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
    assert codec.encode(x, options=codec.options(threads=3)) == frame
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
        # CPython prints this if a new thread has no memory for its first call; the pool works without that thread
        noise=("Exception ignored in thread started by", "MemoryError:"),
    )


def test_frame_too_large_for_memory_raises_memory_error():
    """A finalizer that runs after the MemoryError prints no warning."""
    run(
        """
x = np.zeros(1 << 24, np.uint8)
have = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (have + (4 << 20),) * 2)
for threads in (1, 3):
    try:
        codec.encode(x, options=codec.options(threads=threads))
    except MemoryError:
        continue
    raise SystemExit("there was memory")
gc.collect()
print("the end")
"""
    )


def test_calls_near_the_recursion_limit_succeed_or_raise_recursion_error():
    """After a RecursionError no task is left running, and the next call succeeds."""
    run(
        """
frame = codec.encode(big, options=codec.options(threads=3))

def at(depth):
    if depth:
        return at(depth - 1)
    return codec.encode(big, options=codec.options(threads=3))

sys.setrecursionlimit(200)
ended = 0
for depth in range(120, 200):
    try:
        assert at(depth) == frame
        ended += 1
    except RecursionError:
        pass
assert 10 < ended < 80
assert codec.encode(big, options=codec.options(threads=3)) == frame
print("the end")
"""
    )
