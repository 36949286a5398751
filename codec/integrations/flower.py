# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false
# The framework is not installed where types are checked: its classes are unknown.
"""Flower integration: a client mod and a strategy mix-in that send arrays to each other as frames.

Provisional: may change in any version.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from codec._c.traits import is_lossless
from codec.errors import CodecError
from codec.integrations.federated import DIFFERENCE, FRAME, checked_spec, decode_array, encode_array, is_float
from codec.integrations.flower_records import Arrays, arrays_of, frame_of, pack, plain_array, values_of, with_arrays
from codec.specs import Preset, Spec

__all__ = ["Compressed", "CompressionMod", "pack"]

RESIDUALS = "codec.residuals"  # name of the record in a client's state that stores the residuals
_FAILED = 0  # Flower's error code for unspecified errors
_REPLY_TO = "train"  # prefix of the types of messages whose replies are encoded

logger = logging.getLogger("codec.flower")


class CompressionMod:
    """Client mod that decodes the arrays of messages, and encodes the arrays of replies to training messages.

    Pass it as the first of ``ClientApp(mods=[...])``. The server's strategy must be :class:`Compressed`. An array of a
    reply is encoded if the message has an array of the same name in a record of the same name; otherwise it is sent
    uncompressed. If a training message has arrays, but none of them is encoded, the server's strategy is not
    :class:`Compressed`: the reply is then sent uncompressed, and the logger ``codec.flower`` warns once.

    Parameters
    ----------
    spec : Spec or str
        Codec, or the name of a preset. Lossless codecs restore every bit; :class:`codec.Delta` uses the arrays of the
        message as the base. Lossy codecs encode the change of each array since the message.
    feedback : bool
        Error feedback for lossy codecs: the residual of a reply is added to the client's next reply. Residuals are
        stored in a record of ``context.state``, 4 bytes per value. If Flower or the server drops a reply, its values
        are lost and do not enter the residuals.

    Raises
    ------
    SpecError
        The spec is unknown, or training with it does not converge with this `feedback`.
    """

    def __init__(self, spec: Spec | Preset = "lossless", *, feedback: bool = True) -> None:
        self.spec = checked_spec(spec, feedback)
        self.feedback = feedback and not is_lossless(self.spec)
        self._warned = False

    def __call__(self, message: Message, context: Any, call_next: Any) -> Message:
        """Handle a message. A damaged frame raises FrameError, which Flower reports to the server."""
        given = arrays_of(message.content)
        base = {at: decode_array(a.stype, a.data, None) for at, a in given.items() if a.stype == FRAME}
        message.content = with_arrays(message.content, {at: plain_array(x) for at, x in base.items()})
        trains = message.metadata.message_type.startswith(_REPLY_TO)
        if trains and given and not base and not self._warned:
            self._warned = True
            logger.warning(
                "replies are not compressed, because the arrays of the server's message are not encoded: the strategy "
                "must be codec.integrations.flower.Compressed, as in class Strategy(Compressed, FedAvg)"
            )
        reply = call_next(message, context)
        if reply.has_content() and trains:
            state, coded = context.state, {}
            residuals = {**state[RESIDUALS]} if RESIDUALS in state else {}
            for at, array in arrays_of(reply.content).items():
                if at in base:
                    x, name, residual = values_of(array), "/".join(at), None
                    if self.feedback and is_float(x):
                        residual = residuals[name].numpy() if name in residuals else np.zeros(x.shape, np.float32)
                    coded[at] = Array(array.dtype, tuple(array.shape), *encode_array(x, self.spec, base[at], residual))
                    if residual is not None:
                        residuals[name] = Array(residual)
            reply.content = with_arrays(reply.content, coded)
            if self.feedback:  # replace residuals only after all arrays were encoded
                state[RESIDUALS] = ArrayRecord(residuals)
        return reply


class Compressed:
    """Mix-in for strategies that encodes the arrays of messages losslessly, and decodes the arrays of replies.

    ``class Strategy(Compressed, FedAvg): pass`` is FedAvg for clients with the mod :class:`CompressionMod`; each client
    may use another codec. A reply with a damaged frame, another shape or another base counts as a failure of its
    client only. If clients fail because they lack the mod, or reply with uncompressed arrays, the logger
    ``codec.flower`` warns once.

    The strategy sees bfloat16 and float8 arrays, made by :func:`pack`, as float32. They are rounded to their dtype when
    they are sent.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._dtypes: dict[str, Any] = {}
        self._bases: dict[int, Arrays] = {}  # arrays of the round's message, by node id
        self._warned = False

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Iterable[Message]:
        """Return the messages of a training round, with encoded arrays; see the strategy's method."""
        messages = super().configure_train(server_round, self._plain(arrays), config, grid)  # pyright: ignore
        messages, self._bases = self._encoded(messages)
        return messages

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Iterable[Message]:
        """Return the messages of an evaluation round, with encoded arrays; see the strategy's method."""
        messages = super().configure_evaluate(server_round, self._plain(arrays), config, grid)  # pyright: ignore
        return self._encoded(messages)[0]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Decode replies and aggregate them; see the strategy's method."""
        given = list(replies)
        self._warn_of_missing_mods(given)
        return super().aggregate_train(server_round, [self._decoded(r) for r in given])  # pyright: ignore

    def _warn_of_missing_mods(self, replies: Sequence[Message]) -> None:
        """Warn once if clients cannot read frames, or reply with uncompressed arrays: they lack the mod."""
        reasons = [r.error.reason or "" for r in replies if r.has_error()]
        unread = [reason for reason in reasons if FRAME in reason] or (reasons if len(reasons) == len(replies) else [])
        plain = [
            r.metadata.src_node_id
            for r in replies
            if r.has_content()
            for at, a in arrays_of(r.content).items()
            if at in self._bases.get(r.metadata.src_node_id, {}) and a.stype not in (FRAME, DIFFERENCE)
        ]
        if self._warned or not (unread or plain):
            return
        self._warned = True
        what = (
            f"{len(unread)} of {len(replies)} clients failed, one of them with {unread[0]!r}"
            if unread
            else (f"{len(set(plain))} of {len(replies)} clients reply with uncompressed arrays")
        )
        logger.warning(
            "%s: the clients of a strategy that is Compressed need the mod codec.integrations.flower.CompressionMod, "
            "as in ClientApp(mods=[CompressionMod()])",
            what,
        )

    def _plain(self, arrays: ArrayRecord) -> ArrayRecord:
        """Decode arrays for the strategy, and store the dtypes of frames, which numpy may not support."""
        values = {name: values_of(a) for name, a in arrays.items()}
        self._dtypes |= {name: values[name].dtype for name, a in arrays.items() if a.stype == FRAME}
        return ArrayRecord({name: plain_array(x) for name, x in values.items()})

    def _encoded(self, messages: Iterable[Message]) -> tuple[list[Message], dict[int, Arrays]]:
        """Return messages whose arrays are frames, and the arrays that each node receives."""
        messages, made, bases = list(messages), {}, {}
        for message in messages:
            content = message.content
            if id(content) not in made:  # nodes often share one content object: encode it only once
                base = {at: self._sent(at[1], a.numpy()) for at, a in arrays_of(content).items()}
                made[id(content)] = content, with_arrays(content, {at: frame_of(x) for at, x in base.items()}), base
            _, message.content, bases[message.metadata.dst_node_id] = made[id(content)]
        return messages, bases

    def _sent(self, name: str, x: Any) -> Any:
        return x.astype(self._dtypes.get(name, x.dtype), copy=False)

    def _decoded(self, reply: Message) -> Message:
        """Return a reply with its arrays decoded, or with an error if they cannot be decoded."""
        if not reply.has_content():
            return reply
        base = self._bases.get(reply.metadata.src_node_id, {})
        coded = {at: a for at, a in arrays_of(reply.content).items() if a.stype in (FRAME, DIFFERENCE)}
        try:
            if unknown := coded.keys() - base.keys():
                raise CodecError(f"the reply has arrays that the round did not send: {sorted(unknown)}")
            values = {at: decode_array(a.stype, a.data, base[at]) for at, a in coded.items()}
        except CodecError as e:
            error = Error(_FAILED, f"the reply cannot be decoded: {e}")
            return Message(
                error, reply_to=Message(RecordDict(), reply_to=reply)
            )  # a message from the client to the server
        reply.content = with_arrays(reply.content, {at: plain_array(x) for at, x in values.items()})
        return reply
