"""send_activation, recv_activation, send_gradient, recv_gradient: point-to-point calls for custom pipelines."""

import pytest
import torch

import codec
from codec.torch.pipelining import recv_activation, recv_gradient, send_activation, send_gradient


def _values(dtype):
    return torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(2)).to(dtype)


def _exchange(rank, size, dtype, asynchronous):
    delta, ids, a = codec.ActivationDelta(), [9, 2, 7, 4], _values(dtype)
    found = []
    for _ in range(3):
        # the sender's tensor is not contiguous
        h = torch.zeros(4, 50, 3, dtype=dtype).transpose(1, 2)
        if rank == 0:
            h.copy_(a)
            work = send_activation(h.requires_grad_(), 1, delta=delta, samples=ids, async_op=asynchronous)
            assert (work is not None) == asynchronous
            gradient = torch.empty_like(h)
            recv_gradient(gradient, 1, delta=delta, tag=3)
            found.append(gradient.tolist())
        else:
            recv_activation(h, 0, delta=delta, samples=ids)
            found.append(h.tolist())
            send_gradient(h * 2, 0, delta=delta, tag=3)
        delta.commit()
        a = a + 0.01
    if rank == 0:
        send_activation(a, 1, delta=delta, samples=None)  # no samples: an evaluation, without state
    else:
        recv_activation(h, 0, delta=delta)
        assert (h - a).abs().max() < 0.05
    return found, delta.checks(ids).tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_and_gradients_arrive(ranks, dtype, asynchronous):
    (gradients, ours), (activations, theirs) = ranks.run(_exchange, dtype, asynchronous)
    assert ours == theirs
    assert all(ours)
    for i, (g, a) in enumerate(zip(gradients, activations, strict=True)):
        assert (torch.tensor(a) - _values(dtype).float() - 0.01 * i).abs().max() < 0.06
        assert (torch.tensor(g) - 2 * torch.tensor(a)).abs().max() < 0.1


def _errors(rank, size):
    delta, a = codec.ActivationDelta(), _values(torch.float32)
    if rank == 0:
        send_activation(a, 1, delta=delta, samples=range(4))
        delta.commit()
        send_activation(a, 1, delta=delta, samples=range(4))
        send_gradient(a / 0, 1, delta=delta)
    else:
        recv_activation(a, 0, delta=delta)  # received, but rolled back below
        delta.rollback()
        before = a.clone()
        with pytest.raises(codec.StateError, match="samples 0, 1, 2, 3"):
            recv_activation(a, 0, delta=delta)
        with pytest.raises(codec.PeerError, match="NaN or Inf"):
            recv_gradient(a, 0, delta=delta)
        assert torch.equal(a, before)
    for call in (send_activation, recv_activation):
        with pytest.raises(codec.ArgumentError, match="torch tensors"):
            call([1.0], 1 - rank, delta=delta, samples=None)
        with pytest.raises(codec.ArgumentError, match="delta must be"):
            call(a, 1 - rank, delta=codec.Quantize(4), samples=None)
    with pytest.raises(codec.ArgumentError, match="this rank"):
        recv_gradient(a, rank, delta=delta)


def test_errors_leave_tensors_unchanged(ranks):
    ranks.run(_errors)
