"""Compiled kernels are loaded only from files that no other user can write; otherwise they are compiled again."""

import hashlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import codec
from codec import _warmup
from codec.engines.cuda import cache, kernels

PACKAGES = Path(codec.__file__).parents[1]
KEY, DATA = "0" * 64, b"machine code"
OTHER = 12345  # user id of another user

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a cache folder that holds DATA."""
    path = tmp_path / "cache"
    monkeypatch.setenv("CODEC_CACHE_DIR", str(path))
    cache.store_cached(KEY, DATA)
    assert cache.load_cached(KEY) == DATA
    return path


def with_checksum(data):
    """Return the bytes of a cache file that holds `data`."""
    return hashlib.sha256(data).digest() + data


def test_stored_kernels_are_private(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == [KEY]
    assert (folder / KEY).stat().st_mode & 0o777 == 0o600
    cache.store_cached(KEY, b"newer")
    assert cache.load_cached(KEY) == b"newer"
    assert [path.name for path in folder.iterdir()] == [KEY]


@pytest.mark.parametrize(
    "damaged", [b"", b"x", bytes(32), with_checksum(DATA)[:-1], with_checksum(DATA) + b"x"], ids=len
)
def test_damaged_cache_files_are_not_loaded(folder, damaged):
    (folder / KEY).write_bytes(damaged)
    assert cache.load_cached(KEY) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_cache_files_that_others_can_write_are_not_loaded(folder, mode):
    (folder / KEY).chmod(mode)
    assert cache.load_cached(KEY) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_cache_folders_that_others_can_write_are_not_used(folder, mode):
    folder.chmod(mode)
    assert cache.load_cached(KEY) is None
    with pytest.warns(RuntimeWarning, match=r"other users can write .*CODEC_CACHE_DIR"):
        cache.store_cached("1" * 64, DATA)
    assert [path.name for path in folder.iterdir()] == [KEY]


@as_root
def test_cache_files_and_folders_of_other_users_are_not_loaded(folder):
    os.chown(folder / KEY, OTHER, OTHER)
    assert cache.load_cached(KEY) is None
    os.chown(folder / KEY, 0, 0)
    assert cache.load_cached(KEY) == DATA
    os.chown(folder, OTHER, OTHER)
    assert cache.load_cached(KEY) is None


def test_cache_files_of_other_kinds_are_not_loaded(folder, tmp_path):
    (folder / KEY).rename(tmp_path / "file")
    (folder / KEY).symlink_to(tmp_path / "file")
    assert cache.load_cached(KEY) is None
    (folder / KEY).unlink()
    os.mkfifo(folder / KEY, 0o600)
    assert cache.load_cached(KEY) is None
    (folder / KEY).unlink()
    (folder / KEY).mkdir(0o700)
    before = len(os.listdir("/proc/self/fd"))
    assert cache.load_cached(KEY) is None
    cache.store_cached(KEY, DATA)  # does nothing, because a folder has the file's name
    assert [path.name for path in folder.iterdir()] == [KEY]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("place", ["/dev/null", "/dev/null/nowhere", "/proc/1/fd"])
def test_cache_folders_that_cannot_be_used_are_no_error(monkeypatch, place):
    monkeypatch.setenv("CODEC_CACHE_DIR", place)
    assert cache.load_cached(KEY) is None
    cache.store_cached(KEY, DATA)


def test_no_cache_without_a_home_folder(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "CODEC_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    # "~" is not expanded, as for a user without a home folder
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache.cache_folder() is None
    assert cache.load_cached(KEY) is None
    cache.store_cached(KEY, DATA)


@as_root
def test_no_cache_for_an_unknown_user():
    code = (
        f"import os, sys; sys.path.insert(0, {str(PACKAGES)!r}); from codec.engines.cuda import cache\n"
        f"os.environ.clear(); os.setuid({OTHER}); print(cache.cache_folder(), cache.load_cached('x'))\n"
        "cache.store_cached('x', b'')"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None None\n"


@pytest.mark.parametrize("names", [b'{"a": "b"}', b"5", b"null", b"[1]", b'"x"', b"{", b"\xff", b""])
def test_cached_code_must_name_the_requested_kernels(names):
    assert kernels._deserialize(names + b"\nimage", ("close_frame",)) is None
    code = kernels.Code(b"im\nage", {"close_frame": "_Z"})
    assert kernels._deserialize(kernels._serialize(code), ("close_frame",)) == code


def test_warmup_warns_of_a_shared_numba_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(_warmup, "_try", lambda *_: True)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.warmup(codec.Sign(), "float32")
        tmp_path.chmod(0o777)
        codec.warmup(codec.Sign(), "float32", options=codec.options(engine="native"))
    with pytest.warns(RuntimeWarning, match=r"NUMBA_CACHE_DIR=.* can be written by other users"):
        codec.warmup(codec.Sign(), "float32")
