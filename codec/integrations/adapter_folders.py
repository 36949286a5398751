"""Folders of adapters in PEFT's format, each with all adapters of one version."""

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from codec.errors import StateError
from codec.files.header import CODES, compose
from codec.integrations.adapters import CONFIG, DTYPES, WEIGHTS, Adapter
from codec.tensors.view import TensorView
from codec.weight_sync.identity import Identity

_FOLDER = re.compile(r"(\d{20})-[0-9a-f]{32}")


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
        self.root = Path(root).absolute()
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
            if path.exists():
                os.utime(path)  # it is the newest again
                return path
            for name, adapter in adapters.items():
                (temporary / name).mkdir(parents=True)
                _write(temporary / name / CONFIG, [adapter.config])
                _write(temporary / name / WEIGHTS, _safetensors(adapter.tensors))
            temporary.mkdir(exist_ok=True)
            try:
                temporary.rename(path)
            except OSError:
                if not path.exists():  # otherwise another process was faster
                    raise
        except OSError as e:
            raise StateError(f"adapters cannot be written to {str(self.root)!r}: {e.strerror}") from None
        finally:
            _remove(temporary)
        return path

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


def _write(path: Path, parts: Any) -> None:
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
