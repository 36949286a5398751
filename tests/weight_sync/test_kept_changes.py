"""Changes that the check of an update finds are kept until it is applied, so that frames are decoded once."""

import numpy as np
import pytest

import codec
from support.weight_updates import equal


@pytest.mark.parametrize("folder", [False, True])
def test_frames_are_decoded_once(folder, tmp_path, monkeypatch):
    """The changes that the check of an update finds are kept for the program and the commit, if they are few."""
    old = {name: np.arange(k, k + 5000, dtype=np.float32) for k, name in enumerate("abc")}
    new = {name: x.copy() for name, x in old.items()}
    for x in new.values():
        x[7::100] += 1
    update, whole = codec.WeightSender(old).diff(new), codec.WeightSender(old).diff({n: -x for n, x in old.items()})
    receiver, served = codec.WeightReceiver(old, folder=tmp_path if folder else None), dict(old)
    calls, module = [], codec.weight_sync.bases.base
    for name in ("find_changes", "decode_delta"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, call=original: (calls.append(name), call(*a))[1])
    receiver.stage(update)
    receiver.discard()
    calls.clear()
    receiver.apply(update, load=served.update)
    assert calls == ["find_changes"] * 3
    assert equal(new, served)
    assert equal(new, receiver.tensors())
    receiver.verify()
    receiver.close()
    dense = codec.WeightReceiver(old)
    dense.apply(whole, load=served.update)
    assert calls.count("decode_delta") == 6  # all values change: each frame is decoded again for program and commit
    assert equal({name: -x for name, x in old.items()}, served)
    assert equal(served, dense.tensors())
