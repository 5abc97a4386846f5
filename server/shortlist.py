"""What the filters leave of one row of logits on a CPU, without rewriting the row.

Top-k, top-p and min-p keep few tokens. On a walk along one path only these matter: noise is made for them and nothing
else. The same tokens with the same bits as ``warp``, found by a threshold below the top instead of a sort.

Not here: many rows at once (``warp``), and what is chosen (``choose``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.server.warp import COLD, TOLERANCE, cuts_of
from paceline.shared.sampling import SamplingParams

_REACHES = (4.0, 7.0, 10.0, 14.0, 20.0, 30.0, 60.0, 250.0)
"""Nats below the top that are looked at, one after another, until all that stays is within reach."""
_MAX_SORTED = 8192
"""With more candidates than this ``warp`` is no slower."""
_LEAST = np.float32(-80.0)
"""exp of less is subnormal soon: slow, and nothing beside the top's 1."""

Shortlist = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Ascending ids, and log p there up to a constant."""


def shortlist(scores: NDArray[np.float32], sampling: SamplingParams) -> Shortlist | None:
    """Which tokens the filters keep, and log p there.

    scores: float32[V], edited (``warp.edit``), not yet divided by the temperature. None where no filter is set or it
    keeps very many tokens, for a temperature near 0, and for a row without a finite top: ``warp`` treats these apart.
    """
    if cuts_of(sampling) is None or sampling.temperature < COLD:
        return None
    heated = scores / np.float32(sampling.temperature)
    top = heated.max()
    if not np.isfinite(top):
        return None
    wanted = 0.0
    if sampling.top_p < 1.0 and not sampling.top_k:
        mass = np.exp(np.maximum(heated - top, _LEAST)).sum(dtype=np.float64)
        wanted = (sampling.top_p - TOLERANCE) * float(mass)
    for reach in _REACHES:
        ids = np.flatnonzero(heated >= top - np.float32(reach))
        if len(ids) > _MAX_SORTED:
            break
        count = _num_kept(heated[ids], float(top), reach, wanted, sampling)
        if count is not None:
            values = heated[ids]
            # Stable, from ascending ids: among equals the lowest stands first.
            kept = np.sort(np.argsort(-values, kind="stable")[:count])
            return ids[kept], values[kept]
    return None


def _num_kept(
    values: NDArray[np.float32], top: float, reach: float, wanted: float, sampling: SamplingParams
) -> int | None:
    """How many of these, the likeliest of their row, stay; None if the answer lies beyond them.

    wanted: mass, in units of the top's, that the nucleus must hold if top-k leaves all tokens.
    """
    count = len(values)
    if sampling.top_k:
        if sampling.top_k > count:
            return None
        count = sampling.top_k
    elif sampling.min_p and np.log(sampling.min_p) < -reach and sampling.top_p == 1.0:
        return None
    ordered = -np.sort(-values)[:count]
    if sampling.top_p < 1.0:
        mass = np.cumsum(np.exp(ordered.astype(np.float64) - top))
        if sampling.top_k:
            wanted = (sampling.top_p - TOLERANCE) * float(mass[-1])
        nucleus = int(np.searchsorted(mass, wanted)) + 1
        if nucleus > count and (not sampling.min_p or np.log(sampling.min_p) < -reach):
            return None
        count = min(count, nucleus)
    if sampling.min_p:
        floor = top + np.log(sampling.min_p) - TOLERANCE
        count = min(count, int((ordered >= floor).sum()))
    return max(count, 1)
