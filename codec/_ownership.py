"""Checks that no other user can write a file: only then is code loaded from it."""

import os
import stat


def writable_by_others(status: os.stat_result) -> bool:
    """Return whether a user other than this process's and root owns a file or folder, or can write it."""
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
