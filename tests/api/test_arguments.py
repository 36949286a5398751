"""Invalid arguments raise a CodecError whose message names the argument and what is accepted."""

import ml_dtypes
import numpy as np
import pytest
import torch

import codec
from support import flatcall
from support.processes import run

X = np.linspace(-1, 1, 9_000, dtype=np.float32)
HUGE = 10**5000  # more digits than Python converts to a string


def refused(error=codec.ArgumentError, match=None):
    """Expect an error whose message matches `match`."""
    return pytest.raises(error, match=match)


def test_threads_must_be_a_positive_int():
    """Every function with a parameter `threads` rejects values other than positive ints."""
    frame = codec.encode(X)
    for value in (0, -1, 1.0, "2", True, int, np.arange(2), -HUGE):
        for call in (
            lambda n: codec.encode(X, options=codec.options(threads=n)),
            lambda n: codec.decode(frame, options=codec.options(threads=n)),
            lambda n: codec.accumulate(frame, X.copy(), options=codec.options(threads=n)),
            lambda n: codec.reduce([frame], options=codec.options(threads=n)),
        ):
            with refused(match="threads must be an int of at least 1"):
                call(value)


def test_threads_takes_numpy_integers_and_any_environment_text():
    """`threads` accepts numpy integers, and a CODEC_NUM_THREADS that is no number is ignored."""
    assert (
        codec.encode(X, options=codec.options(threads=np.int64(2)))
        == codec.encode(X, options=codec.options(threads=HUGE))
        == codec.encode(X)
    )
    for text in ("9" * 5000, "0", "-3", "many", "", "١٢"):
        run('assert codec.encode(normal(1 << 20))\nprint("the end")', CODEC_NUM_THREADS=text)


def test_metrics_reject_parameters_out_of_range():
    """Metrics require finite parameters, two betas below 1, and step >= 0; all parameters but lr are keyword-only."""
    optimizers = codec.optimizers
    for metric in (optimizers.Adam, optimizers.AdamW):
        for betas in ((1, 0.999), (0.9, 1.0), (1.5, 0)):
            with refused(match="must be below 1"):
                metric(1e-3, betas=betas)
        for betas in (0.9, (0.9,), (0.9, 0.99, 0.999), "ab", None):
            with refused(match="betas must be"):
                metric(1e-3, betas=betas)
    for metric in (optimizers.SGD, optimizers.Adagrad, optimizers.RMSprop, optimizers.Adam, optimizers.AdamW):
        with pytest.raises(TypeError):
            metric(1e-3, 0.9)
    for metric in (optimizers.Adam, optimizers.AdamW, optimizers.Adagrad):
        first = metric(1e-3, step=0)
        assert first == metric(1e-3)
        assert np.isfinite([first.final({"theta": 0}).theta, first.final({"theta": 0, "v": 0}).theta_v]).all()
    for bad in (10**400, HUGE, float("inf"), float("nan"), -1, "0.1", None):
        with refused(match="lr must be a finite number"):
            optimizers.SGD(bad)
        with refused(match="step must be a finite number"):
            optimizers.Adam(1e-3, step=bad)
    state = {"theta": X, "m": X, "v": X * X}
    for metric in (
        optimizers.Adam(1e300, step=10**300),
        optimizers.AdamW(0, step=1, betas=(0, 0)),
        optimizers.Adam(5e-324, eps=1e308, step=1),
        optimizers.SGD(0.1, dampening=1, momentum=1e308),
        optimizers.Adagrad(1e-300, lr_decay=1e308, step=10**300),
        optimizers.RMSprop(10**300, alpha=1e300),
    ):
        for levels in ("coded", "shared"):
            frame = codec.encode(X, codec.Truncate(level_coding=levels).bind(metric, **state))
            assert codec.decode(frame, codec.Truncate().bind(metric, **state)).shape == X.shape


def test_error_names_the_accepted_values():
    """An argument of a wrong type or range is an ArgumentError."""
    frame, sgd, truncate = codec.encode(X), codec.optimizers.SGD(0.1), codec.Truncate()
    for most in (-1, 1 << 64, "1", 1.5, -HUGE):
        with refused(match="max_nbytes must be an int from 0"):
            codec.decode(frame, max_nbytes=most)
        with refused(match="max_nbytes must be an int from 0"):
            codec.reduce([frame], max_nbytes=most)
    for most in (0, 35_999):
        with refused(codec.LimitError):
            codec.decode(frame, max_nbytes=most)
    for stream in (-1, 1 << 64, "1", 1.5, None, HUGE):
        with refused(match="stream must be an int from 0"):
            codec.encode(X, stream=stream)
    for shape in (1 << 64, (3, 1 << 60), -1, (2, -1), "ab", 1.5, (1,) * 9, (2, HUGE), None):
        with refused():
            codec.bound(shape, "float32")
    assert codec.bound(np.int64(9_000), "float32") == codec.bound([9_000], np.float32) >= len(frame)
    for weight in ("1", None, 1j, 1e39, -HUGE):
        with refused(match="weight must be a number"):
            codec.accumulate(frame, X.copy(), weight=weight)
    for weight in (2, np.float32(2), np.array(2)):
        assert (codec.accumulate(frame, X.copy(), weight=weight) == 3 * X).all()
    for segments in (5, [5], [(1,)], [(0, 5)], [(0, (5,), 7)], [(None, (5,))], [(0, ("a",))], [(0, (HUGE,))], "ab"):
        with refused(match=r"segments must be (a list of )?pairs"):
            codec.encode(codec.view(X, segments=segments))
        with refused(match=r"segments must be (a list of )?pairs"):
            codec.Codebook.from_tensors(codec.view(X, segments=segments))
    with refused(match="keys of a mapping of segments must be names, got 3"):
        codec.view(X, segments={3: (5,)})
    for groups in (
        [], [sgd], [(0, sgd, 1)], [(1, sgd)], [(0, sgd), (0, sgd)], [(0, 7)], [(0, sgd), (1 << 64, sgd)],
        [(-1, sgd)], [(0.5, sgd)], [("0", sgd)], "optimizer", object(),
    ):  # fmt: skip
        with refused():
            codec.encode(X, truncate.bind(groups, theta=X))
    for bad in (5, [X], X[1:], X.astype("f8")):
        with refused():
            codec.encode(X, truncate.bind(sgd, theta=bad))
    for how in ({}, {"optimizer": sgd, "levels": X}, {"levels": X, "theta": X}):
        with refused(match=r"bind\("):
            truncate.bind(**how)
    with refused(match="must be 9000 values of uint8"):
        codec.encode(X, truncate.bind(levels=np.zeros(5, np.uint8)))
    for spec, hint in (
        (codec.Sign, r"codec\.Sign\(\)$"), ("sign", r"codec\.Sign\(\)$"), ("Quantize(4)", r"codec\.Quantize\(\)$"),
        ("codec.Float8", r"codec\.Float8\(\)$"), ([], r"codec\.Lossless\(\), .* or codec\.Sign\(\)$"), (None, "or"),
        ({}, "or"), (codec.Codebook, "or"), ("gzip", "or"), (HUGE, "or"),
    ):  # fmt: skip
        with refused(codec.SpecError, match=f"not a spec: .*; write .*{hint}"):
            codec.encode(X, spec)
        with refused(codec.SpecError, match=f"not a spec: .*; write .*{hint}"):
            codec.advise(X, "1gbit", candidates=[spec])
    book = codec.Codebook.from_tensors(X)
    for books in (5, [5], "ab", [book, None]):
        with refused(match="codebooks must be a Codebook"):
            codec.decode(frame, codebooks=books)
    for one in ([book], 5):
        with refused(match="codebooks must be a Codebook"):
            codec.encode(X, codebook=one)
    for op in (["sum"], "product", None):
        with refused(match="op must be"):
            codec.reduce([frame], op=op)
    with refused(match="cannot be encoded; these can"):
        codec.encode(codec.view(X, ["float32"]))


ENGINES = ("native", "numba")


@pytest.mark.parametrize("engine", ENGINES)
def test_mismatch_with_a_frame_names_both_sides(engine):
    """The message of a mismatch names the dtype and shape of the frame and of the argument."""
    frame, how = codec.encode(X), {"engine": engine}
    others = (np.zeros(9_000), np.zeros((90, 100), np.float32), np.zeros(8_999, np.float32))
    for out in others:
        words = rf"out= must be float32 of shape \(9000,\) for this frame, got {out.dtype} of shape \({out.shape[0]}, ?"
        for call in (
            lambda out: flatcall.decode(frame, out=out, **how),
            lambda out: flatcall.accumulate(frame, out, **how),
            lambda out: flatcall.reduce([frame, frame], out=out, **how),
            lambda out: flatcall.decode_many([frame, frame], out=[X.copy(), out], **how),
        ):
            with refused(match=words) as e:
                call(out)
            assert e.value.code == codec.Status.SHAPE_MISMATCH
    for x in (np.arange(9_000), X.astype(np.float64)):
        other = codec.encode(x)
        for call in (
            lambda f: flatcall.accumulate(f, X.copy(), **how),
            lambda f: flatcall.reduce([frame, f], **how),
            lambda f: flatcall.reduce([f], out=X.copy(), **how),
        ):
            with refused(match=f"only frames of float32, bfloat16 or float16 can be added up, got one of {x.dtype}: "):
                call(other)
    for bytes_, code in ((frame[:-1], "TRUNCATED"), (frame + b"?", "TRAILING")):
        for call in (
            lambda f: flatcall.decode(f, **how),
            lambda f: flatcall.accumulate(f, X.copy(), **how),
            lambda f: flatcall.reduce([frame, f], **how),
        ):
            with refused(codec.FrameError) as e:
                call(bytes_)
            assert (e.value.code.name, e.value.found, e.value.expected) == (code, len(bytes_), len(frame))


def test_objects_that_are_no_tensors_are_rejected():
    """Messages name the given type: a class, an object, a sparse tensor, or a single frame in place of a list."""
    frame = codec.encode(X)
    for frames in (frame, {"a": frame}, None, 5, "ab", memoryview(frame), np.frombuffer(frame, np.uint8)):
        with refused(match="frames must be a sequence of frames, not"):
            codec.reduce(frames)
    assert (codec.reduce(np.stack([np.frombuffer(frame, np.uint8)] * 2)) == X).all()
    for x in (torch.Tensor, np.ndarray, np.float32):
        with refused(match="not a tensor: the class"):
            codec.encode(x)
    for like in (object(), torch.Tensor, np.ndarray, 5, "torch"):
        with refused(match="like= must be an array or tensor, got"):
            codec.decode(frame, like=like)
    for like in (bytearray(4), X[0], ml_dtypes.bfloat16(1)):
        assert type(codec.decode(frame, like=like)) is np.ndarray
    for out in (object(), np.ndarray, "x"):
        with refused(match="out= must be a writable array or tensor, got"):
            codec.decode(frame, out=out)
    with refused(match="layout"):
        codec.decode(frame, out=torch.eye(3).to_sparse())
    with refused(match="out= must be contiguous"):
        codec.decode(frame, out=torch.zeros(18_000)[::2])
    readonly = X.copy()
    readonly.flags.writeable = False
    for residual in (torch.zeros(18_000)[::2], np.zeros(18_000, np.float32)[::2], readonly, 5, X.astype(">f4")):
        with refused(match="residual="):
            codec.encode(X, codec.Sign(), residual=residual)
    book = codec.Codebook.from_tensors(X)
    with refused(match="codebook= is for Lossless and Truncate, not for Sign"):
        codec.encode(X, codec.Sign(), codebook=book)
    with refused(match="needs at least one tensor"):
        codec.Codebook.from_tensors()


@pytest.mark.parametrize("engine", ENGINES)
def test_dtype_that_a_codec_does_not_take_is_named_with_those_that_it_takes(engine):
    wide, how = X.astype(np.float64), {"options": codec.options(engine=engine)}
    for spec in (codec.Sign(), codec.Ternary(), codec.Float8(), codec.Float4(), codec.Quantize(4)):
        words = f"^{type(spec).__name__} accepts float32, bfloat16 or float16, got float64: convert x, or use Lossless$"
        with refused(match=words) as e:
            codec.encode(wide, spec, **how)
        assert e.value.code == codec.Status.BAD_DTYPE
        with refused(match=words):
            codec.encode(wide, spec, residual=X.copy(), **how)
        with refused(match="^'b': " + words[1:]) as e:
            codec.encode_many({"a": X, "b": wide}, spec, **how)
        assert e.value.item == "b"
        with refused(match=f"^{type(spec).__name__} accepts .*, got float64: convert the tensor, or use Lossless$"):
            codec.bound(9_000, "float64", spec)
    with refused(match="^Truncate accepts float32, bfloat16 or float16, got int32: convert x, or use Lossless$"):
        codec.encode(X.astype(np.int32), codec.Truncate().bind(codec.optimizers.SGD(0.1), theta=X), **how)
    with refused(match="a codebook of Truncate encodes exponents of float32, bfloat16, float16, got float64"):
        codec.Codebook.from_counts(np.zeros(256, int), codec.Truncate(), "float64")
    with refused(match="a codebook of Lossless encodes exponents of float32, float64, .*, got int32"):
        codec.CodebookRefresher(dtype="int32")


@pytest.mark.parametrize("engine", ENGINES)
def test_nonfinite_values_are_counted_and_the_first_one_is_named_with_remedies(engine):
    how = {"options": codec.options(engine=engine)}
    x = X[:200].reshape(10, 20).copy()
    x[3, 7], x[5, 0], x[9, 19] = -np.inf, np.nan, np.inf
    place = r"NaN or Inf in 3 of 200 values, the first, -Inf, at \(3, 7\)"
    remedy = r"Correct them, or use Lossless or Float8\(nonfinite=\"propagate\"\)$"
    for spec in (codec.Sign(), codec.Ternary(), codec.Float8(), codec.Float4(), codec.Quantize(4)):
        words = f"x holds {place}: {type(spec).__name__} accepts only finite values. {remedy}"
        for y in (x, x.astype(np.float16), torch.from_numpy(x).bfloat16()):
            with refused(match=f"^{words}") as e:
                codec.encode(y, spec, **how)
            assert e.value.code == codec.Status.NONFINITE
        with refused(match=f"^'b': {words}"):
            codec.encode_many({"a": X, "b": x}, spec, **how)
    x[3, 7] = 0
    with refused(match=r"the first, NaN, at index 100: "):
        codec.encode(x.ravel(), "small", **how)
    with refused(match=r"x \+ residual overflows float32, or the residual holds NaN or Inf: reset the residual"):
        codec.encode(X, codec.Sign(), residual=np.full(X.size, np.inf, np.float32), feedback=True, **how)


def test_residual_of_another_size_or_dtype_is_named_with_both_sizes():
    for wrong, said in (
        (np.zeros(9, np.float32), "9 values of float32"),
        (np.zeros((90, 100)), "9000 values of float64"),
    ):
        with refused(match=rf"residual= must be float32 with as many values as x \(9000\), got {said}"):
            codec.encode(X, codec.Sign(), residual=wrong)


def test_error_lists_the_choices():
    """An unknown choice is rejected with the list of valid ones."""
    for no in ("rows", np.arange(3), 0):
        with refused(codec.SpecError, match='group_size must be "row", None or an int from 1'):
            codec.Sign(group_size=no)
    for no in ("metrics", np.arange(3), 4):
        with refused(codec.SpecError, match='level must be "optimizer" or an int from 0 to 3'):
            codec.Truncate(no)
    for call in (
        lambda: codec.advise(X, "1gbit", lossy=X),
        lambda: codec.advise(X, "1gbit", rtt=X),
        lambda: codec.reduce([codec.encode(X)], op=X),
        lambda: codec.ErrorFeedback(codec.Sign(), role=X),
        lambda: codec.ErrorFeedback.reshard([], 2, op=X),
    ):
        with refused(match="must be"):
            call()
    for call in (lambda: codec.Sign(X), lambda: codec.Float8(rounding=X)):
        with refused(codec.SpecError, match="must be"):
            call()
    with refused(codec.SpecError, match="guard must be one of .*feedback"):
        codec.Truncate(guard="exac")


def test_scales_that_round_to_zero_or_infinity_are_rejected():
    """A scale must be positive and finite in float32 and in the tensor's dtype."""
    for bad in (1e-46, 1e39, 0, -1, float("nan"), float("inf"), HUGE):
        if bad != 0:  # scale 0 is valid: it encodes zeros
            with refused(codec.SpecError, match="scale must be 0, positive and finite as float32"):
                codec.Ternary(scale=bad)
        with refused(codec.SpecError, match="clip must be positive and finite as float32"):
            codec.Ternary(clip=bad)
        with refused(codec.SpecError, match="scale must be positive and finite as float32"):
            codec.Float8(scale=bad)
    for bad in ("1", 1j, [1], False):
        with refused(codec.SpecError, match="must be 0, a positive number or None"):
            codec.Ternary(scale=bad)
    tiny, wide = np.zeros(5, np.float16), np.zeros(5, np.uint16)
    for x, dtype, scales, good in (
        (tiny, None, (1e-8, 2.98e-8, 65520, 1e5), (2.99e-8, 6e-8, 65519, 1)),
        (wide, "bfloat16", (1e-45, 4.59e-41, 3.3961776e38), (4.6e-41, 1e-40, 3.3961e38, 1)),
    ):
        for scale in scales:
            with refused(codec.SpecError, match=f"is 0 or Inf in {dtype or 'float16'}, the dtype of x"):
                codec.encode(codec.view(x, dtype), codec.Ternary(scale=scale))
        for scale in good:
            assert not codec.decode(codec.encode(codec.view(x, dtype), codec.Ternary(scale=scale))).any()


def test_outputs_that_overlap_inputs_are_rejected():
    """An output must be exactly its input or not overlap with it."""
    memory = np.zeros(40_000, np.float32)
    memory[:9_000] = X
    x = memory[:9_000]
    for r in (memory[1:9_001], memory[8_999:17_999]):
        with refused(match="residual= shares memory with x without being x itself"):
            codec.encode(x, codec.Sign(), residual=r)
    with refused(match="residual= shares memory with x"):
        codec.encode(codec.view(memory.view(np.uint16)[:9_000], "bfloat16"), codec.Sign(), residual=x)
    for out in (memory.view(np.uint8), memory.view(np.uint8)[35_999:]):
        with refused(match="out= shares memory with x"):
            codec.encode(x, out=out)
    left = memory[20_000:29_000]
    with refused(match="out= shares memory with residual="):
        codec.encode(x, codec.Sign(), residual=left, out=memory.view(np.uint8)[115_000:])
    theta = {"theta": memory[10_000:19_000]}
    with refused(match="out= shares memory with state's theta"):
        codec.encode(x, codec.Truncate().bind(codec.optimizers.SGD(1), **theta), out=memory.view(np.uint8)[40_000:])
    with refused(match="residual= shares memory with state's theta"):
        codec.encode(x, codec.Truncate().bind(codec.optimizers.SGD(1), **theta), residual=memory[10_000:19_000])
    assert (x == X).all()
    frame = codec.encode(X)
    at = memory.view(np.uint8)[36_000 - len(frame) :][: len(frame)]
    at[:] = np.frombuffer(frame, np.uint8)
    for call in (
        lambda: codec.decode(at, out=x),
        lambda: codec.accumulate(at, x),
        lambda: codec.reduce([frame, at], out=x),
    ):
        with refused(match="out= shares memory with a frame"):
            call()
    assert bytes(at) == frame
    assert (codec.decode(at, out=memory[9_000:18_000]) == X).all()
    state = {"theta": X.copy()}
    frame = codec.encode(X, codec.Truncate(level_coding="shared").bind(codec.optimizers.SGD(1), **state))
    with refused(match="out= shares memory with state's theta without being"):
        wide = np.concatenate([state["theta"], X])
        codec.accumulate(frame, wide[1:9_001], codec.Truncate().bind(codec.optimizers.SGD(1), theta=wide[:9_000]))
    for threads in (1, 3):  # refused, because adding the first frame would overwrite the second one's state
        with refused(match="out= shares memory with state's theta"):
            codec.reduce(
                [frame, frame],
                codec.Truncate().bind(codec.optimizers.SGD(1), **state),
                out=state["theta"],
                options=codec.options(threads=threads),
            )
    assert (state["theta"] == X).all()
    expected = X + codec.decode(frame, codec.Truncate().bind(codec.optimizers.SGD(1), **state))
    assert (
        codec.accumulate(frame, state["theta"], codec.Truncate().bind(codec.optimizers.SGD(1), **state)) == expected
    ).all()
