"""Means of all workers' gradients: TernGrad's step with shared scales, and means of other frames."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np
import torch

import codec
from codec import FrameError
from codec.specs import Ternary
from codec.torch.network.version import hash64
from codec.torch.parameter_server.messages import INTERNAL, Key
from codec.torch.parameter_server.session import Session
from codec.torch.parameter_server.table import server_of
from codec.torch.reduction.arguments import as_array
from codec.torch.reduction.shared_scale import magnitude


def terngrad(
    session: Session, step: int, gradients: Mapping[str, torch.Tensor], spec: Ternary
) -> dict[str, torch.Tensor]:
    """Return the means of ternary codes under scales that all workers share.

    Parameters
    ----------
    session : Session
        Registered keys and connections.
    step : int
        Number of the step.
    gradients : mapping of str to torch.Tensor
        Gradients that go with their keys.
    spec : Ternary
        Spec without a scale.

    Raises
    ------
    ArgumentError
        A gradient has NaN or Inf.
    CodecError
        A server reports an error, or is lost.
    """
    names = list(gradients)
    values = {name: as_array(gradients[name].detach().float()) for name in names}
    mine = {n: _rounded(magnitude(x, spec), gradients[n].dtype) if x.size else 0.0 for n, x in values.items()}
    scales = _shared_scales(session, step, names, mine)
    frames: dict[str, Any] = {}
    for name in names:
        scale, gradient = scales[name], gradients[name].detach().cpu()
        if not isfinite(scale) or scale < mine[name]:
            raise FrameError(f"the shared scale of {name!r} is {scale}; the magnitude here is {mine[name]}")
        if spec.clip is not None:
            gradient = gradient.clamp(-scale, scale)
        how = replace(spec, clip=None, scale=scale)
        frames[name] = codec.encode(gradient, how, stream=session.stream(step, name))
    _, sent = session.round(session.push(step, frames), session.pull(step, names, "decode_average"))
    return session.decoded(sent, names, "decode_average", scales)


def _shared_scales(session: Session, step: int, names: Sequence[str], mine: Mapping[str, float]) -> dict[str, float]:
    """Return the largest magnitude of each gradient on any worker.

    The magnitudes of all gradients of one server are one vector, in the order of names.
    """
    groups = {s: sorted(group) for s, group in session.by_server(names).items()}
    keys = {s: Key(_scales_name(session.servers, s, group), "float32", (len(group),)) for s, group in groups.items()}
    if new := [key for key in keys.values() if key.name not in session.keys]:
        session.register(new)
    vectors = {keys[s].name: np.array([mine[n] for n in group], np.float32) for s, group in groups.items()}
    frames = {name: codec.encode(vector) for name, vector in vectors.items()}
    _, values = session.round(session.push(step, frames), session.pull(step, list(frames), "max"))
    largest = session.decoded(values, list(frames), "max")
    return {
        name: float(scale)
        for s, group in groups.items()
        for name, scale in zip(group, largest[keys[s].name], strict=True)
    }


def _scales_name(servers: Sequence[int], server: int, names: Sequence[str]) -> str:
    """Return a name of a key for the scales of some keys, which :func:`server_of` assigns to their server."""
    number = 0
    while True:
        name = f"{INTERNAL}scales {hash64(*names):x} {number}"
        if server_of(name, servers) == server:
            return name
        number += 1


def mean(
    session: Session, step: int, gradients: Mapping[str, torch.Tensor], spec: codec.Spec
) -> dict[str, torch.Tensor]:
    """Return the means of frames of any spec; parameters as for :func:`terngrad`."""
    names = list(gradients)
    frames = {name: session.frame(step, name, gradients[name], spec) for name in names}
    _, values = session.round(session.push(step, frames), session.pull(step, names, "mean"))
    return session.decoded(values, names, "mean")


def _rounded(limit: float, dtype: torch.dtype) -> float:
    """Return a limit of magnitudes, which must be a value of the tensor's dtype, rounded to it; not to 0."""
    return torch.tensor(limit, dtype=dtype, device="cpu").item() or limit
