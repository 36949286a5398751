"""Certificates of servers, made by the command ``openssl``."""

import subprocess

CONFIGURATION = """[ca]
default_ca = own
[own]
database = {folder}/index
rand_serial = yes
new_certs_dir = {folder}
default_md = sha256
policy = any
copy_extensions = copy
[any]
commonName = supplied
"""


def openssl(*arguments):
    """Run a command of openssl."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def certificate(folder, name, host="IP:127.0.0.1", expired=False):
    """Make a self-signed certificate, in a file with its key and in one without; return both paths."""
    both, public, key, request = (folder / f"{name}.{suffix}" for suffix in ("pem", "crt", "key", "csr"))
    make = "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=codec"
    make += "-addext", f"subjectAltName={host}", "-keyout", key
    if expired:
        (folder / "index").write_text("")
        (folder / "configuration").write_text(CONFIGURATION.format(folder=folder))
        openssl(*make, "-out", request)
        dates = "-startdate", "20200101000000Z", "-enddate", "20200102000000Z"
        sign = "ca", "-batch", "-notext", "-config", folder / "configuration", "-selfsign", "-keyfile", key
        openssl(*sign, "-in", request, *dates, "-out", public)
    else:
        openssl(*make, "-x509", "-days", 1, "-out", public)
    both.touch(0o600)
    both.write_bytes(public.read_bytes() + key.read_bytes())
    return both, public
