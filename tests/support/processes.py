"""Run Python code that could crash or hang in a child process."""

import os
import subprocess
import sys

from support.tiers import HANG_SECONDS

PRELUDE = """
import atexit, functools, gc, itertools, os, random, resource, signal, sys, threading, time
import numpy as np
import codec

rng = np.random.default_rng(0)
random.seed(0)

def normal(n):
    return rng.standard_normal(n).astype(np.float32)

big = normal(300_000)  # 19 blocks
small = normal(700)
ternary = codec.Ternary("base3", seed=3)
"""


def run(code, noise: tuple[str, ...] = (), **environment):
    """Run `PRELUDE` and `code` in a child process, and check that it succeeds.

    Parameters
    ----------
    code : str
        Python code whose last output must be the line "the end".
    noise : tuple of str
        Prefixes of lines that the child may write to stderr; any other line is an error.
    **environment
        Environment variables of the child.
    """
    child = subprocess.run(
        [sys.executable, "-P", "-X", "faulthandler", "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        env={**os.environ, "CODEC_NUM_THREADS": "4", **environment},
    )
    assert child.returncode == 0, (child.returncode, child.stdout[-1000:], child.stderr[-3000:])
    assert child.stdout.endswith("the end\n"), child.stdout[-1000:]
    assert all(line.startswith(noise) for line in child.stderr.splitlines()), child.stderr[-3000:]
