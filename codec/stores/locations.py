"""Names of stores: paths of folders, and URLs of folders in buckets."""

import os
import re
from os import PathLike
from pathlib import Path
from typing import Any

from codec.arguments import shown
from codec.errors import ArgumentError

# Packages of fsspec whose pipe_file(mode="create") is a conditional write of the store, by protocol
PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "az"), "adlfs"),
    "memory": "fsspec",
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*?)://")
_MERGED = re.compile(r"(?:https?|file|" + "|".join(PACKAGES) + r"):(?:/|\Z)")


def scheme_of(given: str | PathLike[str]) -> str | None:
    """Return the scheme of a URL in lower case; None for a path."""
    found = _SCHEME.match(given) if isinstance(given, str) else None
    return None if found is None else found[1].lower()


def location(name: str, given: str | PathLike[str]) -> Path | str:
    """Return the folder that an argument names, or the URL of a folder in a bucket.

    Parameters
    ----------
    name : str
        Name of the argument, for errors.
    given : str or path
        Path, ``file:///path``, or URL of a bucket such as ``s3://bucket/run``.

    Raises
    ------
    ArgumentError
        The argument is something else, or a URL that holds a password, which errors would show.
    """
    try:
        text = os.fspath(given)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ArgumentError(f"{name} must be a path, or a URL such as 's3://bucket/run', got {shown(given)}")
    scheme = scheme_of(given)
    if scheme is None:
        if _MERGED.match(text):
            raise ArgumentError(f"{name}={text!r} is the path of a URL, not a URL: pass a str, not a Path")
        return Path(text)
    rest = text.partition("://")[2]
    if scheme == "file":
        if not rest.startswith("/"):
            raise ArgumentError(f"{name}= must have the form file:///path, with three slashes")
        return Path(rest)
    if scheme not in PACKAGES:
        raise ArgumentError(
            f"{name}= is a URL of a store that must create an object only if it does not exist, and {scheme[:40]!r} is "
            f"not known to do so: pass a folder, or a URL of {', '.join(PACKAGES)}"
        )
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if (at and (":" in user or scheme not in ("abfs", "az"))) or "?" in rest or "#" in rest:
        raise ArgumentError(
            f"{name}= must hold no user, password, ? or #, which errors would show: use the environment variables or "
            f"the files of {PACKAGES[scheme]}"
        )
    if not rest.strip("/"):
        raise ArgumentError(f"{name}={text!r} names no bucket: pass a URL such as {scheme}://bucket/run")
    return f"{scheme}://{rest.rstrip('/')}"


def folder_at(name: str, given: str | PathLike[str]) -> Path:
    """Return the folder that an argument names, which cannot be in a bucket.

    Raises
    ------
    ArgumentError
        The argument is the URL of a bucket, or none of a folder.
    """
    if scheme_of(given) is None:
        found: Any = location(name, given)
        return found
    raise ArgumentError(f"{name}= must be the path of a folder on a disk of this machine, got a URL")
