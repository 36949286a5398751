"""ActivationDelta keeps m bit-identical on both sides; a difference is an error, which raw samples repair."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec.stateful.activation.message import HEAD
from support.activations import Reference, bits, differing, m_of, random_activations
from support.states import seeds, through_npz, through_torch_save

LOSSLESS = codec.Lossless()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPECS = (
    codec.Quantize(4, rounding="nearest"),
    codec.Quantize(2),
    codec.Quantize(3, levels="odd", group_size=7),
    codec.Float8(),
    codec.Float4(),
    codec.Sign(),
    codec.Ternary(),
)


def exchange(sender, receiver, a, samples):
    received = receiver.decode(sender.encode(a, samples), samples, like=a)
    sender.commit()
    receiver.commit()
    return received


@given(st.sampled_from(sorted(DTYPES)), st.sampled_from(["float32", "bfloat16", "8bit"]), st.sampled_from(SPECS), seeds)
def test_both_sides_equal_a_reference_in_numpy(dtype, entries, spec, seed):
    """Both sides equal the reference for new and known samples, several per batch, NaN, commits and rollbacks."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 300))
    sender, receiver = (codec.ActivationDelta(spec, first=LOSSLESS, dtype=entries, edge=5) for _ in range(2))
    reference = Reference(spec, entries, edge=5)
    for _ in range(int(rng.integers(1, 6))):
        for _ in range(int(rng.integers(1, 4))):
            samples = rng.integers(0, 8, int(rng.integers(1, 6))).tolist()
            a = random_activations(rng, (len(samples), n), DTYPES[dtype], nonfinite=0.05)
            expected = reference.trip(a, samples)
            received = receiver.decode(sender.encode(a, samples), samples, like=a)
            assert received.dtype == a.dtype
            assert bits(received) == bits(expected)
        commit = rng.random() < 0.7
        for side in (sender, receiver, reference):
            side.commit() if commit else side.rollback()
        np.testing.assert_equal(m_of(sender), reference.m)
        assert {s: bits(m) for s, m in m_of(sender).items()} == {s: bits(m) for s, m in m_of(receiver).items()}


A = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 6, 50)).astype(np.float32))


def pair(first=LOSSLESS, **arguments):
    return tuple(codec.ActivationDelta(first=first, **arguments) for _ in range(2))


def visits_with_engine(engine, spec):
    """Return all messages without heads, all decoded tensors, and the stored activations m of both sides by sample."""
    sender, receiver = (codec.ActivationDelta(spec, dtype="8bit") for _ in range(2))
    options = codec.options(engine=engine, threads=2)
    a = np.random.default_rng(1).standard_normal((6, 30_000), np.float32)
    found = []
    for samples in ([0, 1, 2, 3], [2, 3, 4, 5], [5, 4, 1, 0]):  # samples sent raw, partly as deltas, all as deltas
        a += 0.1
        message = bytes(sender.encode(a[samples], samples, options=options))
        received = receiver.decode(message, samples, options=options)
        gradient = bytes(receiver.encode_gradient(received, options=options))
        back = sender.decode_gradient(gradient, options=options)
        sender.commit()
        receiver.commit()
        found.append((message[HEAD.size :], gradient[HEAD.size :], bits(received), bits(back)))
    return found, [{sample: bits(m) for sample, m in m_of(side).items()} for side in (sender, receiver)]


@pytest.mark.nightly  # nightly: Numba compiles the kernels
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_numba_engine_gives_equal_messages_and_m(spec):
    found, (ours, theirs) = visits_with_engine("numba", spec)
    assert (found, [ours, theirs]) == visits_with_engine("native", spec)
    assert ours == theirs


def test_first_visit_is_exact_and_later_ones_are_deltas():
    sender, receiver = pair()
    assert bits(exchange(sender, receiver, A, [1, 2, 3, 4])) == bits(A)
    second = exchange(sender, receiver, A + 0.01, [1, 2, 3, 4])
    assert 0 < (second - A - 0.01).abs().max() < 0.01
    assert receiver.stats().delta_samples == sender.stats().delta_samples == 4
    assert sender.stats().change == pytest.approx([0.01], rel=0.1)


def test_evaluation_changes_nothing():
    sender, receiver = pair()
    exchange(sender, receiver, A, range(4))
    before = sender.state_dict(), receiver.state_dict()
    assert bits(receiver.decode(sender.encode(A + 1, None), like=A)) == bits(A + 1)
    sender.commit()
    receiver.commit()
    before[0]["messages"] += 1
    np.testing.assert_equal((sender.state_dict(), receiver.state_dict()), before)


def test_a_sample_advances_once_in_a_step():
    """If a sample occurs twice in a step, as in gradient accumulation, both deltas refer to the old m."""
    sender, receiver = pair()
    exchange(sender, receiver, A, range(4))
    first = receiver.decode(sender.encode(A + 1, range(4)), like=A)
    again = receiver.decode(sender.encode(A + 1, range(4)), like=A)
    sender.commit()
    receiver.commit()
    assert bits(first) == bits(again)
    assert bits(np.stack([m_of(sender)[s] for s in range(4)])) == bits(first)


def test_rollback_restores_every_bit():
    sender, receiver = pair(dtype="bfloat16")
    exchange(sender, receiver, A, range(4))
    before = sender.state_dict(), receiver.state_dict()
    receiver.decode(sender.encode(A * 2, [0, 1, 2, 9]))
    sender.rollback()
    receiver.rollback()
    np.testing.assert_equal((sender.state_dict(), receiver.state_dict()), before)


def test_lossy_first_visit_keeps_what_was_decoded():
    sender, receiver = pair(first=codec.Quantize(8))
    received = exchange(sender, receiver, A, range(4))
    assert 0 < (received - A).abs().max() < 0.05
    assert bits(np.stack([m_of(sender)[s] for s in range(4)])) == bits(received)
    assert differing(sender, receiver) == []


def test_spec_may_change_between_messages():
    sender, receiver = pair()
    exchange(sender, receiver, A, range(4))
    for spec in (codec.Quantize(2), "balanced", codec.Float4()):
        sender.spec = spec
        exchange(sender, receiver, A * 1.1, range(4))
        assert differing(sender, receiver) == []


@pytest.mark.parametrize("through", [lambda x: x, through_npz, through_torch_save])
@pytest.mark.parametrize("entries", ["float32", "bfloat16", "8bit"])
def test_state_dict_restores_m(through, entries):
    sender, receiver = pair(dtype=entries, edge=3)
    exchange(sender, receiver, A, range(4))
    copies = pair(dtype=entries, edge=3)
    copies[0].load_state_dict(through(sender.state_dict()))
    copies[1].load_state_dict(through(receiver.state_dict()))
    assert copies[0].known(range(5)).tolist() == [True] * 4 + [False]
    assert bits(exchange(*copies, A + 1, range(4))) == bits(exchange(sender, receiver, A + 1, range(4)))


@pytest.mark.parametrize("entries", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_resumed_run_is_bit_identical_wherever_it_is_cut(rounding, entries):
    """States that were saved before any of the messages continue with the values of an uninterrupted run.

    Each step has three messages with samples, one with gradients and one without samples, then a commit. A step that a
    cut interrupts is repeated. After the last commit there are two messages, without and with samples.
    """
    spec = codec.Quantize(4, rounding=rounding)

    def side():
        return codec.ActivationDelta(spec, first=codec.Quantize(8), dtype=entries, edge=2)

    def run(cut):
        sides, steps = [side(), side()], []
        messages = iter(range(100))

        def resume():
            if next(messages) != cut:
                return False
            for i, saved in enumerate([s.state_dict(like=A) for s in sides]):
                sides[i] = side()
                sides[i].load_state_dict(saved)
            return True

        def sent(values, samples=None):
            return bits(sides[1].decode(sides[0].encode(values, samples), like=A))

        while len(steps) < 3:
            found = []
            for part in range(5):
                if resume() and part:
                    break
                values = A * (1 + len(steps) / 8)
                if part < 3:
                    found.append(sent(values[part : part + 2], range(part, min(part + 2, 4))))
                elif part == 3:
                    found.append(bits(sides[0].decode_gradient(sides[1].encode_gradient(values), like=A)))
                else:
                    found.append(sent(values))
            else:
                steps.append(found)
                for s in sides:
                    s.commit()
        resume()
        steps.append(sent(A))
        resume()
        return [*steps, sent(A, range(4))]

    want = run(cut=-1)
    for cut in range(17):
        assert run(cut) == want, cut


def test_state_dict_of_tensors_passes_torch_load(tmp_path):
    """A state dict passes torch.load, which refuses numpy arrays: with m in memory, in files, and without samples."""
    sender, receiver = pair()
    exchange(sender, receiver, A, range(4))
    in_files = codec.ActivationDelta(store=tmp_path / "store")
    for delta in (sender, in_files, codec.ActivationDelta()):
        torch.save(delta.state_dict(like=torch.empty(0)), tmp_path / "saved.pt")
        saved = torch.load(tmp_path / "saved.pt")
        assert isinstance(saved["checks"], torch.Tensor)
        delta.load_state_dict(saved)
        np.testing.assert_equal({k: np.asarray(v) for k, v in saved.items()}, delta.state_dict())
    with pytest.raises(codec.ArgumentError, match="like="):
        sender.state_dict(like=5)


@pytest.mark.parametrize("samples", [b"abcd", bytearray(4), {3, 1, 4, 5}, frozenset(range(4))])
def test_samples_without_order_or_of_bytes_are_refused(samples):
    with pytest.raises(codec.ArgumentError, match="samples must be a sequence of sample ids"):
        codec.ActivationDelta().encode(A, samples)


def test_activation_of_another_shape_is_sent_raw():
    sender, receiver = pair()
    exchange(sender, receiver, A, range(4))
    assert bits(exchange(sender, receiver, A[:, :3], range(4))) == bits(A[:, :3])
    assert differing(sender, receiver) == []


def test_gradients_are_quantized_without_state():
    sender, receiver = pair(backward=codec.Quantize(8, rounding="nearest"))
    gradient = sender.decode_gradient(receiver.encode_gradient(A), like=A)
    assert bits(gradient) == bits(codec.decode(codec.encode(A, codec.Quantize(8, rounding="nearest")), like=A))


def test_gradient_with_nan_is_an_error_of_the_peer():
    sender, receiver = pair()
    bad = A.clone()
    bad[1, 2, 3] = torch.nan
    out = torch.ones_like(A)
    with pytest.raises(codec.PeerError, match="NaN or Inf"):
        sender.decode_gradient(receiver.encode_gradient(bad), out=out)
    assert bool((out == 1).all())
    assert sender.decode_gradient(receiver.encode_gradient(A)).shape == A.shape


def test_first_visit_takes_8_bits_by_default():
    sender, receiver = codec.ActivationDelta(), codec.ActivationDelta()
    message = sender.encode(A, range(4))
    assert len(message) < A.nbytes / 2
    received = receiver.decode(message, like=A)
    assert 0 < (received - A).abs().max() < 0.02


def test_first_visit_with_nan_is_lossless():
    sender, receiver = codec.ActivationDelta(), codec.ActivationDelta()
    bad = A.clone()
    bad[2, 1, 1] = torch.nan
    received = exchange(sender, receiver, bad, range(4))
    assert bits(received) == bits(bad)
    assert differing(sender, receiver) == []
