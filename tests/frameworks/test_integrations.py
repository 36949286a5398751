"""codec.integrations with real Lightning, Accelerate and Transformers: frozen layers, resuming, single processes."""

import doctest
import importlib
import os

import lightning
import pytest
import torch

import codec
import codec.torch
from codec.integrations.accelerate import compress
from codec.integrations.lightning import GradientCompression
from support.documentation import blocks
from support.launched import run

STEPS = 4


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))

    def training_step(self, batch, index):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Freeze(lightning.Callback):
    """Freezes the first layer during the first epoch. The model is already wrapped in DistributedDataParallel then."""

    def on_train_epoch_start(self, trainer, module):
        module.layers[0].requires_grad_(trainer.current_epoch > 0)


def _lightning(rank, size, folder, spec, freeze=True):
    """Train two epochs of 4 steps, the first with a frozen layer (`freeze`); return weights by epoch, and stats."""
    weights = []

    class Note(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            weights.append([p.detach().clone() for p in module.parameters()])

    compression = None if spec is None else GradientCompression(spec)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp_find_unused_parameters_true" if size > 1 else "auto",
        max_epochs=2,
        callbacks=[*([compression] if compression else []), *([Freeze()] if freeze else []), Note()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.TensorDataset(torch.randn(128 * size, 64, generator=torch.Generator().manual_seed(7)))
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=32))
    return weights, None if compression is None else compression.hook.stats(by_parameter=True)


def test_lightning_trains_with_frozen_layers_as_without_compression(tmp_path):
    (plain, _), _ = run(2, _lightning, str(tmp_path), None)
    (exact, stats), (other, _) = run(2, _lightning, str(tmp_path), codec.Lossless())
    for have, want in zip(exact, plain, strict=True):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(have, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(exact[-1], other[-1], strict=True))
    assert torch.equal(exact[0][0], Net().layers[0].weight)  # the frozen layer keeps its initial weights
    assert not torch.equal(exact[1][0], exact[0][0])
    assert stats.steps == 8


def test_lightning_gives_near_the_optimizer(tmp_path):
    (_, stats), _ = run(2, _lightning, str(tmp_path), "near", False)
    assert isinstance(stats.parameters["layers.2.weight"].spec, codec.Truncate)
    assert stats.ratio < 0.7


def test_one_process_trains_uncompressed(tmp_path):
    ((_, stats),) = run(1, _lightning, str(tmp_path), "small")
    assert stats.steps == 0
    assert run(1, _trained_alone, blocks("Accelerate")[0], str(tmp_path)) == [(0, "Sequential")]


def _trained_alone(rank, size, code, folder):
    """Run the page's code without torchrun's environment variables: train two steps, and resume for two more."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    namespace = {"__name__": "page"}
    exec(code, namespace)
    namespace["train"](0, 2, folder)
    hook, model = namespace["train"](2, 4, folder)
    return hook.stats().steps, type(model).__name__


def _resumed(rank, size, code, first, last, folder):
    """Train from step `first` to `last`; return the hook's number of steps, and the number of ranks with a state."""
    namespace = {"__name__": "page"}
    exec(code, namespace)
    hook, _ = namespace["train"](first, last, folder)
    states = hook.state_dict(gather=True)["ranks"]
    return hook.stats().steps, len(states)


@pytest.mark.parametrize("framework", ["Accelerate", "Transformers"])
def test_training_resumes_on_another_number_of_ranks(framework, tmp_path):
    (code,) = blocks(framework)
    run(2, _resumed, code, 0, STEPS, str(tmp_path))
    assert run(3, _resumed, code, STEPS, 2 * STEPS, str(tmp_path)) == [(STEPS, 3)] * 3


def _refused(rank, size):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(64, 64))
    hook = compress(accelerator, model, "small")
    with pytest.raises(codec.ArgumentError, match="has a communication hook already"):
        compress(accelerator, model, "balanced")
    with pytest.raises(codec.ArgumentError, match=r"takes no further arguments: pass feedback to ddp_hook"):
        compress(accelerator, model, codec.torch.ddp_hook(), feedback=True)
    with pytest.raises(codec.ArgumentError, match=r"model must be a DistributedDataParallel, got Linear"):
        compress(accelerator, torch.nn.Linear(64, 64), "small")
    model(torch.ones(2, 64)).sum().backward()
    assert hook.stats().steps == 1
    with pytest.raises(codec.StateError, match=r"call trainer\.fit"):
        _ = GradientCompression("small").hook


def test_mistakes_are_refused():
    run(2, _refused)


def _examples(rank, size, name):
    module = importlib.import_module(name)
    names = {
        "codec": codec,
        "torch": torch,
        "lightning": lightning,
        "accelerate": importlib.import_module("accelerate"),
    }
    return doctest.testmod(module, extraglobs=names).failed


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_docstring_examples(name):
    assert run(1, _examples, f"codec.integrations.{name}") == [0]
    assert "WORLD_SIZE" not in os.environ
