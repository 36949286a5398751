"""Environment variables with tokens, certificates and keys: defaults of arguments, and never a silent fallback."""

import json
import os
import subprocess
import sys

import pytest

import codec
from codec.cli.main import main
from codec.weight_sync import Publisher, UpdateStore, pull, serve
from codec.weight_sync.http import client as http
from codec.weight_sync.http.environment import CA, SIGN, TLS, TOKEN, VARIABLES, VERIFY
from support.certificates import certificate, openssl
from support.weight_updates import equal, published, weights

TEXT, KEY, OTHER = "token-of-the-store", b"0123456789abcdef", b"0123456789abcdeF"


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Set variables to files with these contents; without contents, unset them."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def give(**contents):
        for name, content in contents.items():
            path = tmp_path / name
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            path.chmod(0o600)
            monkeypatch.setenv(name, str(path))

    return give


def test_variables_replace_arguments(tmp_path, given):
    both, public = certificate(tmp_path, "server")
    given(**{TOKEN: f"{TEXT}\n", TLS: both.read_bytes(), CA: public.read_bytes(), SIGN: KEY, VERIFY: KEY})
    with Publisher(tmp_path / "store", host="127.0.0.1") as publisher:
        all_weights = published(publisher, 3)
        assert publisher.source.startswith("https://")
        receiver = codec.WeightReceiver()
        assert pull(receiver, publisher.source) == 2
        assert equal(all_weights[2], receiver.tensors())
        with pytest.raises(codec.ArgumentError, match="does not accept this token"):
            pull(codec.WeightReceiver(), publisher.source, token="another-token-entirely")
        with pytest.raises(codec.FrameError, match="signed with another key"):
            pull(codec.WeightReceiver(verify=OTHER), publisher.source)
    assert pull(codec.WeightReceiver(), tmp_path / "store") == 2  # token and certificates are for servers
    given(**{VERIFY: OTHER})
    with pytest.raises(codec.FrameError, match="signed with another key"):
        pull(codec.WeightReceiver(), tmp_path / "store")


def test_unsigned_stores_and_updates_are_errors_with_a_key(tmp_path, given):
    with Publisher(tmp_path, host="127.0.0.1") as publisher:
        published(publisher, 1)
        given(**{VERIFY: KEY})
        for source in (tmp_path, publisher.source):
            with pytest.raises(codec.FrameError, match="list of updates is not signed"):
                pull(codec.WeightReceiver(), source)
    with pytest.raises(codec.FrameError, match="the update is not signed"):
        codec.WeightReceiver().apply(codec.WeightSender(weights()).snapshot().data)
    given(**{SIGN: KEY})
    with pytest.raises(codec.FrameError, match="not signed"):
        Publisher(tmp_path).publish(weights())


def test_token_and_certificate_do_not_fall_back_to_http(tmp_path, given):
    given(**{TOKEN: TEXT})
    with pytest.raises(codec.ArgumentError, match="the token would be readable on the way"):
        http.Connection("http://192.0.2.1:8000", 1)
    http.Connection("http://192.0.2.1:8000", 1, cafile=False)
    public = certificate(tmp_path, "server")[1]
    UpdateStore(tmp_path / "store")
    with serve(tmp_path / "store") as server:
        assert pull(codec.WeightReceiver(), server.url) is None
        given(**{CA: public.read_bytes()})
        with pytest.raises(codec.ArgumentError, match=f"{CA}: cafile= is for https"):
            pull(codec.WeightReceiver(), server.url)


@pytest.mark.parametrize("name", VARIABLES)
def test_variable_without_a_usable_file_is_an_error_that_names_it(name, tmp_path, given, monkeypatch):
    def use():
        if name == SIGN:
            codec.WeightSender(weights())
        elif name == VERIFY:
            codec.WeightReceiver()
        elif name == CA:
            http.Connection("https://127.0.0.1:1", 1)
        else:
            serve(tmp_path).close()

    use()
    for value in ("", str(tmp_path / "none"), str(tmp_path), "/dev/zero", "/" + "x" * 5000):
        monkeypatch.setenv(name, value)
        with pytest.raises(codec.ArgumentError, match=f"^{name}"):
            use()
    given(**{name: "hunter2"})
    with pytest.raises(codec.ArgumentError, match=f"^{name}") as e:
        use()
    assert "hunter2" not in str(e.value)


@pytest.mark.parametrize("name", [TOKEN, SIGN, VERIFY])
def test_secrets_that_others_can_read_are_a_warning(name, tmp_path, given):
    given(**{name: KEY + b"." * 4})
    (tmp_path / name).chmod(0o644)
    use = {
        TOKEN: lambda: serve(tmp_path).close(),
        SIGN: lambda: Publisher(tmp_path / "x"),
        VERIFY: codec.WeightReceiver,
    }
    with pytest.warns(UserWarning, match="other users may read"):
        use[name]()


def test_doctor_prints_paths_and_no_secrets(given, capsys):
    given(**dict.fromkeys(VARIABLES, "hunter2hunter2hunter2"))
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    entries = json.loads(out)
    assert all(entries[f"${name}"] == os.environ[name] for name in VARIABLES)
    assert "hunter2" not in out + err


TRAINER = """
import sys
from codec.weight_sync import Publisher
from support.weight_updates import published
with Publisher(sys.argv[1], host="127.0.0.1") as publisher:
    published(publisher, 3)
    print(publisher.source, flush=True)
    sys.stdin.read()
"""
RECEIVER = """
import os, sys
import codec
from codec.weight_sync import pull
from support.weight_updates import equal, stepped, weights
receiver = codec.WeightReceiver(max_nbytes=1 << 30)
try:
    version = pull(receiver, sys.argv[1])
except codec.CodecError as e:
    sys.exit(f"{type(e).__name__}: {e}")
assert equal(stepped(stepped(weights(), 1), 2), receiver.tensors())
print(version)
"""


def run(program, *arguments, **variables):
    """Start a Python process that can import the package and the support modules of the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, *map(str, arguments)], env=environment, text=True, **pipes
    )


def test_trainer_and_receiver_are_processes_that_share_only_files(tmp_path):
    """Weights reach a receiver over https with token and signature; each receiver that lacks one of them gets none."""
    both, public = certificate(tmp_path, "server")
    for name in ("token", "wrong_token", "key.pem"):
        (tmp_path / name).touch(0o600)
    (tmp_path / "token").write_text(TEXT + "\n")
    (tmp_path / "wrong_token").write_text(TEXT[::-1])
    for name in ("key", "other"):
        openssl("genpkey", "-algorithm", "ed25519", "-out", tmp_path / f"{name}.pem")
        openssl("pkey", "-in", tmp_path / f"{name}.pem", "-pubout", "-out", tmp_path / f"{name}.pub")
    other_ca = certificate(tmp_path, "other_server")[1]
    trainer = {TOKEN: tmp_path / "token", TLS: both, SIGN: tmp_path / "key.pem"}
    right = {TOKEN: tmp_path / "token", CA: public, VERIFY: tmp_path / "key.pub"}
    with run(TRAINER, tmp_path / "store", **trainer) as process:
        source = process.stdout.readline().strip()
        receivers = {
            "2\n": right,
            "requires a token": right | {TOKEN: None},
            "does not accept this token": right | {TOKEN: tmp_path / "wrong_token"},
            "not trusted": right | {CA: other_ca},
            "signature of the list of updates does not match": right | {VERIFY: tmp_path / "other.pub"},
            "must stay with the trainer": right | {VERIFY: tmp_path / "key.pem"},
        }
        started = {
            text: run(RECEIVER, source, **{name: value for name, value in variables.items() if value})
            for text, variables in receivers.items()
        }
        for text, receiver in started.items():
            out, err = receiver.communicate(timeout=60)
            assert text in (out if text == "2\n" else err), out + err
            assert (receiver.returncode == 0) == (text == "2\n")
            assert TEXT not in out + err
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    assert source.startswith("https://127.0.0.1:")
