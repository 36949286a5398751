"""codec.options(tls=) and the variables CODEC_TLS*: accepted values, errors that say what to do, and no pickle."""

import copy
import logging
import os
import pickle
import ssl
import subprocess
import sys

import pytest

import codec
from codec._options import settings_of
from codec._secret import Secret
from codec._security import Security, security_of_environment
from codec._tls import Tls, tls_of_environment
from support.certificates import certificate

KEY = "0123456789abcdef"
FILES = "CODEC_TLS_CERT", "CODEC_TLS_KEY", "CODEC_TLS_CA"


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("CODEC_SECRET", "CODEC_TLS", "GLOO_DEVICE"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return paths of a certificate, its key and its issuer."""
    folder = tmp_path_factory.mktemp("tls")
    _, public = certificate(folder, "rank")
    return {"CODEC_TLS_CERT": public, "CODEC_TLS_KEY": folder / "rank.key", "CODEC_TLS_CA": public}


@pytest.fixture
def variables(files, monkeypatch):
    for name, path in files.items():
        monkeypatch.setenv(name, str(path))


def _pair(**how):
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def test_setting_is_psk_or_a_pair_of_contexts():
    assert codec.options(tls="psk").security.tls == Tls()
    pair = _pair()
    assert codec.options(tls=pair) == codec.options(tls=pair) != codec.options(tls=_pair())
    assert codec.options().security.tls is None
    with codec.options(tls="psk", secret=KEY), codec.options(threads=2):
        assert settings_of(codec.options(timeout=5)).security == Security(Secret(KEY.encode()), Tls())


@pytest.mark.parametrize(
    "value", ["PSK", "", b"psk", True, 1, _pair()[0], (), _pair()[:1], (*_pair(), None), list(_pair())]
)
def test_other_values_are_refused(value):
    with pytest.raises(codec.ArgumentError, match=r'tls must be "psk" or a pair of ssl\.SSLContext'):
        codec.options(tls=value)


def test_contexts_of_the_other_side_or_of_old_versions_are_refused():
    server, client = _pair()
    for pair, name in (((client, client), "server"), ((server, server), "client"), ((client, server), "server")):
        with pytest.raises(codec.ArgumentError, match=f"tls: the context of the {name} is one of the other side"):
            codec.options(tls=pair)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(codec.ArgumentError, match=r"the context of the client excludes TLS 1\.3"):
        codec.options(tls=(server, client))


def test_setting_is_in_no_repr_and_no_pickle():
    options = codec.options(tls=_pair(), threads=3)
    assert "SSL" not in repr(options)
    assert repr(options.security.tls) == "Tls(...)"
    for value in (options, options.security.tls):
        with pytest.raises(TypeError, match=r"cannot be pickled: leave out options\(tls=\), and set CODEC_TLS"):
            pickle.dumps(value)
        assert copy.deepcopy(value) == copy.copy(value) == value
        assert hash(copy.deepcopy(value)) == hash(value)


def test_tls_without_authentication_is_refused(monkeypatch):
    server, client = _pair()
    server.verify_mode = ssl.CERT_REQUIRED
    Security(tls=Tls((server, client))).check()
    for security in (Security(tls=Tls()), Security(tls=Tls(_pair()))):
        with pytest.raises(codec.ArgumentError, match=r"tls needs a secret \(CODEC_SECRET_FILE\), or contexts"):
            security.check()
    monkeypatch.setenv("CODEC_TLS", "psk")
    monkeypatch.setenv("CODEC_SECRET", KEY)
    security_of_environment().check()


def test_setting_of_gloo_without_tls_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    for security in (Security(), Security(Secret(KEY.encode()))):
        with pytest.raises(codec.ArgumentError, match=r"not those of codec: set CODEC_TLS_CERT, .* or CODEC_TLS=psk"):
            security.check()
    Security(Secret(KEY.encode()), Tls()).check()


def test_settings_say_how_connections_are_protected():
    secret = Secret(KEY.encode())
    assert str(Security()) == "not encrypted, not authenticated"
    assert str(Security(secret)) == "not encrypted, authenticated"
    assert str(Security(secret, Tls())) == "encrypted, authenticated"


def test_variable_is_psk_or_an_error(monkeypatch):
    assert tls_of_environment() is None
    monkeypatch.setenv("CODEC_TLS", "psk")
    assert tls_of_environment() == Tls()
    for wrong in ("", "1", "PSK"):
        monkeypatch.setenv("CODEC_TLS", wrong)
        with pytest.raises(codec.ArgumentError, match=r"CODEC_TLS must be psk, got .* CODEC_TLS_CERT, CODEC_TLS_KEY"):
            tls_of_environment()


def test_files_make_contexts_that_require_certificates_of_each_other(variables):
    found = tls_of_environment()
    assert found is not None
    assert found.requires_certificates
    server, client = found.contexts()
    assert server.minimum_version == client.minimum_version == ssl.TLSVersion.TLSv1_3
    assert server.num_tickets == 0
    assert not client.check_hostname


@pytest.mark.parametrize("name", FILES)
def test_missing_variable_is_named(variables, monkeypatch, name):
    monkeypatch.delenv(name)
    with pytest.raises(codec.ArgumentError, match=f"is set, but {name} is not: set CODEC_TLS_CERT, CODEC_TLS_KEY and"):
        tls_of_environment()
    monkeypatch.setenv("CODEC_TLS", "psk")
    with pytest.raises(codec.ArgumentError, match=r"both CODEC_TLS and CODEC_TLS_.* are set"):
        tls_of_environment()


@pytest.mark.parametrize("name", FILES)
def test_file_that_cannot_be_used_is_named(variables, monkeypatch, tmp_path, name):
    for path in (tmp_path / "none", tmp_path, "", "\udcff", sys.executable):
        monkeypatch.setenv(name, str(path))
        with pytest.raises(codec.ArgumentError, match=r"a file of CODEC_TLS_CERT=.* cannot be used: "):
            tls_of_environment()


def test_encrypted_key_is_an_error_and_no_prompt(variables, monkeypatch, tmp_path):
    key = tmp_path / "key"
    encrypt = ["openssl", "pkey", "-in", os.environ["CODEC_TLS_KEY"], "-aes256", "-passout", "pass:x", "-out", str(key)]
    subprocess.run(encrypt, check=True, capture_output=True)
    monkeypatch.setenv("CODEC_TLS_KEY", str(key))
    with pytest.raises(codec.ArgumentError, match="the key is encrypted: decrypt it by openssl"):
        tls_of_environment()


def test_key_that_others_can_read_is_a_warning(variables, files, caplog):
    files["CODEC_TLS_KEY"].chmod(0o600)
    tls_of_environment()
    assert caplog.text == ""
    files["CODEC_TLS_KEY"].chmod(0o604)
    tls_of_environment()
    files["CODEC_TLS_KEY"].chmod(0o600)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("codec.torch", logging.WARNING)
    assert "other users can read the key in CODEC_TLS_KEY=" in caplog.text


def test_import_does_not_load_ssl():
    code = "import sys, codec; codec.options(tls='psk'); assert 'ssl' not in sys.modules and '_ssl' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
