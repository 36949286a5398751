"""The end of worker threads: after the garbage collector has freed their owner, and at the exit of the process."""

import signal
import subprocess
import sys
import threading

import pytest

from codec.torch.group.worker import Worker

SECONDS = 20


class _Owner:
    """Owner of a worker."""

    def __init__(self):
        self.worker = Worker("test")
        self.worker.end_with(self)


def test_ctrl_c_is_raised_while_the_owner_of_a_busy_worker_is_freed():
    busy, never = threading.Event(), threading.Event()

    def free_and_wait():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        owners.clear()  # not gc.collect(), which may run finalizers of other objects
        never.wait(SECONDS)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        owners = [_Owner()]
        thread, work = owners[0].worker._thread, owners[0].worker.submit(lambda: busy.wait(SECONDS))
        with pytest.raises(KeyboardInterrupt):
            free_and_wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not work.is_completed()
    busy.set()
    work.wait()
    thread.join(SECONDS)
    assert not thread.is_alive()


_EXIT = """
import hashlib, sys
from codec.torch.group.worker import Worker

class Owner:
    pass

def work():
    for _ in range(4):
        hashlib.sha256(bytes(64 << 20))
    sys.stdout.write("done")

owner, worker = Owner(), Worker("test")
worker.end_with(owner)
worker.submit(work)
if FREED:
    del owner, worker
"""


@pytest.mark.parametrize("freed", [False, True])
def test_process_exits_after_workers_have_computed(freed):
    command = [sys.executable, "-P", "-c", f"FREED = {freed}{_EXIT}"]
    found = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, b"done", b"")
