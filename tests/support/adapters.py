"""LoRA adapters, and an engine that loads them as vLLM does."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "tiny",
    "target_modules": ["q_proj", "up_proj"],
    "bias": "none",
}
PREFIX = "base_model.model.model.layers"


def adapter(seed, rank=4, zeros=False, **config):
    """Return the configuration and the tensors of an adapter; `zeros`: B is zero, as before the first step."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        for module in ("self_attn.q_proj", "mlp.up_proj"):
            a, b = rng.standard_normal((rank, 64)) / 8, rng.standard_normal((48, rank)) / 100
            tensors[f"{PREFIX}.{layer}.{module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{PREFIX}.{layer}.{module}.lora_B.weight"] = (b * (not zeros)).astype(np.float32)
    return {**CONFIG, "r": rank, **config}, tensors


def stepped(given, seed=0):
    """Return an adapter after a small training step."""
    rng = np.random.default_rng(seed)
    config, tensors = given
    return config, {
        n: x + np.float32(1e-5) * rng.standard_normal(x.shape).astype(np.float32) for n, x in tensors.items()
    }


class Engine:
    """Engine whose adapters are those of the folders at the time of the load. Loads numbered in `fail` fail."""

    def __init__(self, fail=()):
        self.served, self.fail, self.calls = {}, set(fail), []

    def load_lora_adapter(self, lora_name, lora_path):
        self.calls.append(("load", lora_name))
        if len([1 for call, _ in self.calls if call == "load"]) in self.fail:
            raise RuntimeError("out of memory")
        if lora_name in self.served:
            raise ValueError(f"The lora adapter '{lora_name}' has already been loaded.")
        folder = Path(lora_path)
        config = json.loads((folder / "adapter_config.json").read_text())
        self.served[lora_name] = config, load_file(folder / "adapter_model.safetensors")

    def unload_lora_adapter(self, lora_name):
        self.calls.append(("unload", lora_name))
        del self.served[lora_name]

    def serves(self, **adapters):
        """Return True if the engine serves these adapters, by name, to the bit, and no others."""
        names = {name.replace("_", "-"): given for name, given in adapters.items()}
        return self.served.keys() == names.keys() and all(equal(self.served[n], given) for n, given in names.items())


def equal(a, b):
    """Return True if two adapters are equal to the bit."""
    return (
        a[0] == b[0]
        and a[1].keys() == b[1].keys()
        and all(
            x.dtype == b[1][n].dtype and x.shape == b[1][n].shape and x.tobytes() == b[1][n].tobytes()
            for n, x in a[1].items()
        )
    )
