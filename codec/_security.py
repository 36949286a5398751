"""Authentication and encryption of the connections between the ranks of a group."""

import os
from typing import NamedTuple

from codec._secret import FILE_VARIABLE, Secret, secret_of_environment
from codec._secret import VARIABLE as SECRET_VARIABLE
from codec._tls import FILE_VARIABLES, VARIABLE, Tls, given_in, tls_of_environment
from codec.errors import ArgumentError

HAS_SECRET, HAS_TLS = 1, 2  # flags of ranks in hellos and addresses


class Security(NamedTuple):
    """Secret and TLS setting of a group's connections; None: not set."""

    secret: Secret | None = None
    tls: Tls | None = None

    def over(self, outer: "Security") -> "Security":
        """Return a copy of these settings in which each setting that is None has the value of `outer`."""
        return Security(self.secret or outer.secret, self.tls or outer.tls)

    @property
    def flags(self) -> int:
        """Sum of HAS_SECRET, if there is a secret, and HAS_TLS, if there is a TLS setting."""
        return (self.secret is not None) * HAS_SECRET + (self.tls is not None) * HAS_TLS

    def __str__(self) -> str:
        encrypted = "encrypted" if self.tls is not None else "not encrypted"
        return f"{encrypted}, {'not authenticated' if self == NONE else 'authenticated'}"

    def check(self) -> None:
        """Raise ArgumentError if these settings leave connections less protected than the user has requested."""
        if self.tls is not None and self.secret is None and not self.tls.requires_certificates:
            raise ArgumentError(
                "tls needs a secret (CODEC_SECRET_FILE), or contexts that both have verify_mode=ssl.CERT_REQUIRED: "
                "without them, ranks encrypt messages for anyone"
            )
        if self.tls is None and os.environ.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS":
            raise ArgumentError(
                "GLOO_DEVICE_TRANSPORT=TCP_TLS encrypts the connections of Gloo, but not those of codec: set "
                f"{given_in(FILE_VARIABLES)}, or {VARIABLE}=psk with a secret"
            )


NONE = Security()


def security_of_environment() -> Security:
    """Return the settings of CODEC_SECRET_FILE, CODEC_SECRET and CODEC_TLS*.

    Raises
    ------
    ArgumentError
        A variable is invalid.
    """
    return Security(secret_of_environment(), tls_of_environment())


def difference(first: int, first_flags: int, second: int, second_flags: int) -> str | None:
    """Return an error text that names the settings of only one of two ranks; None if their flags are equal."""
    found: list[str] = []
    for flag, has, lacks, how in (
        (HAS_SECRET, "has a secret", "has none", f"set {FILE_VARIABLE}, {SECRET_VARIABLE} or codec.options(secret=)"),
        (HAS_TLS, "uses TLS", "does not", f"set {VARIABLE}, {FILE_VARIABLES[0]} or codec.options(tls=)"),
    ):
        if (first_flags ^ second_flags) & flag:
            a, b = (first, second) if first_flags & flag else (second, first)
            found.append(f"rank {a} {has}, and rank {b} {lacks}: {how} on all ranks or on none, and make a new group")
    return "; ".join(found) or None
