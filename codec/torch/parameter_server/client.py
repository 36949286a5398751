"""Client of parameter servers, which registers keys, pushes frames, pulls reductions, and averages gradients."""

import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

import codec
from codec import ArgumentError, CallOptions, PeerError, SpecError, StateError, Status
from codec._options import settings_of
from codec.arguments import check_timeout, shown, whole
from codec.spec_config import self_contained
from codec.specs import SpecLike, Ternary, require_feedback
from codec.torch.parameter_server.arguments import check_ranks, endpoint_for
from codec.torch.parameter_server.average import mean, terngrad
from codec.torch.parameter_server.links import ClientStats
from codec.torch.parameter_server.means import LOSSLESS
from codec.torch.parameter_server.messages import DTYPES, INTERNAL, MAX_NAME_NBYTES, MAX_STEP, REDUCES, Key, Reduce
from codec.torch.parameter_server.session import Session
from codec.torch.reduction.arguments import plain_spec


class ParameterClient:
    """Client of a worker, which is connected to all parameter servers.

    Provisional: may change in any version.

    Any thread may call methods; one call runs at a time. Tensors may be on any device. Number the steps in ascending
    order. All workers must push the same keys in the same steps.

    Parameters
    ----------
    servers : sequence of int
        Ranks of the servers, in the same order as on the servers.
    group : ProcessGroup, optional
        Group of all servers and workers. Default: all ranks.
    options : CallOptions, optional
        ``codec.options(timeout=)``: longest time that a pull waits for other workers. Use the same timeout as on the
        servers. A server that does not answer within twice this time counts as lost. Default: the timeout of the group.

    Raises
    ------
    ArgumentError
        An argument is wrong, or this rank is a server.
    PeerError
        A server cannot be reached in time.

    See Also
    --------
    ParameterServer : The server to which clients connect.

    Examples
    --------
    >>> rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    >>> if rank > 0:  # rank 0 is the server
    ...     with codec.torch.ParameterClient(servers=[0]) as client:
    ...         client.init({"weight": torch.zeros(100)})
    ...         client.push(0, {"weight": torch.randn(100)}, codec.Float8())
    ...         mean = client.pull(0, ["weight"])["weight"]
    """

    def __init__(self, servers: Sequence[int], *, group: Any = None, options: CallOptions | None = None) -> None:
        settings = settings_of(options)
        timeout = check_timeout(settings.timeout)
        endpoint = endpoint_for(group, timeout, settings.security)
        ranks = check_ranks("servers", servers, endpoint, member=False)
        self._lock = threading.RLock()
        self._session = Session(endpoint, ranks, (timeout or endpoint.timeout).total_seconds())

    def __enter__(self) -> "ParameterClient":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # close without notice, so that servers report this worker as lost to the other workers
            self._session.links.close()

    def init(self, parameters: Mapping[str, Any]) -> None:
        """Register keys (named tensors) on their servers. All workers must register the same keys.

        Parameters
        ----------
        parameters : mapping of str to torch.Tensor or sequence of int
            By name: a tensor, whose dtype and shape are registered, or the shape of a float32 tensor. Values are not
            sent. Allowed dtypes are float32, bfloat16, float16, int8, int16, int32, int64 and uint8.

        Raises
        ------
        ArgumentError
            A name, dtype or shape is not supported, differs from another worker's, or exceeds a limit of the server.
        PeerError
            A server is lost.
        """
        keys = [_key_of(name, of) for name, of in parameters.items()]
        if wrong := [key.name for key in keys if key.name.startswith(INTERNAL)]:
            raise ArgumentError(
                "the name of a key must not begin with a zero byte, which is reserved for the library, got "
                f"{wrong[0]!r}"
            )
        with self._call():
            self._session.register(keys)
            self._session.devices |= {n: of.device for n, of in parameters.items() if isinstance(of, torch.Tensor)}

    def push(self, step: int, tensors: Mapping[str, Any], spec: SpecLike = LOSSLESS) -> None:
        """Send this worker's tensors of a step to the servers.

        Parameters
        ----------
        step : int
            Number of the step, 0 or more.
        tensors : mapping of str to torch.Tensor, float, int, bytes, buffer or None
            Tensors to encode, by key. A number is accepted for a key of shape (); None stands for zeros. A buffer is
            sent as a frame that is already encoded; so is a uint8 tensor, if the key has a floating-point dtype.
        spec : Spec or name of a preset
            Codec of floating-point tensors; integers are sent lossless. :class:`codec.TopK` needs error feedback: push
            frames that ``codec.encode(residual=, feedback=True)`` has returned.

        Raises
        ------
        StateError
            A key is not initialized, or was already pushed in this step; the step has ended, or has begun without this
            worker; or too many steps are in flight.
        ArgumentError, SpecError
            A tensor does not fit its key or the spec.
        PeerError
            A server is lost.
        """
        step, spec = _step(step), plain_spec(spec)
        require_feedback(spec, "push frames of codec.encode(residual=, feedback=True)")
        with self._call():
            frames = {name: self._session.frame(step, name, value, spec) for name, value in tensors.items()}
            self._session.round(self._session.push(step, frames))

    def pull(
        self, step: int, keys: Iterable[str], *, reduce: Reduce = "mean", spec: SpecLike = LOSSLESS
    ) -> dict[str, torch.Tensor]:
        """Wait until all workers have pushed some keys, and return the reductions of their tensors.

        Parameters
        ----------
        step : int
            Number of the step.
        keys : iterable of str
            Names of keys. This worker must have pushed them in the step, and can pull each key only once per step.
        reduce : {"mean", "max", "exact_mean"}
            ``"mean"`` and ``"max"``: the server decodes the frames, and sends the mean or the maximum over the workers
            as frames of `spec`. For integers, only ``"max"`` is supported. ``"exact_mean"``: the server adds the codes
            of :class:`codec.Ternary` frames, which must have the same scale, exactly as integers, and sends the sums;
            for W workers the result is float32(sum * (scale / W)).
        spec : Spec or name of a preset
            Codec of the means; all workers must pass the same. A server encodes a mean once, and sends the same frame
            to all workers. If the spec is a lossy contraction, the server uses error feedback, unless it was created
            with ``feedback=False``. ``"max"`` and ``"exact_mean"`` must be pulled with :class:`codec.Lossless`.

        Returns
        -------
        dict of str to torch.Tensor
            Tensors in host memory, with the dtypes and shapes of the keys.

        Raises
        ------
        StateError
            A key is not initialized, was not pushed by this worker, or was already pulled.
        SpecError
            ``"exact_mean"`` of frames that are not Ternary or have different scales; or ``"mean"`` of integers. Or the
            spec does not fit the tensor or the reduction, needs error feedback that the server does not use, or differs
            from the spec of another worker.
        PeerError
            Another worker was lost or too late, or has abandoned the step; or a server is lost. Or the mean holds NaN
            or Inf, which the spec refuses (``code == codec.Status.NONFINITE``).
        """
        step, names, spec = _step(step), list(keys), self_contained(spec)
        if reduce not in REDUCES:
            raise ArgumentError(f"reduce must be one of {', '.join(map(repr, REDUCES))}, got {shown(reduce)}")
        if len(set(names)) != len(names):
            raise ArgumentError("keys must not contain the same key twice")
        if reduce != "mean" and spec != LOSSLESS:
            raise SpecError(f"reduce={reduce!r} has exact results: leave out spec={spec}")
        with self._call():
            (values,) = self._session.round(self._session.pull(step, names, reduce, spec))
            return self._session.decoded(values, names, reduce)

    def average(
        self,
        step: int,
        gradients: Mapping[str, torch.Tensor | None],
        spec: SpecLike,
        *,
        mean_spec: SpecLike = LOSSLESS,
    ) -> dict[str, torch.Tensor]:
        """Return the mean of all workers' gradients: push and pull in one call.

        With :class:`codec.Ternary` this is a step of TernGrad. Workers push the largest magnitude of each gradient, and
        pull the maxima over all workers. They use these as scales of the ternary codes that they push, and then pull
        ``"exact_mean"``. Sums are exact, so the codes are the only source of error. With ``clip``, magnitudes are
        first limited to that many standard deviations, as in ``algorithm="shared_scale"`` of :func:`all_reduce`. With
        other specs, or with a `mean_spec`, workers push frames and pull their mean.

        If the call fails on this worker, it abandons the step, so that the other workers raise PeerError immediately.

        Parameters
        ----------
        step : int
            Number of the step. It also selects the random bits of the codes.
        gradients : mapping of str to torch.Tensor or None
            Gradients by key; they are not changed. All workers must pass the same keys. None, the gradient of a
            parameter that this worker has not used, counts as zeros.
        spec : Spec or name of a preset
            Codec of the gradients, such as ``codec.Ternary("base3", clip=2.5)``.
        mean_spec : Spec or name of a preset
            Codec of the means, as `spec` of :meth:`pull`.

        Returns
        -------
        dict of str to torch.Tensor
            Means, bit-identical on all workers, with the dtype and device of the gradient, or of the parameter if the
            gradient is None.

        Raises
        ------
        ArgumentError
            A gradient holds NaN or Inf (``code == codec.Status.NONFINITE``), or does not fit its key.
        PeerError
            Another worker has failed, was lost or was too late; or a server is lost.
        SpecError
            The spec has a `scale`, on which the workers must agree themselves; or it is :class:`codec.TopK`, which
            needs error feedback. Or `mean_spec` is refused, as by :meth:`pull`.
        StateError
            As for :meth:`push`.
        """
        step, spec, mean_spec = _step(step), plain_spec(spec), self_contained(mean_spec)
        require_feedback(spec, "push frames of codec.encode(residual=, feedback=True), and pull their mean")
        if isinstance(spec, Ternary) and spec.scale is not None:
            raise SpecError(f"the workers agree on a scale: leave out scale={spec.scale}")
        with self._call():
            try:
                dense = {name: self._session.tensor_of(name, gradient) for name, gradient in gradients.items()}
                for name, gradient in dense.items():
                    self._session.check(name, gradient)
                    if not gradient.is_floating_point():
                        raise ArgumentError(
                            f"{name!r} is {gradient.dtype}, and a mean needs floats: push it, and pull it with "
                            'reduce="max"'
                        )
                if isinstance(spec, Ternary) and mean_spec == LOSSLESS:
                    found = terngrad(self._session, step, dense, spec)
                else:
                    found = mean(self._session, step, dense, spec, mean_spec)
            except Exception as e:
                with suppress(codec.CodecError):
                    self._session.abandon(step, nonfinite=getattr(e, "code", None) == Status.NONFINITE)
                raise
            return {name: found[name].to(self._session.device_of(name, given)) for name, given in gradients.items()}

    def abandon(self, step: int) -> None:
        """Abandon a step: this worker pushes no more keys in it, and workers that wait for its keys raise PeerError.

        Parameters
        ----------
        step : int
            Number of the step.

        Raises
        ------
        PeerError
            A server is lost.
        """
        step = _step(step)
        with self._call():
            self._session.abandon(step, nonfinite=False)

    def stats(self) -> ClientStats:
        """Return the requests and bytes so far."""
        return self._session.links.stats()

    def close(self) -> None:
        """Notify the servers that this worker is done, and close the connections. Servers end after all workers."""
        with self._lock:
            if self._session.links.closed:
                return
            try:
                with suppress(PeerError):  # a lost server need not be notified
                    self._session.close()
            finally:
                self._session.links.close()

    @contextmanager
    def _call(self) -> Generator[None, None, None]:
        """Return a context manager that locks the connections for one call.

        Exceptions other than a CodecError, such as KeyboardInterrupt or a lack of memory, close the client. Other
        workers may have this call's result, and later calls could read this call's replies. Servers report the worker
        as lost.
        """
        with self._lock:
            if self._session.links.closed:
                raise StateError("the client is closed: make a new ParameterClient")
            try:
                yield
            except codec.CodecError:
                raise
            except BaseException:
                self._session.links.close()
                raise


def _step(step: Any) -> int:
    return whole("step", step, 0, MAX_STEP - 1)


def _key_of(name: Any, of: Any) -> Key:
    """Check an item of ``init(parameters)``, and return its key."""
    if not isinstance(name, str) or not 0 < len(name.encode(errors="replace")) <= MAX_NAME_NBYTES:
        raise ArgumentError(f"a key must be a str of 1 to {MAX_NAME_NBYTES} bytes, got {shown(name)}")
    if isinstance(of, torch.Tensor):
        if of.dtype not in DTYPES:
            raise ArgumentError(f"the dtype of {name!r} must be one of {', '.join(DTYPES.values())}, got {of.dtype}")
        return Key(name, DTYPES[of.dtype], tuple(of.shape))
    try:
        shape = tuple(whole("a dimension", size, 0, 1 << 40) for size in of)
    except TypeError:
        raise ArgumentError(f"{name!r} must be a tensor or a shape, got {shown(of)}") from None
    if len(shape) > 8:
        raise ArgumentError(f"{name!r} has {len(shape)} dimensions; the maximum is 8")
    return Key(name, "float32", shape)
