"""Raise exceptions at numbered lines that this thread executes in chosen files of the library."""

import linecache
import sys
from contextlib import contextmanager
from pathlib import Path

import codec

MODULES = [str(path) for path in Path(codec.__file__).parent.rglob("*.py")]


class Lines:
    """Counter of executed lines, and the place of the fault."""

    def __init__(self):
        self.count = 0
        self.place = None  # file, function and line at which fault() was called


@contextmanager
def at_line(point, fault, *where, armed=lambda: True):
    """Call fault() before executed line number `point`, from 0, of some functions; yield the counter of lines.

    Parameters
    ----------
    point : int
        Number of the line, in the order of execution. -1: lines are counted, and fault() is never called.
    fault : callable
        Function without arguments, which may raise an exception.
    where : str
        Ends of file names, such as "ddp/step.py", or a file and a function, such as "ddp/step.py:commit". Lines of
        functions that these functions call count only if they are listed as well.
    armed : callable
        Lines count only while armed() returns True.

    Notes
    -----
    The end of a ``with`` statement does not count: Python would not call the context manager's ``__exit__`` if a trace
    function raised an exception there.
    """
    lines = Lines()
    names = [name.partition(":") for name in where]
    for file, _, _ in names:
        assert any(path.endswith(file) for path in MODULES), f"no module is named {file}"

    def is_listed(code):
        return any(code.co_filename.endswith(file) and function in ("", code.co_name) for file, _, function in names)

    def each_call(frame, event, arg):
        if not is_listed(frame.f_code):
            return None
        last = frame.f_lineno

        def each_line(frame, event, arg):
            nonlocal last
            if event == "line":
                returns, last = frame.f_lineno < last, frame.f_lineno
                if armed() and not (returns and _is_with(frame)):
                    lines.count += 1
                    if lines.count - 1 == point:
                        sys.settrace(None)
                        lines.place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                        fault()
            return each_line

        return each_line

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def _is_with(frame):
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith(("with ", "async with "))


def raising(error):
    """Return a function that raises an exception of class `error`."""

    def fault():
        raise error("injected by the test")

    return fault
