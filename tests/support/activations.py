"""Reference implementation of AQ-SGD in numpy, and access to the activations m that an ActivationDelta stores."""

import numpy as np
import torch

import codec

EIGHT_BIT = codec.Quantize(8, rounding="nearest")


class Reference:
    """Sender and receiver of a pipeline edge in one object. codec encodes frames; numpy and torch do the rest."""

    def __init__(self, spec, entries="float32", edge=0):
        self.spec, self.entries, self.edge = spec, entries, edge
        self.m, self.staged = {}, {}
        self.draws = self.committed_draws = 0

    def trip(self, a, samples):
        """Return the activations that the receiver decodes for the sender's tensor `a`."""
        self.draws += 1
        values, result = a.float().numpy(), a.clone()
        with np.errstate(all="ignore"):
            delta = [i for i, s in enumerate(samples) if s in self.m and np.isfinite(values[i] - self.m[s]).all()]
        new = {i: values[i] for i in range(len(samples)) if i not in delta}
        if delta:
            m = np.stack([self.m[samples[i]] for i in delta])
            stream = self.edge << 40 ^ 2 * self.draws + 1
            decoded = m + codec.decode(codec.encode(values[delta] - m, self.spec, stream=stream))
            result[delta] = torch.from_numpy(decoded).to(a.dtype)
            new |= dict(zip(delta, decoded, strict=True))
        for i, row in new.items():
            self.staged.setdefault(samples[i], row)
        return result

    def commit(self):
        """Replace m by the staged values, rounded to the dtype in which m is stored."""
        for sample, row in self.staged.items():
            self.m[sample] = self._rounded(row)
            if self.entries == "8bit" and not np.isfinite(row).all():
                del self.m[sample]
        self.staged, self.committed_draws = {}, self.draws

    def _rounded(self, row):
        if self.entries == "bfloat16":
            return torch.from_numpy(row).bfloat16().float().numpy()
        if self.entries == "8bit" and np.isfinite(row).all():
            return codec.decode(codec.encode(row, EIGHT_BIT))
        return row.copy()

    def rollback(self):
        """Discard the staged values. The repeated step uses the same random bits."""
        self.staged, self.draws = {}, self.committed_draws


def m_of(side):
    """Return the committed m of every sample in an ActivationDelta."""
    found = {}
    for sample, entry in list(side._ledger.entries.items()):
        found[sample] = np.empty(entry.n, np.float32)
        assert side._ledger.store.read(sample, found[sample])
    return found


def differing(sender, receiver):
    """Return the samples whose checksums are equal on sender and receiver although their m differ."""
    ours, theirs = m_of(sender), m_of(receiver)
    common = sorted(ours.keys() & theirs.keys())
    equal = sender.checks(common) == receiver.checks(common)
    return [s for s, same in zip(common, equal, strict=True) if same and ours[s].tobytes() != theirs[s].tobytes()]


def random_activations(rng, shape, dtype, nonfinite=0.0):
    """Return normally distributed values of a torch dtype; a row has NaN or Inf with probability `nonfinite`."""
    x = rng.standard_normal(shape).astype(np.float32) * np.float32(10.0) ** rng.integers(-2, 3)
    for row in x:
        if rng.random() < nonfinite:
            row[rng.integers(len(row))] = rng.choice([np.nan, np.inf, -np.inf])
    return torch.from_numpy(x).to(dtype)


def bits(x):
    """Return the bytes of a torch tensor or a numpy array."""
    return (x.contiguous().view(torch.uint8).numpy() if isinstance(x, torch.Tensor) else x).tobytes()
