"""Launcher ``python -m codec.run``: compress the gradients of a training script without editing it.

``torchrun --nproc-per-node 2 -m codec.run --codec small train.py ARGUMENT ...`` runs the script as ``__main__``. Each
DistributedDataParallel that the script makes gets a hook, :func:`codec.torch.ddp_hook`, before its first forward pass.
"""

import argparse
import functools
import gc
import logging
import os
import runpy
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
from codec._options import ALGORITHMS, CallOptions
from codec.errors import ArgumentError, CodecError, SpecError
from codec.optimizers.wrappers import unwrapped
from codec.spec_text import spec_of
from codec.specs import Spec
from codec.torch import Hook, ddp_hook
from codec.torch._compat import comm_hooks
from codec.torch.ddp.buckets import needs_optimizer

PROGRAM = "codec.run"
VARIABLE = "CODEC_DDP"  # environment variable with the default of --codec; "off" has the effect of --off

logger = logging.getLogger("codec.torch")

T = TypeVar("T")


class Launch:
    """Registers a hook with every DistributedDataParallel that the launched script creates.

    Parameters
    ----------
    spec : Spec
        Codec of the gradients.
    options : CallOptions
        Algorithm of the all-reduces.
    machines : tuple of int, optional
        Number of machines, and of ranks on each of them, for two levels. Default: one level.
    """

    def __init__(self, spec: Spec, options: CallOptions, machines: tuple[int, int] | None = None) -> None:
        self._spec, self._options, self._machines = spec, options, machines
        self._mesh: DeviceMesh | None = None  # of `machines`; None before the first model
        self._rank = 0
        self.hooks: list[Hook] = []
        self.models = 0  # number of DistributedDataParallel models that have run a forward pass, with or without a hook

    def install(self) -> None:
        """Let each DistributedDataParallel of this process register a hook in its first forward pass.

        Registration waits for the first forward pass, so that a script can register its own hook before. A model that
        has a hook is left unchanged.
        """
        ddp: Any = DistributedDataParallel
        plain = ddp.forward
        seen: weakref.WeakSet[Any] = weakref.WeakSet()

        @functools.wraps(plain)
        def forward(model: Any, *args: Any, **how: Any) -> Any:
            if model not in seen:
                seen.add(model)
                self._register(model)
            return plain(model, *args, **how)

        compiler: Any = torch.compiler
        ddp.forward = compiler.disable(forward, recursive=False)  # torch.compile still compiles the module inside

    def _register(self, model: Any) -> None:
        """Register a hook with a model, unless the model has a hook already."""
        self.models += 1
        self._rank = torch.distributed.get_rank()
        if comm_hooks(model):
            logger.warning(
                "%s does not compress the gradients of a model that has a communication hook of its own: %r",
                PROGRAM,
                comm_hooks(model)[0][0],
            )
            return
        how: dict[str, Any] = {"grad_scaler": _scaler(), "options": self._options}
        if needs_optimizer(self._spec):
            how["optimizer"] = _optimizers(model)
        hook = ddp_hook(self._spec, **how)
        try:
            hook.register(model, group=self._group_of(model))
        except ArgumentError as e:
            if not isinstance(e.__cause__, RuntimeError):
                raise
            hook.called = True  # suppresses the warning at exit about a hook that was never called
            logger.warning(
                "%s does not compress the gradients of a model that has a built-in communication hook", PROGRAM
            )
            return
        self.hooks.append(hook)
        logger.info("%s compresses the gradients of a model by %s", PROGRAM, self._spec)

    def _group_of(self, model: Any) -> DeviceMesh | None:
        """Return the mesh over which a model's gradients are averaged; None: the model's own group."""
        if self._machines is None:
            return None
        machines, ranks = self._machines
        if model.process_group.size() != machines * ranks:
            logger.warning(
                "%s: a model's gradients are averaged over %d of %d ranks, in one level: --machines is for models of "
                "all ranks",
                PROGRAM,
                model.process_group.size(),
                machines * ranks,
            )
            return None
        if self._mesh is None:
            device = next(model.parameters()).device.type
            self._mesh = init_device_mesh(device, self._machines, mesh_dim_names=("between", "within"))
        return self._mesh

    def report(self, *, stats: bool) -> None:
        """If `stats`, print on rank 0 the bytes that each hook has sent; warn if no model was compressed."""
        if not self.models and os.environ.get("RANK", "0") == "0":
            print(f"{PROGRAM}: nothing was compressed, since no DistributedDataParallel has run", file=sys.stderr)
        if stats and self._rank == 0:
            for hook in self.hooks:
                print(f"{PROGRAM}: {hook.spec}: {hook.stats()}", file=sys.stderr, flush=True)


def machines_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of machines, and of ranks on each of them, from the variables that torchrun sets.

    Raises
    ------
    ArgumentError
        LOCAL_WORLD_SIZE is missing, or the machines have different numbers of ranks.
    """
    try:
        world, ranks, rank = (int(environment[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"))
        first = int(environment.get("GROUP_RANK", rank // ranks)) * ranks  # torchrun's rank of the machine
    except (KeyError, ValueError, ZeroDivisionError):
        raise ArgumentError(
            "--machines needs WORLD_SIZE, LOCAL_WORLD_SIZE and RANK as torchrun sets them: start the script by torchrun"
        ) from None
    if world % ranks or not first <= rank < first + ranks:
        raise ArgumentError(
            f"--machines: WORLD_SIZE={world}, LOCAL_WORLD_SIZE={ranks}, RANK={rank}: each machine must have the same "
            "number of ranks, and consecutive ones: start equally many on each by --nproc-per-node"
        )
    return world // ranks, ranks


def _living(kind: type[T]) -> list[T]:
    """Return all existing instances of a class in this process."""
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def _scaler() -> Any:
    """Return the script's enabled GradScaler, or None if there is not exactly one."""
    scalers = [s for s in _living(torch.amp.GradScaler) if s.is_enabled()]
    if len(scalers) > 1:
        logger.warning(
            "%s: the script has %d GradScalers, so that none is used: NaN and Inf in gradients are errors",
            PROGRAM,
            len(scalers),
        )
    return scalers[0] if len(scalers) == 1 else None


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that have the trainable parameters of a model.

    Raises
    ------
    SpecError
        A parameter is in none of them, or in several.
    """
    wanted = {p for p in model.parameters() if p.requires_grad}
    plain: set[torch.optim.Optimizer] = {unwrapped(o) for o in _living(torch.optim.Optimizer)}
    params = {o: wanted & {p for g in o.param_groups for p in g["params"]} for o in plain}
    found = {o: mine for o, mine in params.items() if mine}
    if sum(map(len, found.values())) != len(wanted) or set().union(*found.values()) != wanted:
        raise SpecError(
            "the codec needs optimizers that have each parameter of the model exactly once, found "
            f"{sum(map(len, found.values()))} in {len(found)} optimizers for {len(wanted)} parameters at the first "
            "forward pass: make the optimizers before that pass, or use a codec that needs none, such as --codec "
            "balanced"
        )
    return list(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script with compressed gradients. The script's exit code and exceptions are passed on."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Run a training script; compress the gradients of each DistributedDataParallel that it makes.",
        epilog="example: torchrun --nproc-per-node 2 -m codec.run --codec small train.py --epochs 3",
    )
    parser.add_argument(
        "--codec", default=os.environ.get(VARIABLE), help=f"preset, or spec such as 'Quantize(4)'; default: ${VARIABLE}"
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, default="auto", help="algorithm of all-reduces; default: auto"
    )
    parser.add_argument(
        "--machines",
        action="store_true",
        help="sum gradients uncompressed within each machine, and compress between machines; a machine has "
        "LOCAL_WORLD_SIZE ranks",
    )
    parser.add_argument("--stats", action="store_true", help="print the number of bytes sent when the script ends")
    parser.add_argument(
        "--off", action="store_true", help=f"run the script without compression, as {VARIABLE}=off does"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", help="Python file, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args(argv)
    launch: Launch | None = None
    if not args.off and args.codec != "off":
        if not args.codec:
            parser.error(
                f"no codec was given: pass --codec small, set {VARIABLE}=small, or pass --off to compress nothing"
            )
        try:
            machines = machines_of(os.environ) if args.machines else None
            launch = Launch(spec_of(args.codec), codec.options(algorithm=args.algorithm), machines)
        except CodecError as e:
            parser.error(str(e))
        launch.install()
    sys.argv = [args.script, *args.arguments]
    try:
        if args.module:
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(args.script))
            runpy.run_path(args.script, run_name="__main__")
    finally:
        if launch is not None:
            launch.report(stats=args.stats)


if __name__ == "__main__":
    main()
