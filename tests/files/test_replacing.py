"""replaced(): files appear complete or not at all; devices, pipes and open files are not replaced."""

import os
import resource
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import codec
from codec.files import replacing
from codec.files.replacing import replaced


def write(path, data=b"new"):
    with replaced(Path(path)) as file:
        file.write(data)


@contextmanager
def full_disk(nbytes):
    """Limit the size of files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_new_file_follows_the_umask_and_a_replaced_one_keeps_its_mode(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "x")
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640
        for mode in (0o600, 0o666, 0o444):
            (tmp_path / "x").chmod(mode)
            write(tmp_path / "x")
            assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode
    finally:
        os.umask(before)


def test_temporary_file_of_a_private_file_is_private(tmp_path):
    (tmp_path / "x").touch(0o600)
    with replaced(tmp_path / "x") as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600


def test_file_behind_a_link_is_unchanged(tmp_path):
    (tmp_path / "blob").write_bytes(b"old")
    (tmp_path / "x").symlink_to("blob")
    write(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert not (tmp_path / "x").is_symlink()
    assert (tmp_path / "blob").read_bytes() == b"old"


def test_bytes_are_written_into_pipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for path in (tmp_path / "pipe", tmp_path / "link"):
        write(path)
        assert os.read(reader, 10) == b"new"
    with suppress(ZeroDivisionError), replaced(tmp_path / "pipe") as file:
        file.write(b"%d" % (1 // 0))
    assert os.read(reader, 10) == b""
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert (tmp_path / "link").is_symlink()


def test_pipe_without_reader_is_an_error_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(codec.ArgumentError, match="no program reads from it"):
        write(tmp_path / "pipe")


def test_bytes_are_appended_to_open_files_of_a_process(tmp_path):
    """A link such as /dev/stdout leads to /proc/self/fd/1, which may be a regular file."""
    with open(tmp_path / "out", "wb") as out:
        out.write(b"old ")
        out.flush()
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{out.fileno()}")
        (tmp_path / "link").symlink_to("stdout")
        write(tmp_path / "stdout")
        write(tmp_path / "link")
        assert (tmp_path / "stdout").is_symlink()
        assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out").read_bytes() == b"old newnew"


def test_devices_stay_devices():
    write("/dev/null")
    assert stat.S_ISCHR(os.lstat("/dev/null").st_mode)
    with pytest.raises(codec.ArgumentError, match="'/dev/full' cannot be written: No space left on device"):
        write("/dev/full")


def test_full_disk_is_an_argument_error_that_names_the_folder(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    for nbytes in (100, 1 << 20):  # fails when the buffer is flushed, and in write()
        with full_disk(50), pytest.raises(codec.ArgumentError, match=rf"File too large \(folder '{tmp_path}'\)"):
            write(tmp_path / "x", bytes(nbytes))
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_errors_of_other_files_are_not_of_the_output(tmp_path):
    with pytest.raises(FileNotFoundError), replaced(tmp_path / "x"):
        os.open(tmp_path / "input", os.O_RDONLY)
    with pytest.raises(BrokenPipeError), replaced(tmp_path / "x"):
        raise BrokenPipeError(32, "Broken pipe")
    with pytest.raises(codec.ArgumentError, match="cannot be written: Is a directory"):
        write(tmp_path)
    with pytest.raises(codec.ArgumentError, match="cannot be written: No such file"):
        write(tmp_path / "folder" / "x")
    assert not list(tmp_path.iterdir())


def test_links_in_place_of_the_temporary_file_are_not_followed(tmp_path, monkeypatch):
    (tmp_path / "victim").write_bytes(b"precious")
    monkeypatch.setattr(replacing.secrets, "token_hex", lambda n: "known")
    (tmp_path / ".x.known.tmp").symlink_to("victim")
    with pytest.raises(codec.ArgumentError, match="cannot be written: File exists"):
        write(tmp_path / "x")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / ".x.known.tmp").is_symlink()


def test_names_may_have_the_maximum_length(tmp_path):
    for name in ("x" * 255, "\N{GRINNING FACE}" * 63):
        write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"new"
