"""Ed25519 key pairs: receivers with the public key check signatures, but cannot make them."""

import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

import codec
from codec.files.signing import SigningKey
from codec.weight_sync import Publisher, pull
from support.certificates import certificate
from support.weight_updates import equal, published, stepped, weights

PRIVATE = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = PRIVATE.public_key()
PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
SPKI, NONE = serialization.PublicFormat.SubjectPublicKeyInfo, serialization.NoEncryption()
PRIVATE_PEM, PUBLIC_PEM = PRIVATE.private_bytes(PEM, PKCS8, NONE), PUBLIC.public_bytes(PEM, SPKI)
DER, SSH = serialization.Encoding.DER, serialization.Encoding.OpenSSH
DERS = PRIVATE.private_bytes(DER, PKCS8, NONE), PUBLIC.public_bytes(DER, SPKI)
SSH_PUBLIC = PUBLIC.public_bytes(SSH, serialization.PublicFormat.OpenSSH)
SSH_PRIVATE = PRIVATE.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, NONE)


def in_file(folder, content):
    """Write a key to a file, and return its path."""
    path = folder / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("form", ["object", "bytes", "file"])
def test_receivers_with_the_public_key_follow_the_trainer(tmp_path, form):
    sign, verify = (PRIVATE, PUBLIC) if form == "object" else (PRIVATE_PEM, PUBLIC_PEM)
    if form == "file":
        (tmp_path / "public").mkdir()
        sign, verify = in_file(tmp_path, sign), in_file(tmp_path / "public", verify)
    with Publisher(tmp_path / "store", sign=sign, base=tmp_path / "base") as publisher:
        last = stepped(published(publisher, 3)[-1], 9)
    with Publisher(tmp_path / "store", host="127.0.0.1", sign=sign, base=tmp_path / "base") as publisher:
        assert publisher.publish(last) == 3  # after it has checked its own signatures
        for source in (publisher.source, tmp_path / "store"):
            receiver = codec.WeightReceiver(verify=verify)
            assert pull(receiver, source) == 3
            assert equal(last, receiver.tensors())
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    with pytest.raises(codec.FrameError, match=r"signature of the list of updates does not match"):
        pull(codec.WeightReceiver(verify=other), tmp_path / "store")


def test_every_changed_or_missing_byte_of_an_update_is_an_error():
    sender = codec.WeightSender(weights(), sign=PRIVATE)
    receiver = codec.WeightReceiver(verify=PUBLIC)
    data = bytes(sender.snapshot().data)
    for k in [*range(0, len(data), 97), *range(len(data) - 73, len(data))]:
        with pytest.raises(codec.CodecError):
            receiver.apply(data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :])
    for k in range(1, 80):
        with pytest.raises(codec.CodecError):
            receiver.apply(data[:-k])
    assert receiver.version is None
    receiver.apply(data)


@pytest.mark.parametrize("public", [PUBLIC, PUBLIC_PEM, b"# public\n" + PUBLIC_PEM])
def test_public_keys_cannot_sign(public, tmp_path):
    for given in (public, in_file(tmp_path, public)) if isinstance(public, bytes) else (public,):
        for call in (
            lambda given=given: codec.WeightSender(weights(), sign=given),
            lambda given=given: Publisher(tmp_path / "store", sign=given),
        ):
            with pytest.raises(codec.ArgumentError, match="a public key cannot sign"):
                call()
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("private", [PRIVATE, PRIVATE_PEM, PRIVATE_PEM + PUBLIC_PEM, PUBLIC_PEM + PRIVATE_PEM])
def test_receivers_refuse_the_private_key(private):
    with pytest.raises(codec.ArgumentError, match="a private key must stay with the trainer"):
        codec.WeightReceiver(verify=private)


def test_public_keys_in_any_form_are_no_secret_keys(tmp_path):
    """An attacker signs by HMAC with the bytes of the public key."""
    first = weights()
    raw = PUBLIC.public_bytes_raw()
    for forged in (raw, raw.hex().encode()):
        update = bytes(codec.WeightSender(first, sign=forged).snapshot().data)
        with pytest.raises(codec.FrameError, match=r"signed with a secret key .* to be verified with an Ed25519 key"):
            codec.WeightReceiver(verify=PUBLIC).apply(update)
    # a receiver whose key is a public one by mistake refuses the trainer's updates from the first one on
    with pytest.raises(codec.FrameError, match=r"signed with an Ed25519 key, .* verified with a secret key"):
        codec.WeightReceiver(verify=raw).apply(bytes(codec.WeightSender(first, sign=PRIVATE).snapshot().data))
    for other in (*DERS, SSH_PUBLIC):
        for given in (other, in_file(tmp_path, other)):
            with pytest.raises(codec.ArgumentError, match="neither a secret key nor a PEM key"):
                codec.WeightReceiver(verify=given)


def test_other_pem_files_are_errors_without_the_key(tmp_path):
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    both, certified = certificate(tmp_path, "server")
    encrypted = PRIVATE.private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"abcdef"))
    for content, match in (
        (rsa_key.private_bytes(PEM, PKCS8, NONE), "not an Ed25519 key"),
        (rsa_key.public_key().public_bytes(PEM, SPKI), "not an Ed25519 key"),
        (certified.read_bytes(), "not an Ed25519 key"),
        (both.read_bytes(), "not an Ed25519 key"),
        (PRIVATE_PEM[:60], "not an Ed25519 key"),
        (PUBLIC_PEM.replace(b"M", b"N"), "not an Ed25519 key"),
        (SSH_PRIVATE, "not an Ed25519 key"),
        (encrypted, "is encrypted: decrypt it"),
    ):
        for given in (content, in_file(tmp_path, content)):
            for use in (lambda k: codec.WeightReceiver(verify=k), lambda k: codec.WeightSender(weights(), sign=k)):
                with pytest.raises(codec.ArgumentError, match=match) as e:
                    use(given)
                assert content.splitlines()[1][:20].decode() not in str(e.value)
    with pytest.raises(codec.ArgumentError, match="got an object of RSAPrivateKey"):
        codec.WeightSender(weights(), sign=rsa_key)


def test_private_key_that_others_can_read_is_a_warning(tmp_path, recwarn):
    path = in_file(tmp_path, PUBLIC_PEM)
    path.chmod(0o644)
    codec.WeightReceiver(verify=path)
    assert not recwarn.list
    path.write_bytes(PRIVATE_PEM)
    with pytest.warns(UserWarning, match="other users may read"):
        codec.WeightSender(weights(), sign=path)


def test_pem_keys_need_the_package_cryptography(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(codec.ArgumentError, match=r"pip install 'tensor-codec\[tls\]'"):
        codec.WeightReceiver(verify=PUBLIC_PEM)
    assert repr(SigningKey(b"x" * 16)) == "<codec signing key>"
