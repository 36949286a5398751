"""codec.options(secret=) and the variables CODEC_SECRET and CODEC_SECRET_FILE: accepted values, and no leak."""

import copy
import logging
import os
import pickle
import traceback

import pytest

import codec
from codec._options import settings_of
from codec._secret import Secret, secret_of_environment

KEY = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv("CODEC_SECRET", raising=False)
    monkeypatch.delenv("CODEC_SECRET_FILE", raising=False)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    monkeypatch.setenv("CODEC_SECRET_FILE", str(path))
    return path


def test_secret_is_bytes_or_text():
    for value in (KEY, bytearray(KEY), KEY.decode()):
        assert codec.options(secret=value).security.secret == Secret(KEY)
    assert codec.options(secret="ä" * 8).security.secret == Secret("ä".encode() * 8)
    assert codec.options().security.secret is None
    with codec.options(secret=KEY), codec.options(threads=2):
        assert settings_of(codec.options(timeout=5)).security.secret == Secret(KEY)
    assert codec.options(secret=KEY) == codec.options(secret=KEY)
    assert codec.options(secret=KEY) != codec.options(secret=KEY + b"x")


def test_secret_of_wrong_type_or_size_is_refused_without_showing_it():
    for value in (b"", b"short", "short!!", KEY[:15], bytes(5000), "\ud800" * 20, 12345678901234567890, ["short"] * 20):
        with pytest.raises(codec.ArgumentError, match="secret must ") as raised:
            codec.options(secret=value)
        assert "short" not in str(raised.value)
        assert "1234567" not in str(raised.value)


def test_secret_is_in_no_repr_and_no_pickle():
    options = codec.options(secret=KEY, threads=3)
    assert "threads=3" in repr(options)
    secret = options.security.secret
    for text in (repr(options), str(options), repr(options.security), f"{secret}", repr(vars(type(options)))):
        assert KEY.decode() not in text
    assert hash(Secret(KEY)) == hash(Secret(KEY * 2))  # a hash would tell something of the key
    for value in (options, secret):
        with pytest.raises(TypeError, match=r"cannot be pickled: leave out .*CODEC_SECRET_FILE") as raised:
            pickle.dumps(value)
        assert KEY.decode() not in "".join(traceback.format_exception(raised.value))
        assert copy.deepcopy(value) == copy.copy(value) == value
    assert pickle.loads(pickle.dumps(codec.options(threads=3))) == codec.options(threads=3)


def test_variable_holds_the_secret(monkeypatch):
    assert secret_of_environment() is None
    monkeypatch.setenv("CODEC_SECRET", KEY.decode())
    assert secret_of_environment() == Secret(KEY)
    for wrong in ("", "short"):
        monkeypatch.setenv("CODEC_SECRET", wrong)
        with pytest.raises(codec.ArgumentError, match=f"CODEC_SECRET must have 16 to 4096 bytes, got {len(wrong)}:"):
            secret_of_environment()


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_file_holds_the_secret_without_its_end_of_line(file, end):
    for size in (16, 4096):
        file.write_bytes(b"k" * size + end)
        assert secret_of_environment() == Secret(b"k" * size)
    for size in (15, 4097, 10_000):
        file.write_bytes(b"k" * size + end)
        with pytest.raises(codec.ArgumentError, match=r"the secret in CODEC_SECRET_FILE=.* must have 16 to 4096 bytes"):
            secret_of_environment()


def test_file_that_others_can_read_is_a_warning(file, caplog):
    file.write_bytes(KEY)
    assert secret_of_environment() == Secret(KEY)
    assert caplog.text == ""
    file.chmod(0o604)
    assert secret_of_environment() == Secret(KEY)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("codec.torch", logging.WARNING)
    assert f"other users can read the secret in CODEC_SECRET_FILE={file}: run `chmod o= {file}`" in caplog.text


def test_file_that_is_missing_or_no_file_is_an_error(file, monkeypatch):
    file.unlink()
    with pytest.raises(codec.ArgumentError, match=r"CODEC_SECRET_FILE=.* cannot be read: .*No such file"):
        secret_of_environment()
    os.mkfifo(file)
    with pytest.raises(codec.ArgumentError, match=r"CODEC_SECRET_FILE=.* is not a regular file"):
        secret_of_environment()
    for path in ("", "/dev/zero", str(file.parent)):
        monkeypatch.setenv("CODEC_SECRET_FILE", path)
        with pytest.raises(codec.ArgumentError, match=r"CODEC_SECRET_FILE=.* (cannot be read|is not a regular file)"):
            secret_of_environment()


def test_two_variables_are_an_error(file, monkeypatch):
    file.write_bytes(KEY)
    monkeypatch.setenv("CODEC_SECRET", KEY.decode())
    with pytest.raises(codec.ArgumentError, match="both CODEC_SECRET_FILE and CODEC_SECRET are set: unset one"):
        secret_of_environment()
