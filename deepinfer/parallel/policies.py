"""The policies by name."""

from __future__ import annotations

from typing import Final

from deepinfer.errors import ArgumentError
from deepinfer.parallel.balanced import BalancedPolicy
from deepinfer.parallel.greedy import GreedyPolicy
from deepinfer.parallel.policy import BalancePolicy, KeepPolicy

DEFAULT_POLICY: Final = "balanced"
POLICY_NAMES: Final = ("keep", "greedy", "balanced")


def make_policy(name: str) -> BalancePolicy:
    """Return the policy of that name, with its defaults."""
    if name == "keep":
        return KeepPolicy()
    if name == "greedy":
        return GreedyPolicy()
    if name == "balanced":
        return BalancedPolicy()
    raise ArgumentError("balancing policy", [f"{name!r} is unknown: choose one of {', '.join(POLICY_NAMES)}"])
