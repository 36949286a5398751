"""PEFT loads the adapters that a receiver has written; logits equal the trainer's to the bit. Run by make rollouts."""

import ast
import importlib.util
import json
from pathlib import Path

import peft
import pytest
import torch
import transformers

from codec.integrations.peft import AdapterPublisher, AdapterReceiver

TOKENS = torch.arange(12).reshape(2, 6)
CONFIGS = {
    "causal": {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"},
    "no task": {"r": 8, "target_modules": "all-linear", "lora_alpha": 4},
    "pattern": {"r": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 16}, "use_rslora": True},
    "regex": {"r": 2, "target_modules": r".*\.(q|k)_proj", "lora_dropout": 0.1},
    "dora": {"r": 4, "target_modules": ["q_proj"], "use_dora": True},
    "bias": {"r": 4, "target_modules": ["q_proj"], "bias": "lora_only"},
    "head": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]},
    "tokens": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
}


def base_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Qwen2Config(vocab_size=64, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    return transformers.Qwen2ForCausalLM(config)


def step(model, optimizer):
    model.train()
    logits = model(TOKENS).logits.float()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_adapter_gives_the_logits_of_the_trainer(tmp_path, name, dtype):
    model = peft.get_peft_model(base_model().to(dtype), peft.LoraConfig(**CONFIGS[name]), autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    received = AdapterReceiver(tmp_path / "adapters")
    with AdapterPublisher(tmp_path / "store", host="127.0.0.1") as publisher:
        for version in range(3):
            step(model, optimizer)
            model.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
            assert publisher.publish({"policy": tmp_path / "saved"}) == version
            assert received.pull(publisher.source) == version
            folder = Path(received.paths[f"policy-v{version}"])
            loaded = peft.PeftModel.from_pretrained(base_model().to(dtype), str(folder), autocast_adapter_dtype=False)
            with torch.no_grad():
                assert torch.equal(loaded.eval()(TOKENS).logits, model(TOKENS).logits)
            saved = tmp_path / "saved"
            weights = "adapter_model.safetensors"
            assert (folder / weights).read_bytes() == (saved / weights).read_bytes()
            ours, theirs = (json.loads((f / "adapter_config.json").read_text()) for f in (folder, saved))
            assert ours == theirs | {"auto_mapping": None}


def test_state_dict_and_configuration_of_a_model(tmp_path):
    """Without files of its own, as for a sharded model whose tensors are gathered one by one."""
    model = peft.get_peft_model(base_model(), peft.LoraConfig(r=4, target_modules={"q_proj", "v_proj"}))
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    received = AdapterReceiver(tmp_path / "adapters")
    with AdapterPublisher(tmp_path / "store") as publisher:
        publisher.publish({"policy": (model.peft_config["default"].to_dict(), tensors)})
        received.pull(publisher.source)
    loaded = peft.PeftModel.from_pretrained(base_model(), received.paths["policy-v0"]).eval()
    assert torch.equal(loaded(TOKENS).logits, model.eval()(TOKENS).logits)


def test_sglang_has_the_calls_by_which_a_receiver_loads_adapters():
    """A server of SGLang needs a GPU: the names of its calls are read from its source."""
    folder = Path(importlib.util.find_spec("sglang").origin).parent / "srt/entrypoints"
    calls = {
        node.name: [arg.arg for arg in node.args.args]
        for node in ast.walk(ast.parse((folder / "engine.py").read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert calls["load_lora_adapter"][1:3] == ["lora_name", "lora_path"]
    assert calls["unload_lora_adapter"][1:] == ["lora_name"]
    for call in ("load_lora_adapter", "unload_lora_adapter"):
        assert f'"/{call}"' in (folder / "http_server.py").read_text()
