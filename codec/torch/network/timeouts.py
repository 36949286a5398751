"""Timeout of a process group."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from codec.arguments import LONGEST_TIMEOUT, SHORTEST_TIMEOUT

Timeout = float | timedelta  # float: seconds


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of a group, limited to the range of the option ``timeout=``."""
    timeout = dist.distributed_c10d.default_pg_timeout
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout = options._timeout
            break
    return min(max(timeout, SHORTEST_TIMEOUT), LONGEST_TIMEOUT)
