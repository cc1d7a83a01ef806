"""The forward pass of decode steps: call by call, or from recorded graphs.

What is recorded is the pass from ids to hidden rows. What stands before it (reads of host memory, the drafts' ids) and
behind it (logits, sampling, the drafts' context) runs as ever, on the step's own rows only.

Legend: T rows, S rows of a graph, G look-back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.interface import AcceleratorDriver, Graph
from deepinfer.cache.pools import CachePools
from deepinfer.engine.graphs.buffers import StepBuffers, StepExtents
from deepinfer.engine.graphs.sizes import select
from deepinfer.engine.step_inputs import StepInputs
from deepinfer.errors import DeterminismError
from deepinfer.model.transformer import Hidden, Transformer


class DecodeInputs(NamedTuple):
    """What the pass reads, on the device.

    Attributes:
        ids_T: int64 token ids.
        tokens_TG: int64, the look-back of the n-gram memory.
        memories: what its layers read, by layer.
        layout: the ragged layout.
    """

    ids_T: Tensor
    tokens_TG: Tensor
    memories: Mapping[int, Tensor]
    layout: StepLayout


@dataclass(frozen=True, slots=True)
class _Recorded:
    buffers: StepBuffers
    graph: Graph
    hidden: Hidden


class DecodeSteps:
    """Runs the forward pass of decode steps.

    Attributes:
        replays: steps that ran from a graph.
    """

    def __init__(
        self, transformer: Transformer, pools: CachePools, driver: AcceleratorDriver, *, with_taps: bool
    ) -> None:
        """Begin without graphs: every step runs call by call."""
        self.replays = 0
        self._transformer = transformer
        self._pools = pools
        self._driver = driver
        self._with_taps = with_taps
        self._recorded: dict[int, _Recorded] = {}
        self._sizes: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the recorded graphs, ascending; empty where nothing is recorded."""
        return self._sizes

    def run(self, inputs: StepInputs) -> Hidden:
        """Return the hidden rows of a decode step; they are overwritten by the next step."""
        self.replays += bool(self._sizes)
        return self.run_prepared(self.prepare(inputs))

    def run_prepared(self, inputs: DecodeInputs) -> Hidden:
        """Do the same with inputs that are prepared; the step is not counted."""
        return self.replay(inputs, self.rows_run(inputs.layout.rows)) if self._sizes else self.eager(inputs)

    def rows_run(self, rows: int) -> int:
        """Return the rows that a step of so many runs, padding included."""
        return select(self._sizes, rows) if self._sizes else rows

    def prepare(self, inputs: StepInputs) -> DecodeInputs:
        """Compute what is not recorded: it reads host memory."""
        tokens_TG = self._transformer.ngram_tokens(inputs.ids_T, inputs.history_RG, inputs.layout)
        return DecodeInputs(inputs.ids_T, tokens_TG, self._transformer.recall(tokens_TG), inputs.layout)

    def eager(self, inputs: DecodeInputs) -> Hidden:
        """Run the pass call by call."""
        ids_T, tokens_TG, memories, layout = inputs
        return self._transformer.forward(
            ids_T, tokens_TG, layout, self._pools, with_taps=self._with_taps, memories=memories
        )

    def replay(self, inputs: DecodeInputs, size: int) -> Hidden:
        """Run the pass from the graph of that size and return the rows that are not padding."""
        recorded = self._recorded[size]
        recorded.buffers.load(*inputs)
        recorded.graph.replay()
        rows, taps_SA = inputs.layout.rows, recorded.hidden.taps_TA
        return Hidden(recorded.hidden.hidden_TD[:rows], None if taps_SA is None else taps_SA[:rows])

    def record(
        self,
        sizes: Iterable[int],
        extents: StepExtents,
        trial: Callable[[int, int], DecodeInputs],
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        """Record a graph of each size, the largest first, and try each on values other than those it was recorded with.

        Args:
            sizes: rows of the graphs.
            extents: what bounds the steps.
            trial: makes a step of so many rows that owns the memory it reads and writes, the same for the same number;
                another number gives other values.
            tick: called once for each size.

        Raises:
            DeterminismError: a replay differs from the same step call by call.
        """
        with torch.inference_mode():
            for size in sorted(set(sizes), reverse=True):
                example = trial(size, 0)
                buffers = StepBuffers(size, extents, example.memories, self._driver.device)
                held = DecodeInputs(buffers.ids_S, buffers.tokens_SG, buffers.memories, buffers.layout)
                buffers.load(*example)
                self.eager(held)  # what compiles or allocates at its first call cannot be recorded
                self._driver.synchronize()
                graph = self._driver.new_graph()
                try:
                    hidden = self._captured(graph, held)
                except Exception as error:
                    raise DeterminismError(
                        f"driver {self._driver.name!r} cannot record a decode step of {size} rows: {error}. Run "
                        f"without graphs (decode_graphs=False), and report the driver"
                    ) from error
                self._recorded[size] = _Recorded(buffers, graph, hidden)
                self._try(size, held, trial)
                tick()
        self._sizes = tuple(sorted(self._recorded))

    def _captured(self, graph: Graph, held: DecodeInputs) -> Hidden:
        graph.capture_begin()
        try:
            return self.eager(held)
        finally:
            graph.capture_end()

    def _try(self, size: int, held: DecodeInputs, trial: Callable[[int, int], DecodeInputs]) -> None:
        recorded = self._recorded[size]
        other = trial(size, 1)
        recorded.buffers.load(*other)
        expected = self._effects(self.eager(held), other.layout)
        other = trial(size, 1)  # the caches as they were before
        self.replay(other, size)
        found = self._effects(recorded.hidden, other.layout)
        self._driver.synchronize()
        problems = [name for name in expected if not _same_bits(found[name], expected[name])]
        if problems:
            raise DeterminismError(
                f"the graph of {size} rows that driver {self._driver.name!r} recorded gives other "
                f"{' and '.join(problems)} than the same step call by call: something in it depends on a value that "
                f"the host read while it was recorded. Run without graphs (decode_graphs=False), and report the driver"
            )

    def _effects(self, hidden: Hidden, layout: StepLayout) -> dict[str, Tensor]:
        """Return copies of all that a pass leaves: its results, and the caches of the requests of the step."""
        effects = {
            "hidden rows": hidden.hidden_TD.clone(),
            "state slots": self._pools.slot_bytes_Zb.index_select(0, layout.state_slots_R),
            "blocks": self._pools.block_bytes_Nb.index_select(0, layout.block_table_RB.flatten()),
        }
        return effects if hidden.taps_TA is None else {**effects, "taps": hidden.taps_TA.clone()}


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
