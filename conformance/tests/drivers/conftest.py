"""A small engine in the hand: the real transformer over real pools, with every address chosen by the test.

Legend: T rows, R requests, B blocks of the longest table, G look-back, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from deepinfer.accelerator import AcceleratorDriver, OpOptions, Plan, StepLayout, make_plan, registry
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.model.checkpoint import Checkpoint, make_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.roles import derive_roles
from deepinfer.model.rotary import rotary_tables
from deepinfer.model.transformer import Transformer
from deepinfer.model.weights import load_model

PRESETS = Path(str(files("deepinfer.model"))) / "presets"
BLOCK_SIZE = 4
BACKTRACK = 3


@dataclass
class Request:
    """One request: its tokens so far, and the memory that the test gave it."""

    ids: list[int]
    table: list[int]
    slot: int
    cached: int = 0
    images: list[bool] = field(default_factory=list)

    def is_image(self, position: int) -> bool:
        return position < len(self.images) and self.images[position]


@dataclass
class Chunk:
    """A request and how many of its next positions a step computes."""

    request: Request
    rows: int


class Hand:
    """Runs steps. ``tamper`` may change a step's layout before it is run."""

    def __init__(self, plan: Plan, transformer: Transformer, pools: CachePools) -> None:
        self.plan = plan
        self.transformer = transformer
        self.pools = pools
        self._free_blocks = list(range(pools.num_blocks - 1, 0, -1))
        self._free_slots = list(range(pools.num_slots - 1, 0, -1))
        self.tamper: Callable[[StepLayout], StepLayout] = lambda step: step

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    def poison(self, seed: int) -> None:
        """Fill both pools with random bytes."""
        generator = torch.Generator().manual_seed(seed)
        for pool in (self.pools.block_bytes_Nb, self.pools.slot_bytes_Zb):
            pool.random_(0, 256, generator=generator)

    def request(self, ids: Sequence[int], images: Sequence[bool] = ()) -> Request:
        return Request(list(ids), [], self._free_slots.pop(), images=list(images))

    def chunk(self, request: Request, rows: int) -> Chunk:
        return Chunk(request, rows)

    def fork(self, parent: Request) -> Request:
        """Share full blocks; copy the half-full last block and the state slot."""
        last = parent.cached // BLOCK_SIZE
        child = Request(list(parent.ids), parent.table[:last], self._free_slots.pop(), parent.cached)
        moves = self.plan.ops.moves
        moves.copy(self.pools.slot_bytes_Zb, torch.tensor([parent.slot]), torch.tensor([child.slot]))
        if parent.cached % BLOCK_SIZE:
            child.table.append(self._free_blocks.pop())
            source, target = torch.tensor([parent.table[last]]), torch.tensor([child.table[last]])
            moves.copy(self.pools.block_bytes_Nb, source, target)
        return child

    def release(self, request: Request, others: Sequence[Request]) -> None:
        """Give back what no other request holds, for the next one to find with its old contents."""
        held = {block for other in others for block in other.table}
        self._free_blocks += [block for block in request.table if block not in held]
        self._free_slots.append(request.slot)

    def step(self, kind: str, chunks: Sequence[Chunk]) -> list[int]:
        """Run one step and return the token after each request's last row; caches advance, tokens do not."""
        for chunk in chunks:
            needed = -(-(chunk.request.cached + chunk.rows) // BLOCK_SIZE)
            while len(chunk.request.table) < needed:
                chunk.request.table.append(self._free_blocks.pop())
        step = self.tamper(self._layout(kind, chunks))
        ids_T = torch.tensor(
            [token for c in chunks for token in c.request.ids[c.request.cached : c.request.cached + c.rows]]
        )
        back = max(self.config.engram_max_ngram_size - 1, 0)
        history_RG = torch.tensor([[self._before(c.request, s + 1) for s in range(back)] for c in chunks])
        tokens_TG = self.transformer.ngram_tokens(ids_T, history_RG.view(len(chunks), back), step)
        hidden = self.transformer.forward(ids_T, tokens_TG, step, self.pools)
        last_R = step.row_starts_R1[1:] - 1
        logits_RV = self.transformer.logits(hidden.hidden_TD[last_R])
        for chunk in chunks:
            chunk.request.cached += chunk.rows
        return [int(token) for token in logits_RV.argmax(1)]

    def prefill(self, request: Request, sizes: Sequence[int]) -> int:
        """Compute a prompt in chunks and return the token after the last one."""
        token = -1
        for size in sizes:
            (token,) = self.step("prefill", [Chunk(request, size)])
        return token

    def decode(self, requests: Sequence[Request], tokens: Sequence[int], count: int) -> list[list[int]]:
        """Feed tokens back ``count`` times; return what each request said, the given tokens first."""
        said = [[token] for token in tokens]
        for _ in range(count):
            for request, words in zip(requests, said, strict=True):
                request.ids.append(words[-1])
            for words, token in zip(said, self.step("decode", [Chunk(r, 1) for r in requests]), strict=True):
                words.append(token)
        return said

    def _before(self, request: Request, back: int) -> int:
        position = request.cached - back
        return -1 if position < 0 or request.is_image(position) else request.ids[position]

    def _layout(self, kind: str, chunks: Sequence[Chunk]) -> StepLayout:
        starts = [0]
        for chunk in chunks:
            starts.append(starts[-1] + chunk.rows)
        positions = [c.request.cached + row for c in chunks for row in range(c.rows)]
        longest = max(len(c.request.table) for c in chunks)
        return StepLayout(
            kind=kind,  # type: ignore[arg-type]
            block_size=BLOCK_SIZE,
            ring=self.pools.layout.ring,
            row_starts_R1=torch.tensor(starts),
            cached_R=torch.tensor([c.request.cached for c in chunks]),
            state_slots_R=torch.tensor([c.request.slot for c in chunks]),
            block_table_RB=torch.tensor([c.request.table + [0] * (longest - len(c.request.table)) for c in chunks]),
            request_T=torch.tensor([number for number, c in enumerate(chunks) for _ in range(c.rows)]),
            position_T=torch.tensor(positions),
            window_start_R=torch.zeros(len(chunks), dtype=torch.int64),
            image_T=torch.tensor([c.request.is_image(c.request.cached + row) for c in chunks for row in range(c.rows)]),
            valid_T=torch.ones(len(positions), dtype=torch.bool),
            max_position=max(positions) + 1,
            max_rows=max(c.rows for c in chunks),
        )


@pytest.fixture(scope="session")
def tiny8() -> ModelConfig:
    return ModelConfig.from_file(PRESETS / "tiny8.json")


@pytest.fixture(scope="session")
def three_layers(tiny8: ModelConfig) -> ModelConfig:
    """A window layer with Engram, a ratio-2 owner, a ratio-1 owner."""
    return dataclasses.replace(
        tiny8,
        num_hidden_layers=3,
        compress_ratios=(0, 2, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=2,
        engram_layer_ids=(0,),
        engram_num_embeddings=tiny8.engram_num_embeddings[:1],
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelConfig], Checkpoint]:
    made: dict[ModelConfig, Checkpoint] = {}

    def open_checkpoint(config: ModelConfig) -> Checkpoint:
        if config not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / "made"
            made[config] = Checkpoint.open(make_checkpoint(config, 0, folder))
        return made[config]

    return open_checkpoint


MakeHand = Callable[..., Hand]


@pytest.fixture
def make_hand(checkpoint_of: Callable[[ModelConfig], Checkpoint]) -> MakeHand:
    """Return a function that puts a driver under a model with pools full of random bytes."""

    def make(
        driver: AcceleratorDriver,
        config: ModelConfig,
        options: OpOptions | None = None,
        *,
        num_blocks: int = 40,
        num_slots: int = 6,
    ) -> Hand:
        options = options or OpOptions()
        plan = make_plan(driver, options, reference=registry.load("cpu_ref")())
        layout = CacheLayout.from_config(
            config,
            derive_roles(config),
            block_size=BLOCK_SIZE,
            backtrack=BACKTRACK,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        pools = CachePools.allocate(layout, driver, num_blocks=num_blocks, num_slots=num_slots)
        weights = load_model(config, checkpoint_of(config), plan.ops, driver.device, threads=1)
        hand = Hand(plan, Transformer(config, weights, plan.ops, rotary_tables(config, 512)), pools)
        hand.poison(1)
        return hand

    return make
