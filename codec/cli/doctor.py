"""Command ``codec doctor``: print the available engines and packages, and the reason why others are unavailable."""

import argparse
import os
import platform
from typing import Any

from codec._c import PACKAGE, pool
from codec._c.library import isas
from codec._secret import FILE_VARIABLE
from codec._security import security_of_environment
from codec._tls import FILE_VARIABLES, VARIABLE
from codec.cli.console import EXIT_CODES, add_json, print_entries
from codec.engines import engines
from codec.errors import ArgumentError

_PACKAGES = {  # by distribution: the features that need it
    "numpy": "required",
    "cffi": "required",
    "torch": "codec.torch, .pt files",
    "ml_dtypes": "bfloat16 and float8 in numpy",
    "numba": 'engine="numba"',
    "cupy-cuda12x": 'engine="cuda"',
    "cupy-cuda13x": 'engine="cuda"',
    "cryptography": "CODEC_TLS=psk, Ed25519 keys",
    "zstandard": "small packed files",
    "safetensors": "",
    "tqdm": "progress bars",
    "shtab": "shell completion",
    "matplotlib": "codec bench --plot",
}
_VARIABLES = (
    "CODEC_NUM_THREADS",
    "OMP_NUM_THREADS",
    "CODEC_ISA",
    "CODEC_LIBRARY",
    "CODEC_CUDA_LIBRARY",
    "CODEC_DDP",
    "CODEC_TCP_CONGESTION",
    "GLOO_DEVICE_TRANSPORT",
    FILE_VARIABLE,  # never CODEC_SECRET, whose value is the secret
    VARIABLE,
    *FILE_VARIABLES,
)


def add_commands(commands: Any) -> None:
    """Add the parser of the command ``doctor`` to the parsers of all commands."""
    p = commands.add_parser(
        "doctor",
        help="print what this installation can do",
        description="Print versions, engines and instruction sets, and the reason why one is not available. Put it "
        f"into a report of a problem. {EXIT_CODES}",
    )
    add_json(p)
    p.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Print versions, engines, instruction sets, packages and environment variables."""
    from codec import __version__
    from codec.weight_sync.http.environment import MIRROR, VARIABLES

    entries: dict[str, Any] = {
        "codec": __version__,
        "package": str(PACKAGE),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {platform.libc_ver()[1] or 'musl'}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": pool.default_threads(),
        "instruction sets": ", ".join(isas()),
    }
    for name, why_not in engines().items():
        entries[f"engine {name}"] = "available" if why_not is None else f"not available: {why_not}"
    for name, use in _PACKAGES.items():
        entries[f"package {name}"] = _version(name) or f"not installed{f' ({use})' if use else ''}"
    entries["connections"] = _connections()
    entries |= {f"${name}": os.environ[name] for name in (*_VARIABLES, *VARIABLES, MIRROR) if name in os.environ}
    print_entries(args, entries)
    return 0


def _connections() -> str:
    """Return how connections between ranks that inherit this environment are protected."""
    try:
        security = security_of_environment()
        security.check()
    except ArgumentError as e:
        return f"not possible: {e}"
    return str(security)


def _version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
