"""Which verifier to ask for. Not here: what verifiers do (``paceline.server.verify``)."""

from __future__ import annotations

from paceline.shared.errors import ParameterError
from paceline.shared.sampling import SamplingParams, Verifier


def pick_verifier(wanted: Verifier | str | None, sampling: SamplingParams) -> Verifier:
    """The verifier to ask for. Raises ``ParameterError`` for an unknown one, or greedy above temperature 0."""
    if wanted is None:
        return sampling.default_verifier()
    try:
        verifier = Verifier(wanted)
    except ValueError as error:
        known = ", ".join(entry.value for entry in Verifier)
        raise ParameterError("verify", f"expected a verifier among {known}, got {wanted!r}") from error
    if verifier is Verifier.GREEDY and not sampling.is_greedy:
        raise ParameterError("verify", f"expected temperature 0 for verify greedy, got {sampling.temperature:g}")
    return verifier
