"""codec pack --sign and codec verify --key: files that were changed by someone without the key are errors."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

import codec
from codec.files import signing
from codec.weight_sync.updates import signatures
from support.certificates import openssl
from support.command import run
from support.model_files import safetensors


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def packed(tmp_path, key):
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    assert run("pack", tmp_path / "model.safetensors", "--sign", key) == 0
    return tmp_path / "model.codec.safetensors"


def failed(capsys, *arguments):
    """Run a command that fails with exit code 1, and return its line on stderr."""
    capsys.readouterr()
    assert run(*arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_signed_file_is_verified_with_the_key_and_without(packed, key, tmp_path, capsys):
    assert run("verify", packed) == 0
    assert run("verify", packed, "--key", key) == 0
    out = capsys.readouterr().out
    assert out.endswith("a whole packed file of 16 tensors, signed with this key\n")
    assert run("unpack", packed, "-o", tmp_path / "again") == 0
    assert (tmp_path / "again").read_bytes() == safetensors()
    assert "0123456789abcdef" not in packed.with_name(f"{packed.name}.sig").read_text()


def test_changed_files_and_other_keys_are_errors(packed, key, tmp_path, capsys):
    data, sidecar = packed.read_bytes(), packed.with_name(f"{packed.name}.sig")
    signature = sidecar.read_bytes()
    (tmp_path / "other").write_bytes(safetensors())
    assert run("pack", tmp_path / "other", "-o", packed, "--force") == 0  # a whole file, but not the signed one
    for changed in (packed.read_bytes() + b"x", data[:-1], data[:100] + bytes([data[100] ^ 1]) + data[101:]):
        packed.write_bytes(changed)
        assert "signature of the file does not match" in failed(capsys, "verify", packed, "--key", key)
    packed.write_bytes(data)
    for changed in (signature[:-2] + b"\n", b"", signature * 2, signature.upper(), signature.replace(b" 01", b" 02")):
        sidecar.write_bytes(changed)
        assert "is not a signature" in failed(capsys, "verify", packed, "--key", key)
    sidecar.unlink()
    assert ".sig" in failed(capsys, "verify", packed, "--key", key)
    sidecar.write_bytes(signature)
    (tmp_path / "wrong").write_text("0123456789abcdeF")
    (tmp_path / "wrong").chmod(0o600)
    assert "signed with another key" in failed(capsys, "verify", packed, "--key", tmp_path / "wrong")
    assert run("verify", packed, "--key", key) == 0


def test_frames_and_shards_are_signed(tmp_path, key, capsys):
    np.save(tmp_path / "x.npy", np.arange(1000, dtype=np.float32))
    assert run("pack", tmp_path / "x.npy", "--sign", key) == 0
    (tmp_path / "a.safetensors").write_bytes(safetensors())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert run("pack", index, "-o", tmp_path / "out", "--sign", key) == 0
    assert sorted(os.listdir(tmp_path / "out")) == [
        *("a.safetensors", "a.safetensors.sig", "model.safetensors.index.json", "model.safetensors.index.json.sig"),
    ]
    assert run("verify", tmp_path / "x.npy.codec", tmp_path / "out/a.safetensors", "--key", key) == 0
    assert capsys.readouterr().out.count("signed with this key") == 2


def test_context_tells_files_of_one_key_apart(packed, key, tmp_path, capsys):
    """Without a context, a signature says that a holder of the key has signed these bytes, under any name."""
    model, old, new = tmp_path / "model.safetensors", tmp_path / "old", tmp_path / "new"
    other = tmp_path / "other.codec.safetensors"
    packed.rename(other)
    packed.with_name(f"{packed.name}.sig").rename(f"{other}.sig")
    assert run("verify", other, "--key", key) == 0
    for path, context in ((old, "policy 1"), (new, "policy 2")):
        assert run("pack", model, "-o", path, "--sign", key, "--context", context) == 0
        assert run("verify", path, "--key", key, "--context", context) == 0
    assert "with this context does not match" in failed(capsys, "verify", old, "--key", key, "--context", "policy 2")
    assert "with this context does not match" in failed(capsys, "verify", other, "--key", key, "--context", "")
    assert "does not match" in failed(capsys, "verify", old, "--key", key)
    assert "pass --sign" in failed(capsys, "pack", model, "-o", tmp_path / "x", "--context", "a")
    assert "pass --key" in failed(capsys, "verify", old, "--context", "a")
    codec.WeightSender({"w": np.ones(5)}, sign=b"0123456789abcdef").snapshot(file=tmp_path / "update")
    assert ".sig" in failed(capsys, "verify", tmp_path / "update", "--key", key, "--context", "a")


def test_files_are_verified_with_a_public_key(tmp_path, key, capsys):
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    private.chmod(0o600)
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    packed = tmp_path / "model.codec.safetensors"
    assert run("pack", tmp_path / "model.safetensors", "--sign", private) == 0
    assert run("verify", packed, "--key", public) == 0
    assert capsys.readouterr().err == ""  # also no warning that others can read the public key
    assert "must stay with the trainer" in failed(capsys, "verify", packed, "--key", private)
    assert "is to be verified with a secret key" in failed(capsys, "verify", packed, "--key", key)
    assert "a public key cannot sign" in failed(
        capsys, "pack", tmp_path / "model.safetensors", "-o", tmp_path / "x", "--sign", public
    )
    packed.write_bytes(packed.read_bytes() + b"x")
    assert "signature of the file does not match" in failed(capsys, "verify", packed, "--key", public)


def test_outputs_that_cannot_have_a_signature_are_refused(packed, key, tmp_path, capsys):
    model = tmp_path / "model.safetensors"
    assert "name a file by -o FILE" in failed(capsys, "pack", model, "-o", "-", "--sign", key)
    assert "name a file by -o FILE" in failed(capsys, "pack", model, "-o", "/dev/null", "--sign", key)
    packed.unlink()
    assert ".sig exists" in failed(capsys, "pack", model, "--sign", key)
    assert not packed.exists()
    assert run("pack", model, "--sign", key, "--force") == 0
    (tmp_path / "short").write_text("x")
    (tmp_path / "short").chmod(0o600)
    assert "needs at least 16" in failed(capsys, "pack", model, "--force", "--sign", tmp_path / "short")
    assert "--key is for files" in failed(capsys, "verify", "-", "--key", key)


def test_signature_in_an_update_is_verified(tmp_path, key, capsys):
    tensors = {"w": np.ones(5, ml_dtypes.bfloat16)}
    for name, sign in (("signed", b"0123456789abcdef"), ("other", b"0123456789abcdeF"), ("none", None)):
        codec.WeightSender(tensors, sign=sign).snapshot(file=tmp_path / name)
    assert run("verify", tmp_path / "signed", "--key", key) == 0
    assert "signed with this key" in capsys.readouterr().out
    assert "signature of the update does not match" in failed(capsys, "verify", tmp_path / "other", "--key", key)
    assert ".sig" in failed(capsys, "verify", tmp_path / "none", "--key", key)


def test_signature_of_a_file_is_not_that_of_an_update(tmp_path, key, capsys):
    """Signatures have purposes: who can have any file signed can forge neither updates nor lists of updates."""
    codec.WeightSender({"w": np.ones(5, ml_dtypes.bfloat16)}).snapshot(file=tmp_path / "update")
    with (tmp_path / "update").open("rb") as file:
        signature = signing.file_signature(file, signing.SigningKey(key))
    forged = (tmp_path / "update").read_bytes() + signatures._MAGIC + signature
    (tmp_path / "forged").write_bytes(forged)
    assert "signature of the update does not match" in failed(capsys, "verify", tmp_path / "forged", "--key", key)
