"""A signal handler raises an exception while a call encodes, decodes, reduces or accumulates."""

import pytest

from support.processes import run
from support.tiers import nightly

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
    "Run a call, raise one to three exceptions anywhere in it, and return True if one of them left the call."
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


@pytest.mark.parametrize("threads", [2, nightly(3), 8])
def test_exception_of_a_signal_handler_stops_all_threads(threads):
    """After the exception has left the call, no thread writes to the destination any more."""
    run(
        f"THREADS = {threads}"
        + STORM
        + """
frame, lossy, total = codec.encode(big), codec.encode(big, ternary), big + codec.decode(codec.encode(big, ternary))
mean = codec.reduce([lossy, lossy])

def encoding(out):
    return codec.encode(big, out=out.view(np.uint8), options=codec.options(threads=THREADS))

def decoding(out):
    return codec.decode(frame, out=out[: big.size], options=codec.options(threads=THREADS))

def accumulating(out):
    return codec.accumulate(lossy, out[: big.size], options=codec.options(threads=THREADS))

def reducing(out):
    return codec.reduce([lossy, lossy], out=out[: big.size], options=codec.options(threads=THREADS))

others = len(os.listdir("/proc/self/task"))
calls = [encoding, decoding, accumulating, reducing]
calls += [
    lambda out: codec.encode(big, options=codec.options(threads=THREADS)),
    lambda out: codec.encode(big, ternary, residual=out[: big.size], options=codec.options(threads=THREADS)),
    lambda out: codec.decode(frame, options=codec.options(threads=THREADS)),
    lambda out: codec.reduce([lossy, lossy], options=codec.options(threads=THREADS)),
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
        assert encoding(out) == frame and codec.encode(big, options=codec.options(threads=THREADS)) == frame
        assert codec.encode(big, ternary, options=codec.options(threads=THREADS)) == lossy
        assert (decoding(out) == big).all() and (accumulating(out)[: big.size] == total).all()
        assert (reducing(out) == mean).all()
assert count > 1200
from codec._c import pool
assert len(pool._workers) < THREADS and len(os.listdir("/proc/self/task")) < others + THREADS
print("the end")
"""
    )


def test_interrupt_skips_tasks_that_have_not_begun():
    """No thread begins another task after the signal."""
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
