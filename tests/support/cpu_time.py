"""CPU time of each test: a limit in `make test`, and a table of the most expensive tests.

CPU time includes that of child processes: of those that have ended and, for ranks of collectives, of those that run.
Unlike elapsed time, it hardly depends on the load of the machine. The compilation of kernels is not counted: which test
needs a kernel first depends on the order of tests and on caches.
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

LIMIT = 10  # CPU seconds: a test should take 5 on an idle machine, and a busy one takes twice as many
EXCEPTIONS = Path(__file__).with_name("cpu_time_exceptions.txt")
_TICKS = os.sysconf("SC_CLK_TCK")
_SHOWN = 10  # tests in the table


def exceptions() -> dict[str, float]:
    """Return the limits, in CPU seconds, of the tests and modules that :data:`EXCEPTIONS` names."""
    lines = [line.partition("#")[0].split() for line in EXCEPTIONS.read_text().splitlines()]
    return {test: float(seconds) for test, seconds in filter(None, lines)}


def _of_process(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended; 0 if it has gone."""
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
    """Do not count the CPU time of the calls in this context."""
    global _compilation
    before = sum(os.times()[:4])
    yield
    _compilation += sum(os.times()[:4]) - before


def _numba_listener() -> Any:
    """Return a listener of Numba's events that does not count the compilation of kernels."""
    from numba.core.event import Listener

    class Compilation(Listener):
        depth, before = 0, 0.0  # compilations nest

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


def _is_limited(item: pytest.Item) -> bool:
    """Return whether `make check` and `make test` run a test."""
    elsewhere = item.nodeid.startswith(("tests/frameworks/", "tests/rollouts/"))
    return not (TIER == "nightly" or elsewhere or any(map(item.get_closest_marker, ("gpu", "nightly"))))


class CpuTime:
    """Plugin of pytest: a test of `make test` that takes more CPU time than its limit fails.

    Fixtures of a module or a session are not counted, since other tests use them too.
    """

    def __init__(self) -> None:
        self._limits = exceptions()
        self._took: list[tuple[float, str]] = []
        self._listens = False

    def _listen(self) -> bool:
        """Return whether compilations of Numba, once it is imported, are not counted."""
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
        counted = listens == self._listen()  # a test that imports Numba may have compiled, unnoticed
        if counted and took > limit and _is_limited(item):
            pytest.fail(
                f"the test took {took:.1f} s of CPU time; the limit is {limit:g} s. Use smaller tensors or fewer "
                f"parameters, mark it nightly, or give the reason in {EXCEPTIONS.name}",
                pytrace=False,
            )
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the most expensive tests."""
        terminalreporter.section("CPU seconds of the most expensive tests")
        for took, test in sorted(self._took, reverse=True)[:_SHOWN]:
            terminalreporter.write_line(f"{took:6.2f} {test}")
