"""Local steps of sites that come, go and lag (DiLoCo with a quorum), which exchange frames through a store."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist

from codec import ArgumentError, StateError
from codec._options import settings_of
from codec._secret import secret_of_environment
from codec.arguments import shown, whole
from codec.specs import Quantize, Spec
from codec.torch.feedback.feedback import Feedback
from codec.torch.local_steps.replica import Outer
from codec.torch.local_steps.settings import MOST_STEPS, LocalSettings
from codec.torch.rounds import checkpoint
from codec.torch.rounds.access import Access
from codec.torch.rounds.media import medium_of
from codec.torch.rounds.member import Member
from codec.torch.rounds.names import SITE
from codec.torch.rounds.objects import MOST_WEIGHT
from codec.torch.rounds.site import Site
from codec.torch.rounds.stats import RoundStats

_TIMEOUT = 1800.0  # seconds, as by default in torch.distributed
_LOOKS = 0.05  # maximum part of the time in which a site looks at the store between its steps
_PAUSE = 0.05  # minimum of the seconds between two looks


class Rounds:
    """Local steps of sites that come, go and lag: each round merges the changes of the sites that have come.

    Each site trains the module by itself, and sends the change of its parameters every `every` steps, as a frame with
    error feedback. A round is closed when `quorum` sites have sent a change, and all sites of the last round have, too,
    or the grace time is over. Its manifest lists the changes that all sites merge: their mean, weighted by steps or
    tokens, is the gradient of an outer optimizer (DiLoCo). Sites exchange objects through a store only. They need no
    process group, and no open port.

    Provisional: may change in any version.

    A site joins, also after a crash, by creating this object: it adopts the parameters and buffers of the run. A slow
    site does not delay the others: when the first of them sends its change, it sends that of the steps that it has
    taken so far. A change that misses its round is merged by one of the next four, or stays in the parameters, and is
    sent again. A lost site delays one round, by the grace time.

    Memory, in bytes per value of the parameters: 4 for the values of the last round, 4 for the residual, and while a
    round is merged up to 28, and the frames of all sites.

    Parameters
    ----------
    model : torch.nn.Module
        The module of this site, which is one process, or the return value of ``torch.compile`` for it.
    optimizer : torch.optim.Optimizer or list of Optimizer
        Optimizer of the module, or all of them, as for :class:`LocalSteps`.
    store : str, path, or torch.distributed.Store
        Folder of the run: a local path, or a URL of fsspec of the protocols file, memory, s3, gs or abfs, such as
        ``"s3://bucket/run"``, which needs s3fs, gcsfs or adlfs. Or a store such as TCPStore, whose host must outlive
        the sites. An empty folder begins a run with the parameters of the first site. Objects are signed if
        CODEC_SECRET_FILE or ``codec.options(secret=)`` is set.
    site : str
        Name of this site, of letters, digits, "_", "." and "-". Two sites at a time must not have the same name.
    every : int
        Number of steps after which this site sends its change. Sites may have different numbers.
    spec : Spec, str or Feedback
        Codec of the changes, as for :class:`LocalSteps`.
    quorum : int or (int, float)
        Number of sites without which no round is closed; and the grace time, seconds for which a round with a quorum
        waits for the other sites of the last round. Default: the median delay of the last changes, and 5 times their
        median absolute deviation, but at most a quarter of the time between two changes of this site.
    delay : int
        Number of steps, at most `every`, that this site takes after it has sent its change before it waits for the
        round. The mean then replaces the changes that were sent; those of later steps stay in the parameters.
    outer : callable, optional
        ``outer(parameters)`` returns the outer optimizer, as for :class:`LocalSteps`.

    Raises
    ------
    ArgumentError, SpecError
        An argument has a wrong type or value, or the run in the store has other ones.
    FrameError, PeerError, StateError
        Objects in the store are damaged, or the store fails.

    Examples
    --------
    >>> model = torch.nn.Linear(100, 100)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> rounds = codec.torch.Rounds(model, optimizer, "memory://run", "paris", every=4, quorum=1)
    >>> while rounds.merged < 3:
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 100)).square().mean().backward()
    ...     optimizer.step()
    ...     rounds.step()
    >>> rounds.stats().steps
    12
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        store: Any,
        site: str,
        *,
        every: int = 10,
        spec: Spec | str | Feedback = Quantize(4),  # noqa: B008 - immutable
        quorum: int | tuple[int, float] = 2,
        delay: int = 0,
        outer: Outer | None = None,
    ) -> None:
        options = settings_of(None)
        if not isinstance(site, str) or not SITE.fullmatch(site):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"site must be a name of up to 64 letters, digits, '_', '.' and '-', such as 'paris', got {shown(site)}"
            )
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ArgumentError(
                f"a site of Rounds is one process, but this one is a rank of {dist.get_world_size()}: use LocalSteps"
            )
        self._every = whole("every", every, 1, MOST_STEPS)
        self._delay = whole("delay", delay, 0, self._every)
        sites, grace = _parsed_quorum(quorum)
        settings = LocalSettings.of(self._every, spec, 0, 1, 0, options)
        seconds = _TIMEOUT if options.timeout is None else options.timeout.total_seconds()
        access = Access(medium_of(store, site), options.security.secret or secret_of_environment(), seconds)
        self._member = Member(Site(settings, model, optimizer, outer, options), access, site, sites, grace)
        self._seconds = seconds
        self._wait_s = 0.0
        self._next_look = 0.0  # monotonic time
        self._patience = self._delay  # number of steps after a change for which its round is not waited for
        self._finished = self._reading = False
        self._member.join()

    def __repr__(self) -> str:
        m = self._member
        return f"<codec.torch.Rounds site {m.name!r}, {m.site.settings.spec}, {m.steps} steps, {m.version} rounds>"

    @property
    def steps(self) -> int:
        """Number of calls of :meth:`step`."""
        return self._member.steps

    @property
    def merged(self) -> int:
        """Number of rounds of the run that this site has merged. End the training of all sites by this number."""
        return self._member.version

    def step(self, weight: float = 1.0) -> None:
        """Count a step of the optimizer; if scheduled, send the change, and wait until its round is merged.

        Call this once after each step of the optimizer. In other calls, a site looks at the store in up to 5% of its
        time: it merges rounds that were closed without it, and keeps its own changes. It waits for no round that has
        just begun.

        Parameters
        ----------
        weight : float
            Weight of the step in the mean, such as its number of tokens.

        Raises
        ------
        ArgumentError
            A parameter or buffer holds NaN or Inf, or parameters of the model were replaced, removed or added.
        PeerError
            The store fails, or fewer than `quorum` sites have sent a change within the timeout.
        FrameError
            An object in the store is missing or damaged.
        StateError
            :meth:`finish` was called before. Or this site's anchors are not those of the run, or it was deleted.

        Notes
        -----
        After an error, the model, the residual and the outer optimizer are those before or after a round. The step is
        counted. The next call continues where this one has failed.
        """
        self._check_open()
        weight = _positive("weight", weight)
        m = self._member
        m.steps, m.since, m.weight = m.steps + 1, m.since + 1, min(MOST_WEIGHT, m.weight + weight)
        m.site.replaced = None
        if m.sent is None and m.since >= self._every:
            number = m.version
            m.look()
            self._send(early=m.version > number)  # the others, which have closed a round, have just begun the next one
        elif (begin := time.monotonic()) >= self._next_look:
            self._look()
            now = time.monotonic()
            self._next_look = now + max(_PAUSE, (now - begin) / _LOOKS)
        if m.sent is not None and m.since >= self._patience:
            self._wait(m.quorum)

    def _look(self) -> None:
        """Merge rounds that were closed.

        Send the changes so far if the other sites wait for them, or if a round was closed without this site: the next
        one will wait for it.
        """
        m, number = self._member, self._member.version
        contents = m.look()
        if m.sent is not None:
            m.close(contents, m.quorum)
        elif m.is_due(contents) or m.version > number:
            self._send(early=m.version > number)

    def _send(self, *, early: bool) -> None:
        """Send the changes. This site does not wait for a round that has just begun, for which it is early."""
        self._patience = self._every if early else self._delay
        self._member.send(early=early)

    def _wait(self, quorum: int) -> None:
        """Wait until the current round is merged. If it lacks this site's change, a later round is not waited for."""
        m, begin = self._member, time.monotonic()
        try:
            m.wait(self._seconds, quorum)
        finally:
            self._wait_s += time.monotonic() - begin
        self._patience = self._every

    def finish(self) -> None:
        """Send the changes that remain, and wait until they are merged; later calls of :meth:`step` raise StateError.

        The other sites no longer wait for this one. If too few sites for a quorum come within the grace time, the
        changes are merged nevertheless.

        Raises
        ------
        ArgumentError, FrameError, PeerError, StateError
            As for :meth:`step`. After an error, this method can be called again.
        """
        self._check_open()
        m = self._member
        m.look()
        while m.unmerged:
            if m.sent is None:
                m.send(leaves=True)
            self._wait(1)
        m.site.restore()
        self._finished = True

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this site's state for a checkpoint, to be saved with its model and optimizer.

        Returns
        -------
        dict
            Tensors, numbers and strings, in nested dicts that ``torch.load(weights_only=True)`` accepts.
        """
        self._check_reading()
        return checkpoint.state_of(self._member)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a state that :meth:`state_dict` returned, after the model's state was loaded.

        The model may be loaded before or after this object is created. Load the optimizer's state, too. The site then
        merges the rounds that were closed meanwhile, and keeps its changes, unless a change that it has sent after the
        state was saved contains them. If no round was closed, the run continues bit-identically. Without a checkpoint,
        a site that creates this object again loses only its last steps, and its optimizer's state.

        Parameters
        ----------
        state : mapping
            State of this site.

        Raises
        ------
        StateError
            `state` is damaged, or belongs to another run, or to parameters that the model does not have. Nothing is
            changed.
        FrameError, PeerError
            As for :meth:`step`.
        """
        self._check_reading()
        checkpoint.load(self._member, state)

    def _check_open(self) -> None:
        if self._finished:
            raise StateError("finish() was called before: make a new Rounds to go on")
        self._check_reading()

    def _check_reading(self) -> None:
        if self._reading:
            raise StateError("the model has the parameters of the last round: end the block of averaged() first")

    @contextmanager
    def averaged(self) -> Generator[None]:
        """Return a context manager within which the model has the parameters of the last merged round.

        They are equal on all sites that have merged equally many rounds. Use it to evaluate the model, or to save it.
        Nothing is sent. At the end of the ``with`` block, this site has its own parameters again. Do not train within
        it.

        Raises
        ------
        StateError
            A block has not ended.
        """
        self._check_reading()
        self._reading = True
        try:
            with self._member.site.averaged():
                yield
        finally:
            self._reading = False

    def stats(self) -> RoundStats:
        """Return statistics of this site."""
        m = self._member
        return RoundStats(
            steps=m.steps,
            merged_steps=m.merged_steps,
            rounds=m.version,
            sites=m.sites,
            late_changes=m.late,
            dropped_changes=m.dropped,
            sent_nbytes=m.access.sent_nbytes,
            received_nbytes=m.access.received_nbytes,
            wait_s=self._wait_s,
            grace_s=m.arrivals.grace,
            agreement=m.site.agreement,
        )


def _parsed_quorum(quorum: Any) -> tuple[int, float | None]:
    """Return the number of sites and the grace time for which the argument ``quorum=`` stands."""
    if not isinstance(quorum, tuple):
        return whole("quorum", quorum, 1, 1 << 12), None
    pair = cast(tuple[Any, ...], quorum)
    if len(pair) != 2:
        raise ArgumentError(f"quorum must be a number of sites, or a pair (sites, seconds), got {shown(pair)}")
    return whole("sites of quorum", pair[0], 1, 1 << 12), _positive("seconds of quorum", pair[1], least=0.0)


def _positive(name: str, value: Any, *, least: float | None = None) -> float:
    """Return a finite number above 0, or of at least `least`, as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"{name} must be a number, got {shown(value)}")
    if not (0 < value <= MOST_WEIGHT or value == least):
        raise ArgumentError(
            f"{name} must be a finite number {'of at least 0' if least == 0 else 'above 0'}, got {value}"
        )
    return float(value)
