"""``python -m codec.run`` compresses the gradients of unmodified training scripts."""

import contextlib
import io
import logging
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec import run
from support import launched
from support.ddp_training import small_forward, small_net, take_step
from support.ranks import run_ranks

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(register):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    model = DistributedDataParallel(net)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]

def mean(state, bucket):
    reduced = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return reduced.get_future().then(lambda f: f.value()[0])

def explicit(model):
    import codec
    options = codec.options(algorithm="two_shot")
    codec.torch.ddp_hook("small", options=options).register(model)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(sys.argv[1:], __file__)
    launched, own = train(lambda model: None), train(explicit)
    plain = train(lambda model: model.register_comm_hook(None, mean))
    print("equal", all(map(torch.equal, launched, own)), "exact", all(map(torch.equal, launched, plain)))
    dist.destroy_process_group()
"""


def torchrun(folder, *arguments, **environment):
    """Run the script on two ranks under torchrun; return the output of each rank."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "codec.run", *arguments]
    # Ranks share a pipe: without a buffer, each argument of print() is a separate write.
    more = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "", **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=folder, env=os.environ | more
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def _main(rank, size, folder, arguments):
    """Run the launcher in this process; return the output and the log of launcher and script."""
    os.chdir(folder)
    plain, text = DistributedDataParallel.forward, io.StringIO()
    log = logging.StreamHandler(text)
    logging.getLogger("codec.torch").addHandler(log)
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            run.main(arguments)
    finally:
        DistributedDataParallel.forward = plain
        logging.getLogger("codec.torch").removeHandler(log)
    return text.getvalue()


def check(texts):
    """Check what the ranks print after 4 steps with preset "small"."""
    for rank, text in enumerate(texts):
        assert re.search(r"^\['--epochs', '3'\] .*train\.py$", text, re.MULTILINE), text
        assert "equal True exact False" in text
        for former in ("<function mean", "<codec.torch.Hook"):
            assert (
                f"does not compress the gradients of a model that has a communication hook of its own: {former}" in text
            )
        sent = re.findall(r"codec\.run: Quantize\(bits=4.*\): 4 steps: .* of 268 kB sent \(1\d%\)", text)
        assert len(sent) == (rank == 0), text


ARGUMENTS = ["--codec", "small", "--algorithm", "two_shot", "--stats", "train.py", "--epochs", "3"]


def test_launched_script_trains_as_with_a_hook_of_its_own(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    check(launched.run(2, _main, str(tmp_path), ARGUMENTS))


@pytest.mark.nightly
def test_torchrun_launches_scripts(tmp_path):
    out, err = torchrun(tmp_path, *ARGUMENTS)
    assert out.count("equal True exact False") == 2, out
    assert err.count("4 steps: ") == 1, err


@pytest.mark.nightly
def test_modules_are_launched_and_the_environment_names_the_codec(tmp_path):
    for codec_name, exact in (("small", False), ("off", True)):
        out, _ = torchrun(tmp_path, "-m", "train", "--epochs", "3", CODEC_DDP=codec_name, PYTHONPATH=str(tmp_path))
        assert out.count(f"exact {exact}") == 2, out


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("small", codec.Quantize(4)),
        ("Quantize(4)", codec.Quantize(4)),
        (" Float8(group_size=128) ", codec.Float8(group_size=128)),
        ("Sign('l2', group_size='row')", codec.Sign("l2", group_size="row")),
    ],
)
def test_text_names_a_preset_or_a_spec(text, spec):
    assert run.spec_of(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tiny",
        "Quantize",
        "Quantize(",
        "Quantize(40)",
        "Quantize(open('x'))",
        "Quantize(bits=__import__('os'))",
        "Quantize(no_such=4)",
        "Quantize(*[4])",
        "Quantize(**{'bits': 4})",
        "codec.Quantize(4)",
        "BoundSpec(1)",
        "(" * 10_000,
        "\0",
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(codec.SpecError) as e:
        run.spec_of(text)
    assert len(str(e.value)) < 400


def test_command_line_says_what_is_missing(capsys):
    for arguments, words in (
        ([], "the following arguments are required"),
        (["train.py"], "no codec was given: pass --codec small, set CODEC_DDP=small"),
        (["--codec", "tiny", "train.py"], "not a spec: 'tiny'; the presets are"),
        (["--codec", "small", "--algorithm", "mesh", "train.py"], "invalid choice: 'mesh'"),
    ):
        with pytest.raises(SystemExit) as e:
            run.main(arguments)
        assert e.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("world", "ranks", "rank", "more", "expected"),
    [
        (8, 4, 5, {"GROUP_RANK": "1"}, (2, 4)),
        (8, 4, 5, {}, (2, 4)),
        (4, 1, 3, {"GROUP_RANK": "3"}, (4, 1)),
        (6, 4, 0, {}, "WORLD_SIZE=6, LOCAL_WORLD_SIZE=4, RANK=0: each machine must have the same number"),
        (8, 2, 4, {"GROUP_RANK": "1"}, "RANK=4: each machine must have the same number"),
        (8, 0, 4, {}, "start the script by torchrun"),
        (8, "two", 4, {}, "start the script by torchrun"),
    ],
)
def test_machines_are_those_of_torchrun(world, ranks, rank, more, expected):
    environment = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), **more}
    if isinstance(expected, tuple):
        assert run.machines_of(environment) == expected
        return
    with pytest.raises(codec.ArgumentError, match=expected):
        run.machines_of(environment)


def test_machines_need_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        run.main(["--codec", "small", "--machines", "train.py"])
    assert "--machines needs WORLD_SIZE, LOCAL_WORLD_SIZE and RANK" in capsys.readouterr().err


def _on_machines(rank, size, folder):
    """Launch the script as on two machines of two ranks; return its output, and the hooks' bytes within a machine."""
    local, hooks, plain = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}, [], run.Launch.report
    run.Launch.report = lambda launch, stats: hooks.extend(launch.hooks)
    os.environ |= local
    try:
        text = _main(rank, size, folder, ["--codec", "lossless", "--machines", "machines.py"])
    finally:
        run.Launch.report = plain
    return text, [(h.stats().steps, h.stats().local_nbytes > 0) for h in hooks]


MACHINES = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
some = dist.new_group([0, 1]), dist.new_group([2, 3])
for group in (None, some[dist.get_rank() // 2]):
    model = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)
    model(torch.full((1, 64), 1.0 + dist.get_rank())).sum().backward()
    print(float(model.module.weight.grad[0, 0]))
"""


def test_machines_give_a_model_of_all_ranks_two_levels(tmp_path):
    (tmp_path / "machines.py").write_text(MACHINES)
    for rank, (text, hooks) in enumerate(launched.run(4, _on_machines, str(tmp_path))):
        assert hooks == [(1, True), (1, False)], "a model of some ranks is averaged in one level"
        assert re.findall(r"^[\d.]+$", text, re.MULTILINE) == ["2.5", ("1.5", "3.5")[rank // 2]]
        assert "averaged over 2 of 4 ranks, in one level" in text


def _launched(rank, size):
    """Return the steps of two models that the launcher hooks: with an optimizer; with scaler and torch.compile."""
    plain = DistributedDataParallel.forward
    try:
        near = run.Launch(run.spec_of("near"), codec.options())
        near.install()
        model = DistributedDataParallel(small_net())
        with pytest.raises(codec.SpecError, match="found 0 in 0 optimizers for 6 parameters"):
            take_step(model, rank, small_forward)
        model = DistributedDataParallel(small_net())
        weights, biases = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
        optimizers = {torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases)}
        take_step(model, rank, small_forward, next(iter(optimizers)))
        assert set(near.hooks[0].optimizers) == optimizers

        DistributedDataParallel.forward = plain
        launch = run.Launch(codec.Quantize(4), codec.options())
        launch.install()
        compiled = DistributedDataParallel(small_net())
        if rank == 0:  # compiling takes 4 s of CPU time
            compiled = torch.compile(compiled, backend="eager")
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            scaler.scale(small_forward(compiled, rank)).backward()
        assert launch.hooks[0].reducer._scaler is scaler
        built_in = DistributedDataParallel(small_net())
        built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        take_step(built_in, rank, small_forward)
        assert (launch.models, len(launch.hooks)) == (2, 1)
    finally:
        DistributedDataParallel.forward = plain
    return [launch.hooks[0].stats().steps, near.hooks[0].stats().steps]


def test_launcher_finds_optimizers_scalers_and_compiled_models():
    assert run_ranks(2, _launched, timeout=60) == [[2, 1]] * 2  # rank 1 waits while rank 0 compiles
