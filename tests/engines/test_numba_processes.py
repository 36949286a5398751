"""The Numba engine in separate processes: bounds checks, the compilation cache, and a missing Numba."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import codec
from codec._c import PACKAGE as BUILT
from codec._c import _cffi
from support.tiers import HANG_SECONDS

PYTHON = (sys.executable, "-P", "-W", "error", "-c")  # -P: ignore the working directory
TESTS, PACKAGE = Path(__file__).parent, Path(codec.__file__).parent
LIBRARY = os.environ.get("CODEC_LIBRARY") or str(BUILT / "lib/libcodec.so")


def run(*command, cwd=None, **env):
    """Return the output of a process, which must succeed."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.nightly
def test_no_access_is_out_of_range(tmp_path):
    """With Numba's bounds checks, hostile and hand-made frames cause no IndexError.

    Kernels are not optimized, which halves the compile time; Numba's cache cannot be used then.
    """
    options = ("-p", "no:cacheprovider", "-W", "ignore::numba.core.errors.NumbaWarning")
    command = [
        sys.executable,
        "-m",
        "pytest",
        *options,
        str(TESTS / "test_numba_frames.py"),
        "-k",
        "hostile or by_hand",
    ]
    out = run(*command, cwd=tmp_path, NUMBA_BOUNDSCHECK="1", NUMBA_OPT="0", NUMBA_CACHE_DIR=str(tmp_path))
    assert " passed" in out


def test_bounds_checks_detect_accesses_out_of_range(tmp_path):
    """Accesses out of range are detected in kernels and in functions that they call, for arrays and slices."""
    (tmp_path / "reading.py").write_text(
        "from codec.engines.numba.jit import jit, kernel\n"
        "@jit\n"
        "def within(x, i):\n"
        "    return x[i]\n"
        "@kernel\n"
        "def read(x, n, i):\n"
        "    return within(x[:n], i)\n"
    )
    code = (
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1]); import reading\n"
        "x = np.arange(8)\n"
        "assert reading.read(x, 5, 4) == 4\n"
        "for n, i in (5, 5), (8, 8), (8, -9), (0, 0):\n"
        "    try: reading.read(x, n, i)\n"
        "    except IndexError: print('seen')\n"
    )
    env = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    assert run(*PYTHON, code, str(tmp_path), **env).split() == ["seen"] * 4


PROBE = """
from codec.engines.numba.jit import kernel
from codec.engines.numba.words import small_value
@kernel
def values(code, y):
    for i in range(len(code)):
        y[i] = small_value(code[i], 3, 7)
"""
CALL = """
import sys, numpy as np, codec.engines.numba.jit
print(codec.__file__, flush=True)
sys.stdin.readline()
from codec.engines.numba.probe import values
load = values._cache.load_overload
def look(*args):
    found = load(*args)
    print("looked", flush=True)
    sys.stdin.readline()  # until all processes have searched the cache
    return found
values._cache.load_overload = look
y = np.empty(3, np.float32)
values(np.array([0x38, 0x40, 0x7E], np.uint8), y)
print(y.tolist() == [1, 2, 448], sum(values.stats.cache_hits.values()), sum(values.stats.cache_misses.values()))
"""


class PackageCopy:
    """Copy of the package with one more small kernel, and processes that call that kernel."""

    def __init__(self, folder):
        self.numba = folder / "codec" / "engines" / "numba"
        ignored = shutil.ignore_patterns("__pycache__", "torch", "lib", "include")
        shutil.copytree(PACKAGE, folder / "codec", ignore=ignored)
        if not (folder / "codec/_c/_cffi.py").exists():
            shutil.copy(_cffi.__file__, folder / "codec/_c")
        (self.numba / "probe.py").write_text(PROBE)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        self.env = {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(folder / "cache"), "CODEC_LIBRARY": LIBRARY}

    def call(self, processes=1):
        """Run concurrent processes; return (correct, cache hits, cache misses) of each."""
        env, pipe = {**os.environ, **self.env}, subprocess.PIPE
        some = [
            subprocess.Popen([*PYTHON, CALL], env=env, stdin=pipe, stdout=pipe, text=True) for _ in range(processes)
        ]
        for process in some:
            assert Path(process.stdout.readline().strip()).parent == self.numba.parents[1]
        for process in some:
            print("go", file=process.stdin, flush=True)
        assert [process.stdout.readline() for process in some] == ["looked\n"] * processes
        for process in some:
            print("go on", file=process.stdin, flush=True)
        results = [process.communicate(timeout=HANG_SECONDS)[0].split() for process in some]
        assert [process.returncode for process in some] == [0] * processes
        return [(same, int(hits), int(misses)) for same, hits, misses in results]


@pytest.mark.nightly  # nightly: compiles kernels four times
def test_kernels_are_compiled_once_and_again_when_a_source_changes(tmp_path):
    """Two concurrent processes compile a kernel once each; later processes load it, until the source changes."""
    copy = PackageCopy(tmp_path)
    assert copy.call(2) == [("True", 0, 1)] * 2
    assert copy.call() == [("True", 1, 0)]
    words = copy.numba / "words.py"
    words.write_text(words.read_text() + "\n\n@jit\ndef small_value(code, mbits, bias):\n    return F32(1)\n")
    assert copy.call() == [("False", 0, 1)]
    assert copy.call() == [("False", 1, 0)]


def test_second_process_loads_all_kernels_from_the_cache():
    """A second process loads all kernels from the cache, so no kernel depends on addresses of its process."""
    code = """
import numpy as np, codec
from codec.engines.numba import rows
frame = codec.encode(np.ones(1000, np.float32), codec.Sign())
assert (codec.decode(frame, options=codec.options(engine="numba")) == 1).all()
print(sum(rows.decode_blocks.stats.cache_misses.values()))
"""
    run(*PYTHON, code)
    assert run(*PYTHON, code) == "0\n"


def test_numba_is_imported_only_when_used():
    """Neither `import codec` nor codec.engines() imports Numba."""
    code = """
import sys, numpy as np, codec
assert codec.engines()["numba"] is None
codec.decode(codec.encode(np.ones(1000, np.float32)))
assert "numba" not in sys.modules
import codec.engines.numba.calls
assert "numba" in sys.modules
"""
    run(*PYTHON, code)


def test_missing_numba_is_an_engine_error_that_says_what_to_install():
    """Without Numba, engine="numba" is an error that says what to install; other engines work."""
    code = """
import sys
sys.modules["numba"] = None
import numpy as np, codec
x = np.linspace(-1, 1, 5_000, dtype=np.float32)
why = codec.engines()["numba"]
assert "tensor-codec[numba]" in why, why
frame = codec.encode(x, codec.Float8())
bound = codec.Truncate().bind(codec.optimizers.SGD(0.1), theta=x)
assert (codec.decode(codec.encode(x)) == x).all()
assert codec.decode(codec.encode(x, bound)).shape == (5_000,)
assert codec.reduce([frame, frame]).shape == codec.decode(frame, options=codec.options(engine="native")).shape
for call in (
    lambda: codec.encode(x, options=codec.options(engine="numba")),
    lambda: codec.decode(frame, options=codec.options(engine="numba")),
    lambda: codec.encode_many([x], options=codec.options(engine="numba")),
    lambda: codec.decode_many([frame], options=codec.options(engine="numba")),
    lambda: codec.accumulate(frame, x.copy(), options=codec.options(engine="numba")),
    lambda: codec.reduce([frame], options=codec.options(engine="numba")),
):
    try:
        call()
    except codec.EngineError as e:
        assert str(e) == f"the numba engine cannot be used on this machine: {why}", e
    else:
        raise AssertionError("no error")
"""
    run(*PYTHON, code)
