"""Calls of codec by keywords alone, for parametrized tests that keep the arguments of a call in a dictionary."""

from dataclasses import fields, replace

import numpy as np

import codec
from codec._options import settings_of
from codec.decoding import decode_request, engine_for
from codec.tensors.view import view_bytes

_OPTIONS = {f.name for f in fields(codec.CallOptions)}


def bind(optimizer, state=None, spec=None):
    """Return a spec bound to an optimizer, to groups of optimizers or to an array of levels; None without these."""
    spec = codec.Truncate() if spec is None else spec
    if optimizer is None and not state:
        return None
    if isinstance(optimizer, np.ndarray) or hasattr(optimizer, "data_ptr") or hasattr(optimizer, "__dlpack__"):
        return spec.bind(levels=optimizer)
    return spec.bind(optimizer, **(state or {}))


def split(how):
    """Return the keywords of a public call: collect keywords that name options in one ``options=`` argument."""
    options = {name: value for name, value in how.items() if name in _OPTIONS}
    rest = {name: value for name, value in how.items() if name not in _OPTIONS}
    nontemporal = options.pop("nontemporal", False)
    options = replace(codec.options(**options), nontemporal=nontemporal)
    return {**rest, "options": options} if len(rest) < len(how) else rest


def viewed(x, how):
    """Return the tensor as a view with the keywords `dtype` and `segments`, if given, and the other keywords."""
    rest = {name: value for name, value in how.items() if name not in ("dtype", "segments")}
    return (x if len(rest) == len(how) else codec.view(x, how.get("dtype"), how.get("segments"))), rest


class with_head:
    """Decode a frame on a device whose first bytes the host already has, so that the engine need not copy them."""

    def __init__(self, frame, head, bound, out=None, max_nbytes=None):
        v = view_bytes(frame)
        r = decode_request((v,), bound, settings_of(None), out, max_nbytes=max_nbytes)
        self.request = r._replace(head=view_bytes(head))
        self.engine = engine_for(None, v, out, None)

    def decode(self):
        return self.engine.decode(self.request)

    def accumulate(self, weight):
        self.engine.accumulate(self.request, weight)


def encode(x, spec=codec.Lossless(), *, optimizer=None, state=None, **how):  # noqa: B008 - immutable
    x, how = viewed(x, how)
    return codec.encode(x, bind(optimizer, state, spec) or spec, **split(how))


def encode_many(xs, spec=codec.Lossless(), *, optimizer=None, state=None, **how):  # noqa: B008
    specs = spec if state is None else [bind(optimizer, each, spec) for each in state]
    return codec.encode_many(xs, specs, **split(how))


def decode(frame, *, optimizer=None, state=None, head=None, **how):
    if head is not None:
        return with_head(frame, head, bind(optimizer, state), **how).decode()
    return codec.decode(frame, bind(optimizer, state), **split(how))


def decode_many(frames, *, optimizer=None, state=None, **how):
    specs = None if state is None else [bind(optimizer, each) for each in state]
    return codec.decode_many(frames, specs, **split(how))


def accumulate(frame, out, weight=1.0, *, optimizer=None, state=None, head=None, **how):
    if head is not None:
        return with_head(frame, head, bind(optimizer, state), out=out, **how).accumulate(weight)
    return codec.accumulate(frame, out, bind(optimizer, state), weight=weight, **split(how))


def reduce(frames, op="mean", *, optimizer=None, state=None, **how):
    return codec.reduce(frames, bind(optimizer, state), op=op, **split(how))


def codebook(*xs, spec=codec.Lossless(), optimizer=None, state=None, **how):  # noqa: B008
    xs = [viewed(x, how)[0] for x in xs]
    return codec.Codebook.from_tensors(*xs, spec=bind(optimizer, state, spec) or spec)


def all_reduce(x, spec=codec.Lossless(), *, optimizer=None, state=None, **how):  # noqa: B008
    import codec.torch

    x, how = viewed(x, how)
    return codec.torch.all_reduce(x, bind(optimizer, state, spec) or spec, **split(how))


def ddp_hook(spec, **how):
    import codec.torch

    return codec.torch.ddp_hook(spec, **split(how))
