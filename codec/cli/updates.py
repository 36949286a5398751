"""Commands ``codec delta make``, ``codec delta apply`` and ``codec delta compose``."""

import argparse
from pathlib import Path
from typing import Any

from codec import readable
from codec.cli.console import (
    EXIT_CODES,
    OTHER_BASE,
    add_output,
    check_output,
    output_path,
    print_error,
    progress_bar,
    report,
)
from codec.errors import ArgumentError, StateError
from codec.files.opening import FileKind, kind_of, opened
from codec.files.signing import SigningKey
from codec.inspection import verify


def add_commands(commands: Any) -> None:
    """Add the parser of the command ``delta`` to the parsers of all commands."""
    delta = commands.add_parser(
        "delta",
        help="make, apply or compose updates of .safetensors files",
        description=f"Make, apply or compose updates of .safetensors files. {EXIT_CODES}",
    )
    commands = delta.add_subparsers(metavar="command", required=True)
    p = commands.add_parser(
        "make",
        help="write the update from one .safetensors file to another",
        description=f"Write the update that makes the weights of NEW from those of OLD. {EXIT_CODES}",
    )
    p.add_argument("old", help=".safetensors file before the update")
    p.add_argument("new", help=".safetensors file after the update, with the same names, dtypes and shapes")
    p.add_argument("--version", type=int, default=1, help="version of NEW; OLD has the one before; default: 1")
    _finish(p, run_make)
    p = commands.add_parser(
        "apply",
        help="apply updates to a .safetensors file",
        description=f"Apply updates to OLD, and write the result, with OLD's header. {EXIT_CODES[:-1]}; "
        f"{OTHER_BASE} if an update needs other weights, or was applied already.",
    )
    p.add_argument("old", help=".safetensors file")
    p.add_argument("updates", nargs="+", metavar="update", help="update, in order")
    _finish(p, run_apply)
    p = commands.add_parser(
        "compose",
        help="make one update of a chain",
        description=f"Write one update that does to OLD what a chain of updates does. {EXIT_CODES[:-1]}; "
        f"{OTHER_BASE} if an update does not follow the weights before it.",
    )
    p.add_argument("old", help=".safetensors file before the first update")
    p.add_argument("updates", nargs="+", metavar="update", help="update, in order")
    _finish(p, run_compose)


def _finish(p: Any, run: Any) -> None:
    add_output(p, required=True)
    p.set_defaults(run=run, command=p)


def run_make(args: argparse.Namespace) -> int:
    """Run ``codec delta make``: write the update between the weights in two files."""
    from codec.weight_sync.files import diff_files

    args.output = check_output(args.output, args.force, args.old, args.new)
    if args.version < 1:
        raise ArgumentError(f"--version must be at least 1, got {args.version}")
    with output_path(args.output, args.old, args.new) as out, progress_bar() as progress:
        update = diff_files(args.old, args.new, out, version=args.version, progress=progress)
    return _report(args, update)


def run_apply(args: argparse.Namespace) -> int:
    """Run ``codec delta apply``: apply updates to the weights in a file."""
    from codec.weight_sync.files import apply_files
    from codec.weight_sync.updates.update import Update

    args.output = check_output(args.output, args.force, args.old, *args.updates)
    updates = [Update.open(path) for path in args.updates]
    try:
        with output_path(args.output, args.old, *args.updates) as out, progress_bar("updates") as progress:
            base = apply_files(args.old, updates, out, progress)
            nbytes = Path(out).stat().st_size
    except StateError as e:
        print_error(e)
        return OTHER_BASE
    entries = {"file": args.output, "nbytes": nbytes, "version": base.version,
               "tensors": len(base.weights), "digest": base.weights.digest().hex()}  # fmt: skip
    count = readable.count(len(base.weights), "tensor")
    report(args, entries, f"{args.output}: version {base.version}, {count}, with the header of {args.old}")
    return 0


def run_compose(args: argparse.Namespace) -> int:
    """Run ``codec delta compose``: merge a chain of updates into one update."""
    from codec.weight_sync.files import compose_files
    from codec.weight_sync.updates.update import Update

    args.output = check_output(args.output, args.force, args.old, *args.updates)
    updates = [Update.open(path) for path in args.updates]
    try:
        with output_path(args.output, args.old, *args.updates) as out, progress_bar() as progress:
            update = compose_files(args.old, updates, out, progress)
    except StateError as e:
        print_error(e)
        return OTHER_BASE
    return _report(args, update)


def is_update(path: str) -> bool:
    """Return True if `path` is a regular file that begins with the magic bytes of an update."""
    if not Path(path).is_file():
        return False
    with opened(path) as fd:
        return kind_of(fd) is FileKind.UPDATE


def update_entries(path: str) -> dict[str, Any]:
    """Return the entries that ``codec inspect`` prints for an update."""
    from codec.weight_sync.updates.update import Update

    return _entries(Update.open(path), path)


def verify_update(path: str) -> str:
    """Verify all frames of an update; return a line that describes the update.

    Raises
    ------
    FrameError
        The update is damaged.
    """
    from codec.weight_sync.updates.update import Update

    update = Update.open(path)
    for name, entry in update.entries.items():
        for k in range(len(entry.frames)):
            if (frame := update.frame(name, k)) is not None:
                verify(frame)
    return f"a whole update to version {update.version}"


def check_signed_update(path: str, key: SigningKey) -> bool:
    """Check the signature of an update; return False if it has none.

    Raises
    ------
    FrameError
        The file is not an update, or its signature does not match.
    """
    from codec.weight_sync.updates.update import Update

    update = Update.open(path)
    if update.signature is None:
        return False
    update.check_signature(key)
    return True


def _entries(update: Any, path: str) -> dict[str, Any]:
    weights = update.total.nbytes
    return {
        "file": path, "nbytes": update.nbytes, "version": update.version, "base": update.base,
        "tensors": update.total.tensors, "changed": len(update.entries), "weights_nbytes": weights,
        "ratio": update.nbytes / max(1, weights),
        "digest": update.digest.hex(), "base_digest": update.base_digest.hex(),
    }  # fmt: skip


def _report(args: argparse.Namespace, update: Any) -> int:
    e = _entries(update, args.output)
    changed = f"{e['changed']} of {e['tensors']} tensors changed"
    sizes = f"{readable.size(e['nbytes'])}, {100 * e['ratio']:.3g}% of the weights"
    report(args, e, f"{args.output}: version {update.base} to {update.version}, {changed}, {sizes}")
    return 0
