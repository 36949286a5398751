"""Ownership checks of files: code is loaded only from files that no other user can write."""

import os
import stat


def writable_by_others(status: os.stat_result) -> bool:
    """Return True if a user other than root and this process's user owns a file or folder, or can write it."""
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
