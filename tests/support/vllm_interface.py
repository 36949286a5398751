"""The trainer's side of vLLM's weight transfers, as far as codec.integrations.vllm_trainer uses it, without vLLM."""

import dataclasses
import importlib.util
import sys
import types
from functools import cached_property
from typing import Generic, TypeVar

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
class _ParamMeta:
    name: str
    dtype: object
    shape: tuple
    owners: tuple | None = dataclasses.field(default=None, kw_only=True)


def owned_interface():
    """Return a module with the names of vLLM 0.33: a WeightSource has iter_full(), and each parameter has owners."""

    class WeightSource:
        def implements_iter_full(self):
            return type(self).iter_full is not WeightSource.iter_full

        def iter_full(self):
            raise NotImplementedError

    class ModuleSource(WeightSource):
        def __init__(self, module):
            self._module = module

        @cached_property
        def metadata(self):
            return [_ParamMeta(name, p.dtype, tuple(p.shape)) for name, p in self._module.named_parameters()]

        def iter_full(self):
            return iter(self._module.named_parameters())

    return types.SimpleNamespace(
        WeightSource=WeightSource,
        ModuleSource=ModuleSource,
        ParamMeta=_ParamMeta,
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
