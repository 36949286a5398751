"""Atomic replacement of files; devices and pipes are written into instead."""

import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from errno import ENXIO
from pathlib import Path
from typing import BinaryIO

from codec.errors import ArgumentError

_MAX_NAME = 50  # characters of the file's name in the temporary name, which must not exceed 255 bytes
_MAX_LINKS = 40  # maximum number of links in a chain, as in Linux


class replaced:
    """Context manager that opens a temporary file beside `path`, and renames it to `path` if the block succeeds.

    A new file has the permissions that the umask leaves of 0o666. A file that replaces another one has the permissions
    and, if the process may set them, the owner and the group of that file. A link to a regular file is replaced; the
    file behind the link is unchanged.

    A device or a pipe, also behind links, is never replaced: if the block succeeds, the bytes are written into it. The
    same holds for a link to an open file of a process, such as ``/dev/stdout``.

    Raises
    ------
    ArgumentError
        The file cannot be written: on entering, on leaving, and for each OSError of the block that names no file. An
        existing file is then unchanged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary: Path | None = None  # None: the bytes are written into `_sink`
        self._sink: int | None = None
        self._old: os.stat_result | None = None

    def __enter__(self) -> BinaryIO:
        try:
            self._sink = _sink_of(self._path)
            if self._sink is not None:
                self._file: BinaryIO = tempfile.TemporaryFile()
                return self._file
            with suppress(FileNotFoundError):
                found = os.lstat(self._path)
                self._old = found if stat.S_ISREG(found.st_mode) else None
            name = f".{self._path.name[:_MAX_NAME]}.{secrets.token_hex(8)}.tmp"
            mode = 0o666 if self._old is None else self._old.st_mode & 0o666
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self._path.with_name(name), flags, mode)
            self._temporary = self._path.with_name(name)
            self._file = os.fdopen(fd, "w+b")
        except OSError as e:
            self._close()
            raise self._failed(e) from None
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._commit()
            elif isinstance(error, OSError) and error.filename is None and not isinstance(error, BrokenPipeError):
                raise self._failed(error, tempfile.gettempdir() if self._temporary is None else None) from None
        except BrokenPipeError:
            raise
        except OSError as e:
            raise self._failed(e) from None
        finally:
            with suppress(OSError):  # closing writes buffered bytes, which fails again if the disk is full
                self._file.close()
            self._close()

    def _commit(self) -> None:
        self._file.flush()
        if self._temporary is None:
            assert self._sink is not None
            self._file.seek(0)
            with os.fdopen(self._sink, "wb", closefd=False) as out:
                shutil.copyfileobj(self._file, out, 1 << 20)
            return
        if self._old is not None:
            fd, mode = self._file.fileno(), self._old.st_mode & 0o777
            with suppress(OSError):  # only root may set another owner
                os.fchown(fd, self._old.st_uid, self._old.st_gid)
            if os.fstat(fd).st_gid != self._old.st_gid:
                mode &= ~0o070  # the rights of the old group are not for another one
            os.fchmod(fd, mode)
        os.fsync(self._file.fileno())
        self._temporary.replace(self._path)

    def _close(self) -> None:
        """Remove the temporary file, and close the device or pipe."""
        if self._temporary is not None:
            with suppress(OSError):  # the outcome of the block does not depend on it
                self._temporary.unlink(missing_ok=True)
        if self._sink is not None:
            os.close(self._sink)
            self._sink = None

    def _failed(self, error: OSError, folder: str | None = None) -> ArgumentError:
        """Return the error for an output that cannot be written; `folder` may be full. Default: the output's folder."""
        why = error.strerror or str(error)
        if error.errno == ENXIO:
            why = "no program reads from it"
        if folder is None and not is_special(self._path):
            folder = str(self._path.absolute().parent)
        where = f" (folder {folder!r})" if folder else ""
        return ArgumentError(f"{str(self._path)!r} cannot be written: {why}{where}")


def is_special(path: str | Path) -> bool:
    """Return True if bytes are written into `path`, which is no regular file: a device, a pipe or an open file."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISDIR(mode) and (not stat.S_ISREG(mode) or _is_open_file(path))


def _sink_of(path: Path) -> int | None:
    """Open a device, a pipe or an open file for writing; return None for every other path.

    A pipe that no program reads is an OSError, because opening it could block for ever.
    """
    if not is_special(path):
        return None
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


def _is_open_file(path: str | Path) -> bool:
    """Return True if a link leads to an open file of a process, as /dev/stdout leads to /proc/self/fd/1."""
    at = os.fspath(path)
    for _ in range(_MAX_LINKS):
        if not os.path.islink(at):
            return False
        folder = os.path.realpath(os.path.dirname(at))
        if folder.startswith("/proc/"):
            return True
        at = os.path.join(folder, os.readlink(at))
    return False
