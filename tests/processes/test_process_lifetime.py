"""Processes fork, and interpreters exit, while calls are in flight."""

from support.processes import run


def test_forked_child_encodes_with_its_own_threads():
    """A child process forked while the parent's threads encode starts new worker threads."""
    run(
        """
frame, stop = codec.encode(big), False

def encode():
    while not stop:
        assert codec.encode(big, options=codec.options(threads=2)) == frame

threads = [threading.Thread(target=encode) for _ in range(3)]
for t in threads:
    t.start()
for _ in range(25):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        with codec.options(threads=3):
            os._exit(0 if codec.encode(big) == frame and (codec.decode(frame) == big).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
stop = True
for t in threads:
    t.join()
print("the end")
""",
        PYTHONWARNINGS="ignore",
    )


def test_calls_succeed_while_the_interpreter_exits():
    """Calls in atexit handlers and in threads that outlive the main thread succeed, also for large tensors."""
    run(
        """
huge = normal(1 << 20)
frame = codec.encode(huge) if WARM else codec.encode(huge, options=codec.options(threads=1))

def right(when):
    assert codec.encode(huge) == frame and (codec.decode(frame) == huge).all()
    assert codec.encode(huge, options=codec.options(threads=3)) == frame
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
frame = codec.encode(huge, options=codec.options(threads=1))

@atexit.register
def last():
    assert codec.encode(huge) == frame
    print("the end")
"""
    )


def test_interpreter_exits_while_daemon_threads_encode():
    """The process exits without a crash and prints nothing."""
    for _ in range(10):
        run(
            """
huge = normal(1 << 20)
frame = codec.encode(huge)

def forever():
    while True:
        codec.decode(codec.encode(huge, options=codec.options(threads=2)), options=codec.options(threads=2))

for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(random.random() * 0.02)
print("the end")
"""
        )
