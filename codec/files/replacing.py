"""Atomic replacement of a file."""

import os
from pathlib import Path
from typing import BinaryIO

from codec.errors import ArgumentError


class replaced:
    """Context manager that opens a temporary file beside `path`, and renames it to `path` if the block succeeds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> BinaryIO:
        try:
            self._file: BinaryIO = self._temporary.open("w+b")
        except OSError as e:
            raise ArgumentError(f"{str(self._path)!r} cannot be written: {e.strerror}") from None
        return self._file

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._temporary.replace(self._path)
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)
