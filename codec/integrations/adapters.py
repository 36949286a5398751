"""LoRA adapters as weights: the tensors of each adapter, and its ``adapter_config.json`` as a tensor of bytes.

The name of a tensor is the name of its adapter, a slash, and the name that PEFT gives the tensor. So updates, digests,
signatures and stores of weights hold for adapters, too.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from codec.errors import ArgumentError
from codec.weight_sync.files import read_safetensors
from codec.weight_sync.updates.kinds import TensorKind
from codec.weight_sync.updates.mapping import mapped
from codec.weight_sync.updates.shards import tensor_of
from codec.weight_sync.updates.weights import kind_of, view_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # files of a folder that PEFT saves
DTYPES = ("float64", "float32", "bfloat16", "float16")  # in the order in which files of safetensors place them
MAX_RANK = 512  # largest rank that vLLM serves
MAX_ADAPTERS = 256
_MAX_CONFIG = 1 << 20  # bytes
_MAX_NAME = 1000  # characters in the name of a tensor
_MAX_SAVED = 100  # entries of modules_to_save
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LORA = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
_VECTOR = re.compile(r"(.+)\.(?:lora_magnitude_vector(?:\.weight)?|lora_B\.bias)")  # of DoRA, and of lora_bias
_PREFIX = "base_model.model."
_IMPORTS = ("auto_map", "auto_mapping", "megatron_config", "trust_remote_code")  # keys by which loaders import code


class Adapter(NamedTuple):
    """Configuration and tensors of an adapter."""

    config: bytes
    tensors: dict[str, Any]


def adapter_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return adapters as weights.

    Parameters
    ----------
    given : mapping of str to path or (mapping, mapping)
        For each name of an adapter the folder that PEFT has saved, or its configuration and its tensors.

    Raises
    ------
    ArgumentError
        An adapter cannot be read, or :func:`check_adapter` rejects it.
    """
    if not isinstance(cast(Any, given), Mapping):
        raise ArgumentError(f"adapters must be a mapping from names to folders, got {type(given).__name__}")
    weights = dict[str, Any]()
    for name, source in given.items():
        try:
            adapter = _read(source)
            check_adapter(name, adapter.config, {n: kind_of(n, view_of(n, x)) for n, x in adapter.tensors.items()})
        except ValueError as e:
            raise ArgumentError(f"adapter {name!r} cannot be published: {e}") from None
        weights[f"{name}/{CONFIG}"] = np.frombuffer(adapter.config, np.uint8)
        weights |= {f"{name}/{n}": x for n, x in adapter.tensors.items()}
    return weights


def _read(source: Any) -> Adapter:
    """Return an adapter, whose configuration names no code to import, with the text that PEFT writes."""
    if isinstance(source, str | os.PathLike):
        folder = Path(cast(str, source))
        config = json.loads(bytes(mapped(folder / CONFIG)))
        slots, _ = read_safetensors(str(folder / WEIGHTS))
        tensors: dict[str, Any] = {tensor_of(key): slot.view for key, slot in slots.items()}
    else:
        try:
            config, tensors = source
            config, tensors = dict(config), dict(tensors)
        except (TypeError, ValueError):
            raise ValueError("pass a folder that PEFT has saved, or a pair of configuration and tensors") from None
    if isinstance(config, dict):
        config = {k: v for k, v in cast(dict[str, Any], config).items() if k != "runtime_config"}
        config |= {k: None for k in config if k == "auto_mapping"}
    return Adapter(json.dumps(config, indent=2, sort_keys=True, default=_plain).encode(), tensors)


def _plain(value: Any) -> Any:
    """Return a value of a configuration that JSON lacks, such as a set, as PEFT writes it."""
    if isinstance(value, set | frozenset):
        return sorted(cast(set[Any], value))
    raise ValueError(f"its configuration contains a {type(value).__name__}")


def split(kinds: Mapping[str, TensorKind]) -> dict[str, dict[str, str]]:
    """Return for each adapter in weights the names of its tensors, with their names in the weights.

    Raises
    ------
    ValueError
        The weights are something else.
    """
    adapters = dict[str, dict[str, str]]()
    for full in kinds:
        name, slash, tensor = full.partition("/")
        if not slash:
            raise ValueError(f"{full!r} is not a tensor of an adapter: the store has other weights")
        adapters.setdefault(name, {})[tensor] = full
    if len(adapters) > MAX_ADAPTERS:
        raise ValueError(f"there are {len(adapters)} adapters, more than {MAX_ADAPTERS}")
    for name, tensors in adapters.items():
        kind = kinds.get(tensors.get(CONFIG, ""))
        if kind is None or kind.dtype != "uint8" or len(kind.shape) != 1 or kind.nbytes > _MAX_CONFIG:
            raise ValueError(f"adapter {name!r} has no {CONFIG}")
    return adapters


def check_adapter(
    name: str,
    text: bytes,
    kinds: Mapping[str, TensorKind],
    base_model: str | None = None,
    max_rank: int = MAX_RANK,
) -> None:
    """Check that an adapter is one of LoRA, imports no code, and has the tensors that its configuration describes.

    Parameters
    ----------
    name : str
        Name of the adapter, which occurs in names of files.
    text : bytes
        Its configuration.
    kinds : mapping of str to TensorKind
        Dtype and shape of its tensors.
    base_model : str, optional
        ``base_model_name_or_path`` that the configuration must have.
    max_rank : int
        Maximum rank.

    Raises
    ------
    ValueError
        The adapter is something else.
    """
    if not isinstance(cast(Any, name), str) or not _NAME.fullmatch(name):
        raise ValueError("its name must be 1 to 100 letters, digits, dots, dashes and underscores")
    config = _parsed(text)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"its peft_type is {config.get('peft_type')!s:.40}, not LORA")
    if bad := [key for key in _IMPORTS if config.get(key)]:
        raise ValueError(f"its configuration has {bad[0]}, by which loaders import code: remove the entry")
    found = config.get("base_model_name_or_path")
    if base_model is not None and found != base_model:
        raise ValueError(f"it is for the base model {found!s:.200}, not {base_model}")
    _check_tensors(kinds, _ranks(config, max_rank), config)


def _parsed(text: bytes) -> dict[str, Any]:
    if len(text) > _MAX_CONFIG:
        raise ValueError(f"its configuration has {len(text)} bytes, more than {_MAX_CONFIG}")
    try:
        config = json.loads(text)
    except RecursionError:
        raise ValueError("its configuration is nested too deeply") from None
    except ValueError:
        raise ValueError("its configuration is not JSON") from None
    if not isinstance(config, dict):
        raise ValueError("its configuration is not a JSON object")
    return cast(dict[str, Any], config)


def _ranks(config: Mapping[str, Any], most: int) -> set[int]:
    """Return the ranks that a configuration gives modules: ``r``, and the values of ``rank_pattern``."""
    pattern: Any = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise ValueError("its rank_pattern is not a mapping")
    ranks = [config.get("r"), *cast(dict[str, Any], pattern).values()]
    for rank in ranks:
        if type(rank) is not int or not 1 <= rank <= most:
            raise ValueError(f"its rank must be 1 to {most}, got {rank!s:.40}")
    return set(cast(list[int], ranks))


def _check_tensors(kinds: Mapping[str, TensorKind], ranks: set[int], config: Mapping[str, Any]) -> None:
    pairs = dict[str, dict[str, int]]()
    saved: Any = config.get("modules_to_save")
    if isinstance(saved, list) and len(cast(list[Any], saved)) > _MAX_SAVED:
        raise ValueError(f"its modules_to_save has more than {_MAX_SAVED} entries")
    for name, kind in kinds.items():
        if name == CONFIG:
            continue
        if len(name) > _MAX_NAME:
            raise ValueError(f"the name of a tensor has {len(name)} characters, more than {_MAX_NAME}")
        if kind.dtype not in DTYPES:
            raise ValueError(
                f"its tensor {name!r} has dtype {kind.dtype}, but adapters have one of {', '.join(DTYPES)}"
            )
        inner = name.removeprefix(_PREFIX)
        if (found := _LORA.fullmatch(inner)) and inner != name and len(kind.shape) >= 2:
            pairs.setdefault(found[1], {})[found[2]] = kind.shape[found[2] == "B"]
        elif inner == name or not (_VECTOR.fullmatch(inner) or _is_trained(inner, config)):
            raise ValueError(f"its configuration does not explain the tensor {name!r}")
    listed: Any = config.get("target_modules")
    targets = {t for t in cast(list[Any], listed) if isinstance(t, str)} if isinstance(listed, list) else None
    experts = bool(config.get("target_parameters"))  # the ranks of a layer's experts are added
    for module, sizes in pairs.items():
        a, b = sizes.get("A"), sizes.get("B")
        if not a or a != b or not (a in ranks or (experts and any(a % rank == 0 for rank in ranks))):
            raise ValueError(f"its configuration does not explain the ranks of {module!r}: {a} and {b}")
        if targets is not None and not experts and not _is_target(module, targets):
            raise ValueError(f"its target_modules do not contain {module!r}")
    if not pairs:
        raise ValueError("it has no tensors of LoRA")


def _is_target(module: str, targets: set[Any]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[k:]) in targets for k in range(len(parts)))


def _is_trained(name: str, config: Mapping[str, Any]) -> bool:
    """Return True for a tensor of a whole module, a bias, or tokens, which the configuration says were trained."""
    saved: Any = config.get("modules_to_save")
    if isinstance(saved, list) and any(isinstance(m, str) and f".{m}." in f".{name}" for m in cast(list[Any], saved)):
        return True
    if name.endswith(".bias"):
        return config.get("bias") in ("all", "lora_only")
    return bool(config.get("trainable_token_indices")) and "trainable_tokens_delta" in name
