"""Arguments of a wrong type raise a CodecError in every public function, for every parameter."""

import inspect

import numpy as np
import pytest
import torch

import codec
from codec import optimizers
from codec.advisor.cost_model import Cost, LinkModel, predict_seconds

X = np.linspace(-1, 1, 600, dtype=np.float32)
FRAME = bytes(codec.encode(X))
BOOK = codec.Codebook.from_tensors(X)
CYCLE = []
CYCLE.append(CYCLE)


WRONG = {
    "none": None,
    "true": True,
    "negative": -1,
    "half": 1.5,
    "large": 1 << 70,
    "huge": 10**5000,
    "negative_huge": -(10**5000),
    "nan": float("nan"),
    "infinite": float("inf"),
    "complex": 1j,
    "text": "x",
    "surrogate": "\udcff",
    "nul": "\0",
    "bytes": b"x",
    "object": object(),
    "type": int,
    "function": len,
    "ellipsis": ...,
    "list": [],
    "list_of_none": [None],
    "list_of_huge": [10**5000],
    "pairs": [("a", 10**5000)],
    "pair_of_lists": [([], [])],
    "cycle": CYCLE,
    "tuple": (1, 2, 3),
    "dict": {},
    "dict_of_none": {"a": None},
    "dict_of_numbers": {1: 2},
    "set": {1},
    "range": range(3),
    "scalar": np.float32("nan"),
    "complex_array": np.zeros(600, np.complex64),
    "object_array": np.array([object()] * 3),
    "empty": np.empty(0, np.float32),
    "rank_9": np.zeros((1,) * 9, np.float32),
    "text_array": np.array(["x"]),
    "record": np.zeros(2, [("a", "f4")]),
    "torch_complex": torch.zeros(3, dtype=torch.complex64),
    "torch_meta": torch.zeros(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(3)),
}

sgd, truncate = optimizers.SGD(0.1), codec.Truncate()


def bind_and_encode(optimizer=None, theta=None, m=None, v=None, levels=None):
    """Encode a tensor with a spec that is bound to these arguments."""
    return codec.encode(X, truncate.bind(optimizer, theta=theta, m=m, v=v, levels=levels))


def encode_view(tensor, dtype=None, segments=None):
    """Encode a view of a tensor."""
    return codec.encode(codec.view(tensor, dtype, segments))


CALLS = {
    "bound": (codec.bound, {"shape": 5, "dtype": "float32"}),
    "encode": (codec.encode, {"x": X}),
    "encode_sign": (codec.encode, {"x": X, "spec": codec.Sign(), "residual": X.copy(), "feedback": True}),
    "encode_truncate": (bind_and_encode, {"optimizer": sgd, "theta": X, "m": X, "v": X}),
    "encode_levels": (bind_and_encode, {"levels": np.zeros(X.size, np.uint8)}),
    "options": (codec.options, {}),
    "preset": (codec.preset, {"name": "near"}),
    "view": (encode_view, {"tensor": X}),
    "predict_seconds": (predict_seconds, {"cost": Cost(1, 1), "link": LinkModel(1e9), "world_size": 4}),
    "encode_async": (codec.encode_async, {"x": X, "out": np.empty(9000, np.uint8)}),
    "encode_many": (codec.encode_many, {"tensors": [X]}),
    "encode_many_of_dict": (codec.encode_many, {"tensors": {"a": X}}),
    "decode": (codec.decode, {"frame": FRAME}),
    "decode_many": (codec.decode_many, {"frames": [FRAME]}),
    "accumulate": (codec.accumulate, {"frame": FRAME, "out": X.copy()}),
    "reduce": (codec.reduce, {"frames": [FRAME, FRAME]}),
    "inspect": (codec.inspect, {"frame": FRAME}),
    "verify": (codec.verify, {"frame": FRAME}),
    "segments": (codec.segments, {"tensors": [X]}),
    "codebook": (codec.Codebook, {"lengths": BOOK.lengths, "escape_length": BOOK.escape_length, "id": BOOK.id}),
    "from_bytes": (codec.Codebook.from_bytes, {"data": BOOK.to_bytes()}),
    "from_counts": (codec.Codebook.from_counts, {"counts": np.ones(256, int)}),
    "advise": (codec.advise, {"tensor_or_model": X, "link": "1gbit"}),
    "link": (LinkModel, {"bits_per_second": 1e9}),
    "warmup": (codec.warmup, {"specs": codec.Sign(), "dtypes": "float32", "options": codec.options(engine="native")}),
    "refresher": (codec.CodebookRefresher, {}),
    "feedback": (codec.ErrorFeedback, {"spec": codec.Sign()}),
    "reshard": (codec.ErrorFeedback.reshard, {"state_dicts": [], "world_size": 2}),
    **{kind.__name__: (kind, {}) for kind in codec.Spec.__subclasses__()},
    **{
        kind.__name__: (kind, {"lr": 0.1})
        for kind in (optimizers.SGD, optimizers.AdamW, optimizers.Adagrad, optimizers.RMSprop)
    },
}


def refresher(method):
    """Return a function that calls a method of a new refresher."""
    return lambda **how: getattr(codec.CodebookRefresher(), method)(**how)


def feedback(method):
    """Return a function that calls a method of a new ErrorFeedback."""
    return lambda **how: getattr(codec.ErrorFeedback(codec.Sign()), method)(**how)


METHODS = {
    "refresher.count": (refresher("count"), {"x": X}),
    "refresher.propose": (refresher("propose"), {"step": 50, "summed_counts": np.zeros(257, np.int64)}),
    "refresher.current": (refresher("current"), {"step": 5}),
    "refresher.rollback": (refresher("rollback"), {"step": 5}),
    "refresher.load_state_dict": (refresher("load_state_dict"), {"state_dict": {}}),
    "feedback.begin": (feedback("begin"), {"layout": [("a", 5)]}),
    "feedback.encode": (feedback("encode"), {"key": "a", "x": X}),
    "feedback.rescale": (feedback("rescale"), {"scale": 2.0}),
    "feedback.load_state_dict": (feedback("load_state_dict"), {"state_dict": {}}),
}


def parameters_of(function, given):
    """Return the names of a function's keyword parameters; for a wrapped method, those in `given`."""
    names = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
    ]
    return names or list(given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CALLS, *METHODS])
def test_wrong_types_raise_codec_errors(name):
    """A call with one argument of a wrong type either succeeds or raises a CodecError."""
    function, given = (CALLS | METHODS)[name]
    others = []
    for parameter in parameters_of(function, given):
        for kind, value in WRONG.items():
            try:
                function(**{**given, parameter: value})
            except codec.CodecError as e:
                if "\n" in str(e) or len(str(e)) > 500:
                    others.append(f"{parameter}={kind}: message of {len(str(e))} characters: {e}"[:300])
            except Exception as e:
                others.append(f"{parameter}={kind}: {type(e).__name__}: {e}"[:150])
    assert not others, "\n".join(others)


STATES = {
    "refresher": codec.CodebookRefresher,
    "feedback": lambda: codec.ErrorFeedback(codec.Sign()),
}


@pytest.mark.parametrize("name", STATES)
def test_wrong_entries_of_states_raise_codec_errors(name):
    """load_state_dict either accepts a state, which is then usable, or rejects it and changes nothing."""
    store = STATES[name]()
    if name == "feedback":
        store.encode("a", X)
    good = store.state_dict()
    for entry in [*good, "more", "a[0:5]", "book[3]", 5]:
        for kind, value in WRONG.items():
            before = repr(store.state_dict())
            try:
                store.load_state_dict({**good, entry: value})
            except codec.StateError:
                assert repr(store.state_dict()) == before, (entry, kind)
                continue
            if name == "refresher":
                store.current(1 << 61)
                store.propose(1 << 61, store.counts())
            else:
                store.encode("a", X)
            store.load_state_dict(good)


def test_parameters_of_specs_become_python_numbers():
    """Specs convert numbers of numpy and torch to Python numbers, and reject bools and strings."""
    f, i, t = np.float32, np.int64, torch.tensor
    for given, kept in (
        (codec.Ternary(scale=f(0.5), clip=t(2.5), seed=i(3)), codec.Ternary(scale=0.5, clip=2.5, seed=3)),
        (codec.Quantize(i(4), t(32), seed=np.uint8(7)), codec.Quantize(4, 32, seed=7)),
        (codec.Float8(group_size=i(128), scale=np.float64(2)), codec.Float8(group_size=128, scale=2.0)),
        (codec.Sign(group_size=t(64)), codec.Sign(group_size=64)),
        (
            codec.Truncate(np.uint8(2), guard=i(-3), max_code_length=i(7)),
            codec.Truncate(2, guard=-3, max_code_length=7),
        ),
        (codec.Lossless(i(7)), codec.Lossless(7)),
        (
            codec.optimizers.AdamW(f(0.25), betas=(f(0.5), t(0.75)), step=t(3.0)),
            codec.optimizers.AdamW(0.25, betas=(0.5, 0.75), step=3),
        ),
        (codec.optimizers.SGD(t(0.5), maximize=np.True_), codec.optimizers.SGD(0.5, maximize=True)),
        (codec.optimizers.Adagrad(step=2.0), codec.optimizers.Adagrad(step=2)),
    ):
        assert given == kept
        assert repr(given) == repr(kept)
    for no in (True, np.True_, t(True), "1", [1], np.ones(1), 1j, np.complex64(1)):
        for make in (
            lambda x: codec.Ternary(scale=x),
            lambda x: codec.Quantize(x),
            lambda x: codec.Sign(group_size=x),
            lambda x: codec.Truncate(x),
        ):
            with pytest.raises(codec.SpecError, match="must be"):
                make(no)
        for make in (codec.optimizers.SGD, lambda x: codec.optimizers.Adam(step=x)):
            with pytest.raises(codec.ArgumentError, match="must be"):
                make(no)
    for no in (2.5, t(2.5), -1, float("nan")):
        with pytest.raises(codec.ArgumentError, match="step must be"):
            codec.optimizers.Adam(step=no)
    with pytest.raises(codec.ArgumentError, match="maximize must be True or False"):
        codec.optimizers.SGD(maximize="no")
