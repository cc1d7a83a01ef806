"""What is done between building and serving: decode steps are recorded, and their costs measured."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from deepinfer.accelerator import Plan
from deepinfer.engine.cost_curves import CurveFolder, Facts
from deepinfer.engine.graphs.buffers import StepExtents
from deepinfer.engine.graphs.planning import GraphPlan
from deepinfer.engine.graphs.trial_steps import TrialSteps
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.round_lengths import RoundLengths
from deepinfer.engine.speculation import Speculation
from deepinfer.engine.step_costs import Clock, StepCosts, measure_curve
from deepinfer.engine.verify_lengths import VerifyLengths
from deepinfer.engine.worker import Worker
from deepinfer.sampling.verify_budget import CostCurve

_LOG = logging.getLogger(__name__)
_SMALL_SIZE = 8
"""Up to so many rows a single one more can be dear or cheap: a product may take another way."""


def progress_bar(doing: str, unit: str, total: int | None = None, *, is_wanted: bool = True) -> tqdm[None]:
    """Return a bar that shows only where somebody looks: logs and pipes get none, and of many ranks one has it."""
    shown = is_wanted and sys.stderr.isatty()
    return tqdm(desc=doing, unit=unit, unit_scale=unit == "B", total=total, disable=not shown, leave=False)


def variation_problems(options: EngineOptions, plan: Plan) -> list[str]:
    """Return why lengths of verification must not vary in an engine with these options."""
    if not (options.variable_verification and plan.options.batch_invariant and options.verification == "standard"):
        return []
    return [
        "variable_verification lets what else runs, and how fast, decide where a step is cut, and in standard "
        "verification the tokens depend on that, which batch invariance rules out. Use verification='coupled', whose "
        "tokens do not, or a fixed length"
    ]


def measured_sizes(graphs: GraphPlan) -> tuple[int, ...]:
    """Return the rows whose cost is measured: each recorded size; without graphs all small sizes and a choice above."""
    if graphs.is_recorded:
        return graphs.sizes
    most = graphs.sizes[-1]
    powers = [1 << p for p in range(most.bit_length())]
    sizes = {*range(1, _SMALL_SIZE + 1), *powers, *(3 * power for power in powers), most}
    return tuple(sorted(size for size in sizes if size <= most))


@dataclass(frozen=True, slots=True)
class Startup:
    """One engine before its first request.

    Attributes:
        worker: runs the steps.
        graphs: what is recorded.
        extents: what bounds decode steps.
        trial: makes steps out of nothing.
        clock: seconds.
    """

    worker: Worker
    graphs: GraphPlan
    extents: StepExtents
    trial: TrialSteps
    clock: Clock

    def record(self) -> None:
        """Record decode steps where that is planned."""
        _LOG.info("decode graphs: %s", self.graphs)
        if self.graphs.is_recorded:
            with progress_bar("recording", "graph", len(self.graphs.sizes)) as bar:
                self.worker.decode_steps.record(self.graphs.sizes, self.extents, self.trial, bar.update)

    def vary_lengths(self, speculation: Speculation, facts: Facts, folder: str | None) -> None:
        """Let each step choose its lengths, by the kept curve of these facts or one that is measured now."""
        kept = None if folder is None else CurveFolder(Path(folder))
        curve = None if kept is None else kept.find(facts)
        if curve is None:
            sizes = measured_sizes(self.graphs)
            with progress_bar("measuring", "size", len(sizes)) as bar:
                curve = self._measured(sizes, bar.update)
            if kept is not None:
                kept.keep(facts, curve)
        costs = ", ".join(f"{size}: {cost * 1e3:.2f}" for size, cost in zip(curve.sizes, curve.seconds, strict=True))
        _LOG.info("cost of a decode step by its rows, milliseconds: %s", costs)
        self.worker.lengths = VerifyLengths(
            StepCosts(curve), speculation.chances, RoundLengths(speculation.drafts, self.worker.tally)
        )

    def _measured(self, sizes: tuple[int, ...], tick: Callable[[], object]) -> CostCurve:
        def prepare(size: int) -> Callable[[], object]:
            inputs = self.trial(size, 0)
            return lambda: self.worker.trial_run(inputs)

        return measure_curve(sizes, prepare, self.clock, is_padded=self.graphs.is_recorded, tick=tick)
