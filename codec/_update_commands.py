"""Commands ``codec delta``, ``codec apply`` and ``codec compose``."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from codec import readable
from codec.errors import ArgumentError, StateError
from codec.inspection import verify
from codec.weight_sync.files import apply_files, compose_files, diff_files
from codec.weight_sync.update import MAGIC, Update

OTHER_BASE = 3  # exit code
_BAR = 24  # characters


def add_commands(commands: Any) -> None:
    """Add the commands to a parser of arguments."""
    p = commands.add_parser(
        "delta",
        help="write the update from one .safetensors file to another",
        description="Write the update that makes the weights of NEW from those of OLD. Exit codes: 0; 1 after errors.",
    )
    p.add_argument("old", help=".safetensors file before the update")
    p.add_argument("new", help=".safetensors file after the update, with the same names, dtypes and shapes")
    p.add_argument("--version", type=int, default=1, help="version of NEW; OLD has the one before; default: 1")
    _add_common(p, run_delta)
    p = commands.add_parser(
        "apply",
        help="apply updates to a .safetensors file",
        description="Apply updates to OLD, and write the result, with OLD's header. Exit codes: 0; 1 after errors; "
        f"{OTHER_BASE} if an update needs other weights, or was applied already.",
    )
    p.add_argument("old", help=".safetensors file")
    p.add_argument("updates", nargs="+", metavar="update", help="update, in order")
    _add_common(p, run_apply)
    p = commands.add_parser(
        "compose",
        help="make one update of a chain",
        description="Write one update that does to OLD what a chain of updates does. Exit codes: 0; 1 after errors; "
        f"{OTHER_BASE} if an update does not follow the weights before it.",
    )
    p.add_argument("old", help=".safetensors file before the first update")
    p.add_argument("updates", nargs="+", metavar="update", help="update, in order")
    _add_common(p, run_compose)


def _add_common(p: Any, run: Any) -> None:
    p.add_argument("-o", "--output", required=True, help="file to write; it appears when it is complete")
    p.add_argument("--force", action="store_true", help="replace the output if it exists")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run)


def run_delta(args: argparse.Namespace) -> int:
    """Write the update between two files."""
    _check_output(args)
    if args.version < 1:
        raise ArgumentError(f"--version must be at least 1, got {args.version}")
    with _Progress() as progress:
        update = diff_files(args.old, args.new, args.output, version=args.version, progress=progress)
    return _report(args, update)


def run_apply(args: argparse.Namespace) -> int:
    """Apply updates to a file."""
    _check_output(args)
    updates = [Update.open(path) for path in args.updates]
    try:
        with _Progress() as progress:
            base = apply_files(args.old, updates, args.output, progress)
    except StateError as e:
        return _other_base(e)
    entries = {"file": args.output, "nbytes": Path(args.output).stat().st_size, "version": base.version,
               "tensors": len(base.weights), "digest": base.weights.digest().hex()}  # fmt: skip
    _print(args, entries, f"{args.output}: version {base.version}, {len(base.weights)} tensors")
    return 0


def run_compose(args: argparse.Namespace) -> int:
    """Make one update of a chain."""
    _check_output(args)
    updates = [Update.open(path) for path in args.updates]
    try:
        with _Progress() as progress:
            update = compose_files(args.old, updates, args.output, progress)
    except StateError as e:
        return _other_base(e)
    return _report(args, update)


def is_update(path: str) -> bool:
    """Return True if a regular file begins as an update does."""
    try:
        if not Path(path).is_file():
            return False
        with Path(path).open("rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def update_entries(path: str) -> dict[str, Any]:
    """Return what ``codec inspect`` prints of an update."""
    return _entries(Update.open(path), path)


def verify_update(path: str) -> str:
    """Verify all frames of an update; return a line about it.

    Raises
    ------
    FrameError
        The update is damaged.
    """
    update = Update.open(path)
    for name, entry in update.entries.items():
        for k in range(len(entry.frames)):
            if (frame := update.frame(name, k)) is not None:
                verify(frame)
    return f"a whole update to version {update.version}"


def _check_output(args: argparse.Namespace) -> None:
    if Path(args.output).exists() and not args.force:
        raise ArgumentError(f"{args.output} exists: choose another name, or replace it with --force")


def _other_base(e: StateError) -> int:
    print(f"codec: {e}", file=sys.stderr)
    return OTHER_BASE


def _entries(update: Update, path: str) -> dict[str, Any]:
    weights = sum(kind.nbytes for kind in update.tensors.values())
    return {
        "file": path, "nbytes": update.nbytes, "version": update.version, "base": update.base,
        "tensors": len(update.entries), "changed": len(update.changed), "weights_nbytes": weights,
        "ratio": update.nbytes / max(1, weights),
        "digest": update.digest.hex(), "base_digest": update.base_digest.hex(),
    }  # fmt: skip


def _report(args: argparse.Namespace, update: Update) -> int:
    e = _entries(update, args.output)
    changed = f"{e['changed']} of {e['tensors']} tensors changed"
    sizes = f"{readable.size(e['nbytes'])}, {100 * e['ratio']:.3g}% of the weights"
    _print(args, e, f"{args.output}: version {update.base} to {update.version}, {changed}, {sizes}")
    return 0


def _print(args: argparse.Namespace, entries: dict[str, Any], line: str) -> None:
    print(json.dumps(entries, indent=1) if args.json else line)


class _Progress:
    """Progress bar on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._shown, self._last = sys.stderr.isatty(), 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._shown and (now - self._last > 0.1 or done == total):
            self._last = now
            full = _BAR * done // max(1, total)
            print(f"\r[{'#' * full:{_BAR}}] {100 * done // max(1, total):3}%", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._last:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
