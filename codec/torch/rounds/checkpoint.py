"""States of Rounds in checkpoints: entries, and their checks."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from codec import FrameError, StateError
from codec.stateful.schema import STEPS, Schema, array, in_json, mapping, plain, read_fields, real
from codec.torch._compat import from_numpy
from codec.torch.local_steps.checkpoint import check_outer
from codec.torch.rounds.follower import RunPlace, SentChange
from codec.torch.rounds.member import Member
from codec.torch.rounds.objects import MOST_WEIGHT, ChangeHead, SnapshotHead
from codec.torch.rounds.site import Site, check_tensors

_STATE = Schema(
    "Rounds",
    {
        **dict.fromkeys(("steps", "since"), STEPS),
        "weight": real(2 * MOST_WEIGHT),
        **dict.fromkeys(("life", "parameters"), plain(str)),
        "place": in_json(mapping()),
        **dict.fromkeys(("anchors", "outer", "sent"), mapping()),
        "residual": array("float32"),
    },
)
_SENT = {"steps": STEPS, "since": STEPS, "data": array("uint8"), "parts": mapping(), "residual": array("float32")}
_REMEDY = "load one that state_dict() of Rounds returned"


def state_of(member: Member) -> dict[str, Any]:
    """Return the state of a site."""
    site, sent, place = member.site, member.sent, member.place
    head = SnapshotHead(
        place.run, site.rounds, site.arguments(), place.before, site.anchors_digest(), place.awaited, place.merged
    )
    found: dict[str, Any] = {}
    if sent is not None:
        found = {
            "steps": sent.steps,
            "since": sent.since,
            "data": torch.frombuffer(bytearray(sent.data), dtype=torch.uint8),
            "parts": _by_name(site, sent.parts),
            "residual": _tensor(sent.residual),
        }
    return _STATE.save(
        {
            "steps": member.steps,
            "since": member.since,
            "weight": member.weight,
            "life": member.life,
            "parameters": site.digest(),
            "place": json.dumps(head.entries()),
            "anchors": {name: x.clone() for name, x in site.anchors.items()},
            "outer": {} if site.outer is None else site.outer.state_dict(),
            "sent": found,
            "residual": _tensor(site.residual),
        }
    )


def load(member: Member, saved: Any) -> None:
    """Continue from a state of an earlier process of this site.

    Raises
    ------
    StateError
        The state is damaged, or is of another run, model or site, or the model has other parameters. Nothing is
        changed.
    """
    entries, site = _STATE.read(saved), member.site
    try:
        head = SnapshotHead.read("place", entries["place"])
        check_tensors("anchors", entries["anchors"], site.anchors)
        sent = _sent(member, entries["sent"])
    except FrameError as e:
        raise StateError(f"the Rounds state is damaged, or of another model: {e}") from e
    if head.run != member.place.run or head.round > member.version:
        raise StateError("the Rounds state is of another run than the store: pass the store= of the saved Rounds")
    check_outer(site.outer, entries["outer"])
    former = site.replaced
    if former is not None and former.digest != entries["parameters"]:
        former = None
    if former is None and entries["parameters"] != site.digest():
        raise StateError(
            "the model does not have the parameters with which this state was saved: call model.load_state_dict() with "
            "the model that this site saved together with the state, and then load_state_dict() of the Rounds"
        )
    n = site.residual_size
    residuals = [entries["residual"], *([] if sent is None else [sent.residual])]
    if any(len(x) not in (0, n) for x in residuals if x is not None):
        raise StateError("the Rounds state has residuals of another model")
    site.load_outer(entries["outer"])
    with torch.no_grad():
        for x, values in () if former is None else former.values:
            x.copy_(values)
        for name, anchor in site.anchors.items():
            anchor.copy_(entries["anchors"][name])
    site.rounds, site.replaced = head.round, None
    site.residual = entries["residual"] if len(entries["residual"]) else None
    place = RunPlace(head.run, head.before, head.awaited, head.merged)
    member.resume(entries["life"], place, sent, (entries["steps"], entries["since"], entries["weight"]))


def _sent(member: Member, given: Mapping[str, Any]) -> SentChange | None:
    """Return the change that was sent when a state was saved."""
    if not given:
        return None
    found = read_fields("'sent' of the Rounds state", _REMEDY, _SENT, given)
    data = found["data"].tobytes()
    head = ChangeHead.read("sent", member.access.opened_any(data))
    parts = found["parts"]
    check_tensors(
        "sent change", parts, {k: a.detach().to("meta", torch.float32) for k, a in member.site.anchors.items()}
    )
    by_piece = [
        [parts[p.name].to(a.device) for p, a in zip(f.pieces, f.anchors, strict=True)] for f in member.site.fragments
    ]
    residual = found["residual"] if len(found["residual"]) else None
    return SentChange(head.name, data, found["steps"], found["since"], head.weight, by_piece, residual)


def _by_name(site: Site, parts: Any) -> dict[str, torch.Tensor]:
    return {
        p.name: x.clone()
        for f, some in zip(site.fragments, parts, strict=True)
        for p, x in zip(f.pieces, some, strict=True)
    }


def _tensor(x: Any) -> torch.Tensor:
    return from_numpy(np.zeros(0, np.float32) if x is None else x.copy())
