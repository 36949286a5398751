"""Public signatures: few parameters, presets and bound specs wherever a spec is accepted."""

import inspect

import numpy as np
import pytest
import torch

import codec
import codec.torch
import codec.torch.pipelining
import codec.weight_sync
from codec.advisor.advise import Advice
from codec.inspection import Info
from codec.stateful.activation.change import ActivationStats
from codec.stateful.activation.store_info import StoreInfo
from codec.torch.ddp.stats import HookStats
from codec.torch.fsdp.stats import FsdpStats
from codec.torch.local_steps.stats import LocalStats
from codec.torch.pipelining.stats import PipelineStats
from codec.torch.transport.counters import Counters

X = np.linspace(-1, 1, 5000, dtype=np.float32)
PRESETS = ("lossless", "near", "balanced", "small", "smallest")
# classes whose objects functions return and users do not construct
RESULTS = (
    ActivationStats,
    Advice,
    Info,
    codec.Status,
    StoreInfo,
    FsdpStats,
    Counters,
    LocalStats,
    HookStats,
    PipelineStats,
)


def public():
    """Yield name and object of each public callable."""
    packages = codec.torch, codec.torch.ops, codec.torch.pipelining
    for module in (codec, codec.kv, codec.optimizers, codec.weight_sync, *packages):
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and value not in RESULTS:
                yield name, value
            if inspect.isclass(value):
                yield from ((f"{name}.{k}", m) for k, m in vars(value).items() if inspect.isfunction(m) and k[0] != "_")


def test_no_public_call_has_more_than_nine_parameters():
    """Optimizers also have the arguments of torch's."""
    many = {}
    for name, value in public():
        if not (inspect.isclass(value) and issubclass(value, BaseException)):
            known = {"self"}
            if inspect.isclass(value) and issubclass(value, torch.optim.Adam):
                known |= inspect.signature(torch.optim.Adam).parameters.keys()
            parameters = [p for p in inspect.signature(value).parameters if p not in known]
            if len(parameters) > 9:
                many[name] = parameters
    assert not many


def test_presets_are_ordered_by_frame_size():
    bound = codec.preset("near").bind(codec.optimizers.SGD(0.1), theta=X)
    sizes = [len(codec.encode(X, bound if name == "near" else name)) for name in PRESETS]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 5


def test_every_call_that_takes_a_spec_takes_the_name_of_a_preset():
    spec = codec.preset("small")
    assert codec.encode(X, "small") == codec.encode(X, spec)
    assert codec.encode_many([X], "small") == [codec.encode(X, spec)]
    by_name = codec.encode_many({"x": X, "y": X[:9]}, {"y": "lossless", "x": "balanced"})
    assert by_name == {"x": codec.encode(X, codec.preset("balanced")), "y": codec.encode(X[:9])}
    assert codec.bound(X.shape, X.dtype, "small") == codec.bound(X.shape, X.dtype, spec)
    assert codec.ErrorFeedback("smallest").spec == codec.preset("smallest")
    assert codec.Codebook.from_tensors(X, spec="lossless") == codec.Codebook.from_tensors(X)
    assert codec.advise(X, "1mbit", candidates=["small"]).spec == spec
    codec.warmup(["small", "lossless"], "float32", options=codec.options(engine="native"))


def test_unknown_presets_are_rejected_with_all_names():
    for wrong in ("tiny", "Small", ""):
        with pytest.raises(codec.SpecError, match="'lossless', 'near', 'balanced', 'small', 'smallest'"):
            codec.preset(wrong)
        with pytest.raises(codec.SpecError, match="'lossless', 'near', 'balanced', 'small', 'smallest'"):
            codec.encode(X, wrong)
    with pytest.raises(codec.SpecError, match="needs an optimizer"):
        codec.encode(X, "near")


def test_bound_specs_of_parts_agree_with_the_whole():
    """A spec bound to metric groups equals one bound to the levels of the groups; advise splits the bound state as it
    splits the tensors.
    """
    spec, theta = codec.Truncate(level_coding="shared"), X[::-1].copy()
    groups = [(0, codec.optimizers.SGD(0.1)), (2000, codec.optimizers.SGD(1e-4))]
    bound = spec.bind(groups, theta=theta)
    levels = np.concatenate([o.levels(X[a:b], theta[a:b]) for (a, o), b in zip(groups, (2000, 5000), strict=True)])
    given = codec.Truncate().bind(levels=levels)
    assert codec.encode(X, codec.Truncate().bind(groups, theta=theta)) == codec.encode(X, given)
    tensors = [X[:1500].reshape(30, 50), X[1500:]]
    segments = codec.view(X, segments=codec.segments(tensors))
    advice = codec.advise(tensors, "1mbit", candidates=[bound])
    assert advice.table[1].cost.frame_nbytes == len(codec.encode(segments, bound))
    assert codec.advise(segments, "1mbit", candidates=[bound]).table[1].nbytes == advice.table[1].nbytes


def test_decoding_takes_no_other_spec():
    for call in (
        lambda spec: codec.decode(codec.encode(X), spec),
        lambda spec: codec.accumulate(codec.encode(X), X.copy(), spec),
        lambda spec: codec.reduce([codec.encode(X)], spec),
        lambda spec: codec.decode_many([codec.encode(X)], spec),
        lambda spec: codec.decode_many([codec.encode(X)], [spec]),
    ):
        for spec in (codec.Lossless(), "near", codec.Truncate(), 5):
            with pytest.raises(codec.SpecError, match="bound to the sender's optimizer"):
                call(spec)
    with pytest.raises(codec.ArgumentError, match="op must be a keyword argument"):
        codec.reduce([codec.encode(X)], "mean")
