"""Shared functions of commands: arguments, atomic outputs, progress, JSON, exit codes."""

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from codec.errors import ArgumentError
from codec.files.opening import printable, standard_input
from codec.files.replacing import is_special, replaced
from codec.files.signing import SUFFIX, file_signature, write_signature

PROGRAM = "codec"
FAILED, WRONG_USAGE, OTHER_BASE, INTERRUPTED = 1, 2, 3, 130  # exit codes; 0: success
STANDARD = "-"  # path of standard input and output
EXIT_CODES = f"Exit codes: 0; {FAILED} after an error; {WRONG_USAGE} for wrong arguments."

Progress = Callable[[int, int], None]


def add_output(p: argparse.ArgumentParser, *, required: bool = False, default: str = "") -> None:
    """Add ``--output``, ``--force`` and ``--json`` to the parser of a command that writes a file."""
    text = "file to write, - for standard output" if default else "file to write; it appears when it is complete"
    p.add_argument("-o", "--output", required=required, help=f"{text}; default: {default}" if default else text)
    p.add_argument("--force", action="store_true", help="replace the output if it exists")
    add_json(p)


def add_json(p: argparse.ArgumentParser) -> None:
    """Add ``--json`` to the parser of a command."""
    p.add_argument("--json", action="store_true", help="print JSON")


def add_threads(p: argparse.ArgumentParser) -> None:
    """Add ``--threads`` to the parser of a command."""
    p.add_argument(
        "--threads", type=int, metavar="N", help="number of threads; default: chosen from the size of the tensors"
    )


def check_output(path: str, force: bool, *inputs: str) -> str:
    """Return the path of a command's output: STANDARD for every name of standard output, such as /dev/stdout.

    Raises
    ------
    ArgumentError
        The command would replace a file without ``--force``, or its own input.
    """
    if path == STANDARD or _is_standard_output(path):
        return STANDARD
    if any(i != STANDARD and Path(path).exists() and Path(i).exists() and os.path.samefile(path, i) for i in inputs):
        raise ArgumentError(f"{printable(path)} is the input as well as the output: choose another name for the output")
    if Path(path).is_dir() or path.endswith(os.sep):
        raise ArgumentError(f"{printable(path)} is a folder, but the output must be a file: name a file in the folder")
    if os.path.lexists(path) and not force and not (is_special(path) and not Path(path).is_block_device()):
        raise ArgumentError(f"{printable(path)} exists: choose another name, or pass --force to replace the file")
    return path


def _is_standard_output(path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:
        return False


@contextmanager
def output_file(path: str, *inputs: str) -> Generator[BinaryIO]:
    """Open a temporary file. If the block succeeds, rename the file to `path`, or for ``-`` copy it to stdout.

    The file is not readable by users who may not read all `inputs`.
    """
    if path != STANDARD:
        with _as_private_as(inputs), replaced(Path(path)) as file:
            yield file
        return
    out = _standard_output()
    try:
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            shutil.copyfileobj(file, out, 1 << 20)
            out.flush()
    except BrokenPipeError:
        raise
    except OSError as e:
        if e.filename is not None:
            raise
        raise ArgumentError(
            f"standard output cannot be written: {e.strerror} (temporary folder {tempfile.gettempdir()!r})"
        ) from None


def check_signed(args: argparse.Namespace, path: str) -> None:
    """Check that the signature of an output can be written beside it, if ``--sign`` was given."""
    if getattr(args, "sign", None) is None:
        return
    if path == STANDARD or is_special(path):
        raise ArgumentError("--sign writes a second file, beside the output: name a file by -o FILE")
    check_output(path + SUFFIX, args.force)


@contextmanager
def signed_output(args: argparse.Namespace, path: str, *inputs: str) -> Generator[BinaryIO]:
    """Open a file as :func:`output_file`; if ``--sign`` was given, write its signature beside it after the file."""
    key, signature = getattr(args, "sign", None), None
    with output_file(path, *inputs) as file:
        yield file
        if key is not None:
            signature = file_signature(file, key, args.context)
    if signature is not None:
        write_signature(path, signature)


@contextmanager
def output_path(path: str, *inputs: str) -> Generator[str]:
    """Yield the path of a file to create, as :func:`output_file` for functions of the library that take a path."""
    if path != STANDARD and not is_special(path):
        with _as_private_as(inputs):
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="codec-") as folder, output_file(path) as file:
        made = Path(folder) / "output"
        yield str(made)
        with made.open("rb") as f:
            shutil.copyfileobj(f, file, 1 << 20)


@contextmanager
def _as_private_as(inputs: Sequence[str]) -> Generator[None]:
    """Create files in the block without the rights that users do not have on one of the inputs."""
    mode = 0o666
    for path in inputs:
        with suppress(OSError):  # STANDARD, or an input whose absence is reported when it is opened
            mode &= os.stat(path).st_mode | 0o600
    before = os.umask(0o077)
    os.umask(before | (0o666 & ~mode))
    try:
        yield
    finally:
        os.umask(before)


def _standard_output() -> BinaryIO:
    if sys.stdout is None:
        raise ArgumentError("standard output is closed: pass -o FILE")
    if sys.stdout.isatty():
        raise ArgumentError(
            "standard output is a terminal, to which no binary data is written: pass -o FILE, or use a pipe"
        )
    return sys.stdout.buffer


@contextmanager
def input_file(path: str) -> Generator[str]:
    """Yield `path`; for ``-``, the path of a temporary copy of standard input."""
    if path != STANDARD:
        yield path
        return
    source = standard_input()
    with tempfile.NamedTemporaryFile(prefix="codec-") as file:
        try:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
        except OSError as e:
            folder = tempfile.gettempdir()
            raise ArgumentError(f"standard input cannot be copied to the folder {folder!r}: {e.strerror}") from None
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
        print_line(json.dumps(entries, indent=1) if args.json else line)
    elif args.json:
        print(json.dumps(entries, indent=1), file=sys.stderr)


def print_entries(args: argparse.Namespace, entries: Mapping[str, Any]) -> None:
    """Print a mapping, one line per entry, or as JSON."""
    if args.json:
        print(json.dumps(entries, indent=1))
        return
    width = max(14, *map(len, entries))
    for name, value in entries.items():
        print_line(f"{name:{width}} {value}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> None:
    """Print a table. Columns whose index is in `left` are left-aligned, all others right-aligned."""
    lines = [[visible(cell) for cell in line] for line in (columns, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip())


def print_line(text: str) -> None:
    """Print a line of text, or JSON, on standard output, without the control characters of names."""
    print("\n".join(map(visible, text.split("\n"))), flush=True)


def print_error(error: object) -> None:
    """Print an error as one line on standard error."""
    text = visible(" ".join(str(error).split("\n")))
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Return text with escapes in place of control characters and other unprintable characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
