"""Entry point of the command ``codec``: parse arguments, run the command, return the exit code."""

import argparse
import os
import signal
import sys
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import codec
from codec.cli import advise, bench, checkpoints, doctor, frames, models, tools, updates
from codec.cli.console import FAILED, INTERRUPTED, PROGRAM, print_error
from codec.errors import CodecError

_GROUPS = (models, frames, updates, checkpoints, bench, advise, doctor, tools)  # in the order of the help text


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of the program ``codec`` with all commands."""
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Compression of tensors: model files, arrays, and what training jobs send.",
        epilog="Exit codes: 0; 1 after an error, with one line on standard error; 2 for wrong arguments; 3 if an "
        "update needs other weights. python -m codec.run --help: run a training script with compressed gradients",
    )
    tools.add_flags(made)
    made.add_argument("--version", action="version", version=codec.__version__)
    made.set_defaults(run=tools.run_flags)
    commands = made.add_subparsers(metavar="command")
    for group in _GROUPS:
        group.add_commands(commands)
    for command in commands.choices.values():
        command.set_defaults(command=command)
    return made


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    _complete_standard_streams()
    made = parser()
    args, unknown = made.parse_known_args(argv)
    args.parser = made
    if unknown:
        getattr(args, "command", made).error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.run is tools.run_flags and not args.flags:
        made.print_help()
        return 0
    if args.run is not tools.run_flags and args.flags:
        made.error("pass either a command or flags such as --cflags, not both: see --help")
    try:
        with warnings.catch_warnings(), _signals_exit():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _print_warning
            return args.run(args)
    except BrokenPipeError:  # the process that reads standard output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (CodecError, OSError) as e:
        print_error(e)
    except MemoryError:
        print_error("there is not enough memory")
    except KeyboardInterrupt:
        return INTERRUPTED
    return FAILED


def _complete_standard_streams() -> None:
    """Keep files that are opened later off closed standard streams, and print what the locale lacks as escapes."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    if sys.stderr is None:  # print(file=None) would write to standard output
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - open until the process ends
    out: Any = sys.stdout
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="backslashreplace")


@contextmanager
def _signals_exit() -> Generator[None]:
    """Raise SystemExit in the block for SIGTERM and SIGHUP, so that temporary files are removed."""

    def leave(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the removal
        raise SystemExit(128 + number)

    main_thread = threading.current_thread() is threading.main_thread()
    both = (signal.SIGTERM, signal.SIGHUP) if main_thread else ()
    before = [each for each in both if signal.getsignal(each) is signal.SIG_DFL]
    for each in before:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in before:
            signal.signal(each, signal.SIG_DFL)


def _print_warning(message: object, *_: object, **__: object) -> None:
    print_error(message)
