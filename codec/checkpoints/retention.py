"""Deletion of old checkpoints that no kept checkpoint needs."""

import os
import secrets
import shutil
from pathlib import Path

from codec.checkpoints.index import METADATA, NAME, IndexHead, read_head
from codec.errors import CodecError, StateError

_SUFFIX = ".deleted"


def delete_old(folder: Path, keep: int) -> list[Path]:
    """Delete checkpoints beside a checkpoint, and return their folders.

    The `keep` checkpoints saved last are kept, and all that they need. A folder is renamed before its files are
    deleted, so that a checkpoint is there as a whole or not at all. Checkpoints that need others are deleted first, so
    an interruption breaks no chain. A later call deletes what an interrupted one has left.

    Parameters
    ----------
    folder : path
        Folder of the checkpoint that was saved last, which is kept.
    keep : int
        Number of checkpoints to keep, at least 1.

    Raises
    ------
    StateError
        A checkpoint cannot be read, so that its base is not known, or a folder cannot be renamed. All checkpoints can
        still be loaded.
    """
    root = folder.absolute().parent
    for left in root.glob(f".*{_SUFFIX}"):
        shutil.rmtree(left, ignore_errors=True)
    newest = root / folder.name  # whatever its clock said
    found = sorted(_heads(root), key=lambda each: (each[0] == newest, each[1].saved), reverse=True)
    needed = _needed([head for _, head in found], keep)
    deleted = list[Path]()
    for path, head in sorted(found, key=lambda each: each[1].depth, reverse=True):
        if head.digest in needed or path.is_symlink():
            continue
        aside = root / f".{path.name[:50]}.{secrets.token_hex(8)}{_SUFFIX}"
        try:
            os.rename(path, aside)
        except OSError as e:
            raise StateError(f"the old checkpoint {str(path)!r} cannot be deleted: {e.strerror}") from None
        shutil.rmtree(aside, ignore_errors=True)
        deleted.append(path)
    return deleted


def _heads(root: Path) -> list[tuple[Path, IndexHead]]:
    """Return the folders of complete checkpoints in a folder, and the first lines of their lists."""
    found = list[tuple[Path, IndexHead]]()
    try:
        for path in root.iterdir():
            if all(_exists(path / name) for name in (METADATA, NAME)):
                found.append((path, read_head(path)))
    except (OSError, CodecError) as e:
        raise StateError(f"no old checkpoint is deleted, since one cannot be read: {e}") from None
    return found


def _exists(path: Path) -> bool:
    """Return False if there is no such file; raise OSError if this is not known."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _needed(heads: list[IndexHead], keep: int) -> set[str]:
    """Return the digests of the first `keep` checkpoints, and of all checkpoints on which they may depend."""
    needed = {head.digest for head in heads[:keep]}
    while more := {head.base.digest for head in heads if head.base is not None and head.digest in needed} - needed:
        needed |= more
    return needed
