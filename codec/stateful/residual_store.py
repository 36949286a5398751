"""Store of residuals with transactions: a step changes copies of residuals, then commits them or rolls them back."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from codec.arguments import plain
from codec.arguments import shown as shown_value
from codec.errors import ArgumentError, StateError
from codec.stateful.checkpoint import load, save
from codec.stateful.ranges import (
    HOST,
    Array,
    Layout,
    Memory,
    Range,
    Store,
    forget_nobodys,
    gather,
    layout_of,
    pieces,
    scaled,
    shared,
    shown,
    union,
    without,
)

Role = Literal["worker", "server"]


class State(NamedTuple):
    """Complete state of a store. It is immutable and replaced atomically, so that an interrupt cannot corrupt it."""

    kept: Store  # committed residuals
    pending: Store  # buffers of begin() that are not committed yet
    spare: Store  # unused buffers, which begin() reuses
    scale: float = 1.0  # factor by which gradients and residuals are multiplied, such as the scale of a GradScaler
    before: "State | None" = None  # state to roll back to after settle, pass_on or rescale; None after a commit

    def changed(self, kept: Store, scale: float) -> "State":
        """Return a state with the committed residuals `kept`. A rollback of the new state restores the old one."""
        return State(kept, self.pending, {}, scale, self if self.before is None else self.before)


class ResidualStore:
    """Residuals of one role by parameter and range, in host or device memory.

    :class:`codec.ErrorFeedback` documents the methods that both classes have. The parameter `memory` allocates new
    arrays. A method that raises an error does not change the store.

    Parameters
    ----------
    role : {"worker", "server"}
        Role of the residuals in state dicts.
    decay : float
        Factor by which :meth:`begin` multiplies residuals.

    Attributes
    ----------
    state : State
        Complete state. Assigning an earlier state undoes all later calls.
    """

    def __init__(self, role: Role, decay: float = 1.0) -> None:
        self.role: Role = role
        self.decay = decay
        self.state = State({}, {}, {})

    def begin(self, layout: Any, memory: Memory = HOST) -> Array:
        """Return a decayed copy of the residuals of a layout; the caller may write to it until commit or rollback.

        Raises
        ------
        ArgumentError
            `layout` is not a layout, or contains a parameter value twice.
        StateError
            A parameter value is already in a buffer that was neither committed nor rolled back.
        """
        at, state = layout_of(layout), self.state
        new = at not in state.kept
        # layouts of committed residuals are disjoint, so if `at` is one of them, it can overlap only itself and new
        # layouts
        others = state.pending if new else [o for o in state.pending if o == at or o not in state.kept]
        if others and (begun := shared(r for other in (at, *others) for r in other)):
            raise StateError(
                f"{shown(begun)} is in a buffer of begin() that is still in use: call commit() or rollback() first"
            )
        if new:
            buffer = gather(state.kept, at, memory)
        else:
            buffer = memory.copy(state.kept[at], state.spare.get(at))
            forget_nobodys(buffer, at)
        if self.decay != 1:
            buffer *= np.float32(self.decay)
        self.state = state._replace(pending={**state.pending, at: buffer})
        return buffer

    def commit(self, layout: Layout | None = None) -> None:
        """Replace residuals by the contents of all buffers from :meth:`begin`, or only of the one for `layout`."""
        state = self.state
        begun = state.pending if layout is None else {layout: state.pending[layout]}
        kept = state.kept
        if new := begun.keys() - kept.keys():
            kept = without(kept, new)  # remove residuals of parameters that are now in other buckets
        pending = {at: buffer for at, buffer in state.pending.items() if at not in begun}
        spare = {**state.spare, **{at: state.kept[at] for at in begun if at in kept}}
        spare = {at: array for at, array in spare.items() if at in kept}
        self.state = State({**kept, **begun}, pending, spare, state.scale)

    def rollback(self) -> None:
        """Drop all buffers of :meth:`begin`, and undo all calls since the last commit."""
        state = self.state
        before = state if state.before is None else state.before
        again = {at: buffer for at, buffer in {**state.spare, **state.pending}.items() if at in before.kept}
        self.state = State(before.kept, {}, again, before.scale)

    def pass_on(self, ranges: Any, to: "ResidualStore", factor: float, memory: Memory = HOST) -> None:
        """Move residuals of some ranges, multiplied by a factor, to another store, which adds them to its residuals.

        Raises
        ------
        StateError
            Some of these ranges are in a buffer that :meth:`begin` of this store, or of `to`, has returned and that is
            not yet committed.
        """
        at = layout_of(ranges)
        to._refuse_begun(at)
        values = self.settle(at, memory) * np.float32(factor * to.state.scale / self.state.scale)
        if values.any():
            values += gather(to.state.kept, at, memory)
            to.state = to.state.changed({**without(to.state.kept, [at]), at: values}, to.state.scale)

    def settle(self, ranges: Any, memory: Memory = HOST) -> Array:
        """Remove and return the residuals of some ranges.

        Raises
        ------
        StateError
            Some of these ranges are in a buffer that :meth:`begin` has returned and that is not yet committed.
        """
        at, state = layout_of(ranges), self.state
        self._refuse_begun(at)
        values = gather(state.kept, at, memory)
        if values.any():
            self.state = state.changed(without(state.kept, [at]), state.scale)
        return values

    def rescale(self, scale: float) -> None:
        """Rescale all residuals to match gradients multiplied by `scale`.

        Raises
        ------
        ArgumentError
            `scale`, or its ratio to the previous scale, is not a number from 2^-126 to 2^126.
        StateError
            A buffer of :meth:`begin` is neither committed nor rolled back.
        """
        state, number = self.state, plain(scale)
        # outside of this range, float32 cannot represent the factor or its inverse
        if isinstance(number, bool) or not isinstance(number, int | float) or not 2.0**-126 <= number <= 2.0**126:
            raise ArgumentError(f"scale must be a number from 2^-126 to 2^126, got {shown_value(scale)}")
        if not 2.0**-126 <= number / state.scale <= 2.0**126:
            raise ArgumentError(
                f"residuals of scale {state.scale!r} cannot be rescaled to {shown_value(scale)}: the ratio must be "
                "from 2^-126 to 2^126"
            )
        if state.pending:
            raise StateError(
                "residuals cannot be rescaled while a buffer of begin() is in use: call commit() or rollback() first"
            )
        if number != state.scale:
            self.state = state.changed(scaled(state.kept, number / state.scale), float(number))

    def fork(self) -> "ResidualStore":
        """Return an independent store with the same residuals.

        Both stores share the arrays of residuals; nothing is copied. Only the new store keeps the spare buffers.
        """
        fork = ResidualStore(self.role, self.decay)
        fork.state, self.state = self.state, self.state._replace(spare={})
        return fork

    def pieces(self) -> list[tuple[Range, Array]]:
        """Return each range that has a committed residual, with a view of the residual."""
        return pieces(self.state.kept)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict of all committed residuals, rescaled to unscaled gradients."""
        return save(self.role, scaled(self.state.kept, 1 / self.state.scale))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace all residuals by copies of those in a state dict, and drop buffers of :meth:`begin`.

        Raises
        ------
        StateError
            `state_dict` is not a state dict, has another role or version, or contains NaN or Inf.
        """
        role, store = load(state_dict)
        if role != self.role:
            raise StateError(f"this state dict has role {role!r}, but these residuals have role {self.role!r}")
        self.state = State(store, {}, {})

    def _refuse_begun(self, at: Layout) -> None:
        """Raise StateError if a value of a layout is in a buffer of :meth:`begin`."""
        begun = union(r for other in self.state.pending for r in other)
        if (twice := shared([*union(at), *begun])) is not None:
            raise StateError(
                f"{shown(twice)} is in a buffer of begin() that is still in use: call commit() or rollback() first"
            )
