"""Collectives of tensors on a GPU, compared with those of tensors in host memory."""

import torch
import torch.distributed as dist

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


class _BucketOnGpu:
    """Bucket of DistributedDataParallel with its gradients on a GPU."""

    def __init__(self, bucket, buffer):
        self._bucket, self._buffer = bucket, buffer

    def __getattr__(self, name):
        return getattr(self._bucket, name)

    def buffer(self):
        return self._buffer


def register_on(model, hook, place):
    """Register a hook whose buckets `place` moves to a GPU."""

    def reduce(hook, bucket):
        future = hook.reduce(_BucketOnGpu(bucket, place(bucket.buffer())))
        return future.then(lambda done: host(done.value()))

    reduce.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(hook, reduce)
