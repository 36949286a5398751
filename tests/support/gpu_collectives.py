"""Collectives of tensors on a GPU, compared with those of tensors in host memory."""

import codec
import codec.torch
from support.collective_values import tensor_bytes
from support.cuda_tensors import host

SHAPE = 70, 100


def how(algorithm="two_shot", **settings):
    return codec.options(algorithm=algorithm, **settings)


def outcome(call, *args, **kwargs):
    """Return "success", or the type and the message of the error."""
    try:
        call(*args, **kwargs)
    except codec.CodecError as e:
        return type(e).__name__, str(e), e.code
    return "success"


def compare(put, call, x, **kwargs):
    """Run call(tensor, ...) on the GPU and on the host; check that the outcomes and the resulting tensors are equal."""
    there, here = put(x), x.clone()
    found = [outcome(call, t, **kwargs) for t in (there, here)]
    assert found[0] == found[1], found
    assert tensor_bytes(host(there)) == tensor_bytes(here)
    return found[0]
