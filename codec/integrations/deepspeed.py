"""Convert a DeepSpeed configuration with OneBitAdam or ZeroOneAdam to the arguments of codec.torch.OneBitAdam.

Provisional: may change in any version.

DeepSpeed need not be installed.
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from codec import ArgumentError
from codec.arguments import shown, whole
from codec.specs import Sign
from codec.torch.one_bit_adam import OneBitAdam, VarianceSchedule

__all__ = ["Config", "read_config"]


class _Refused(NamedTuple):
    """Entry of a key without which training would differ: an error, unless it is off, with advice on an alternative."""

    advice: str


def _number(name: str, value: Any, below: float = math.inf) -> float:
    """Return `value` if it is a number in [0, below), otherwise raise ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        limit = "of at least 0" if below == math.inf else f"from 0 to below {below}"
        raise ArgumentError(f"{name!r} of a DeepSpeed configuration must be a number {limit}, got {shown(value)}")
    return value


def _count(name: str, value: Any, least: int = 1) -> int:
    return whole(repr(name), value, least)


def _betas(name: str, value: Any) -> tuple[float, ...]:
    """Return the decay rates of the first and the second moment, each in [0, 1)."""
    if not isinstance(value, list | tuple) or len(cast(Any, value)) != 2:
        raise ArgumentError(f"{name!r} must be a list of two numbers, got {shown(cast(Any, value))}")
    return tuple(_number(name, b, 1.0) for b in cast(Any, value))


def _power_of_2(name: str, value: Any) -> int:
    number = _count(name, value)
    if number & (number - 1):
        lower = 1 << (number.bit_length() - 1)
        raise ArgumentError(f"{name!r} must be a power of 2 here, got {number}: use {lower} or {2 * lower}")
    return number


def _kind(name: str, value: Any) -> str:
    """Return the canonical name of the optimizer type; raise ArgumentError if it is not supported."""
    key = value.lower() if isinstance(value, str) else None
    if key in _TYPES:
        return _TYPES[key]
    instead = f": {_OTHERS[key]}" if key in _OTHERS else ""
    raise ArgumentError(f"{name!r} must be OneBitAdam or ZeroOneAdam, got {shown(value)}{instead}")


def _section(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name!r} of a DeepSpeed configuration must be a dict, got {shown(value)}")
    return cast(Mapping[str, Any], value)


_TYPES = {"onebitadam": "OneBitAdam", "zerooneadam": "ZeroOneAdam"}
_OTHERS = {  # alternatives to other optimizers of DeepSpeed, by type
    "onebitlamb": "use OneBitAdam: 1-bit LAMB is not part of this library",
    "adam": "use torch.optim.AdamW with codec.torch.ddp_hook",
    "adamw": "use torch.optim.AdamW with codec.torch.ddp_hook",
}

_WITHOUT_EFFECT = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "prescale_gradients", "gradient_predivide_factor",
    "disable_allgather", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "tensorboard", "wandb", "csv_monitor",
    "flops_profiler", "autotuning",
)  # fmt: skip

# Known keys of each section: a function that checks and returns a value; or _Refused; or, for a key that is ignored,
# advice on how to get the same effect ("" if no advice is needed). "optimizer.params" has the keys of its type, too.
_Entry = Callable[[str, Any], Any] | _Refused | str
_KEYS: Mapping[str, Mapping[str, _Entry]] = {
    "": {
        **dict.fromkeys(_WITHOUT_EFFECT, ""),
        "optimizer": _section,
        "fp16": _section,
        "zero_optimization": _section,
        "gradient_clipping": _number,
        "gradient_accumulation_steps": "accumulate under no_sync()",
        "scheduler": "make a torch.optim.lr_scheduler",
        "bf16": "use torch.autocast",
        "bfloat16": "use torch.autocast",
        "communication_data_type": "pass warmup=",
        "activation_checkpointing": "use torch.utils.checkpoint",
        "checkpoint": "save optimizer.state_dict()",
        "comms_logger": "print optimizer.stats()",
        "amp": _Refused("use torch.autocast and 'fp16' or 'bf16'"),
        "sparse_gradients": _Refused("use nn.Embedding(sparse=False)"),
        "sparse_attention": _Refused("build it into the model"),
        "compression_training": _Refused("build it into the model"),
        "progressive_layer_drop": _Refused("build it into the model"),
        "curriculum_learning": _Refused("build it into the data loader"),
        "data_efficiency": _Refused("build it into the data loader"),
        "eigenvalue": _Refused("remove it"),
        "elasticity": _Refused("use torchrun with --nnodes=MIN:MAX"),
    },
    "optimizer": {"type": _kind, "params": _section, "legacy_fusion": ""},
    "optimizer.params": {
        "lr": _number,
        "eps": _number,
        "weight_decay": _number,
        "betas": _betas,
        **dict.fromkeys(("cuda_aware", "comm_backend_name", "bias_correction", "eps_inside_sqrt"), ""),
        "amsgrad": _Refused("remove it, which DeepSpeed does not support either"),
        "max_grad_norm": _Refused("use 'gradient_clipping', as with DeepSpeed"),
    },
    "OneBitAdam": {"freeze_step": _count},
    "ZeroOneAdam": {
        "var_freeze_step": _count,
        "var_update_scaler": _count,
        "local_step_scaler": _count,
        "local_step_clipper": _power_of_2,
    },
    "fp16": {
        "enabled": lambda _, value: value,
        "initial_scale_power": lambda name, value: _count(name, value, 0),
        "loss_scale_window": _count,
        "loss_scale": _Refused("use 0, for a dynamic scale: torch.amp.GradScaler has no other"),
        "fp16_master_weights_and_grads": _Refused("keep parameters in float32"),
        **dict.fromkeys(("auto_cast", "hysteresis", "consecutive_hysteresis", "min_loss_scale"), ""),
    },
    "zero_optimization": {
        "stage": _Refused("use DistributedDataParallel, or OneBitAdam between the replicas of an FSDP2 model")
    },
}


@dataclass(frozen=True)
class Config:
    """Arguments for this library's optimizer that :func:`read_config` has computed from a DeepSpeed configuration.

    Attributes
    ----------
    arguments : dict
        Arguments of :class:`codec.torch.OneBitAdam`, without ``params``.
    register : dict
        Arguments of :meth:`codec.torch.OneBitAdam.register`: ``max_grad_norm``, if there is ``gradient_clipping``.
    grad_scaler : dict or None
        Arguments of ``torch.amp.GradScaler``; None if ``fp16`` is not enabled. Pass the scaler to ``register``, too.
    """

    arguments: dict[str, Any]
    register: dict[str, Any]
    grad_scaler: dict[str, Any] | None = None

    def optimizer(self, params: Iterable[Any]) -> OneBitAdam:
        """Return the optimizer. Like DeepSpeed's, it does not correct the bias of the moments.

        Parameters
        ----------
        params : iterable
            Parameters, named parameters or parameter groups.
        """
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        return OneBitAdam([{"bias_correction": False} | group for group in groups], **self.arguments)


def read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """Read a DeepSpeed configuration whose optimizer is OneBitAdam or ZeroOneAdam.

    After a lossless warm-up, ranks exchange signs of the momenta. Optimizer parameters that the configuration omits
    have DeepSpeed's defaults. Steps are not limited, as in DeepSpeed: ``config.arguments["max_ratio"] = 1`` prevents
    that they diverge where second moments are tiny.

    Parameters
    ----------
    config : mapping, str or path
        Configuration, or the path of its JSON file.

    Returns
    -------
    Config
        Arguments of the optimizer; its method ``optimizer()`` creates the optimizer.

    Warns
    -----
    UserWarning
        Once, with all keys that have no effect here.

    Raises
    ------
    ArgumentError
        The file cannot be read. Or a key is unknown, is unsupported, or has an invalid value; the message then names
        the key and an alternative.

    Examples
    --------
    >>> from codec.integrations.deepspeed import read_config
    >>> params = {"lr": 4e-4, "freeze_step": 23_000}
    >>> config = read_config({"optimizer": {"type": "OneBitAdam", "params": params}, "gradient_clipping": 1.0})
    >>> optimizer = config.optimizer(torch.nn.Linear(100, 100).parameters())
    >>> optimizer.freeze_step, config.register
    (23000, {'max_grad_norm': 1.0})
    """
    ignored: list[str] = []
    top = _take("", _KEYS[""], _read(config), ignored)
    if "optimizer" not in top:
        raise ArgumentError("the DeepSpeed configuration has no 'optimizer': it must be OneBitAdam or ZeroOneAdam")
    optimizer = _take("optimizer", _KEYS["optimizer"], top["optimizer"], ignored)
    kind = optimizer.get("type") or _kind("optimizer.type", None)
    known = {**_KEYS["optimizer.params"], **_KEYS[kind]}
    arguments = _arguments(kind, _take("optimizer.params", known, optimizer.get("params", {}), ignored))
    stage = {"stage": top.get("zero_optimization", {}).get("stage")}
    _take("zero_optimization", _KEYS["zero_optimization"], stage, ignored)
    scaler = None
    given = top.get("fp16", {"enabled": False})
    if _is_on(given):
        schedule = arguments["freeze_step"]
        if isinstance(schedule, VarianceSchedule) and schedule.max_interval > 1:
            raise ArgumentError(
                "'fp16' is not supported with ZeroOneAdam, since the scalers of ranks could skip different local "
                "steps: use 'bf16', or \"local_step_clipper\": 1"
            )
        fp16 = _take("fp16", _KEYS["fp16"], given, ignored)
        power, window = fp16.get("initial_scale_power", 16), fp16.get("loss_scale_window", 1000)
        scaler = {"init_scale": 2.0 ** min(power, 127), "growth_interval": window}
    if ignored:
        warnings.warn(f"these keys of the DeepSpeed configuration have no effect: {', '.join(ignored)}", stacklevel=2)
    clipping = top.get("gradient_clipping")
    return Config(arguments, {"max_grad_norm": float(clipping)} if clipping else {}, scaler)


def _take(section: str, known: Mapping[str, _Entry], given: Mapping[str, Any], ignored: list[str]) -> dict[str, Any]:
    """Return the checked values of a section by key, without those that are None; append ignored keys to `ignored`."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{section}.{key}" if section else str(key)
        entry = known.get(key)
        if entry is None:
            raise ArgumentError(
                f"{name!r} of the DeepSpeed configuration, {shown(value)}, is unknown or not supported: remove it, and "
                "implement in the training loop what it does"
            )
        if isinstance(entry, str):
            ignored.append(f"{name} ({entry})" if entry else name)
        elif isinstance(entry, _Refused):
            if _is_on(value):
                raise ArgumentError(
                    f"{name!r} of the DeepSpeed configuration, {shown(value)}, is not supported: {entry.advice}"
                )
        elif value is not None:
            found[key] = entry(name, value)
    return found


def _arguments(kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of OneBitAdam for the parameters of a DeepSpeed optimizer."""
    found = {name: params[name] for name in ("lr", "eps", "weight_decay", "betas") if name in params}
    if kind == "OneBitAdam":
        steps = params.get("freeze_step", 100_000)
    else:
        steps = VarianceSchedule(
            params.get("var_freeze_step", 100_000),
            refreshes=params.get("var_update_scaler", 16),
            double_every=params.get("local_step_scaler", 32_678),
            max_interval=params.get("local_step_clipper", 16),
        )
    return found | {"freeze_step": steps, "spec": Sign(group_size=1024), "max_ratio": None}


def _read(config: Any) -> Mapping[str, Any]:
    """Return the configuration as a mapping; read it from a JSON file if `config` is a path."""
    if isinstance(config, Mapping):
        return cast(Mapping[str, Any], config)
    if not isinstance(config, str | os.PathLike):
        raise ArgumentError(f"config must be a dict or the path of a JSON file, got {shown(config)}")
    path = os.fspath(cast("str | os.PathLike[str]", config))
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file, object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as e:
        raise ArgumentError(f"the DeepSpeed configuration {shown(path)} cannot be read: {shown(e)}") from e
    if not isinstance(found, dict):
        raise ArgumentError(f"the DeepSpeed configuration {shown(path)} must be a JSON object, got {shown(found)}")
    return cast(dict[str, Any], found)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raise ValueError for a duplicate key, which DeepSpeed refuses, too."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return found


def _is_on(value: Any) -> bool:
    """Return True if a feature is enabled. A section without the key ``enabled`` counts as enabled."""
    if isinstance(value, Mapping):
        return bool(cast(Mapping[str, Any], value).get("enabled", True))
    return bool(value)
