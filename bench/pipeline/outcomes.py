"""Combine losses by step with measured step times: loss by time, and the time to a target loss."""

import math
from collections.abc import Sequence
from typing import Any

from systems import FP32, Setting

TOLERANCE = 0.005  # the target is FP32's loss of the last epoch times (1 + TOLERANCE)


def trailing(losses: Sequence[float], length: int) -> list[float]:
    """Return, for each step, the mean of the last `length` losses, or of all losses so far if these are fewer."""
    return [sum(losses[max(0, i + 1 - length) : i + 1]) / min(length, i + 1) for i in range(len(losses))]


def target_of(plain: Sequence[float], an_epoch: int) -> float:
    """Return the target loss: FP32's mean over the last epoch, plus the tolerance."""
    return trailing(plain, an_epoch)[-1] * (1 + TOLERANCE)


def steps_to(losses: Sequence[float], target: float, an_epoch: int) -> float:
    """Return the number of steps until the mean loss over an epoch is at most `target`; infinity if it never is."""
    means = trailing(losses, an_epoch)
    found = (i + 1 for i in range(an_epoch - 1, len(means)) if means[i] <= target)
    return next(found, math.inf)


def seconds_after(steps: float, first: float, later: float, an_epoch: int) -> float:
    """Return the time of `steps` steps, which take `first` seconds each in the first epoch, and `later` afterwards."""
    return first * min(steps, an_epoch) + later * max(0, steps - an_epoch)


def same_setting(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return Setting(**a) == Setting(**b)


def outcome_rows(trainings: Sequence[dict[str, Any]], times: Sequence[dict[str, Any]], an_epoch: int) -> list[Any]:
    """Return the time to the target loss for each run and each rate with timed steps.

    Parameters
    ----------
    trainings : sequence of dict
        Fields of simulation.Training.
    times : sequence of dict
        Rows with `stages`, `rate`, `setting`, `first` and `later`.
    an_epoch : int
        Number of steps in an epoch.
    """
    rows: list[dict[str, Any]] = []
    for t in trainings:
        place = t["task"], t["stages"]
        plain = next((p for p in trainings if (p["task"], p["stages"]) == place and is_fp32(p)), None)
        if plain is None:
            continue
        target = target_of(plain["losses"], an_epoch)
        base_steps = steps_to(plain["losses"], target, an_epoch)
        steps = math.inf if t["diverged"] else steps_to(t["losses"], target, an_epoch)
        for timed in times:
            if timed["stages"] != t["stages"] or not same_setting(timed["setting"], t["setting"]):
                continue
            base = next(b for b in times if is_fp32(b) and (b["stages"], b["rate"]) == (t["stages"], timed["rate"]))
            base_seconds = seconds_after(base_steps, base["first"], base["later"], an_epoch)
            seconds = seconds_after(steps, timed["first"], timed["later"], an_epoch)
            rows.append(
                {
                    "task": t["task"],
                    "stages": t["stages"],
                    "rate": timed["rate"],
                    "label": t["label"],
                    "steps": steps,
                    "seconds": seconds,
                    "speedup": base_seconds / seconds if math.isfinite(steps) else 0.0,
                    "step_speedup": base["later"] / timed["later"],
                    "target": target,
                    "diverged": t["diverged"],
                }
            )
    return rows


def is_fp32(row: dict[str, Any]) -> bool:
    return row["setting"]["system"] == FP32
