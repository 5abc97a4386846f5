"""The step-time model t(n) = a + b*n, fitted to the steps that the engine has seen.

A calibration at start gives the first figures (``calibrate``); contexts get longer and machines busier, so old steps
are forgotten at a fixed rate. Least squares over decayed sums, and two anchors, one row and many: the first figures,
as many times longer as steps have been of late. Real steps are no straight line (the second row often costs more than
the ten behind it), so steps of few rows say how long a step is, but little about what many rows would cost: fitted to
them alone, rows look dear, budgets shrink, and nothing but small steps would ever be seen again.
"""

from __future__ import annotations

from paceline.shared.messages import StepTime

_DECAY = 0.98
_ANCHOR_ROWS = (1.0, 32.0)
_ANCHOR_WEIGHT = 1.0
_OUTLIER = 5.0
"""A step that took this many times longer than expected says more about a pause of the machine than about its rows."""


class StepTimeModel:
    """``current`` is the fit so far."""

    def __init__(self, first: StepTime) -> None:
        self._first = first
        self.current = first
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._expected = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learns from one step."""
        seconds = min(seconds, _OUTLIER * self.current.at(num_rows)) if self._weight else seconds
        values = (1.0, num_rows, seconds, num_rows * num_rows, num_rows * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            _DECAY * old + new for old, new in zip(sums, values, strict=True)
        )
        self._expected = _DECAY * self._expected + self._first.at(num_rows)
        self.current = self._fit()

    def _fit(self) -> StepTime:
        weight, x, y, xx, xy = self._weight, self._x, self._y, self._xx, self._xy
        level = y / max(self._expected, 1e-12)
        for rows in _ANCHOR_ROWS:
            seconds = level * self._first.at(rows)
            weight += _ANCHOR_WEIGHT
            x += _ANCHOR_WEIGHT * rows
            y += _ANCHOR_WEIGHT * seconds
            xx += _ANCHOR_WEIGHT * rows * rows
            xy += _ANCHOR_WEIGHT * rows * seconds
        slope = max((weight * xy - x * y) / max(weight * xx - x * x, 1e-12), 0.0)
        base = max((y - slope * x) / weight, 0.0)
        return StepTime(base, slope)
