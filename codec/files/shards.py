"""Index of a sharded model, ``model.safetensors.index.json``, which lists the files that contain its tensors."""

import json
import os
from pathlib import Path
from typing import Any

from codec.files.header import MAX_JSON
from codec.files.opening import opened

_NO_FILES = ("", ".", "..", "-")  # folders, and the name of standard input


def weight_map(path: str) -> dict[str, str]:
    """Return for each tensor that an index lists the name of the file that contains it.

    Raises
    ------
    ArgumentError
        As in :func:`shard_names`.
    """
    shard_names(path)
    with opened(path) as fd:
        return json.loads(os.pread(fd, MAX_JSON, 0))["weight_map"]


def shard_names(path: str) -> list[str]:
    """Return the names of the files that an index lists; they must be in the folder of the index.

    Raises
    ------
    ArgumentError
        The index cannot be read, or lists a file of another folder.
    """
    with opened(path) as fd:
        given: Any = json.loads(os.pread(fd, MAX_JSON, 0))
        names: set[Any] = set(given["weight_map"].values())
        if not names or not all(isinstance(n, str) and _is_file_name(n) for n in names):
            raise ValueError("its weight_map does not name files of its folder")
        return sorted(names)


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and name not in _NO_FILES and "\0" not in name
