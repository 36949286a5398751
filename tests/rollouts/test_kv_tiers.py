"""File tiers of KV caches in LMCache, SGLang and vLLM store and load compressed pages. Run by make rollouts."""

import os
import time
from types import SimpleNamespace

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "LMCACHE_LOG_LEVEL": "CRITICAL"}

import numpy as np
import pytest
import torch

NBYTES = 4 * 2 * 64 * 256 * 2  # bytes of a chunk: layers, sides (keys, values), tokens, channels, bytes per value


def chunk(seed=0, shape=(2, 4, 64, 256)):
    """Return random bfloat16 keys and values (sides, layers, tokens, channels); a few key channels are large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[0] += 20 * (torch.rand(shape[-1], generator=generator) > 0.9)
    return x.to(torch.bfloat16)


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def files(folder):
    return [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 10_000]


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


class LMCache:
    """LMCache's file-system adapter behind its serde wrapper with our serde, and a source and a target buffer."""

    def __init__(self, folder, shapes=None, **settings):
        from lmcache.v1.distributed import api, config
        from lmcache.v1.distributed.l1_manager import L1Manager
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
        from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
        from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

        import codec.integrations.lmcache  # noqa: F401 - registers the serde

        memory = config.L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
        self.manager = L1Manager(config.L1ManagerConfig(memory_config=memory))
        serde = create_serde_processor(SerdeConfig("codec", settings))
        self.adapter = SerdeL2AdapterWrapper(FSL2Adapter(FSL2AdapterConfig(str(folder))), serde, self.manager)
        shapes = shapes or [torch.Size((2, 4, 64, 256))]
        self.layout = api.MemoryLayoutDesc(shapes=shapes, dtypes=[torch.bfloat16] * len(shapes))
        self.key = api.ObjectKey(chunk_hash=b"\1" * 16, model_name="model", kv_rank=0)
        names = [api.ObjectKey(chunk_hash=bytes([i]) * 16, model_name="l1", kv_rank=0) for i in (2, 3)]
        made = self.manager.reserve_write(keys=names, is_temporary=[True] * 2, layout_desc=self.layout, tag="test")
        self.source, self.target = (made[name][1] for name in names)

    def wait(self, poll):
        for _ in range(2000):
            if (result := poll()) is not None:
                return result
            time.sleep(0.005)
        raise TimeoutError

    def store(self):
        task = self.adapter.submit_store_task([self.key], [self.source])
        return self.wait(lambda: self.adapter.pop_completed_store_tasks().get(task)).is_successful()

    def load(self):
        task = self.adapter.submit_load_task([self.key], [self.target])
        return self.wait(lambda: self.adapter.query_load_result(task)).get_indices_list() == [0]


@pytest.mark.parametrize(
    ("settings", "size", "most"), [({}, 0.75, 0), ({"key_bits": 8, "value_bits": 4}, 0.45, 0.15), ({"slot": 2}, 1, 0)]
)
def test_lmcache_stores_and_loads_a_chunk(tmp_path, settings, size, most):
    host = LMCache(tmp_path, **settings)
    host.source.tensor.copy_(chunk())
    assert host.store()
    assert files(tmp_path)[0].stat().st_size <= size * NBYTES + 5000
    assert host.load()
    assert error(host.target.tensor, chunk()) <= most
    host.target.tensor.zero_()
    damage(files(tmp_path)[0])
    assert not host.load()
    assert not host.target.tensor.any()


def test_lmcache_takes_chunks_of_several_groups_and_latents(tmp_path):
    host = LMCache(tmp_path, [torch.Size((2, 2, 64, 128)), torch.Size((3, 64, 576))], value_bits=8)
    for i in range(2):
        host.source.get_tensor(i).copy_(chunk(i, host.layout.shapes[i]))
    assert host.store()
    assert host.load()
    assert torch.equal(host.target.get_tensor(0)[0], host.source.get_tensor(0)[0])
    assert all(error(host.target.get_tensor(i), host.source.get_tensor(i)) < 0.01 for i in range(2))


def test_lmcache_does_not_store_a_chunk_that_exceeds_its_slot(tmp_path):
    host = LMCache(tmp_path)
    host.source.tensor.view(torch.uint16).random_(0, 1 << 16)
    assert not host.store()
    assert not host.load()


class Pool(SimpleNamespace):
    """Stand-in for SGLang's host memory pool with the attributes that its file backend reads."""

    def __init__(self, layout):
        super().__init__(layout=layout, layer_num=4, page_size=64, head_num=4, head_dim=64, dtype=torch.bfloat16)

    def flat(self, x):
        """Return the values of a chunk in the order in which this layout stores them."""
        orders = {"page_first": (0, 2, 1, 3, 4), "page_head": (0, 3, 2, 1, 4)}
        return x.reshape(2, 4, 64, 4, 64).permute(orders.get(self.layout, (0, 1, 2, 3, 4))).flatten()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize(("bits", "most"), [({}, 0), ({"key_bits": 8, "value_bits": 8}, 0.01)])
def test_sglang_stores_and_loads_pages(tmp_path, layout, bits, most):
    storage = sglang_storage(tmp_path, layout, **bits)
    x = chunk()
    flat = storage.mem_pool_host.flat(x)
    assert storage.batch_set(["a", "b"], [flat, flat])
    assert storage.batch_exists(["a", "b", "c"]) == 2
    sizes = {p.stat().st_size for p in files(tmp_path)}
    assert len(sizes) == 1
    assert max(sizes) < (0.57 if bits else 0.7) * NBYTES
    out = [torch.zeros_like(flat) for _ in range(3)]
    a, b, c = storage.batch_get(["a", "b", "c"], out)
    assert (a is out[0], b is out[1], c) == (True, True, None)
    assert error(a, flat) <= most


def sglang_storage(folder, layout="layer_first", **settings):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    extra = {"backend_name": "codec", "module_path": "codec.integrations.sglang", "class_name": "CodecFile"}
    extra |= {"file_storage_path": str(folder), **settings}
    numbers = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": layout != "layer_first"}
    config = HiCacheStorageConfig(**numbers, **flags, model_name="org/model", extra_config=extra)
    storage = StorageBackendFactory.create_backend("dynamic", config, None)
    storage.register_mem_pool_host(Pool(layout))
    return storage


def test_sglang_stores_other_pages_without_loss(tmp_path):
    """Pages that contain NaN, and data of other pools (float32 state, bytes), are stored lossless."""
    storage = sglang_storage(tmp_path, key_bits=4, value_bits=4)
    broken = chunk()
    broken[0, 1, 2, 3] = float("nan")
    for name, x in (("nan", broken.flatten()), ("state", torch.rand(1000)), ("bytes", torch.arange(99).byte())):
        assert storage.set(name, x)
        assert torch.equal(storage.get(name, torch.zeros_like(x)).view(torch.uint8), x.view(torch.uint8))


def test_sglang_removes_a_damaged_page(tmp_path):
    storage = sglang_storage(tmp_path)
    flat = chunk().flatten()
    assert storage.set("a", flat)
    damage(files(tmp_path)[0])
    out = torch.zeros_like(flat)
    assert storage.get("a", out) is None
    assert not out.any()
    assert not storage.exists("a")
    assert storage.set("a", flat)
    assert torch.equal(storage.get("a", out), flat)


class Tier:
    """vLLM's secondary tier with our codec, above a primary tier of eight chunks with one layer after the other."""

    def __init__(self, folder, dtype="bfloat16", world=1):
        from vllm.v1.kv_offload import config
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        layers = tuple(f"layer.{i}" for i in range(4))
        group = config.OffloadingGroupConfig(tokens_per_block=64, layer_names=layers, group_id=0)
        parallel = {"tp_size": world, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0, "world_size": world}
        parallel |= {"data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None}
        settings = config.OffloadingConfig(
            groups=(group,),
            worker_kv_bytes_per_block=NBYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="test",
            model=config.OffloadingModelConfig(name="org/model", dtype=dtype),
            cache=config.OffloadingCacheConfig(tokens_per_hash=64, blocks_per_chunk=1),
            parallel=config.OffloadingParallelConfig(**parallel, is_parallelism_agnostic=False),
        )
        spec = SimpleNamespace(config=settings, blocks_per_chunk=1, replicated_layout=False)
        spec.cpu_page_size_per_worker = NBYTES // world
        self.memory = np.zeros((8, NBYTES + 4096), np.int8)  # vLLM pads each chunk to a page of memory
        tier = {"type": "CodecTier", "module_path": "codec.integrations.vllm_tier", "root_dir": str(folder)}
        self.tier = SecondaryTierFactory.create_secondary_tier(tier, memoryview(self.memory), spec)

    def row(self, i):
        return torch.from_numpy(self.memory)[i, :NBYTES].view(torch.bfloat16)

    def run(self, submit, keys, chunks):
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        context = ReqContext(req_id="r") if "req_id" in ReqContext.__annotations__ else ReqContext()
        submit(TransferJob(1, keys, np.array(chunks), True, context))
        self.tier.drain_jobs()
        [result] = self.tier.get_finished_jobs()
        return result


@pytest.mark.parametrize(("dtype", "world"), [("bfloat16", 1), ("bfloat16", 2), ("fp8_e4m3", 1)])
def test_vllm_tier_stores_and_loads_chunks(tmp_path, dtype, world):
    from vllm.v1.kv_offload.base import make_offload_key

    host = Tier(tmp_path, dtype, world)
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(3)]
    for i in range(3):
        host.row(i).copy_(chunk(i).flatten())
    assert host.run(host.tier.submit_store, keys, [0, 1, 2]).success
    sizes = [p.stat().st_size for p in files(tmp_path)]
    assert len(sizes) == 3
    if dtype == "bfloat16":
        assert max(sizes) < 0.7 * NBYTES
    assert host.run(host.tier.submit_load, keys, [5, 6, 7]).success
    assert all(torch.equal(host.row(5 + i), host.row(i)) for i in range(3))
    damage(host_file := next(p for p in files(tmp_path) if ("01" * 32) in p.name))
    host.memory[5:] = 0
    result = host.run(host.tier.submit_load, keys, [5, 6, 7])
    assert (result.success, tuple(result.successful_keys)) == (False, (keys[0],))
    assert torch.equal(host.row(5), host.row(0))
    assert not host.memory[6].any()
    assert not host_file.exists()
    host.tier.shutdown()
