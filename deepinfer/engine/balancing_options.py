"""The options of redundant experts and of their balancing: what is refused, and what unset ones mean."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

from deepinfer.errors import ArgumentError
from deepinfer.parallel.loads import MOST_STEPS
from deepinfer.settings import Settings

ExpertBalancing = Literal["off", "greedy", "balanced"]


class BalancingOptions(NamedTuple):
    """Four options of an engine; None for what is unset.

    Attributes:
        redundant_experts: slots beyond one an expert.
        policy: who plans, or "off".
        interval_steps: steps between plans.
        window_steps: steps that a plan is made from.
    """

    redundant_experts: int | None
    policy: ExpertBalancing | None
    interval_steps: int | None
    window_steps: int | None

    def problems(self, *, is_spread: bool) -> list[str]:
        """Return what contradicts itself or another option; types and ranges have been looked at."""
        found = []
        if self.window_steps is not None and self.window_steps > MOST_STEPS:
            found.append(f"expert_balancing_window={self.window_steps} is more than {MOST_STEPS} steps")
        asked = []
        if self.redundant_experts:
            asked.append(f"redundant_experts={self.redundant_experts}")
        if self.policy not in (None, "off"):
            asked.append(f"expert_balancing={self.policy!r}")
        if asked and not is_spread:
            found.append(
                f"{' and '.join(asked)}: every rank holds all experts, nothing can be copied or moved; set "
                f"expert_parallel_size to the ranks that shall share them"
            )
        if self.policy == "off" or not is_spread:
            found += self._idle_problems()
        return found

    def _idle_problems(self) -> list[str]:
        """Return that steps are counted for a plan that nobody makes, where they are."""
        idle = [
            f"{name}={value}"
            for name, value in (
                ("expert_balancing_interval", self.interval_steps),
                ("expert_balancing_window", self.window_steps),
            )
            if value is not None
        ]
        if not idle:
            return []
        return [
            f"{' and '.join(idle)}: nothing is balanced (expert_balancing='off', or unset without redundant experts, "
            f"or one rank)"
        ]

    def under(self, settings: Settings, *, is_spread: bool, has_prompts_only: bool) -> BalancingOptions:
        """Return what they mean: whoever pays for redundant slots gets them balanced, and nobody else.

        Production plans anew every 1,000 prompt steps or 10,000 decode steps, from a window of a tenth.

        Raises:
            ArgumentError: an interval or a window is given, and the environment leaves nothing to plan for.
        """
        if not is_spread:
            return self._replace(redundant_experts=0, policy="off")
        redundant = self.redundant_experts if self.redundant_experts is not None else settings.redundant_experts
        policy = self.policy or cast("ExpertBalancing | None", settings.expert_balancing)
        policy = policy or ("balanced" if redundant else "off")
        if policy == "off":
            if problems := self._idle_problems():
                raise ArgumentError("engine options", problems)
            return BalancingOptions(redundant, policy, None, None)
        interval = self.interval_steps or (1_000 if has_prompts_only else 10_000)
        window = self.window_steps or min(MOST_STEPS, max(1, interval // 10))
        return BalancingOptions(redundant, policy, interval, window)
