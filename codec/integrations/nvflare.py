# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false
# The framework is not installed where types are checked: its classes are unknown.
"""NVFlare integration: a filter that encodes outgoing arrays as frames and decodes incoming ones.

Provisional: may change in any version.
"""

import logging
import threading
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey

from codec._c.traits import is_lossless
from codec.arguments import shown
from codec.errors import FrameError
from codec.integrations.federated import checked_spec, decode_array, encode_array, is_float
from codec.specs import Lossless

__all__ = ["FrameFilter"]

KINDS = "codec.kinds"  # key of a DXO's meta: kind of each encoded array, FRAME or DIFFERENCE, by name
TORCH = "codec.torch"  # key of a DXO's meta: True if the arrays were torch tensors
BASE = "codec.base"  # property of the context that stores the arrays of the current task

logger = logging.getLogger("codec.nvflare")


class FrameFilter(DXOFilter):
    """Filter that encodes the arrays that a site sends, and decodes the arrays that it receives.

    Configure it four times: for task data and for task results, at the server and at all clients. It must be the last
    filter of outgoing and the first of incoming data. It encodes numpy arrays and torch tensors of the data kinds
    WEIGHTS and WEIGHT_DIFF, and returns a new DXO; the given DXO is unchanged. A damaged frame, another shape or
    another base is a filter error, which NVFlare counts for this client only. If one of the four is missing, so that
    arrays are sent uncompressed, the logger ``codec.nvflare`` warns once.

    Parameters
    ----------
    spec : str
        Codec for the results that clients send: the name of a preset, or a spec in Python syntax, "Quantize(4)". Lossy
        codecs encode a WEIGHT_DIFF itself; for WEIGHTS they encode the change since the start of the task. Task data
        are encoded losslessly.
    feedback : bool
        Error feedback for lossy codecs: the encoding error (residual) of a result is added to this client's next
        result. The filter stores residuals in memory while the job runs, 4 bytes per value.

    Raises
    ------
    SpecError
        The spec is unknown, or training with it does not converge with this `feedback`.
    """

    def __init__(self, spec: str = "lossless", feedback: bool = True) -> None:
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(kinds, kinds)
        self.spec, self.feedback = spec, feedback  # NVFlare reads constructor arguments from attributes
        self._codec = checked_spec(spec, feedback)
        self._residuals: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        self._lock = threading.Lock()
        self._warned = False

    def process_dxo(self, dxo: DXO, shareable: Any, fl_ctx: Any) -> DXO:
        """Return a DXO with encoded arrays if it leaves this site, with decoded arrays if it arrives."""
        is_task = self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN
        leaves = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT
        # None on a client; the server has several peers.
        peer = fl_ctx.get_peer_context() if is_task == leaves else None
        key = f"{BASE}/{peer.get_identity_name()}" if peer else BASE
        base = {} if is_task else fl_ctx.get_prop(key, {})
        meta = dict(dxo.meta)
        self._warn_of_missing_filters(dxo, base, leaves, is_task)
        data = self._encoded(dxo, base, is_task, meta) if leaves else _decoded(dxo, base, is_task, meta)
        if is_task:
            arrays = {name: x for name, x in (dxo.data if leaves else data).items() if _is_array(x)}
            if not leaves:  # copy the base: trainers change the received arrays in place
                arrays = {name: x.copy() if isinstance(x, np.ndarray) else x.clone() for name, x in arrays.items()}
            fl_ctx.set_prop(key, arrays, private=True, sticky=True)
        return DXO(dxo.data_kind, data, meta)

    def _warn_of_missing_filters(self, dxo: DXO, base: dict[str, Any], leaves: bool, is_task: bool) -> None:
        """Warn once if arrays are sent uncompressed, because a filter is missing on this or on the other site."""
        if self._warned or not any(map(_is_array, dxo.data.values())):
            return
        if leaves and not is_task and not base:
            self._warned = True
            logger.warning("results are not compressed, because no FrameFilter is an input filter of this client")
        elif not leaves and KINDS not in dxo.meta:
            self._warned = True
            logger.warning("arrays arrive uncompressed, because no FrameFilter is an output filter of the other site")

    def _encoded(self, dxo: DXO, base: dict[str, Any], is_task: bool, meta: dict[str, Any]) -> dict[str, Any]:
        spec = Lossless() if is_task else self._codec
        lossy = not is_lossless(spec)
        data, kinds, residuals, is_torch = dict(dxo.data), {}, {}, False
        with self._lock:
            for name, x in dxo.data.items():
                if not _is_array(x) or not (is_task or name in base):
                    continue
                is_torch |= not isinstance(x, np.ndarray)
                at, residual = (str(dxo.data_kind), name), None
                if lossy and self.feedback and is_float(x):
                    residual = self._residuals.get(at, np.zeros(x.shape, np.float32)).copy()
                    residuals[at] = residual
                before = base.get(name) if dxo.data_kind == DataKind.WEIGHTS else None
                kinds[name], data[name] = encode_array(x, spec, before, residual)
            self._residuals |= residuals  # store residuals only after all arrays were encoded
        meta |= {KINDS: kinds, TORCH: is_torch}
        return data


def _decoded(dxo: DXO, base: dict[str, Any], is_task: bool, meta: dict[str, Any]) -> dict[str, Any]:
    kinds, data, like = meta.pop(KINDS, {}), dict(dxo.data), None
    if not isinstance(kinds, dict):
        raise FrameError(f"{KINDS!r} in the meta of the message must be a dict, got {shown(kinds)}")
    if meta.pop(TORCH, False) and kinds:
        import torch

        like = torch.empty(0)
    if kinds and not base and not is_task:
        raise FrameError("the result holds frames, but no FrameFilter is an output filter of this server's tasks")
    for name, kind in kinds.items():
        frame, before = data.get(name), base.get(name)
        if not isinstance(frame, bytes) or (before is None and not is_task):
            raise FrameError(f"{shown(name)} is not an array of the task, or its frame is not bytes")
        try:
            x = decode_array(kind, frame, before, like)
        except FrameError as e:
            e.args = (f"{name}: {e}",)
            raise
        if like is not None and isinstance(x, np.ndarray):  # `x` is the sum of base and difference
            x = torch.from_numpy(x).to(before.dtype)  # pyright: ignore
        data[name] = x
    return data


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or (hasattr(x, "detach") and hasattr(x, "dtype"))
