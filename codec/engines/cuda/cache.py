"""Cache on disk for the machine code of kernels, for later processes.

A kernel runs with the rights of the process, so a file is loaded only if no other user could have written it. The
digest in a file detects damage, but does not authenticate the author.
"""

import hashlib
import os
import secrets
import stat
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from codec._ownership import writable_by_others

_MAX_NBYTES = 64 << 20  # maximum bytes read from a file; kernels take less than 1 MiB
_DIGEST = hashlib.sha256().digest_size
_NO_WAIT = os.O_NOFOLLOW | os.O_NONBLOCK  # flags of os.open: do not follow links, and do not wait for a pipe


def cache_folder() -> Path | None:
    """Return ``CODEC_CACHE_DIR``, or ``codec`` in the user's cache folder; None if there is no home folder."""
    if own := os.environ.get("CODEC_CACHE_DIR"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "codec"
    except RuntimeError:  # for example a container whose user has no entry in passwd
        return None


@contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Generator[int]:
    """Open a file or folder for reading; ``folder``: descriptor of the folder to which a relative path refers."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def load_cached(key: str) -> bytes | None:
    """Return the bytes that :func:`store_cached` stored under a key, or None. Never raise an exception.

    Returns
    -------
    bytes or None
        None if the file does not exist, cannot be read, is damaged, is not a regular file of this user or root, or
        could have been written by other users.
    """
    try:
        folder = cache_folder()
        if folder is None:
            return None
        with _opened(folder, os.O_DIRECTORY) as at, _opened(key, _NO_WAIT, at) as fd:
            status = os.fstat(fd)
            if writable_by_others(os.fstat(at)) or writable_by_others(status) or not stat.S_ISREG(status.st_mode):
                return None
            with open(fd, "rb", closefd=False) as f:
                digest, data = f.read(_DIGEST), f.read(_MAX_NBYTES)
            return data if hashlib.sha256(data).digest() == digest else None
    except Exception:  # any error: the caller then compiles the kernel
        return None


def store_cached(key: str, data: bytes) -> None:
    """Store bytes under a key atomically, in a file that only this user can read and write.

    Failures are ignored. A RuntimeWarning reports a folder that other users can write; nothing is stored there.
    """
    folder = cache_folder()
    if folder is None:
        return
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(folder, os.O_DIRECTORY) as at:
            if writable_by_others(os.fstat(at)):
                warnings.warn(
                    f"CUDA kernels are compiled anew by each process, since other users can write {folder}: "
                    "set CODEC_CACHE_DIR to a folder of your own that has mode 0700",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return
            _write(at, key, hashlib.sha256(data).digest() + data)


def _write(folder: int, key: str, data: bytes) -> None:
    """Write a temporary file in the folder, and rename it to ``key`` when it is complete."""
    name = f"{key}.{secrets.token_hex(8)}"
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(fd, "wb") as f:
            f.write(data)
        os.replace(name, key, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise
