"""from_pretrained of transformers reads packed files once codec.integrations.transformers is imported."""

import json
import shutil

import pytest
import torch
import transformers

import codec
import codec.integrations.transformers
from support.command import run
from support.documentation import blocks


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=1000, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def equal(a, b):
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(x.dtype == two[n].dtype and torch.equal(x, two[n]) for n, x in one.items())


def packed(model, tmp_path, **how):
    """Save a model, pack its files, and return the folder of the packed model."""
    model.save_pretrained(tmp_path / "plain", **how)
    (tmp_path / "packed").mkdir()
    name = "model.safetensors.index.json" if how else "model.safetensors"
    assert run("pack", tmp_path / "plain" / name, "-o", tmp_path / "packed" / ("" if how else name)) == 0
    for file in ("config.json", "generation_config.json"):
        shutil.copy(tmp_path / "plain" / file, tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "200KB"}])
def test_packed_models_are_loaded_bit_identical(model, tmp_path, dtype, shards):
    model = model.to(dtype)
    folder = packed(model, tmp_path, **shards)
    for how in ({"dtype": "auto"}, {"disable_mmap": True}):
        for place in (folder, tmp_path / "plain"):
            assert equal(transformers.GPT2LMHeadModel.from_pretrained(place, **how), model)
    assert equal(transformers.AutoModel.from_pretrained(folder), model.transformer)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]  # then it is that of the first tensor
    (folder / "config.json").write_text(json.dumps(config))
    assert transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == dtype


def test_damaged_packed_models_are_refused(model, tmp_path):
    path = packed(model, tmp_path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(codec.ChecksumError, match="the checksum does not match"):
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "packed")


def test_page_runs(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    [block] = [b for b in blocks("Transformers", "docs/guides/model-files.md") if "from_pretrained" in b]
    names = {}
    monkeypatch.setattr("subprocess.run", lambda command, check: run(*command[1:]))
    exec(block, names)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert equal(names["AutoModel"].from_pretrained("model"), model.transformer)
