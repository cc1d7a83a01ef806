"""Settings of the whole test run that must stand before torch starts its threads.

Tests compute with tiny tensors: one thread is faster than two that wait for each other, and a thread that spins while
it waits slows every neighbour on a shared machine. A test that is about threads sets their number itself.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
