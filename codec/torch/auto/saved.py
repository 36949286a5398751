"""State of the automatic choice of a hook's specs in checkpoints."""

import json
from typing import Any, NamedTuple, cast

from codec import StateError
from codec.torch.auto import costs


class SavedChoice(NamedTuple):
    """State of a GradientChoice."""

    steps: int  # steps since the measurements began
    level: int
    names: list[str]  # names of the tensors whose specs are chosen
    numbers: list[int]  # agreed measurements

    def text(self, quality: str, raw: int) -> str:
        """Return the state as JSON, with the name of the quality, and 1 if level 0 is raw, else 0."""
        entries = {"count": self.steps, "level": self.level, "names": self.names, "numbers": self.numbers}
        return json.dumps({"quality": quality, "raw": raw} | entries)

    @classmethod
    def parsed(cls, text: Any, quality: str, raw: int, specs: int) -> "SavedChoice | None":
        """Parse the state of a choice among a number of specs; return None if it is of another quality.

        Raises
        ------
        StateError
            The text is no state of a GradientChoice.
        """
        damaged = StateError("'auto' of this state is not the choice of a hook: it is damaged")
        try:
            state = cast(dict[str, Any], json.loads(text))
            steps, level, names, numbers = (state[key] for key in ("count", "level", "names", "numbers"))
            if (state["quality"], state["raw"]) != (quality, raw):
                return None
            is_valid = (
                all(isinstance(name, str) for name in names)
                and all(type(n) is int and -1 <= n < 1 << 53 for n in [steps, level, *numbers])
                and steps >= 0
                and 0 <= level < raw + specs
                and len(numbers) in (0, costs.length(len(names), specs))
                and min(numbers[: costs.length(0, specs)], default=0) >= 0
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            raise damaged from None
        if not is_valid:
            raise damaged
        return cls(steps, level, names, numbers)
