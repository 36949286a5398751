"""Compressed weight updates are loaded by a vLLM engine that generates on the CPU. Run by make rollouts."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
import vllm
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

import codec
from codec.integrations.vllm_trainer import CodecTrainerInitInfo, full_weights
from codec.weight_sync.store.source import read_head
from support.group_publishing import publish_saved
from support.ranks import run_ranks

SIZE = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZE |= {"num_key_value_heads": 1, "max_position_embeddings": 128}
PROMPT = {"prompt_token_ids": [1, 2, 3, 4]}
GREEDY = vllm.SamplingParams(max_tokens=12, temperature=0, detokenize=False, ignore_eos=True, logprobs=1)


def new_model(kind, seed=0):
    """Return a small random model: Qwen3-MoE with grouped experts if `kind` is "moe", else dense Qwen2."""
    torch.manual_seed(seed)
    if kind == "moe":
        config = transformers.Qwen3MoeConfig(
            **SIZE, intermediate_size=128, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZE, intermediate_size=128))
    return model.to(torch.bfloat16)


class Served:
    """vLLM engine with the methods that a trainer calls on its client."""

    def __init__(self, folder):
        self.llm = vllm.LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=64,
            enforce_eager=True,
            enable_prefix_caching=False,
            weight_transfer_config={"backend": "codec"},
        )
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        self.worker = executor.driver_worker.worker
        self.model = self.worker.model_runner.get_model()
        self.start_weight_update, self.finish_weight_update = (
            self.llm.start_weight_update,
            self.llm.finish_weight_update,
        )

    def init_weight_transfer_engine(self, info):
        self.llm.init_weight_transfer_engine({"init_info": info})

    def update_weights(self, info):
        self.llm.update_weights({"update_info": info})

    def weights(self):
        return {name: x.detach().clone() for name, x in self.model.state_dict().items()}

    def generated(self):
        """Return (token, log-probability) pairs of a greedy completion."""
        [out] = self.llm.generate([PROMPT], GREEDY, use_tqdm=False)
        steps = zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True)
        return [(token, step[token].logprob) for token, step in steps]


def same(a, b):
    different = [k for k in a if k not in b or not torch.equal(bits(a[k]), bits(b[k]))]
    return (a.keys() == b.keys() and not different) or print(different)


def bits(x):
    return x.reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module", params=["dense", "moe"])
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    new_model(request.param).save_pretrained(folder)
    engine = Served(folder)
    engine.kind, engine.folder = request.param, folder
    yield engine
    engine.worker.shutdown_weight_transfer_engine()
    del engine.llm
    gc.collect()


@pytest.fixture
def trainer(served, tmp_path):
    """Return a trainer that has sent its initial weights to the engine."""
    served.worker.weight_transfer_engine.shutdown()
    model = new_model(served.kind, seed=1)
    info = CodecTrainerInitInfo(folder=str(tmp_path / "updates"), rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=served, source=ModuleSource(model))
    engine.model = model
    engine.send_weights()
    yield engine
    engine.shutdown()


def step(model, seed, names=None):
    """Change 2% of the values of weights whose name contains `names`, as a training step does. None: all weights."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if names is None or names in name:
                flat = p.view(-1)
                at = torch.from_numpy(rng.choice(len(flat), max(1, len(flat) // 50), replace=False))
                flat[at] *= 1.5


def fresh(model, path):
    """Save the model, load it into an engine of another process, and return that engine's weights and completion."""
    model.save_pretrained(path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # tests/support is not installed
    command = [sys.executable, __file__, path, path / "result"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(path / "result")


def test_engine_has_the_weights_of_one_that_loads_them_from_files(served, trainer, tmp_path):
    for k in range(3):
        step(trainer.model, k)
        trainer.send_weights()
    weights, tokens = fresh(trainer.model, tmp_path / "model")
    assert same(served.weights(), weights)
    assert served.generated() == tokens


def test_change_of_one_expert_or_layer_leaves_the_others(served, trainer, tmp_path):
    """vLLM loads grouped layers as a whole, so weights that did not change must not become undefined."""
    step(trainer.model, 1, "layers.0.mlp.experts" if served.kind == "moe" else "layers.1.self_attn.q_proj")
    trainer.send_weights()
    weights, tokens = fresh(trainer.model, tmp_path / "model")
    assert same(served.weights(), weights)
    assert not any(x.isnan().any() for x in served.weights().values() if x.is_floating_point())
    assert served.generated() == tokens


@pytest.mark.parametrize("fault", ["damaged", "other base", "not staged"])
def test_refused_update_leaves_the_engine_serving(served, trainer, fault, monkeypatch):
    weights, tokens = served.weights(), served.generated()
    publisher = trainer._publisher
    step(trainer.model, 2)
    if fault == "damaged":
        stage = publisher.stage

        def damage(given):
            update = stage(given)
            path = publisher._store.path(update.version, update.base)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.unlink()
            path.write_bytes(data)
            return update

        monkeypatch.setattr(publisher, "stage", damage)
    elif fault == "other base":
        served.worker.weight_transfer_engine._receiver._base.weights["model.norm.weight"].memory[0] ^= 1
    else:
        original = served.update_weights
        monkeypatch.setattr(served, "update_weights", lambda info: original({**info, "phase": "load"}))
    with pytest.raises(Exception):  # noqa: B017, PT011 - vLLM's own
        trainer.send_weights()
    assert same(served.weights(), weights)
    assert served.generated() == tokens


def test_failure_inside_load_is_rolled_back(served, trainer, tmp_path, monkeypatch):
    """The engine returns to the version that it served before, and the next update brings it up to date."""
    weights, tokens = served.weights(), served.generated()
    original, calls = served.model.load_weights, []

    def load_weights(tensors):
        calls.append(None)
        if len(calls) > 1:
            return original(tensors)
        some = [pair for pair, _ in zip(tensors, range(7), strict=False)]
        original(iter(some))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(served.model, "load_weights", load_weights)
    step(trainer.model, 3)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.send_weights()
    assert len(calls) == 2
    assert same(served.weights(), weights)
    assert served.generated() == tokens
    step(trainer.model, 4)
    trainer.send_weights()
    expected, tokens = fresh(trainer.model, tmp_path / "model")
    assert same(served.weights(), expected)
    assert served.generated() == tokens


def test_worker_that_starts_again_catches_up(served, trainer, tmp_path):
    step(trainer.model, 5)
    trainer.send_weights()
    served.worker.weight_transfer_engine.shutdown()
    served.init_weight_transfer_engine({"source": trainer._publisher.source})
    step(trainer.model, 6)
    trainer.send_weights()
    expected, _ = fresh(trainer.model, tmp_path / "model")
    assert same(served.weights(), expected)


def test_engine_loads_the_shards_of_two_ranks(served, trainer, tmp_path):
    model, paths = new_model(served.kind, seed=2), [tmp_path / "first", tmp_path / "second"]
    for seed, path in enumerate(paths):
        step(model, seed, "layers.1")
        torch.save(dict(model.named_parameters()), path)
    assert run_ranks(2, publish_saved, str(tmp_path / "sharded"), paths) == [1, 1]
    served.init_weight_transfer_engine({"source": str(tmp_path / "sharded")})
    for update in read_head(tmp_path / "sharded").updates:
        served.start_weight_update()
        for phase in ("stage", "load"):
            served.update_weights({"phase": phase, "update": update.fields(with_run=True)})
        served.finish_weight_update()
    weights, tokens = fresh(model, tmp_path / "model")
    assert same(served.weights(), weights)
    assert served.generated() == tokens


def test_update_is_small(trainer):
    step(trainer.model, 7)
    update = trainer._publisher.stage(full_weights(trainer.source))
    trainer._publisher.abandon()
    nbytes = sum(p.nbytes for p in trainer.model.parameters())
    assert isinstance(update, codec.Update)
    assert update.nbytes < nbytes / 4


if __name__ == "__main__":
    engine = Served(sys.argv[1])
    torch.save((engine.weights(), engine.generated()), sys.argv[2])
