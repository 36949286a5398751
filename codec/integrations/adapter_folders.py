"""Folders of adapters in PEFT's format, each with all adapters of one version."""

import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from codec.errors import StateError
from codec.files.header import CODES, compose
from codec.integrations.adapters import CONFIG, DTYPES, WEIGHTS, Adapter
from codec.stores.locations import folder_at
from codec.tensors.view import TensorView
from codec.weight_sync.updates.identity import Identity

_FOLDER = re.compile(r"(\d{20})-[0-9a-f]{32}", re.ASCII)
_ABANDONED = 3600.0  # age of temporary folders that are deleted, in seconds


def version_path(root: Path, identity: Identity) -> Path:
    """Return the folder of a version, which other values never have."""
    return root / f"{identity.version:020d}-{identity.digest.hex()}"


class AdapterFolders:
    """Folder with a subfolder for each version, which has a subfolder for each adapter.

    A version appears once it is complete. Several processes may write the same version.

    Parameters
    ----------
    root : path
        The folder, which is created if it does not exist. Other files in it are left alone.

    Raises
    ------
    StateError
        The folder cannot be used.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = folder_at("folder", root).absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise StateError(f"{str(self.root)!r} cannot be used: {e.strerror}") from None

    def write(self, identity: Identity, adapters: Mapping[str, Adapter]) -> Path:
        """Write the adapters of a version, whose tensors are TensorViews; a complete version is not written again.

        Raises
        ------
        StateError
            The files cannot be written; nothing is left.
        """
        path = version_path(self.root, identity)
        temporary = self.root / f".{path.name}.{secrets.token_hex(8)}.tmp"
        try:
            self._remove_temporary()
            if path.exists():
                if _has(path, adapters):
                    os.utime(path)  # it is the newest again
                    return path
                _remove(path)  # the machine has failed, or something else has written to it
            for name, adapter in adapters.items():
                (temporary / name).mkdir(parents=True)
                for file, parts in _files(adapter):
                    _write(temporary / name / file, parts)
            temporary.mkdir(exist_ok=True)
            try:
                temporary.rename(path)
            except OSError:
                if not (path.exists() and _has(path, adapters)):  # otherwise another process was faster
                    raise
        except OSError as e:
            raise StateError(f"adapters cannot be written to {str(self.root)!r}: {e.strerror}") from None
        finally:
            _remove(temporary)
        return path

    def _remove_temporary(self) -> None:
        """Delete what killed processes have left, but not what other processes write now."""
        for path in self.root.glob(".*.tmp"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED and _FOLDER.match(path.name[1:]):
                    _remove(path)

    def versions(self) -> list[tuple[Path, int, list[str]]]:
        """Return path, version and names of the adapters of all versions, oldest first."""
        found = list[tuple[int, Path, int, list[str]]]()
        for path in self.root.iterdir():
            if match := _FOLDER.fullmatch(path.name):
                with suppress(OSError):  # another process has removed it
                    found.append((path.stat().st_mtime_ns, path, int(match[1]), sorted(os.listdir(path))))
        return [one[1:] for one in sorted(found)]

    def remove(self, path: Path) -> None:
        """Delete a version. What cannot be deleted is left."""
        _remove(path)


def _remove(path: Path) -> None:
    """Delete the files of a version, and its folders if they contain nothing else."""
    with suppress(OSError):
        for folder in path.iterdir():
            for name in (WEIGHTS, CONFIG):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
        path.rmdir()


def _files(adapter: Adapter) -> Iterator[tuple[str, Iterator[Any]]]:
    """Yield name and parts of each file of an adapter."""
    yield CONFIG, iter([adapter.config])
    yield WEIGHTS, _safetensors(adapter.tensors)


def _has(path: Path, adapters: Mapping[str, Adapter]) -> bool:
    """Return True if a folder has the files of these adapters, and no other adapters."""
    files = ((path / name / file, parts) for name, adapter in adapters.items() for file, parts in _files(adapter))
    return sorted(os.listdir(path)) == sorted(adapters) and all(_equals(file, parts) for file, parts in files)


def _equals(path: Path, parts: Iterator[Any]) -> bool:
    try:
        with path.open("rb") as f:
            return all(f.read(len(part)) == bytes(part) for part in parts) and not f.read(1)
    except OSError:
        return False


def _write(path: Path, parts: Iterator[Any]) -> None:
    with path.open("xb") as f:
        for part in parts:
            f.write(part)
        f.flush()
        os.fsync(f.fileno())


def _safetensors(tensors: Mapping[str, TensorView]) -> Iterator[Any]:
    """Yield the bytes of a .safetensors file, the same as those of the package safetensors."""
    order = sorted(tensors, key=lambda name: (DTYPES.index(tensors[name].dtype), name))
    rows = [(name, CODES[tensors[name].dtype], tensors[name].shape, tensors[name].nbytes) for name in order]
    yield compose(rows, {"format": "pt"}).prefix
    for name in order:
        yield tensors[name].array()
