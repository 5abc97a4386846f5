"""What the settings of client and server say alike about a wrong option, without the library that finds it.

Not here: the options (each side's ``settings``), and how errors become exit codes (``cli``).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

EITHER_PADDING_OR_COMPRESSION = (
    "expected --padding or --compression, got both: compression would take the zeros out again"
)


def describe_mistake(mistake: Mapping[str, Any], given: Container[str]) -> tuple[str, str]:
    """The field that is wrong, and one sentence that names it as it was typed: as an option or as a variable.

    mistake: one of pydantic's ``ValidationError.errors()``. given: fields that came from options.
    """
    field = str(mistake["loc"][0])
    typed = f"--{field.replace('_', '-')}" if field in given else f"PACELINE_{field.upper()}"
    reason = str(mistake["msg"]).removeprefix("Input ").lower()
    return field, f"expected a valid {typed}, got {mistake.get('input')!r}: {reason}"
