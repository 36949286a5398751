"""Entry point of the command ``codec``: parse arguments, run the command, return the exit code."""

import argparse
import os
import sys
import warnings

import codec
from codec.cli import advise, arrays, bench, doctor, frames, models, tools, updates
from codec.cli.console import FAILED, INTERRUPTED, PROGRAM, print_error
from codec.errors import CodecError

_GROUPS = (models, arrays, frames, updates, bench, advise, doctor, tools)  # in the order of the help text


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
    return made


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    made = parser()
    args = made.parse_args(argv)
    args.parser = made
    if args.run is tools.run_flags and not args.flags:
        made.print_help()
        return 0
    if args.run is not tools.run_flags and args.flags:
        made.error("pass either a command or flags such as --cflags, not both: see --help")
    try:
        with warnings.catch_warnings():
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


def _print_warning(message: object, *_: object, **__: object) -> None:
    print_error(message)
