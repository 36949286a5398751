"""DeepSpeed configurations become arguments of our optimizers, whose steps equal DeepSpeed's; some keys are refused."""

import json
import math
import warnings

import pytest
import torch
from torch import nn

import codec
import codec.torch
from codec.integrations.deepspeed import read_config

CONFIG = {
    "train_batch_size": 4096,
    "steps_per_print": 1000,
    "optimizer": {
        "type": "OneBitAdam",
        "params": {
            "lr": 2e-4,
            "betas": [0.9, 0.99],
            "eps": 1e-6,
            "weight_decay": 0.01,
            "freeze_step": 6,
            "bias_correction": True,
            "cuda_aware": False,
            "comm_backend_name": "nccl",
        },
    },
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "initial_scale_power": 12},
}


def read(config):
    """Read a configuration; return the arguments found and the texts of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read_config(config)
    return found, [str(w.message) for w in caught]


def changed(**entries):
    """Return CONFIG with entries replaced; the prefix `params_` marks an entry of the optimizer's parameters."""
    params = {k.removeprefix("params_"): v for k, v in entries.items() if k.startswith("params_")}
    others = {k: v for k, v in entries.items() if not k.startswith("params_")}
    optimizer = CONFIG["optimizer"] | {"params": CONFIG["optimizer"]["params"] | params}
    return CONFIG | {"optimizer": optimizer} | others


def test_arguments_are_those_of_the_configuration(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    for config in (CONFIG, path, str(path)):
        found, texts = read(config)
        assert found.arguments == {
            "lr": 2e-4,
            "betas": (0.9, 0.99),
            "eps": 1e-6,
            "weight_decay": 0.01,
            "freeze_step": 6,
            "spec": codec.Sign(group_size=1024),
            "max_ratio": None,
        }
        assert found.register == {"max_grad_norm": 1.0}
        assert found.grad_scaler == {"init_scale": 4096.0, "growth_interval": 500}
        torch.amp.GradScaler("cpu", **found.grad_scaler)
        (text,) = texts
        for key in ("optimizer.params.comm_backend_name", "train_batch_size", "steps_per_print", "fp16.hysteresis"):
            assert key in text
        assert "freeze_step" not in text


def test_defaults_are_those_of_deepspeed_without_a_warning():
    found, texts = read({"optimizer": {"type": "onebitadam"}})
    assert not texts
    assert found.arguments["freeze_step"] == 100_000
    assert (found.register, found.grad_scaler) == ({}, None)
    found, _ = read({"optimizer": {"type": "ZeroOneAdam"}, "fp16": {"enabled": False, "loss_scale": 128}})
    assert found.arguments["freeze_step"] == codec.torch.VarianceSchedule(100_000, 16, 32_678, 16)


def deepspeed_steps(theta, gradients, lr, betas, eps, weight_decay, freeze_step):
    """Compute steps of DeepSpeed's OnebitAdam on one rank: no bias correction, decoupled weight decay."""
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        if t <= freeze_step:
            v = betas[1] * v + (1 - betas[1]) * g * g
        theta = theta - lr * (m / (v.sqrt() + eps) + weight_decay * theta)
    return theta


@pytest.mark.filterwarnings("ignore:second moments")
def test_steps_are_those_of_deepspeeds_formula():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 80))
    gradients = [torch.randn_like(p) for _ in range(10)]
    config, _ = read(CONFIG)
    how = {name: config.arguments[name] for name in ("lr", "betas", "eps", "weight_decay", "freeze_step")}
    expected = deepspeed_steps(p.detach().clone(), gradients, **how)
    corrected = deepspeed_steps(p.detach().clone(), gradients, **how | {"lr": how["lr"] * math.sqrt(1 - 0.99**6)})
    optimizer = config.optimizer([("weight", p)])
    for i, g in enumerate(gradients):
        p.grad = g.clone()
        optimizer.step()
        if i == 7:  # after freeze_step, when second moments are frozen
            state = optimizer.state_dict()
            optimizer = codec.torch.OneBitAdam([("weight", p)], freeze_step=6, max_ratio=None)
            optimizer.load_state_dict(state)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-6)
    assert (expected - corrected).abs().max() > 1e-4  # a step with bias correction would differ visibly


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(zero_optimization={"stage": 2}), ["zero_optimization.stage", "DistributedDataParallel"]),
        (changed(params_max_grad_norm=1.0), ["optimizer.params.max_grad_norm", "gradient_clipping"]),
        (changed(params_amsgrad=True), ["optimizer.params.amsgrad"]),
        (changed(params_freezestep=5), ["optimizer.params.freezestep", "unknown"]),
        (changed(params_lr="auto"), ["optimizer.params.lr", "auto", "number"]),
        (changed(params_freeze_step=0), ["optimizer.params.freeze_step"]),
        (changed(params_betas=[0.9, 1.0]), ["optimizer.params.betas"]),
        (changed(sparse_gradients=True), ["sparse_gradients", "nn.Embedding"]),
        (changed(amp={"enabled": True}), ["amp", "torch.autocast"]),
        (changed(made_up={}), ["made_up", "unknown"]),
        (changed(fp16={"enabled": True, "loss_scale": 128}), ["fp16.loss_scale", "dynamic"]),
        (changed(fp16=True), ["fp16", "dict"]),
        (changed(gradient_clipping=math.nan), ["gradient_clipping", "number"]),
        ({"optimizer": {"type": "OneBitLamb"}}, ["optimizer.type", "1-bit LAMB"]),
        ({"optimizer": {"type": "AdamW"}}, ["optimizer.type", "ddp_hook"]),
        ({"optimizer": {"type": "ZeroOneAdam", "params": {"local_step_clipper": 12}}}, ["clipper", "8 or 16"]),
        ({"optimizer": {"type": "ZeroOneAdam"}, "fp16": {"enabled": True}}, ["fp16", "bf16"]),
        ({"optimizer": {"type": "ZeroOneAdam", "params": {"freeze_step": 5}}}, ["optimizer.params.freeze_step"]),
        ({}, ["optimizer"]),
        (3, ["config", "dict"]),
    ],
)
def test_errors_name_the_key_and_the_alternative(config, words):
    with pytest.raises(codec.ArgumentError) as e:
        read_config(config)
    assert all(word in str(e.value) for word in words), str(e.value)


@pytest.mark.parametrize("text", ['{"optimizer": {}, "optimizer": {}}', "[1]", "{", "[" * 100_000])
def test_files_that_are_no_configuration_are_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(codec.ArgumentError, match=r"bad\.json"):
        read_config(path)
    with pytest.raises(codec.ArgumentError, match="nowhere"):
        read_config(tmp_path / "nowhere")


def test_parameter_groups_without_bias_correction_are_checked():
    p = nn.Parameter(torch.randn(64, 80))
    groups = [{"params": [p], "bias_correction": False}]
    with pytest.raises(codec.ArgumentError, match="bias_correction"):
        codec.torch.OneBitAdam(groups, freeze_step=4, warmup=codec.Truncate())
    with pytest.raises(codec.ArgumentError, match="bias_correction"):
        codec.torch.OneBitAdam([{"params": [p], "bias_correction": None}], freeze_step=4)
    optimizer = codec.torch.OneBitAdam(groups, freeze_step=4)
    optimizer.load_state_dict(torch.optim.AdamW([p]).state_dict())  # torch's state dict lacks the option
    assert optimizer.param_groups[0]["bias_correction"] is False
    damaged = optimizer.state_dict()
    damaged["param_groups"][0]["bias_correction"] = 7
    with pytest.raises(codec.StateError, match="bias_correction"):
        optimizer.load_state_dict(damaged)
