"""The sdist and the wheel contain every required file once, and no other files.

Both are built from a copy of the tracked files. C code is compiled with -O0, so that a wheel takes 5 s of CPU time.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path

import pytest

import codec
from codec import _c

ROOT = Path(__file__).parents[2]
STRAY = [
    "build/old/libcodec.so",
    "dist/old.whl",
    ".venv/bin/python",
    "codec/__pycache__/x.pyc",
    "codec/lib/libcodec.so",
]


def tracked():
    """Return the paths of all files that git tracks, or that `git add .` would add."""
    command = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return {name for name in listed if name and (ROOT / name).is_file()}


def build(kind, source, target):
    """Build an sdist or a wheel from a folder, without build isolation, and return its path."""
    command = [sys.executable, "-P", "-m", "build", f"--{kind}", "--no-isolation", "--outdir", target]
    debug = ["-Ccmake.build-type=Debug", "-Ccmake.define.CMAKE_C_FLAGS_DEBUG=-O0"]
    done = subprocess.run([*command, *debug, source], check=False, capture_output=True, text=True, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a copy of the tracked files, with stray files added that no distribution may contain."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked() | set(STRAY):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name in STRAY:
            (folder / name).write_text("stray")
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    """Unpack the sdist, and return the folder with its files."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


def contents(wheel):
    """Return the bytes of each file in a wheel except RECORD, which contains the other files' digests."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_import_from_a_checkout_without_a_build_names_the_command(checkout):
    command = [sys.executable, "-c", "import codec"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=checkout, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: codec is not built in {checkout}: run `pip install -e .` there")


def test_sdist_holds_tracked_files_and_metadata_only(unpacked):
    held = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert held == {name for name in tracked() if not name.startswith((".ci/", ".github/"))} | {"PKG-INFO"}


def test_wheel_holds_each_module_and_file_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    info = f"tensor_codec-{codec.__version__}.dist-info/"
    # Installed by CMake, but not part of the Python package
    own = {name for name in tracked() if name.startswith("native/cuda_api/")}
    headers = {name.replace("bindings/gloo/", "native/") for name in tracked() - own if "/include/codec/" in name}
    kernels = {name for name in tracked() if name.startswith(("native/cuda/", "native/src/exact/"))}
    cmake = {f"codec/lib/cmake/codec/codec-config{part}.cmake" for part in ("", "-version", "-debug")}
    expected = {name for name in tracked() if name.startswith("codec/")}
    expected |= {name.replace("native/include/", "codec/include/") for name in headers}
    expected |= {name.replace("native/src/", "native/").replace("native/", "codec/kernels/") for name in kernels}
    expected |= {"codec/_c/_cffi.py", "codec/lib/libcodec.so", "codec/lib/pkgconfig/codec.pc"} | cmake
    expected |= {info + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert set(names) == expected


@pytest.mark.nightly
def test_wheel_from_sdist_equals_wheel_from_checkout(wheel, unpacked, tmp_path):
    again = build("wheel", unpacked, tmp_path)
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def test_one_version_in_wheel_pkgconfig_and_cmake(wheel):
    files = contents(wheel)
    metadata = next(text for name, text in files.items() if name.endswith("/METADATA"))
    assert message_from_bytes(metadata)["Version"] == codec.__version__
    release = re.match(r"\d+\.\d+\.\d+", codec.__version__)[0]
    assert f"\nVersion: {release}\n" in files["codec/lib/pkgconfig/codec.pc"].decode()
    cmake = files["codec/lib/cmake/codec/codec-config-version.cmake"].decode()
    assert f'set(PACKAGE_VERSION "{release}")' in cmake


def test_citation_has_the_version():
    assert f"\nversion: {codec.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_wheel_installs_the_command(wheel):
    files = contents(wheel)
    entry_points = ConfigParser()
    entry_points.read_string(next(text for name, text in files.items() if name.endswith("/entry_points.txt")).decode())
    assert dict(entry_points["console_scripts"]) == {"codec": "codec.__main__:main"}


def test_library_needs_no_glibc_newer_than_2_28():
    """A wheel built on Debian 12 (glibc 2.36) runs with glibc 2.28, so that its tag manylinux_2_28 is right."""
    command = ["objdump", "-T", _c.PACKAGE / "lib/libcodec.so"]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = {tuple(map(int, version.split("."))) for version in re.findall(r"\(?GLIBC_([\d.]+)\)?", symbols)}
    assert (2, 2, 5) in needed
    assert max(needed) <= (2, 28)
