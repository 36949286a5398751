"""encode_many and decode_many equal single calls, and either process all tensors or change nothing."""

import numpy as np
import pytest
import torch

import codec
from support.specs import LOSSY

rng = np.random.default_rng(0)
SHAPES = [(64, 100), (64,), (), (0, 3), (1000, 700), (3, 3, 64, 64), (1 << 20,), (5,), (4, 1 << 17), (64,)]
TENSORS = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
SGD = codec.optimizers.SGD(0.1)


def draws(i, stream=0):
    return (stream + (i << 32)) % (1 << 64)


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
@pytest.mark.parametrize("spec", [codec.Lossless(), LOSSY["ternary_entropy"], LOSSY["quantize_4"]], ids=repr)
def test_frames_and_tensors_are_those_of_single_calls(spec, threads):
    """A batch returns what single calls return, as a list or a dict; tensor i uses the random stream `stream + i`."""
    expected = [codec.encode(x, spec, stream=draws(i, (1 << 64) - 7)) for i, x in enumerate(TENSORS)]
    frames = codec.encode_many(TENSORS, spec, stream=(1 << 64) - 7, options=codec.options(threads=threads))
    assert type(frames) is list
    assert frames == expected
    named = {f"parameter {i}": x for i, x in enumerate(TENSORS)}
    by_name = codec.encode_many(named, spec, stream=(1 << 64) - 7, options=codec.options(threads=threads))
    assert type(by_name) is dict
    assert by_name == dict(zip(named, expected, strict=True))
    assert codec.encode_many(iter(TENSORS), spec, stream=(1 << 64) - 7) == expected
    values = [codec.decode(frame) for frame in expected]
    outs = [np.full(x.shape, 7, np.float32) for x in TENSORS]
    for result in (
        codec.decode_many(frames, options=codec.options(threads=threads)),
        list(codec.decode_many(by_name, options=codec.options(threads=threads)).values()),
        codec.decode_many(tuple(frames), out=outs, options=codec.options(threads=threads)),
        [y.numpy() for y in codec.decode_many(frames, like=torch.zeros(1), options=codec.options(threads=threads))],
    ):
        assert all(a.shape == b.shape and (a == b).all() for a, b in zip(result, values, strict=True))
    by_key = dict(zip(reversed(list(named)), reversed(outs), strict=True))  # keys in another order than in `by_name`
    assert codec.decode_many(by_name, out=by_key, options=codec.options(threads=threads))["parameter 3"] is outs[3]


def test_batch_shares_arguments_and_takes_a_state_for_each_tensor():
    xs = [rng.standard_normal(n).astype(np.float32) for n in (100_000, 2_000, 700)]
    book = codec.Codebook.from_tensors(xs[0])
    frames = codec.encode_many(xs, codebook=book)
    assert frames == [codec.encode(x, codebook=book) for x in xs]
    assert all((a == b).all() for a, b in zip(codec.decode_many(frames, codebooks=book), xs, strict=True))
    spec = codec.Truncate(level_coding="shared", guard=0)
    states = [{"theta": rng.standard_normal(x.shape).astype(np.float32)} for x in xs]
    bound = [spec.bind(SGD, **s) for s in states]
    for threads in (1, 3):
        frames = codec.encode_many(xs, bound, options=codec.options(threads=threads))
        assert frames == [codec.encode(x, b) for x, b in zip(xs, bound, strict=True)]
        values = [codec.decode(f, b) for f, b in zip(frames, bound, strict=True)]
        outs = [s["theta"].copy() for s in states]
        mine = [spec.bind(SGD, theta=out) for out in outs]  # each output is the state with which its frame is decoded
        for got in (
            codec.decode_many(frames, bound, options=codec.options(threads=threads)),
            codec.decode_many(frames, mine, out=outs, options=codec.options(threads=threads)),
        ):
            assert all((a == b).all() for a, b in zip(got, values, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_error_names_the_first_bad_item_and_changes_nothing(threads):
    """The error's message and `item` name the index or key of the first bad item, for any number of threads."""
    xs = [x.copy() for x in TENSORS]
    xs[4][0, 0] = xs[6][-1] = xs[8][0, 0] = np.nan
    with pytest.raises(codec.ArgumentError, match=r"^4: .*NaN") as caught:
        codec.encode_many(xs, codec.Sign(), options=codec.options(threads=threads))
    assert (caught.value.item, caught.value.code) == (4, codec.Status.NONFINITE)
    with pytest.raises(codec.ArgumentError, match=r"^'layer 6': .*NaN") as caught:
        codec.encode_many(
            {f"layer {i}": x for i, x in enumerate(xs) if i != 4}, codec.Sign(), options=codec.options(threads=threads)
        )
    assert caught.value.item == "layer 6"
    with pytest.raises(codec.ArgumentError, match=r"^2: dtype"):
        codec.encode_many([*xs[:2], np.zeros(3, complex)], options=codec.options(threads=threads))
    frames = codec.encode_many(TENSORS)
    for bad in ([1], [4], [6, 8], [9, 4]):
        damaged = list(frames)
        for i in bad:
            damaged[i] = damaged[i][:-1] + bytes([damaged[i][-1] ^ 1])
        outs = [np.full(x.shape, 7, np.float32) for x in TENSORS]
        for out in (None, outs):
            with pytest.raises(codec.ChecksumError, match=rf"^{min(bad)}: ") as caught:
                codec.decode_many(damaged, out=out, options=codec.options(threads=threads))
            assert caught.value.item == min(bad)
            assert caught.value.code == codec.Status.CHECKSUM
        assert all((out == 7).all() for out in outs)
    outs[7] = np.zeros(6, np.float32)
    with pytest.raises(codec.ArgumentError, match=r"^7: out= must be"):
        codec.decode_many(frames, out=outs, options=codec.options(threads=threads))
    assert all((out == 7).all() for i, out in enumerate(outs) if i != 7)


def test_outputs_that_overlap_other_outputs_or_frames_are_rejected():
    """Only an array of the same tensor's optimizer state may be a destination."""
    xs = [np.arange(5_000, dtype=np.float32) + i for i in range(3)]
    frames = codec.encode_many(xs)
    memory = np.full(15_000, 7, np.float32)
    parts = [memory[:5_000], memory[5_000:10_000], memory[10_000:]]
    codec.decode_many(frames, out=parts)
    assert (memory == np.concatenate(xs)).all()
    memory[:] = 7
    with pytest.raises(codec.ArgumentError, match="items 0 and 2 shares memory"):
        codec.decode_many(frames, out=[memory[:5_000], memory[5_000:10_000], memory[4_000:5_000]])
    room = memory.view(np.uint8)[20_000:][: len(frames[2])]
    room[:] = np.frombuffer(frames[2], np.uint8)
    before = memory.tobytes()
    with pytest.raises(codec.ArgumentError, match="out= of item 1 shares memory with an input of item 2"):
        codec.decode_many([frames[0], frames[1], room], out=[xs[0].copy(), parts[1], xs[2].copy()])
    with pytest.raises(codec.ArgumentError, match="2: out= shares memory with a frame"):
        codec.decode_many([frames[0], frames[1], room], out=[xs[0].copy(), xs[1].copy(), parts[1]])
    assert memory.tobytes() == before


def test_arguments_that_are_not_lists_or_dicts_alike_are_rejected():
    frames = codec.encode_many(TENSORS)
    assert codec.encode_many([]) == codec.decode_many(()) == []
    assert codec.encode_many({}) == codec.decode_many({}, out={}) == {}
    for bad in (TENSORS[0], torch.zeros(3, 4), 5, None, "ab", b"ab"):
        with pytest.raises(codec.ArgumentError, match="must be a sequence or mapping"):
            codec.encode_many(bad)
        with pytest.raises(codec.ArgumentError, match="must be a sequence or mapping"):
            codec.decode_many(bad)
    for out in (TENSORS[:-1], dict(enumerate(TENSORS)), 5, TENSORS[0]):
        with pytest.raises(codec.ArgumentError, match="out="):
            codec.decode_many(frames, out=out)
    with pytest.raises(codec.ArgumentError, match="keys of the first argument, but lacks 'a'"):
        codec.decode_many({"a": frames[0]}, out={"b": TENSORS[0]})
    with pytest.raises(codec.ArgumentError, match=r"'a': .*dtype"):
        codec.encode_many({"a": np.zeros(3, complex)})
    with pytest.raises(codec.ArgumentError, match="threads must be"):
        codec.encode_many(TENSORS, options=codec.options(threads=0))
    with pytest.raises(codec.ArgumentError, match="stream must be"):
        codec.encode_many(TENSORS, stream=-1)
    with pytest.raises(codec.SpecError, match=r"0: .*needs an optimizer"):
        codec.encode_many(TENSORS, codec.Truncate())
    with pytest.raises(codec.LimitError, match="4: "):
        codec.decode_many(frames, max_nbytes=100_000)
    assert codec.decode_many(frames, out=[x.copy() for x in TENSORS], max_nbytes=0)


def test_segments_gives_offsets_of_a_flat_bucket():
    """segments() lists the offset and shape of each tensor in a bucket of consecutive tensors."""
    expected = [(0, (64, 100)), (6400, (64,)), (6464, ()), (6465, (0, 3)), (6465, (5,))]
    shapes = [(64, 100), (64,), (), (0, 3), (5,)]
    for given in (
        shapes,
        [list(s) for s in shapes],
        [np.zeros(s) for s in shapes],
        [torch.zeros(s) for s in shapes],
        dict(enumerate(shapes)),
        (torch.Size(s) for s in shapes),
        torch.nn.ParameterList([torch.zeros(s) for s in shapes]),
    ):
        assert codec.segments(given) == expected
    bucket = np.concatenate([x.ravel() for x in TENSORS])
    frame = codec.encode(codec.view(bucket, segments=codec.segments(TENSORS)))
    assert (codec.decode(frame) == bucket).all()
    assert codec.encode(codec.view(bucket, segments={str(i): x for i, x in enumerate(TENSORS)})) == frame
    for bad in ([5], ["ab"], [(3, -1)], [(2.5,)], [None]):
        with pytest.raises(codec.ArgumentError):
            codec.segments(bad)


def test_view_takes_the_parameters_of_a_module():
    model = torch.nn.Linear(100, 64)
    bucket = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    view = codec.view(bucket, segments=model)
    assert view.names == ("weight", "bias")
    assert codec.encode(view) == codec.encode(codec.view(bucket, segments=codec.segments(model)))


@pytest.mark.parametrize("shapes", [[(600,)], [(1 << 18,)], [(600,), (600,)], [(0,)], [(0,), (0,)]], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 1 << 70])
def test_batch_of_fewer_tensors_than_threads(shapes, threads):
    """In a batch of fewer tensors than threads, each tensor may be split over threads."""
    xs = [np.ones(shape, np.float32) for shape in shapes]
    frames = codec.encode_many(xs, options=codec.options(threads=threads))
    assert frames == [codec.encode(x) for x in xs]
    assert all(
        (y == x).all()
        for x, y in zip(xs, codec.decode_many(frames, options=codec.options(threads=threads)), strict=True)
    )


def _gathered(count=3):
    """Yield arrays that share one buffer, as a generator that gathers tensors one by one."""
    buffer = np.empty(1000, np.float32)
    for k in range(count):
        buffer[:] = k
        yield buffer[: 900 + k]


def test_iterators_whose_tensors_share_memory_are_rejected():
    """An iterator is read to its end first, so that all its tensors would have the values of the last one."""
    frames = [codec.encode(np.full(9, k, np.float32)) for k in range(3)]
    room = bytearray(1000)

    def read():
        for frame in frames:
            room[: len(frame)] = frame
            yield memoryview(room)[: len(frame)]

    for call in (
        lambda: codec.encode_many(_gathered()),
        lambda: codec.encode_many(list(_gathered()), codec.Delta(), base=_gathered()),
        lambda: codec.decode_many(read()),
        lambda: codec.reduce(read()),
    ):
        with pytest.raises(codec.ArgumentError, match=r"items 0 and 1 of the iterator .* share memory"):
            call()
    assert len(codec.encode_many(np.full(9, k, np.float32) for k in range(3))) == 3
    assert len(codec.decode_many(frames[0] for _ in range(3))) == 3
    assert len(codec.encode_many([*_gathered(1)] * 3)) == 3
