"""Convert a DeepSpeed configuration with OneBitAdam or ZeroOneAdam to the arguments of codec.torch.OneBitAdam.

DeepSpeed need not be installed.
"""

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from codec import ArgumentError
from codec.arguments import shown, whole
from codec.specs import Sign
from codec.torch.one_bit_adam import OneBitAdam, ZeroOneSchedule

__all__ = ["Config", "read_config"]

_TYPES = {"onebitadam": "OneBitAdam", "zerooneadam": "ZeroOneAdam"}

# Alternatives to DeepSpeed optimizers that the converter does not support, by optimizer type.
_OTHERS = {
    "onebitlamb": "use OneBitAdam: 1-bit LAMB is not part of this library",
    "adam": "use torch.optim.AdamW with codec.torch.ddp_hook",
    "adamw": "use torch.optim.AdamW with codec.torch.ddp_hook",
}

# Keys that are ignored, each with advice on how to get the same effect; "" if no advice is needed.
_IGNORED = {
    "train_batch_size": "",
    "train_micro_batch_size_per_gpu": "",
    "gradient_accumulation_steps": "accumulate under no_sync()",
    "scheduler": "make a torch.optim.lr_scheduler",
    "bf16": "use torch.autocast",
    "bfloat16": "use torch.autocast",
    "communication_data_type": "pass warmup=",
    "prescale_gradients": "",
    "gradient_predivide_factor": "",
    "disable_allgather": "",
    "activation_checkpointing": "use torch.utils.checkpoint",
    "checkpoint": "save optimizer.state_dict()",
    "zero_allow_untested_optimizer": "",
    "zero_force_ds_cpu_optimizer": "",
    "dataloader_drop_last": "",
    "steps_per_print": "",
    "wall_clock_breakdown": "",
    "memory_breakdown": "",
    "dump_state": "",
    "tensorboard": "",
    "wandb": "",
    "csv_monitor": "",
    "comms_logger": "print optimizer.stats()",
    "flops_profiler": "",
    "autotuning": "",
}
_IGNORED_PARAMS = {"cuda_aware": "", "comm_backend_name": "", "bias_correction": "", "eps_inside_sqrt": ""}
_IGNORED_FP16 = {"auto_cast": "", "hysteresis": "", "consecutive_hysteresis": "", "min_loss_scale": ""}

# Keys that are refused, because training would differ if they were ignored, with advice on what to use instead.
_UNSUPPORTED = {
    "amp": "use torch.autocast and 'fp16' or 'bf16'",
    "sparse_gradients": "use nn.Embedding(sparse=False)",
    "sparse_attention": "build it into the model",
    "compression_training": "build it into the model",
    "progressive_layer_drop": "build it into the model",
    "curriculum_learning": "build it into the data loader",
    "data_efficiency": "build it into the data loader",
    "eigenvalue": "remove it",
    "elasticity": "use torchrun with --nnodes=MIN:MAX",
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
    top = _Section("", _read(config), ignored := [])
    optimizer = top.section("optimizer")
    if optimizer is None:
        raise ArgumentError("the DeepSpeed configuration has no 'optimizer': it must be OneBitAdam or ZeroOneAdam")
    kind = _kind(optimizer.take("type"))
    params = optimizer.section("params") or _Section("optimizer.params", {}, ignored)
    optimizer.end({"legacy_fusion": ""})
    arguments = _optimizer(kind, params)
    clipping = top.number("gradient_clipping")
    scaler = _grad_scaler(top.section("fp16"), arguments["freeze_step"])
    _check_zero(top.section("zero_optimization"))
    for name, instead in _UNSUPPORTED.items():
        if _is_on(value := top.take(name)):
            raise ArgumentError(f"{name!r} of the DeepSpeed configuration, {shown(value)}, is not supported: {instead}")
    top.end(_IGNORED)
    if ignored:
        warnings.warn(f"these keys of the DeepSpeed configuration have no effect: {', '.join(ignored)}", stacklevel=2)
    return Config(arguments, {"max_grad_norm": float(clipping)} if clipping else {}, scaler)


class _Section:
    """Section of a configuration. Reading an entry removes it, so entries that remain at the end are unknown.

    Parameters
    ----------
    path : str
        Dotted path of the section, for error messages; "" for the whole configuration.
    entries : mapping
        Entries of the section: values by key.
    ignored : list of str
        List to which :meth:`end` appends the paths of ignored keys.
    """

    def __init__(self, path: str, entries: Mapping[str, Any], ignored: list[str]) -> None:
        self._path, self._left, self._ignored = path, dict(entries), ignored

    def name(self, key: object) -> str:
        """Return the dotted path of a key, for error messages."""
        return f"{self._path}.{key}" if self._path else str(key)

    def take(self, key: str) -> Any:
        """Remove a key and return its value; None if the key is missing."""
        return self._left.pop(key, None)

    def section(self, key: str) -> "_Section | None":
        """Remove a key and return its value, a dict, as a section; None if the key is missing."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ArgumentError(f"{self.name(key)!r} of a DeepSpeed configuration must be a dict, got {shown(value)}")
        return _Section(self.name(key), cast(Mapping[str, Any], value), self._ignored)

    def number(self, key: str, below: float = math.inf) -> float | None:
        """Remove a key and return its value, a number in [0, below); None if the key is missing."""
        value = self.take(key)
        return None if value is None else _number(self.name(key), value, below)

    def count(self, key: str, default: int, least: int = 1) -> int:
        """Remove a key and return its value, an integer of at least `least`; `default` if the key is missing."""
        value = self.take(key)
        return default if value is None else whole(f"{self.name(key)!r}", value, least)

    def end(self, ignored: Mapping[str, str]) -> None:
        """Report the remaining keys as ignored, with hints; raise ArgumentError for a key that is not in `ignored`."""
        for key, value in self._left.items():
            if key not in ignored:
                raise ArgumentError(
                    f"{self.name(key)!r} of the DeepSpeed configuration, {shown(value)}, is unknown or not supported: "
                    "remove it, and implement in the training loop what it does"
                )
            hint = ignored[key]
            self._ignored.append(f"{self.name(key)} ({hint})" if hint else self.name(key))


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


def _number(name: str, value: Any, below: float = math.inf) -> float:
    """Return `value` if it is a number in [0, below), otherwise raise ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        limit = "of at least 0" if below == math.inf else f"from 0 to below {below}"
        raise ArgumentError(f"{name!r} of a DeepSpeed configuration must be a number {limit}, got {shown(value)}")
    return value


def _kind(given: Any) -> str:
    """Return the canonical name of the optimizer type; raise ArgumentError if it is not supported."""
    key = given.lower() if isinstance(given, str) else None
    if key in _TYPES:
        return _TYPES[key]
    instead = f": {_OTHERS[key]}" if key in _OTHERS else ""
    raise ArgumentError(f"'optimizer.type' must be OneBitAdam or ZeroOneAdam, got {shown(given)}{instead}")


def _optimizer(kind: str, params: _Section) -> dict[str, Any]:
    """Return the arguments of OneBitAdam for the parameters of a DeepSpeed optimizer."""
    found: dict[str, Any] = {}
    for name in ("lr", "eps", "weight_decay"):
        if (value := params.number(name)) is not None:
            found[name] = value
    if (betas := params.take("betas")) is not None:
        found["betas"] = _betas(params.name("betas"), betas)
    if _is_on(params.take("amsgrad")):
        raise ArgumentError(f"{params.name('amsgrad')!r} is not supported, as in DeepSpeed: remove it")
    if params.take("max_grad_norm"):
        name = params.name("max_grad_norm")
        raise ArgumentError(f"{name!r} is not supported, as in DeepSpeed: use 'gradient_clipping'")
    freeze_step = params.count("freeze_step", 100_000) if kind == "OneBitAdam" else _schedule(params)
    params.end(_IGNORED_PARAMS)
    return found | {"freeze_step": freeze_step, "spec": Sign(group_size=1024), "max_ratio": None}


def _betas(name: str, value: Any) -> tuple[float, ...]:
    """Return the decay rates of the first and the second moment, each in [0, 1)."""
    if not isinstance(value, list | tuple) or len(cast(Any, value)) != 2:
        raise ArgumentError(f"{name!r} must be a list of two numbers, got {shown(cast(Any, value))}")
    return tuple(_number(name, b, 1.0) for b in cast(Any, value))


def _schedule(params: _Section) -> ZeroOneSchedule:
    """Return the schedule of 0/1 Adam."""
    freeze_step, refreshes = params.count("var_freeze_step", 100_000), params.count("var_update_scaler", 16)
    double_every, most = params.count("local_step_scaler", 32_678), params.count("local_step_clipper", 16)
    if most & (most - 1):
        lower = 1 << (most.bit_length() - 1)
        raise ArgumentError(
            f"{params.name('local_step_clipper')!r} must be a power of 2 here, got {most}: use {lower} or {2 * lower}"
        )
    return ZeroOneSchedule(freeze_step, refreshes=refreshes, double_every=double_every, max_interval=most)


def _grad_scaler(fp16: _Section | None, freeze_step: Any) -> dict[str, Any] | None:
    """Return the arguments of a GradScaler; None if the configuration does not enable fp16."""
    if fp16 is None or not _is_on(fp16.take("enabled")):
        return None
    if isinstance(freeze_step, ZeroOneSchedule) and freeze_step.max_interval > 1:
        raise ArgumentError(
            "'fp16' is not supported with ZeroOneAdam, since the scalers of ranks could skip different local steps: "
            "use 'bf16', or \"local_step_clipper\": 1"
        )
    if fp16.number("loss_scale"):
        raise ArgumentError("'fp16.loss_scale' must be 0 here, for a dynamic scale: torch.amp.GradScaler has no other")
    if _is_on(fp16.take("fp16_master_weights_and_grads")):
        raise ArgumentError("'fp16.fp16_master_weights_and_grads' is not supported: keep parameters in float32")
    power, window = fp16.count("initial_scale_power", 16, 0), fp16.count("loss_scale_window", 1000)
    fp16.end(_IGNORED_FP16)
    return {"init_scale": 2.0 ** min(power, 127), "growth_interval": window}


def _check_zero(zero: _Section | None) -> None:
    """Raise ArgumentError if the configuration shards the optimizer (ZeRO stage 1 or higher)."""
    if zero is not None and (stage := zero.take("stage")) not in (None, 0):
        raise ArgumentError(
            f"'zero_optimization.stage' must be 0, got {shown(stage)}: use DistributedDataParallel, or "
            "OneBitAdam between the replicas of an FSDP2 model"
        )


def _is_on(value: Any) -> bool:
    """Return True if a feature is enabled. A section without the key ``enabled`` counts as enabled."""
    if isinstance(value, Mapping):
        return bool(cast(Mapping[str, Any], value).get("enabled", True))
    return bool(value)
