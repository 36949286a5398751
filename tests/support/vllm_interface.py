"""The trainer's side of vLLM's weight transfers, as far as codec.integrations.vllm_trainer uses it, without vLLM."""

import dataclasses
import importlib.util
import sys
import types
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch.distributed import tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")


class _InitInfo:
    """TrainerInitInfo of vLLM: the rank is a keyword, and rank 0 sends."""

    @property
    def is_sender(self):
        return self.rank == 0


_InitInfo = dataclasses.make_dataclass(
    "TrainerInitInfo", [("rank", int, dataclasses.field(kw_only=True))], bases=(_InitInfo,)
)


class _Engine(Generic[T]):
    def __init__(self, *, client, source=None, is_sender=True):
        self.client, self.source, self.is_sender = client, source, is_sender


def iterable_interface():
    """Return a module with the names of vLLM 0.32: a WeightSource is iterable."""

    class WeightSource:
        pass

    class ModuleSource(WeightSource):
        def __init__(self, module):
            self._module = module

        def __iter__(self):
            return iter(self._module.named_parameters())

    return types.SimpleNamespace(
        WeightSource=WeightSource,
        ModuleSource=ModuleSource,
        TrainerInitInfo=_InitInfo,
        TrainerWeightTransferEngine=_Engine,
    )


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Placement: every rank along this axis of the mesh has the whole extent."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Placement: this axis of the mesh splits a dimension as torch.chunk does."""

    dim: int


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    """Parameter of the whole model: its owners, and how their mesh splits it. Placements of None: it is replicated."""

    name: str
    dtype: torch.dtype
    shape: tuple
    owners: tuple | None = dataclasses.field(default=None, kw_only=True)
    mesh_shape: tuple | None = dataclasses.field(default=None, kw_only=True)
    placements: tuple | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def of(cls, name, p):
        """Return the metadata of a parameter, which may be a DTensor."""
        shape = tuple(p.shape)
        if not isinstance(p, DTensor):
            return cls(name, p.dtype, shape)
        placements = tuple(Shard(x.dim) if type(x) is tensor.Shard else Replicate() for x in p.placements)
        if not plain(p) or all(x == Replicate() for x in placements):
            placements = None
        mesh = p.device_mesh.mesh
        return cls(
            name,
            p.dtype,
            shape,
            owners=tuple(mesh.flatten().tolist()),
            mesh_shape=tuple(mesh.shape),
            placements=placements,
        )


def plain(p):
    """Return True if the placements of a DTensor can be stated in ParamMeta: those of FSDP with TP cannot."""
    return all(type(x) in (tensor.Shard, tensor.Replicate) for x in p.placements)


def owned_interface():
    """Return a module with the names of vLLM 0.33: a WeightSource has iter_full() or iter_local(), and metadata."""

    class WeightSource:
        def implements_iter_full(self):
            return type(self).iter_full is not WeightSource.iter_full

        def implements_iter_local(self):
            return type(self).iter_local is not WeightSource.iter_local

        def iter_full(self):
            raise NotImplementedError

        def iter_local(self):
            raise NotImplementedError

    class ModuleSource(WeightSource):
        def __init__(self, module):
            self._module = module

        @cached_property
        def metadata(self):
            return [ParamMeta.of(name, p) for name, p in self._module.named_parameters()]

        def iter_full(self):
            for name, p in self._module.named_parameters():
                yield name, p.full_tensor() if isinstance(p, DTensor) else p

        def iter_local(self):
            for name, p in self._module.named_parameters():
                if isinstance(p, DTensor):
                    yield name, p.to_local() if plain(p) else p.full_tensor()
                else:
                    yield name, p

    return types.SimpleNamespace(
        WeightSource=WeightSource,
        ModuleSource=ModuleSource,
        ParamMeta=ParamMeta,
        TrainerInitInfo=_InitInfo,
        TrainerWeightTransferEngine=_Engine,
    )


def file_interface(path):
    """Return the module in a file base.py of vLLM, which imports two names of vLLM for its annotations."""
    for name, attribute in (("parallel", "ParallelConfig"), ("weight_transfer", "WeightTransferConfig")):
        module = sys.modules[f"vllm.config.{name}"] = types.ModuleType(f"vllm.config.{name}")
        setattr(module, attribute, object)
    spec = importlib.util.spec_from_file_location("vllm.distributed.weight_transfer.base", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
