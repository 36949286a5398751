"""Sites and stores for tests of codec.torch.Rounds."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import codec
import codec.torch
from codec.torch.rounds.names import StoreContents
from support.local_training import EXACT, Linear, gradient


class MemoryStore:
    """Store in memory, which all sites of a test share; `calls` counts its calls."""

    def __init__(self):
        self.objects, self.lock, self.calls = {}, threading.Lock(), 0

    def call(self, kind, name=""):
        """Run before each call; subclasses raise errors here."""

    def put(self, name, data):
        self.call("put", name)
        with self.lock:
            self.objects[name] = bytes(data)

    def create(self, name, data):
        self.call("create", name)
        with self.lock:
            if name in self.objects:
                return False
            self.objects[name] = bytes(data)
            return True

    def get(self, name, most):
        self.call("get", name)
        with self.lock:
            found = self.objects.get(name)
        if found is not None and len(found) > most:
            raise codec.LimitError("too large")
        return found

    def names(self):
        self.call("names")
        with self.lock:
            return list(self.objects)

    def delete(self, names):
        self.call("delete")
        with self.lock:
            for name in names:
                self.objects.pop(name, None)

    @property
    def contents(self):
        return StoreContents.of(self.objects)


class Around(MemoryStore):
    """Store of one site, whose calls go to a shared store; `before(kind, name)` runs before each of them."""

    def __init__(self, shared, before):
        self.objects, self.lock, self.call = shared.objects, shared.lock, before


class Pushing:
    """Site whose local changes do not depend on its parameters, and are integers, so that sums of them are exact."""

    def __init__(self, store, number, **how):
        self.number, self.model, self.pushed = number, how.pop("model", None) or Linear(), 0
        with torch.no_grad():
            for p in self.model.parameters():
                p.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        how = {"every": 2, "spec": EXACT, "quorum": 1, "grace": 0.0} | how
        grace, early = how.pop("grace"), how.pop("early", True)
        how["quorum"] = how["quorum"] if grace is None else (how["quorum"], grace)
        with codec.options(timeout=how.pop("timeout", 30)):
            self.rounds = codec.torch.Rounds(self.model, self.optimizer, store, f"site{number}", **how)
        if not early:
            self.rounds._next_look = float("inf")  # the site looks at the store only when its change is due

    @property
    def member(self):
        return self.rounds._member

    def steps(self, n, weight=1.0):
        """Take `n` steps."""
        for _ in range(n):
            for i, p in enumerate(self.model.parameters()):
                p.grad = change(i, tuple(p.shape), self.number, self.pushed)
            self.pushed += 1
            self.optimizer.step()
            self.rounds.step(weight)

    def total(self, begin=0):
        """Return the sum of all local changes from step `begin` on."""
        shapes = [tuple(p.shape) for p in self.model.parameters()]
        steps = range(begin, self.pushed)
        return [-sum((change(i, s, self.number, t) for t in steps), torch.zeros(s)) for i, s in enumerate(shapes)]

    def unmerged(self):
        """Return the changes that no round has merged: the distance of the parameters from the anchors."""
        anchors = self.member.site.anchors
        return [p.detach() - anchors[name].detach() for name, p in self.model.named_parameters()]


def change(i, shape, site, step):
    """Return the gradient of parameter `i` in a step of a site: integers."""
    return torch.as_tensor(gradient(i, shape, site, step) * 8).round()


def merged_changes(objects, site, model):
    """Return the sum of a site's changes that manifests list, by parameter, read from the objects of a store."""
    from codec.torch.rounds.objects import ChangeHead, ManifestHead, unsealed

    totals = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    seen = set()
    for name, data in objects.items():
        if not name.startswith("manifest"):
            continue
        for listed in ManifestHead.read(name, unsealed(name, data, None)[0]).changes:
            assert listed.name not in seen, "a change was merged twice"
            seen.add(listed.name)
            if listed.name.site != f"site{site.number}":
                continue
            head, payload = unsealed(str(listed.name), objects[str(listed.name)], None)
            values = site.member.site.decoded(payload, ChangeHead.read("", head).frames)
            flat = torch.cat([torch.from_numpy(x) for x in values])
            at = 0
            ordered = sorted(site.member.site.fragments[0].pieces, key=lambda piece: piece.exact)
            for piece in ordered:
                totals[piece.name] += flat[at : at + piece.n].view(piece.shape)
                at += piece.n
    return list(totals.values())


def together(*calls):
    """Run calls in threads at the same time, and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]
