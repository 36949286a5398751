"""Command ``codec compose``, and what ``codec ls`` and ``codec verify`` do with folders of checkpoints."""

import argparse
from pathlib import Path
from typing import Any

from codec import readable
from codec.checkpoints.index import is_checkpoint
from codec.cli.console import EXIT_CODES, add_json, print_table, report
from codec.files.opening import printable

__all__ = ["add_commands", "checkpoint_entries", "is_checkpoint", "print_checkpoint", "verify_folder"]


def add_commands(commands: Any) -> None:
    """Add the parser of the command ``compose`` to the parsers of all commands."""
    p = commands.add_parser(
        "compose",
        help="make a full checkpoint of one that stores changes",
        description="Write a full checkpoint with the items of a checkpoint that stores changes of earlier ones. "
        f"{EXIT_CODES}",
    )
    p.add_argument("folder", help="folder that codec.torch.checkpoint_writer has written")
    p.add_argument("-o", "--output", required=True, help="folder to create")
    add_json(p)
    p.set_defaults(run=run_compose)


def run_compose(args: argparse.Namespace) -> int:
    """Run ``codec compose``."""
    from codec.checkpoints.chain import Checkpoint
    from codec.torch.saving.compose import compose_checkpoint

    made = compose_checkpoint(args.folder, args.output)
    before, after = (sum(item.length for item in each.items.values()) for each in (Checkpoint(args.folder), made))
    entries = {"file": args.output, "items": len(made.items), "input_nbytes": before, "output_nbytes": after,
               "digest": made.head.digest}  # fmt: skip
    count = readable.count(len(made.items), "item")
    line = f"{args.output}: a full checkpoint of {count}, {readable.size(before)} to {readable.size(after)}"
    report(args, entries, line)
    return 0


def checkpoint_entries(folder: str) -> dict[str, Any]:
    """Return the entries that ``codec ls --json`` prints for a checkpoint."""
    from codec.checkpoints.chain import Checkpoint

    checkpoint = Checkpoint(folder)
    head = checkpoint.head
    return {
        "digest": head.digest,
        "base": None if head.base is None else head.base.path,
        "base_digest": None if head.base is None else head.base.digest,
        "depth": head.depth,
        "items": [
            {"name": item.name, "offsets": item.offsets, "nbytes": item.nbytes, "stored_nbytes": item.length,
             "stored": "changes" if item.changes else "frames", "file": item.file}
            for item in checkpoint.items.values()
        ],
    }  # fmt: skip


def print_checkpoint(entries: dict[str, Any]) -> None:
    """Print what ``codec ls`` shows of a checkpoint."""
    items = entries["items"]
    table = [[_title(i), readable.size(i["nbytes"]), _share(i["stored_nbytes"], i["nbytes"]), i["stored"]]
             for i in items]  # fmt: skip
    total, stored = (sum(i[key] for i in items) for key in ("nbytes", "stored_nbytes"))
    table.append([readable.count(len(items), "item"), readable.size(total), _share(stored, total), ""])
    print_table(["name", "size", "stored", "as"], table, left=(0, 3))
    if entries["base"] is None:
        print("a full checkpoint")
    else:
        print(f"changes of {printable(entries['base'])}, digest {printable(entries['base_digest'])}, "
              f"{readable.count(entries['depth'], 'base')} in all")  # fmt: skip


def _title(item: dict[str, Any]) -> str:
    return item["name"] + (str(list(item["offsets"])) if any(item["offsets"] or ()) else "")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}%"


def verify_folder(folder: str) -> str:
    """Decode a checkpoint and what it needs of its bases; return a line that describes it."""
    from codec.checkpoints.chain import verify_checkpoint

    checkpoint = verify_checkpoint(folder)
    count = readable.count(len(checkpoint.items), "item")
    bases = [Path(each.folder).name for each in checkpoint.bases()]
    needs = f", with the bases {', '.join(map(printable, bases))}" if bases else ""
    return f"a whole checkpoint of {count}{needs}"
