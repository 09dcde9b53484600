"""Seeded runs of the real core with simulated peers on a virtual clock: a failing seed replays exactly."""

from shared.compiled import use_compiled

use_compiled()
