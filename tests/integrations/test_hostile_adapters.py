"""Adapters of hostile stores: an error, and no file is written. Publishers reject such adapters, too."""

import json
import os
import re
import time

import ml_dtypes
import numpy as np
import pytest

import codec
from codec.integrations.adapters import adapter_weights
from codec.integrations.peft import AdapterPublisher, AdapterReceiver
from codec.weight_sync import Publisher
from support.adapters import PREFIX, Engine, adapter, equal, stepped

LAYER = f"{PREFIX}.0.self_attn.q_proj"


def changed(**config):
    given = adapter(1)
    return given[0] | config, given[1]


def with_tensor(name, shape=(4, 64), dtype=np.float32):
    config, tensors = adapter(1)
    return config, tensors | {name: np.zeros(shape, dtype)}


HOSTILE = {
    "auto_map": (changed(auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    "megatron": (changed(megatron_config={"a": 1}, megatron_core="os"), "megatron_config"),
    "remote code": (changed(trust_remote_code=True), "trust_remote_code"),
    "other method": (changed(peft_type="IA3"), "IA3, not LORA"),
    "no method": (changed(peft_type=None), "not LORA"),
    "huge rank": (adapter(1, rank=600), "1 to 512, got 600"),
    "rank of the configuration": (changed(r=8), "does not explain the ranks"),
    "huge rank in the configuration": (changed(r=10**30), "1 to 512"),
    "rank pattern": (changed(rank_pattern={"q_proj": 10**9}), "1 to 512"),
    "rank pattern of lists": (changed(rank_pattern=[4]), "rank_pattern is not a mapping"),
    "rank is true": (changed(r=True), "1 to 512, got True"),
    "half a pair": (with_tensor(f"{PREFIX}.7.self_attn.q_proj.lora_A.weight"), "does not explain the ranks"),
    "module": (with_tensor(f"{PREFIX}.0.mlp.gate_proj.lora_A.weight"), "does not explain the ranks|do not contain"),
    "base weights": (with_tensor(f"{LAYER}.weight"), "does not explain the tensor"),
    "bias": (with_tensor(f"{LAYER}.bias", (4,)), "does not explain the tensor"),
    "no prefix": (with_tensor("model.layers.0.self_attn.q_proj.lora_A.weight"), "does not explain the tensor"),
    "vector": (with_tensor(f"{LAYER}.lora_A.weight", (4,)), "does not explain the tensor"),
    "dtype": (with_tensor(f"{LAYER}.lora_A.weight", dtype=np.int32), "has dtype int32"),
    "long name": (with_tensor(f"{LAYER}{'.x' * 1000}.lora_A.weight"), "characters, more than 1000"),
    "many modules": (changed(modules_to_save=[f"m{k}" for k in range(101)]), "more than 100 entries"),
    "8 bits": (with_tensor(f"{LAYER}.lora_A.weight", dtype=ml_dtypes.float8_e4m3fn), "has dtype float8_e4m3fn"),
    "no tensors": ((adapter(1)[0], {}), "no tensors of LoRA"),
}


def pulled(tmp_path, weights, **how):
    """Publish any weights, and pull them; return the error."""
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(weights)
        with pytest.raises(codec.FrameError) as caught:
            AdapterReceiver(tmp_path / "adapters", Engine(), **how).pull(publisher.source)
    assert os.listdir(tmp_path / "adapters") == []
    return str(caught.value)


def weights_of(name, config, tensors):
    """Return an adapter as weights, unchecked."""
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    return {f"{name}/adapter_config.json": np.frombuffer(text, np.uint8)} | {
        f"{name}/{n}": x for n, x in tensors.items()
    }


@pytest.mark.parametrize("case", HOSTILE)
def test_adapter_is_rejected_by_receivers_and_publishers(tmp_path, case):
    given, message = HOSTILE[case]
    error = pulled(tmp_path, weights_of("policy", *given))
    assert "version 0 of the adapters is not loaded" in error
    assert re.search(message, error)
    with pytest.raises(codec.ArgumentError, match=message):
        adapter_weights({"policy": given})


@pytest.mark.parametrize("name", ["..", ".hidden", "a b", "", "x" * 101, "-rf", "a\0b", "é"])
def test_name_that_could_leave_the_folder_is_rejected(tmp_path, name):
    assert "its name must be" in pulled(tmp_path, weights_of(name, *adapter(1)))
    with pytest.raises(codec.ArgumentError, match="its name must be"):
        adapter_weights({name: adapter(1)})


def test_path_in_a_name_is_part_of_the_tensors_name(tmp_path):
    for name in ("../../evil", "/etc/evil"):
        error = pulled(tmp_path / name.replace("/", "_"), weights_of(name, *adapter(1)))
        assert "has no adapter_config.json" in error


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"peft_type": "LORA"}'], ids=range(7)
)
def test_configuration_that_is_not_one_is_rejected(tmp_path, text):
    assert "not loaded: its " in pulled(tmp_path, weights_of("policy", text, adapter(1)[1]))


def test_configuration_that_is_huge_or_of_another_kind_is_rejected(tmp_path):
    weights = weights_of("policy", *adapter(1))
    for k, value in enumerate((np.zeros(1 << 21, np.uint8), np.zeros((2, 2), np.uint8), np.zeros(3, np.float32))):
        error = pulled(tmp_path / str(k), weights | {"policy/adapter_config.json": value})
        assert "has no adapter_config.json" in error


def test_long_lists_in_a_configuration_take_no_time():
    """A hostile configuration of 1 MB has 50,000 target modules."""
    config, _ = adapter(1)
    targets = [f"m{k}" for k in range(50_000)]
    many = {f"{PREFIX}.{k}.m5.lora_{x}.weight": np.zeros((4, 4), np.float32) for k in range(1000) for x in "AB"}
    begin = time.process_time()
    adapter_weights({"policy": (config | {"target_modules": targets}, many)})
    assert time.process_time() - begin < 2


def test_too_many_adapters_are_rejected(tmp_path):
    weights = {f"a{k}/adapter_config.json": np.zeros(2, np.uint8) for k in range(300)}
    assert "300 adapters, more than 256" in pulled(tmp_path, weights)


def test_limits_of_the_receiver(tmp_path):
    weights = weights_of("policy", *adapter(1, rank=32))
    assert "1 to 16, got 32" in pulled(tmp_path / "rank", weights, max_rank=16)
    assert "is for the base model tiny, not large" in pulled(tmp_path / "base", weights, base_model="large")
    assert "more than max_nbytes, 1000" in pulled(tmp_path / "nbytes", weights, max_nbytes=1000)


def test_rejected_version_leaves_the_engine_serving_until_the_next_one(tmp_path):
    engine, good = Engine(), adapter(1)
    received = AdapterReceiver(tmp_path / "adapters", engine)
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish(weights_of("policy", *good))
        assert received.pull(publisher.source) == 0
        publisher.stage(weights_of("policy", *changed(auto_map={"a": "b.c"})), full=True)
        publisher.commit()
        for _ in range(2):
            with pytest.raises(codec.FrameError, match="auto_map"):
                received.pull(publisher.source)
        assert received.version == 0
        assert engine.serves(policy_v0=good)
        publisher.stage(weights_of("policy", *stepped(good)), full=True)
        publisher.commit()
        assert received.pull(publisher.source) == 2
        assert equal(engine.served["policy-v2"], stepped(good))


def test_publisher_drops_the_entry_by_which_peft_imports_the_model_class(tmp_path):
    """PEFT writes auto_mapping if task_type is not set; only AutoPeftModel reads it."""
    with AdapterPublisher(tmp_path / "store") as publisher:
        publisher.publish({"policy": changed(auto_mapping={"parent_library": "x", "base_model_class": "y"})})
        received = AdapterReceiver(tmp_path / "adapters", engine := Engine())
        received.pull(publisher.source)
    assert engine.served["policy-v0"][0]["auto_mapping"] is None


def test_trained_modules_biases_and_experts_are_explained_by_the_configuration():
    config, tensors = adapter(1)
    for extra, entries in {
        f"{LAYER}.bias": {"bias": "lora_only"},
        "base_model.model.lm_head.weight": {"modules_to_save": ["lm_head"]},
        f"{LAYER}.lora_magnitude_vector": {"use_dora": True},
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": {"trainable_token_indices": [1, 2]},
    }.items():
        adapter_weights({"policy": (config | entries, tensors | {extra: np.zeros(4, np.float32)})})
    experts = {
        f"{PREFIX}.0.mlp.experts.lora_{k}.weight": np.zeros(s, np.float32) for k, s in (("A", (32, 8)), ("B", (8, 32)))
    }
    with pytest.raises(codec.ArgumentError, match="ranks of"):
        adapter_weights({"policy": (config, tensors | experts)})
    adapter_weights({"policy": (config | {"target_parameters": ["mlp.experts.up_proj"]}, tensors | experts)})


@pytest.mark.parametrize(
    "given", [None, 3, "folder", {"policy": 3}, {"policy": "/nonexistent"}, {"policy": ({}, 3)}, {3: adapter(1)}]
)
def test_arguments_that_are_no_adapters(given):
    with pytest.raises(codec.ArgumentError):
        adapter_weights(given)
