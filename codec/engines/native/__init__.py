"""Native engine: the C library, for tensors in host memory on any CPU, with any number of threads."""

from codec.engines.native.code_sums import sum_codes
from codec.engines.native.decoding import accumulate, decode
from codec.engines.native.encoding import encode
from codec.engines.native.many import decode_many, encode_many
from codec.engines.native.reducing import reduce

__all__ = ["accumulate", "decode", "decode_many", "encode", "encode_many", "reduce", "sum_codes", "why_not"]


def why_not() -> str | None:
    """Return None: the native engine can always be used."""
    return None
