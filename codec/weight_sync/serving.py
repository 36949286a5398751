"""Rule of receivers: when a call returns, the serving program has the tensors of the version that the call returns.

A program takes tensors by ``load=`` or ``into=``, or reads them from :meth:`WeightReceiver.updated`. Two invariants
keep the rule, whichever call fails or is interrupted, and however often:

1. `unloaded` names each tensor whose value in the program may differ from the value in the weights. A name is added
   before the weights change, and before the program gets a value that the weights do not have yet. A name is removed
   only after the program has taken the value that the weights have.
2. The weights change after the program has taken the new values. If the weights did not change, the program gets the
   old values back. If they did, or if the update is in place and will be completed, the program keeps the new values.

After a folder was opened, all names are unloaded, because the program has started with weights of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from codec.weight_sync.bases.base import Base
from codec.weight_sync.updates.update import Update

# Function of (names, update, whole): pass the values that the named tensors have after `update`, or their current
# values if it is None, to the program, and return the names that were passed. Of names that are not in `whole`, the
# program lacks only the pieces that have a frame.
Write = Callable[[Sequence[str], Update | None, set[str]], Iterable[str]]


class Serving:
    """Record of the tensors that the program of a receiver lacks.

    Parameters
    ----------
    base : Base
        Weights of the receiver.

    Attributes
    ----------
    unloaded : set of str
        Names of the tensors that the program may lack.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self.unloaded = set(base.weights.tensors)
        self._passed: set[str] = set()  # names whose values after the staged update the program has

    def begin(self) -> None:
        """Begin a new update: the program has none of its values."""
        self._passed = set()

    def lacking(self, update: Update) -> list[str]:
        """Return the names of the tensors that the program needs in order to serve the version after `update`."""
        wanted = self.unloaded.union(update.tensors)
        return [name for name in self._base.tensors_after(update) if name in wanted]

    def updated(self, names: Iterable[str], update: Update, like: Any) -> Iterator[tuple[str, Any]]:
        """Yield names and tensors with the values after `update`, as :meth:`Base.tensors`; note which were passed."""
        self.unloaded.update(update.tensors)
        for name, tensor in self._base.tensors(names, update, like):
            self._passed.add(name)
            yield name, tensor

    def commit(self, update: Update) -> None:
        """Apply `update` to the weights, after the program has taken its values."""
        self.unloaded.update(update.tensors)
        self._base.settle()
        if not self._base.has(update):  # otherwise an interrupted call has applied it
            self._base.apply(update)
        self._committed(update)

    def _committed(self, update: Update) -> None:
        self.unloaded = (self.unloaded & self._base.weights.tensors.keys()) - self._passed

    def advance(self, update: Update, write: Write) -> None:
        """Pass the values after `update` to the program, and apply `update` to the weights, or do neither."""
        names, whole = self.lacking(update), set(self.unloaded)
        self.unloaded.update(update.tensors)
        try:
            self._passed.update(write(names, update, whole))
            self.commit(update)
        except BaseException:
            if self._base.reached(update):
                self._committed(update)
            else:
                self.reload([name for name in names if name in self._base.weights.tensors], write)
            raise

    def reload(self, names: Sequence[str], write: Write) -> None:
        """Pass the current values of the named tensors to the program."""
        self.unloaded.update(names)
        if names:
            self.unloaded.difference_update(write(names, None, set(names)))
