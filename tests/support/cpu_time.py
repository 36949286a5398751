"""CPU time of each test: a limit in `make test`, and a table of the most expensive tests.

The CPU time of a test includes that of child processes that have ended, and of running processes that are ranks of a
collective. CPU time depends less on the load of the machine than elapsed time; limits are multiplied by the slowdown
that remains, since other programs share caches, and other virtual machines cores. Compilation of kernels is excluded,
because the order of tests and the state of caches decide which test compiles a kernel.
"""

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.tiers import TIER

LIMIT = 10  # CPU seconds per test: at most 5 are expected on an idle machine, and a busy machine doubles them
IDLE_SECONDS = 0.05  # of the loop of slowdown(), on an idle EPYC of Zen 4
EXCEPTIONS = Path(__file__).with_name("cpu_time_exceptions.txt")
_TICKS = os.sysconf("SC_CLK_TCK")
_SHOWN = 10  # number of tests in the printed table


def exceptions() -> dict[str, float]:
    """Return the limits in CPU seconds of tests and modules, by name, as read from the file :data:`EXCEPTIONS`."""
    lines = [line.partition("#")[0].split() for line in EXCEPTIONS.read_text().splitlines()]
    return {test: float(seconds) for test, seconds in filter(None, lines)}


def _of_process(pid: int) -> float:
    """Return the CPU seconds of a process and of its ended children; 0 if the process no longer exists."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15])) / _TICKS


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, its children, and the fork server with its ranks."""
    total = sum(os.times()[:4])
    if server := sys.modules.get("multiprocessing.forkserver"):
        total += _of_process(server._forkserver._forkserver_pid or 0)
        total += sum(_of_process(child.pid) for child in list(sys.modules["multiprocessing.process"]._children))
    return total


_compilation = 0.0  # CPU seconds that this process and its compilers have spent on kernels


@contextmanager
def compilation() -> Generator[None]:
    """Exclude CPU time that is spent inside this context from the CPU time of the test."""
    global _compilation
    before = sum(os.times()[:4])
    yield
    _compilation += sum(os.times()[:4]) - before


def _numba_listener() -> Any:
    """Return a listener of Numba's events that excludes the time of kernel compilation."""
    from numba.core.event import Listener

    class Compilation(Listener):
        depth, before = 0, 0.0  # number of nested compilations; CPU seconds when the outermost one began

        def on_start(self, event: Any) -> None:
            self.depth += 1
            if self.depth == 1:
                self.before = time.thread_time()

        def on_end(self, event: Any) -> None:
            global _compilation
            self.depth -= 1
            if self.depth == 0:
                _compilation += time.thread_time() - self.before

    return Compilation()


def slowdown() -> float:
    """Return how many times as long a loop takes here and now as on an idle machine; at least 1."""
    begin = time.thread_time()
    for _ in range(1 << 21):
        pass
    return max(1.0, (time.thread_time() - begin) / IDLE_SECONDS)


def _is_limited(item: pytest.Item) -> bool:
    """Return True if the limit applies to a test: `make check` and `make test` run it."""
    elsewhere = item.nodeid.startswith(("tests/frameworks/", "tests/rollouts/"))
    return not (TIER == "nightly" or elsewhere or any(map(item.get_closest_marker, ("gpu", "nightly"))))


class CpuTime:
    """Plugin of pytest that fails each test of `make test` whose CPU time exceeds its limit.

    Fixtures of module or session scope are not counted, because several tests share them.
    """

    def __init__(self) -> None:
        self._limits = exceptions()
        self._took: list[tuple[float, str]] = []
        self._listens = False

    def _listen(self) -> bool:
        """Register the listener once Numba is imported; return True if Numba's compilations are excluded."""
        if not self._listens and "numba" in sys.modules:
            sys.modules["numba.core.event"].register("numba:compile", _numba_listener())
            self._listens = True
        return self._listens

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run the test, and compare its CPU time with its limit."""
        listens = self._listen()
        before = cpu_seconds() - _compilation
        result = yield
        took = cpu_seconds() - _compilation - before
        self._took.append((took, item.nodeid))
        test, module = item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
        limit = self._limits.get(test, self._limits.get(module, LIMIT))
        counted = listens == self._listen()  # False for a test that imported Numba: its compilations were not seen
        if counted and took > limit and _is_limited(item) and took > limit * (slower := slowdown()):
            pytest.fail(
                f"the test took {took:.1f} s of CPU time; the limit is {limit * slower:.1f} s. Use smaller tensors or "
                f"fewer parameters, mark it nightly, or give the reason in {EXCEPTIONS.name}",
                pytrace=False,
            )
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the most expensive tests."""
        terminalreporter.section("CPU seconds of the most expensive tests")
        for took, test in sorted(self._took, reverse=True)[:_SHOWN]:
            terminalreporter.write_line(f"{took:6.2f} {test}")
