"""Weights of a small model in many dtypes, and copies that differ as if training steps had changed them."""

import ml_dtypes
import numpy as np

import codec
from codec.weight_sync.bases import checking
from codec.weight_sync.updates import assembly, kinds
from codec.weight_sync.updates import weights as slots


def set_piece_nbytes(monkeypatch, nbytes):
    """Set the size of a piece in bytes, in each module that has the constant."""
    for module in (assembly, checking, kinds, slots):
        monkeypatch.setattr(module, "PIECE_NBYTES", nbytes)


def weights(seed=0, experts=3):
    """Return tensors by name: a grouped MoE layer, FP8 with e8m0 scales, packed FP4, NaN values, and odd shapes."""
    rng = np.random.default_rng(seed)
    bf16, fp8, e8m0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
    tensors = {"model.embed_tokens.weight": rng.standard_normal((50, 24)).astype(bf16)}
    for e in range(experts):
        tensors[f"model.layers.0.mlp.experts.{e}.w1.weight"] = rng.standard_normal((24, 40)).astype(bf16)
    tensors |= {
        "model.layers.0.fp8.weight": rng.standard_normal((64, 128)).astype(fp8),
        "model.layers.0.fp8.weight_scale": rng.integers(110, 130, (64, 4)).astype(np.uint8).view(e8m0),
        "model.layers.0.fp4.weight_packed": rng.integers(0, 256, (32, 48), dtype=np.uint8),
        "model.layers.0.norm.weight": rng.standard_normal(24).astype(np.float32),
        "model.layers.0.mask": rng.integers(0, 2, 33).astype(bool),
        "model.nan": np.full(7, np.nan, np.float32),
        "model.step": np.array(3, np.int64),
        "model.empty": np.empty((0, 5), np.float16),
    }
    return tensors


def stepped(tensors, seed, part=0.02):
    """Return a copy of the tensors in which a fraction `part` of each tensor's bytes has changed."""
    rng = np.random.default_rng(seed)
    changed = {}
    for name, x in tensors.items():
        bits = np.frombuffer(x.tobytes(), np.uint8).copy()
        if x.dtype != bool:
            bits[rng.random(len(bits)) < part] ^= 1
        changed[name] = bits.view(x.dtype).reshape(x.shape)
    return changed


def equal(tensors, others):
    """Return True if two dicts have the same names, dtypes and shapes, and bit-identical tensors."""
    others = dict(others)
    return tensors.keys() == others.keys() and all(
        x.dtype == others[name].dtype and x.shape == others[name].shape and x.tobytes() == others[name].tobytes()
        for name, x in tensors.items()
    )


def versions(count, seed=0):
    """Return the weights of `count` versions, and the updates from each version to the next."""
    all_weights, updates = [weights(seed)], []
    sender = codec.WeightSender(all_weights[0])
    for k in range(1, count):
        all_weights.append(stepped(all_weights[-1], k))
        updates.append(bytes(sender.diff(all_weights[-1]).data))
        sender.commit()
    return all_weights, updates


def published(publisher, count):
    """Publish `count` versions, and return the weights of each."""
    all_weights = [weights()]
    for k in range(1, count):
        all_weights.append(stepped(all_weights[-1], k))
    assert [publisher.publish(w) for w in all_weights] == list(range(count))
    return all_weights
