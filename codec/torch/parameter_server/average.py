"""Average the gradients of all workers: by TernGrad with shared scales, or from frames of other codecs."""

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
    """Return the means of gradients that workers send as ternary codes, with scales that all workers share.

    Parameters
    ----------
    session : Session
        Registered keys and connections.
    step : int
        Number of the step.
    gradients : mapping of str to torch.Tensor
        Gradients with the dtypes and shapes of their keys.
    spec : Ternary
        Codec, without a scale.

    Raises
    ------
    ArgumentError
        A gradient holds NaN or Inf.
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
            raise FrameError(
                f"the shared scale of {name!r} must be at least the magnitude on this rank, {mine[name]}, got {scale}"
            )
        if spec.clip is not None:
            gradient = gradient.clamp(-scale, scale)
        how = replace(spec, clip=None, scale=scale)
        frames[name] = codec.encode(gradient, how, stream=session.stream(step, name))
    _, sent = session.round(session.push(step, frames), session.pull(step, names, "exact_mean"))
    return session.decoded(sent, names, "exact_mean", scales)


def _shared_scales(session: Session, step: int, names: Sequence[str], mine: Mapping[str, float]) -> dict[str, float]:
    """Return the maximum over all workers of each gradient's magnitude, given those of this worker in `mine`.

    For each server, the magnitudes of the gradients whose keys it holds are sent as one vector, sorted by name.
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
    """Return the name of a key for the scales of `names`; :func:`server_of` assigns that key to `server`."""
    number = 0
    while True:
        name = f"{INTERNAL}scales {hash64(*names):x} {number}"
        if server_of(name, servers) == server:
            return name
        number += 1


def mean(
    session: Session, step: int, gradients: Mapping[str, torch.Tensor], spec: codec.Spec, mean_spec: codec.Spec
) -> dict[str, torch.Tensor]:
    """Return the means of gradients that workers send as frames of any codec, and servers as frames of `mean_spec`.

    The other parameters are those of :func:`terngrad`.
    """
    names = list(gradients)
    frames = {name: session.frame(step, name, gradients[name], spec) for name in names}
    _, values = session.round(session.push(step, frames), session.pull(step, names, "mean", mean_spec))
    return session.decoded(values, names, "mean")


def _rounded(limit: float, dtype: torch.dtype) -> float:
    """Round a scale to the dtype of its gradient, but never to 0."""
    return torch.tensor(limit, dtype=dtype, device="cpu").item() or limit
