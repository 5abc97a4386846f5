"""Text that tokenizers and UTF-8 can carry. Half of a surrogate pair is what bytes or JSON leave that were cut."""

from __future__ import annotations

from paceline.shared.errors import ParameterError


def check_unicode(param: str, text: str) -> str:
    """``text`` as it is. Raises ``ParameterError`` if it holds surrogates, naming ``param``."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"expected {param} to be whole Unicode text, got half a character at position {error.start}"
        raise ParameterError(param, message) from None
    return text
