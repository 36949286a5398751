"""State of DDP hooks: codebooks that ranks agree on, and residuals when algorithms and numbers of ranks change."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.ddp import codebook_sync
from codec.torch.group.autotune import RawFallback
from codec.torch.reduction import execution
from support import flatcall
from support.ddp_training import ENCODE_ALL, data, hook_state_bytes, parameter_bytes, wrapped
from support.faults import damaged_frames
from support.ranks import run_ranks

EVERYTHING = {"policy": ENCODE_ALL}


class Sent:
    """Recorder of sent messages: total bytes, and the codebook ids in frames."""

    def __init__(self):
        self._replaced = damaged_frames(self)
        self.damage = lambda frame: False
        self._replaced.__enter__()
        self.clear()

    def clear(self):
        self.nbytes, self.books, self.frames = 0, set(), 0
        return self

    def stop(self):
        self._replaced.__exit__(None, None, None)

    def __call__(self, frame, to):
        info = codec.inspect(frame)
        if info.dtype != "int64":  # frames of symbol counts are int64, and are left out here
            self.nbytes += frame.nbytes
            self.books.add(info.codebook_id)
        self.frames += 1  # number of all frames, also those of symbol counts
        if self.damage(frame):
            frame = frame.copy()
            frame[frame.nbytes // 2] ^= 4
        return frame


class SimilarLayers(torch.nn.Module):
    """Layers whose gradients, and means over ranks, have similar distributions, so that a shared codebook pays."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ParameterList(torch.randn(50, 60) for _ in range(10))
        # Widely spread exponents need large codebooks
        self.spread = [torch.exp(4 * torch.randn(50, 60)) for _ in range(10)]

    def forward(self, x):
        return sum(x @ (p * s) for p, s, x in zip(self.layers, self.spread, x.chunk(10, 1), strict=True))


def step_of(model, optimizer, rank, step, scale=1.0):
    x = torch.randn(20, 500, generator=torch.Generator().manual_seed(step)) * (scale + rank / 1000)
    optimizer.zero_grad()
    (model(x) * x[:, :60]).mean().backward()
    optimizer.step()


def hooked(spec, interval=3, model=None, optimizer=None, **how):
    model = wrapped(model or SimilarLayers())
    refresher = codec.CodebookRefresher(spec, interval=interval, delay=1) if interval else None
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    how = EVERYTHING | {"optimizer": optimizer, "refresher": refresher} | how
    return model, optimizer, flatcall.ddp_hook(spec, **how).register(model)


SPECS = [
    (codec.Lossless(), "two_shot"),
    (codec.Lossless(), "all_gather"),
    (codec.Truncate(2), "ring"),
    (codec.Truncate(), "two_shot"),
    (codec.Truncate(level_coding="shared"), "two_shot"),
]


def _refreshed(rank, size):
    """Train; return the codebook ids in each step's frames, the bytes sent, and the parameters."""
    found = []
    for spec, algorithm in SPECS:
        feedback = {"feedback": True} if spec == codec.Truncate() else {}
        runs = [hooked(spec, n, algorithm=algorithm, **feedback) for n in (3, 0)]
        sent, steps = Sent(), []
        for step in range(9):
            nbytes = []
            for model, optimizer, _ in runs:
                sent.clear()
                step_of(model, optimizer, rank, step)
                nbytes.append(sent.nbytes)
                steps.append(sent.books)
            assert parameter_bytes(runs[0][0]) == parameter_bytes(runs[1][0])
            assert steps.pop() == {None}
            assert (nbytes[0] < nbytes[1]) == (steps[-1] != {None}), (spec, step, nbytes)
        sent.stop()
        found.append((parameter_bytes(runs[0][0]), steps))
    return found


def test_ranks_switch_to_an_agreed_codebook():
    """All ranks switch to a new codebook at the agreed step; frames become smaller and decode to the same values."""
    results = run_ranks(3, _refreshed)
    assert all(r == results[0] for r in results)
    for _, steps in results[0]:
        assert steps[:4] == [{None}] * 4
        assert all(len(books) == 1 and None not in books for books in steps[4:]), steps
        assert steps[4] == steps[6] != steps[7] == steps[8]


def _failed(rank, size):
    """Ranks agree on codebooks despite failed steps, damaged counts, new ranks, and ranks that load other states."""
    model, optimizer, hook = hooked(codec.Lossless(), algorithm="two_shot")
    sent, log = Sent(), []

    def go(*steps, fails=False):
        for step in steps:
            before = parameter_bytes(model)
            sent.clear()
            if fails:
                with pytest.raises(codec.CodecError):
                    step_of(model, optimizer, rank, step)
                assert parameter_bytes(model) == before
            else:
                step_of(model, optimizer, rank, step, 4.0 ** (step // 6))  # the best codebook changes every 6 steps
                hook.state_dict()  # waits for the background work of the step
                log.append((step, *sent.books))

    go(0, 1, 2, 3, 4)
    sent.damage = lambda frame: rank == 1 and sent.frames == 4
    go(5, fails=True)
    sent.damage = lambda frame: False
    go(6)  # a new codebook is due, but ranks keep the old ones
    sent.damage = lambda frame: rank == 1 and codec.inspect(frame).dtype == "int64"
    go(7, 8, 9, 10)  # the switch of step 9 fails
    sent.damage = lambda frame: rank == 2 and sent.frames == 4
    go(11, 12, fails=True)  # the switch of step 12 fails, too
    sent.damage = lambda frame: False
    state = hook.state_dict()
    hook.load_state_dict(state)
    go(13, 14, 15, 16)
    if rank == 0:
        hook.load_state_dict(state)  # rank 0 loads an old state: one step fails, then all ranks start over
    go(17, fails=True)
    go(18, 19, 20)
    saved = pickle.loads(pickle.dumps(hook.state_dict()))
    model, optimizer, hook = hooked(codec.Lossless(), algorithm="two_shot", model=model.module)
    if rank != 2:  # rank 2 has no state, so all ranks start over
        hook.load_state_dict(saved)
    go(21, 22)
    before = hook_state_bytes(hook)
    for broken in ({}, {**saved, "refresher": {**saved["refresher"], "latest": "now"}}):
        with pytest.raises(codec.StateError):
            hook.load_state_dict(broken)
        assert hook_state_bytes(hook) == before
    model, optimizer, hook = hooked(codec.Lossless(), 3 + (rank == 1), model=model.module)
    go(23, fails=True)  # refresh intervals differ by rank: an error on all ranks, without a timeout
    return log, parameter_bytes(model)


def test_sums_of_counts_of_many_ranks_do_not_overflow():
    counts = np.ones((1024, 257), np.int64)
    counts[:, 7] = 1 << 60  # summed over ranks, this count would overflow int64
    total = codebook_sync.sum_of_counts(counts)
    assert total.dtype == np.int64
    assert total[8] == 1024
    assert total.argmax() == 7
    assert total.min() == 1024


def test_failures_leave_ranks_with_the_same_codebooks():
    results = run_ranks(3, _failed)
    assert all(r == results[0] for r in results)
    log = results[0][0]
    named = {step: book for step, *books in log for book in books}
    assert len(named) == len(log)  # at most one codebook per step
    assert {step for step, book in named.items() if book is None} == {0, 1, 2, 3, 18, 21}
    assert named[4] == named[6] != named[7] == named[10] == named[13] == named[15] != named[16]
    assert named[19] == named[20] != named[16]


def test_wrong_refresher_arguments_are_rejected():
    with pytest.raises(codec.ArgumentError, match="with the spec of the hook"):
        codec.torch.ddp_hook(codec.Lossless(), refresher=codec.CodebookRefresher(codec.Truncate()))
    hook = codec.torch.ddp_hook(refresher=codec.CodebookRefresher(interval=7, delay=2))
    assert pickle.loads(pickle.dumps(hook)).refresher.interval == 7
    assert set(hook.state_dict()) == {
        "format",
        "version",
        "rank",
        "world_size",
        "within",
        "steps",
        "sparse",
        "dense",
        "buckets",
        "shapes",
        "digest",
        "refresher",
    }


def mean_over_ranks(t):
    """Return the mean of a tensor over ranks."""
    t = t.clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


def residual_sum(hook, model):
    """Return the sum of all ranks' residuals, with parameters concatenated."""
    found = []
    state = hook.state_dict()
    for name, p in model.module.named_parameters():
        left = torch.zeros(p.numel())
        for role, scale in (
            ("worker", 1),
            ("server", dist.get_world_size()),
        ):  # the owner's residual belongs to the mean, so it counts N times
            for key, values in state[role].items():
                at, _, where = key.rpartition("[")
                if at == name:
                    start, stop = map(int, where[:-1].split(":"))
                    left[start:stop] += scale * torch.as_tensor(values)
        found.append(left)
    return mean_over_ranks(torch.cat(found))


def train_and_sum(model, rank, steps):
    """Train; return the sum of exact mean gradients, and the sum of the gradients that the optimizer saw."""
    sums = []
    for sync in (False, True):
        total = 0
        for step in steps:
            x, y = data(rank, step)
            model.zero_grad()
            model.require_backward_grad_sync = sync
            torch.nn.functional.cross_entropy(model(x), y).backward()
            total = total + torch.cat([p.grad.flatten() for p in model.parameters()])
        sums.append(total)
    return mean_over_ranks(sums[0]), sums[1]


def hook_with_feedback(spec, algorithm):
    """Return a model and its hook with error feedback and a fixed algorithm."""
    model, how = wrapped(), {"algorithm": algorithm, **EVERYTHING}
    if algorithm == "lossless":
        how = {"policy": lambda name, p: codec.Lossless()}
    return model, flatcall.ddp_hook(spec, feedback=True, **how).register(model)


CHANGES = [
    (codec.Quantize(2, 8), "two_shot", "all_gather"),
    (codec.Quantize(2, 8), "all_gather", "two_shot"),
    (codec.Quantize(2, 8), "two_shot", "raw"),
    (codec.Quantize(2, 8), "two_shot", "auto"),  # frames at first, raw after the trial
    (codec.Quantize(2, 8), "two_shot", "lossless"),  # the policy returns Lossless
]


def _change_algorithm(rank, size):
    left = []
    way, small = RawFallback.way, execution._SMALL
    for spec, before, after in CHANGES:
        model, hook = hook_with_feedback(spec, before)
        train_and_sum(model, rank, [0, 1])
        was = residual_sum(hook, model)
        state = pickle.loads(pickle.dumps(hook.state_dict()))
        model, hook = hook_with_feedback(spec, after)
        hook.load_state_dict(state)
        assert torch.equal(residual_sum(hook, model), was)
        for step in (2, 3, 4):  # in step 2 all parameters are in a single bucket
            if after == "auto":
                execution._SMALL = 100
                RawFallback.way = lambda tuner, index, step=step: "values" if step > 2 else "frames"
            mean, sent = train_and_sum(model, rank, [step])
            now = residual_sum(hook, model)
            torch.testing.assert_close(sent + now, mean + was, atol=1e-5, rtol=1e-4)
            was = now
        RawFallback.way, execution._SMALL = way, small
        left.append((bool(now.any()), len(hook.state_dict()["server"].keys() - {"format", "version", "role"})))
    return left


def test_residuals_survive_a_change_of_algorithm():
    """After a change of algorithm, also to raw, residuals of workers and of owners of sums are still sent."""
    results = run_ranks(3, _change_algorithm)
    owing_still = [now for now, _ in results[0]]
    assert owing_still == [True, True, False, False, False]
    for i, (_, _, after) in enumerate(CHANGES):
        servers = sum(r[i][1] for r in results)
        assert bool(servers) == (after in ("two_shot", "raw", "auto")), after


def _refused_first_bucket(rank, size):
    """The first bucket fails in the step in which later buckets change the owners of residuals for the first time."""
    model, hook = hook_with_feedback(codec.Quantize(2, 8), "two_shot")
    train_and_sum(model, rank, [0, 1])
    state = hook.state_dict()
    lossless = replace(ENCODE_ALL, choose=lambda name, p: None if name[:2] in ("20", "18") else codec.Lossless())
    for policy in (ENCODE_ALL, lossless):
        model = wrapped()
        hook = codec.torch.ddp_hook(codec.Quantize(2, 8), feedback=True, policy=policy).register(model)
        train_and_sum(model, rank, [2])  # DDP rebuilds its buckets after this step
        hook.load_state_dict(state)
        was = hook_state_bytes(hook)
        list(model.parameters())[-1].register_hook(lambda g: g * (torch.nan if rank else 1))
        with pytest.raises(codec.CodecError):
            train_and_sum(model, rank, [3])
        assert hook_state_bytes(hook) == was


def test_rejected_step_leaves_residuals_unchanged():
    run_ranks(3, _refused_first_bucket)


def _between(rank, size):
    """Small parameters between large ones are sent exactly, without residuals."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in ((20, 256), (256, 256), (256, 5))))
    model = DistributedDataParallel(net)
    hook = codec.torch.ddp_hook(
        codec.Quantize(2, 8), feedback=True, options=codec.options(algorithm="two_shot")
    ).register(model)
    large = ["0.weight", "1.weight"]
    total = {n: torch.zeros(p.shape) for n, p in net.named_parameters()}
    for step in range(4):
        x, y = data(rank, step)
        model.zero_grad()
        with model.no_sync():
            torch.nn.functional.cross_entropy(model(x), y).backward()
        alone = {n: p.grad.clone() for n, p in net.named_parameters()}
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        for n, p in net.named_parameters():
            codec.torch.all_reduce(alone[n], op="mean", options=codec.options(algorithm="two_shot"))
            total[n] += alone[n] - p.grad
            assert torch.equal(p.grad, alone[n]) == (n not in large), n
    assert all([part.whole for part in parts] == [True, False] for _, parts in hook.reducer._parts.values())
    state = hook.state_dict()
    keys = {key.partition("[")[0] for role in ("worker", "server") for key in state[role]}
    assert keys == {"format", "version", "role", *large}
    left = torch.cat([total[n].flatten() for n in total])
    torch.testing.assert_close(residual_sum(hook, model), left, atol=1e-5, rtol=1e-4)
    before = hook_state_bytes(hook)
    net[1].bias.register_hook(lambda g: g * torch.nan if rank == 1 else g)  # frames of other ranks cannot encode NaN
    with pytest.raises(codec.CodecError):
        torch.nn.functional.cross_entropy(model(x), y).backward()
    assert hook_state_bytes(hook) == before


def test_small_parameters_between_large_ones_are_exact():
    run_ranks(3, _between)


def _train_part(rank, size):
    model, hook = hook_with_feedback(codec.Quantize(2, 8), "two_shot")
    train_and_sum(model, rank, [0, 1, 2])
    state, before = hook.state_dict(), hook_state_bytes(hook)
    with pytest.raises(codec.StateError):  # an invalid part: nothing of the state is loaded
        hook.load_state_dict({**state, "server": {}})
    assert hook_state_bytes(hook) == before
    return state, residual_sum(hook, model)


def _train_with_other_ranks(rank, size, states, was, algorithm):
    model, hook = hook_with_feedback(codec.Quantize(2, 8), algorithm)
    hook.load_state_dict(states[rank])
    torch.testing.assert_close(residual_sum(hook, model), was, atol=1e-6, rtol=1e-5)
    mean, sent = train_and_sum(model, rank, [3, 4])
    torch.testing.assert_close(sent + residual_sum(hook, model), mean + was, atol=1e-5, rtol=1e-4)
    return was.any() and sent.any()


def test_residuals_survive_a_change_of_the_number_of_ranks():
    old = run_ranks(3, _train_part)
    for size, algorithm in ((2, "two_shot"), (4, "two_shot"), (1, "auto")):
        states = codec.torch.Hook.reshard([state for state, _ in old], size)
        assert all(run_ranks(size, _train_with_other_ranks, states, old[0][1], algorithm))
