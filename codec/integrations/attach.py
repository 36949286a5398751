"""Helpers of the gradient integrations: create a hook, register it with a model, and save and load its state."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from codec.arguments import shown
from codec.errors import ArgumentError, StateError
from codec.specs import Preset, Spec
from codec.torch import Hook, ddp_hook
from codec.torch._compat import comm_hooks
from codec.torch.ddp.lifetime import models

logger = logging.getLogger("codec.torch")

Given = Hook | Spec | Preset


def host(*modules: str) -> Any:
    """Import and return the first of `modules`, alternative names of one framework, that is installed.

    Raises
    ------
    ImportError
        None of the modules is installed.
    """
    for module in modules:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as e:
            if (e.name or "").split(".")[0] != module.split(".")[0]:
                raise
    package = modules[0].split(".")[0]
    raise ImportError(f"codec.integrations.{package} needs {package}, which is not installed: pip install {package}")


class WithHook:
    """Callback of a trainer that makes a hook when training begins. A subclass names the method that trains."""

    _train = "trainer.fit()"
    _hook: Hook | None = None

    @property
    def hook(self) -> Hook:
        """Hook of the model; available once training has begun.

        Raises
        ------
        StateError
            Training has not begun.
        """
        if self._hook is None:
            raise StateError(f"the hook is made when training begins: call {self._train} first")
        return self._hook


def hook_of(given: Given, how: Mapping[str, Any], optimizers: Sequence[Any] = (), scaler: Any = None) -> Hook:
    """Return `given` if it is a hook; otherwise create a hook with :func:`codec.torch.ddp_hook`.

    Parameters
    ----------
    given : Hook, Spec or str
        Hook, or the spec or preset of a new one.
    how : mapping
        Keyword arguments of :func:`codec.torch.ddp_hook` for a new hook.
    optimizers : sequence of torch.optim.Optimizer
        Optimizers that the framework uses, the default of ``optimizer=``.
    scaler : torch.amp.GradScaler or None
        Scaler that the framework uses. If it is enabled, it is the default of ``grad_scaler=``.

    Raises
    ------
    ArgumentError, SpecError
        `given` is a hook and `how` is not empty. Also the errors of :func:`codec.torch.ddp_hook`.
    """
    if isinstance(given, Hook):
        if how:
            raise ArgumentError(
                f"{shown(given)} exists already, and takes no further arguments: pass {', '.join(how)} to ddp_hook()"
            )
        return given
    arguments = dict(how)
    if optimizers:
        arguments.setdefault("optimizer", list(optimizers))
    if scaler is not None and scaler.is_enabled():
        arguments.setdefault("grad_scaler", scaler)
    return ddp_hook(given, **arguments)


def attach(hook: Hook, model: Any, world_size: int) -> bool:
    """Register a hook with the model that a framework has wrapped in a DistributedDataParallel.

    Returns
    -------
    bool
        False if the hook was not registered: in a run of one process, which sends no gradients.

    Raises
    ------
    ArgumentError
        The model is not a DistributedDataParallel, or has another hook.
    """
    plain: Any = _plain(model)
    if not isinstance(plain, DistributedDataParallel) and world_size == 1:
        logger.info("the run has a single process, which sends no gradients: nothing is compressed")
        hook.called = True  # so that the process logs no warning about an unused hook when it ends
        return False
    if not isinstance(plain, DistributedDataParallel) or all(h is not hook for h, _ in comm_hooks(plain)):
        hook.register(model)
    return True


def wrapper_of(module: Any) -> Any:
    """Return the DistributedDataParallel that wraps a module, or the module itself if there is none.

    If there are several, return the one with the fewest hooks. A wrapper from an earlier training run of the module
    still has its hook until it is garbage-collected.
    """
    ddp: list[Any] = [*models()]  # torch does not type its attributes
    found = [m for m in ddp if _plain(m.module) is _plain(module)]
    return min(found, key=lambda m: len(comm_hooks(m)), default=module)


def _plain(module: Any) -> Any:
    """Return the module that ``torch.compile`` has wrapped, or the module itself if it is not compiled."""
    return getattr(module, "_orig_mod", module)


def state_of(hook: Hook | None) -> dict[str, Any]:
    """Return the hook states of all ranks; an empty dict if the hook is not registered. All ranks must call this."""
    return {} if hook is None or hook.reducer.group is None else hook.state_dict(gather=True)


def restore(hook: Hook, state: Mapping[str, Any]) -> None:
    """Load a state from :func:`state_of` into a registered hook; reshard it if the number of ranks has changed."""
    group = hook.reducer.group
    if group is None:
        return
    if not state:
        logger.warning("the checkpoint holds no state of a hook: residuals begin at zero")
        return
    if len(state.get("ranks", ())) in (0, group.size()):
        hook.load_state_dict(state)
    else:
        mine: list[dict[str, Any]] = Hook.reshard(state, group.size())
        hook.load_state_dict(mine[int(group.rank())])
