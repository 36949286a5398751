"""Shared functions of commands: arguments, atomic outputs, progress, JSON, exit codes."""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from codec.errors import ArgumentError
from codec.files.opening import printable
from codec.files.replacing import replaced

PROGRAM = "codec"
FAILED, WRONG_USAGE, OTHER_BASE, INTERRUPTED = 1, 2, 3, 130  # exit codes; 0: success
STANDARD = "-"  # path of standard input and output
EXIT_CODES = f"Exit codes: 0; {FAILED} after an error; {WRONG_USAGE} for wrong arguments."

Progress = Callable[[int, int], None]


def add_output(p: Any, *, required: bool = False, default: str = "") -> None:
    """Add ``--output``, ``--force`` and ``--json`` to the parser of a command that writes a file."""
    text = "file to write, - for standard output" if default else "file to write; it appears when it is complete"
    p.add_argument("-o", "--output", required=required, help=f"{text}; default: {default}" if default else text)
    p.add_argument("--force", action="store_true", help="replace the output if it exists")
    add_json(p)


def add_json(p: Any) -> None:
    """Add ``--json`` to the parser of a command."""
    p.add_argument("--json", action="store_true", help="print JSON")


def add_threads(p: Any) -> None:
    """Add ``--threads`` to the parser of a command."""
    p.add_argument(
        "--threads", type=int, metavar="N", help="number of threads; default: chosen from the size of the tensors"
    )


def check_output(path: str, force: bool, *inputs: str) -> None:
    """Raise ArgumentError if a command would replace a file without ``--force``, or its own input."""
    if path == STANDARD:
        return
    if any(i != STANDARD and Path(path).exists() and Path(i).exists() and os.path.samefile(path, i) for i in inputs):
        raise ArgumentError(f"{printable(path)} is the input as well as the output: choose another name for the output")
    if Path(path).is_dir():
        raise ArgumentError(f"{printable(path)} is a folder, but the output must be a file: name a file in the folder")
    if Path(path).exists() and not force:
        raise ArgumentError(f"{printable(path)} exists: choose another name, or pass --force to replace the file")


@contextmanager
def output_file(path: str) -> Generator[BinaryIO]:
    """Open a temporary file. If the block succeeds, rename the file to `path`, or for ``-`` copy it to stdout."""
    if path != STANDARD:
        with replaced(Path(path)) as file:
            yield file
        return
    if sys.stdout.isatty():
        raise ArgumentError(
            "standard output is a terminal, to which no binary data is written: pass -o FILE, or use a pipe"
        )
    import shutil
    import tempfile

    with tempfile.TemporaryFile() as file:
        yield file
        file.seek(0)
        shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
        sys.stdout.buffer.flush()


@contextmanager
def input_file(path: str) -> Generator[str]:
    """Yield `path`; for ``-``, the path of a temporary copy of standard input."""
    if path != STANDARD:
        yield path
        return
    import shutil
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="codec-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        file.flush()
        yield file.name


@contextmanager
def progress_bar(unit: str = "B") -> Generator[Progress | None]:
    """Yield a function that shows progress on stderr; None if stderr is no terminal or tqdm is not installed."""
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm if sys.stderr.isatty() else None
    except ImportError:
        tqdm = None
    if tqdm is None:
        yield None
        return
    with tqdm(unit=unit, unit_scale=True, leave=False, dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.refresh()

        yield show


def report(args: argparse.Namespace, entries: Mapping[str, Any], line: str) -> None:
    """Print a command's result as a line or as JSON; if stdout has the command's data, print only JSON, to stderr."""
    if args.output != STANDARD:
        print(json.dumps(entries, indent=1) if args.json else line, flush=True)
    elif args.json:
        print(json.dumps(entries, indent=1), file=sys.stderr)


def print_entries(args: argparse.Namespace, entries: Mapping[str, Any]) -> None:
    """Print a mapping, one line per entry, or as JSON."""
    if args.json:
        print(json.dumps(entries, indent=1))
        return
    width = max(14, *map(len, entries))
    for name, value in entries.items():
        print(f"{name:{width}} {value}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Print a table. Columns whose index is in `left` are left-aligned, all others right-aligned."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip())


def print_error(error: object) -> None:
    """Print an error as one line on standard error."""
    text = " ".join(str(error).split("\n"))
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)
