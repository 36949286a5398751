"""Specs as text, for command lines and for torch graphs, which cannot contain objects."""

import ast

from codec.arguments import shown
from codec.errors import CodecError, SpecError
from codec.presets import resolve
from codec.specs import CODECS, Spec


def spec_of(text: str) -> Spec:
    """Parse a spec: the name of a preset, or a spec as it is written in Python.

    Parameters
    ----------
    text : str
        Text such as "small", "Quantize(4)" or "Float8(group_size=128)"; never executed as Python code.

    Raises
    ------
    SpecError
        The text is neither a preset nor a spec, or the spec has wrong parameters.

    Examples
    --------
    >>> from codec.spec_text import spec_of
    >>> spec_of("Sign(group_size=1024)")
    Sign(scale='l1', group_size=1024)
    """
    kinds = {kind.__name__: kind for kind in CODECS}
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in kinds):
            return resolve(text)[0]
        given = [ast.literal_eval(a) for a in call.args]
        named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        return kinds[call.func.id](*given, **named)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as e:
        if isinstance(e, CodecError):
            raise
        why = e.msg if isinstance(e, SyntaxError) else e  # without the position, which is in "<unknown>"
        raise SpecError(
            f"a spec must be the name of a preset, or text such as Quantize(4), got {shown(text)}: {why}"
        ) from None
