"""No traceback shows a secret, even with the local variables of all frames, as error reporters print them."""

import traceback

import pytest

import codec
from codec._secret import Secret, secret_of_environment

KEY = "key-0123456789abcdef-of-ranks"
LONG = KEY * 200


def leaks(error):
    """Return True if an error's traceback with local variables, or one of its causes, shows a part of the secret."""
    text = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format(chain=True))
    assert " = " in text  # it has local variables
    return KEY[:8] in text


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv("CODEC_SECRET", raising=False)
    monkeypatch.delenv("CODEC_SECRET_FILE", raising=False)


CALLS = {
    "another argument": lambda: codec.options(secret=KEY, threads=-1),
    "another engine": lambda: codec.options(secret=KEY.encode(), engine="none"),
    "too long": lambda: codec.options(secret=LONG),
    "too long bytes": lambda: codec.options(secret=bytearray(LONG.encode())),
    "not in UTF-8": lambda: codec.options(secret=KEY + "\ud800"),
    "a list": lambda: codec.options(secret=[KEY]),
    "a class": lambda: Secret(LONG.encode()),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_of_options_shows_no_secret(name):
    with pytest.raises(codec.CodecError) as raised:
        CALLS[name]()
    assert not leaks(raised.value)


@pytest.mark.parametrize("both", [True, False])
def test_error_of_the_environment_shows_no_secret(both, monkeypatch, tmp_path):
    monkeypatch.setenv("CODEC_SECRET", KEY if both else LONG)
    if both:
        monkeypatch.setenv("CODEC_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(codec.ArgumentError) as raised:
        secret_of_environment()
    monkeypatch.undo()  # its repr would show the variable
    assert not leaks(raised.value)


def test_error_of_a_file_shows_no_secret(monkeypatch, tmp_path):
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(LONG)
    monkeypatch.setenv("CODEC_SECRET_FILE", str(file))
    with pytest.raises(codec.ArgumentError, match="4096") as raised:
        secret_of_environment()
    assert not leaks(raised.value)
