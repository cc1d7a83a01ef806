"""A bench for the transformer: it builds ragged steps and pools by hand, without scheduler or engine."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.accelerator.batch import StepKind, StepLayout
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.plan import make_plan
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.model import ModelConfig, derive_roles
from deepinfer.model.checkpoint import Checkpoint
from deepinfer.model.rotary import rotary_tables
from deepinfer.model.transformer import GivenEmbeddings, Hidden, Transformer
from deepinfer.model.truncation import TruncationMode, truncate
from deepinfer.model.weights import load_model
from deepinfer_cpu_ref import Driver

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
POSITIONS = 256

FILLS = {
    "zeros": torch.zeros(1, dtype=torch.float32),
    "nan": torch.full((1,), -1, dtype=torch.int32).view(torch.float32),  # bytes 255: NaN as float32, E4M3 and UE8M0
    "large": torch.full((1,), 1e30, dtype=torch.float32),
}


@dataclass
class Request:
    """One request: its ids from position 0, what is an image, what is computed, and the memory it owns."""

    ids: list[int]
    image: list[bool]
    state_slot: int
    blocks: list[int]
    cached: int = 0


Work = Sequence[tuple[Request, int]]


@dataclass
class Bench:
    """A model over pools of its own. ``fill`` is what memory holds that nobody has written."""

    model: Transformer
    pools: CachePools
    fill: Tensor
    free_blocks: list[int] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for pool in (self.pools.block_bytes_Nb, self.pools.slot_bytes_Zb):
            pool.view(torch.float32).copy_(self.fill.expand(pool.shape[0], pool.shape[1] // 4))
        # Shuffled and without number 0, so that a missing look-up in the table cannot go unnoticed.
        self.free_blocks = random.Random(1).sample(range(1, self.pools.num_blocks), self.pools.num_blocks - 1)
        self.free_slots = random.Random(2).sample(range(1, self.pools.num_slots), self.pools.num_slots - 1)

    def admit(self, ids: Sequence[int], image: Sequence[bool] | None = None) -> Request:
        count = self.pools.layout.blocks_of(len(ids))
        blocks = [self.free_blocks.pop() for _ in range(count)]
        return Request(list(ids), list(image or [False] * len(ids)), self.free_slots.pop(), blocks)

    def release(self, request: Request) -> None:
        """Give the memory back as it is: the next owner finds it."""
        self.free_blocks += request.blocks
        self.free_slots.append(request.state_slot)

    def poison(self, request: Request) -> None:
        """Overwrite the request's own memory wherever no committed position is kept that a later step may read."""
        layout, pools = self.pools.layout, self.pools
        window = layout.ring - layout.backtrack
        kept = {layout.ring_place(p) for p in range(max(0, request.cached - window + 1), request.cached)}
        for section in layout.rings:
            records_Rb = pools.window(section.layer).bytes_ZRb[request.state_slot]
            for place in set(range(layout.ring)) - kept:
                records_Rb[place] = self._bytes(records_Rb.shape[1])
        for rows in layout.pendings:
            rows_PW = pools.pending(rows.layer).rows_ZPW[request.state_slot]
            waiting = {(request.cached - 1) % rows.capacity} if request.cached % 2 else set()
            for place in set(range(rows.capacity)) - waiting:
                rows_PW[place] = self.fill
        for owner in layout.owners:
            index_Nb, main_NEb = pools.index_keys(owner.layer).bytes_Nb, pools.entries(owner.layer).bytes_NEb
            data, scale = layout.index_format.data_bytes, layout.index_format.scale_bytes
            for entry in range(request.cached // owner.ratio, len(request.blocks) * owner.entries):
                block, place = request.blocks[entry // owner.entries], entry % owner.entries
                main_NEb[block, place] = self._bytes(main_NEb.shape[2])
                index_Nb[block, place * data : (place + 1) * data] = self._bytes(data)
                first_scale = owner.entries * data + place * scale
                index_Nb[block, first_scale : first_scale + scale] = self._bytes(scale)

    def step(
        self,
        kind: StepKind,
        work: Work,
        *,
        padding_rows: int = 0,
        embeddings: GivenEmbeddings | None = None,
        with_taps: bool = False,
        commit: bool = True,
        keep_starts: Sequence[int] | None = None,
        truncated_by: TruncationMode = "compact",
    ) -> Hidden:
        """Run ``q`` more positions of each request in one step; rows come request by request."""
        look_back = self.model.config.engram_max_ngram_size - 1
        ids: list[int] = []
        images: list[bool] = []
        positions: list[int] = []
        owners: list[int] = []
        starts = [0]
        histories: list[list[int]] = []
        for number, (request, rows) in enumerate(work):
            span = range(request.cached, request.cached + rows)
            ids += [request.ids[p] for p in span]
            images += [request.image[p] for p in span]
            positions += span
            owners += [number] * rows
            starts.append(len(ids))
            before = [request.cached - back for back in range(1, look_back + 1)]
            histories.append([-1 if p < 0 or request.image[p] else request.ids[p] for p in before])
        cached = [request.cached for request, _ in work]
        slots = [request.state_slot for request, _ in work]
        tables = [request.blocks for request, _ in work]
        if padding_rows:  # as a request of its own that owns nothing: slot 0, block 0
            ids += [0] * padding_rows
            images += [False] * padding_rows
            positions += [0] * padding_rows
            owners += [len(work)] * padding_rows
            starts.append(len(ids))
            histories.append([-1] * look_back)
            cached.append(0)
            slots.append(0)
            tables.append([])
        longest = max(len(table) for table in tables)
        step = StepLayout(
            kind=kind,
            block_size=self.pools.layout.block_size,
            ring=self.pools.layout.ring,
            row_starts_R1=torch.tensor(starts),
            cached_R=torch.tensor(cached),
            state_slots_R=torch.tensor(slots),
            block_table_RB=torch.tensor([table + [0] * (longest - len(table)) for table in tables]),
            request_T=torch.tensor(owners),
            position_T=torch.tensor(positions),
            window_start_R=torch.zeros(len(cached), dtype=torch.int64),
            image_T=torch.tensor(images),
            valid_T=torch.arange(len(ids)) < len(ids) - padding_rows,
            max_position=max(positions) + 1,
            max_rows=max(end - start for start, end in pairwise(starts)),
        )
        ids_T = torch.tensor(ids)
        tokens_TG = self.model.ngram_tokens(ids_T, torch.tensor(histories), step)
        truncation = None if keep_starts is None else truncate(step, keep_starts, truncated_by)
        hidden = self.model.forward(
            ids_T, tokens_TG, step, self.pools, embeddings, with_taps=with_taps, truncation=truncation
        )
        if commit:
            for request, rows in work:
                request.cached += rows
        return hidden

    def logits(self, kind: StepKind, work: Work, **options: Any) -> Tensor:
        """Run a step and return the logits of all its valid rows."""
        hidden_TD = self.step(kind, work, **options).hidden_TD
        return self.model.logits(hidden_TD[: sum(rows for _, rows in work)])

    def prefill(self, request: Request, chunks: Sequence[int]) -> Tensor:
        return torch.cat([self.logits("prefill", [(request, rows)]) for rows in chunks])

    def prefill_together(self, requests: Sequence[Request], chunks: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run the chunks of many requests, each request's next one in the same step; return each one's logits."""
        logits: list[list[Tensor]] = [[] for _ in requests]
        for turn in range(max(map(len, chunks))):
            numbers = [number for number, sizes in enumerate(chunks) if turn < len(sizes)]
            rows = [chunks[number][turn] for number in numbers]
            together = self.logits("prefill", [(requests[n], q) for n, q in zip(numbers, rows, strict=True)])
            for number, part in zip(numbers, together.split(rows), strict=True):
                logits[number].append(part)
        return [torch.cat(parts) for parts in logits]

    def decode(self, request: Request, steps: int) -> Tensor:
        return torch.cat([self.logits("decode", [(request, 1)]) for _ in range(steps)])

    def _bytes(self, count: int) -> Tensor:
        return self.fill.view(torch.uint8).repeat(-(-count // 4))[:count]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "tiny8.safetensors")


@pytest.fixture(scope="session")
def tiny8() -> ModelConfig:
    return ModelConfig.from_file(GOLDEN / "tiny8.json")


@pytest.fixture(scope="session")
def golden_directory(golden: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden's weights as a checkpoint directory."""
    directory = tmp_path_factory.mktemp("golden")
    shutil.copy(GOLDEN / "tiny8.json", directory / "config.json")
    weights = {name.removeprefix("w."): tensor for name, tensor in golden.items() if name.startswith("w.")}
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def model_of(tiny8: ModelConfig, golden_directory: Path) -> Callable[[OpOptions], Transformer]:
    """The golden's model for some options, loaded once for each."""
    models: dict[OpOptions, Transformer] = {}
    driver = Driver()

    def build(options: OpOptions) -> Transformer:
        if options not in models:
            ops = make_plan(driver, options).ops
            weights = load_model(tiny8, Checkpoint.open(golden_directory), ops, driver.device)
            models[options] = Transformer(tiny8, weights, ops, rotary_tables(tiny8, POSITIONS).to(driver.device))
        return models[options]

    return build


@pytest.fixture(scope="session")
def bench_of(model_of: Callable[[OpOptions], Transformer]) -> Callable[..., Bench]:
    """Make a bench: fresh pools for the golden's model."""

    def build(
        *,
        options: OpOptions | None = None,
        fill: str = "nan",
        block_size: int = 8,
        backtrack: int = 4,
        num_blocks: int = 64,
        num_slots: int = 8,
    ) -> Bench:
        options = options or OpOptions()
        model = model_of(options)
        layout = CacheLayout.from_config(
            model.config,
            derive_roles(model.config),
            block_size=block_size,
            backtrack=backtrack,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        pools = CachePools(
            layout,
            torch.empty(num_blocks, layout.block_bytes, dtype=torch.uint8),
            torch.empty(num_slots, layout.slot_bytes, dtype=torch.uint8),
        )
        return Bench(model, pools, FILLS[fill])

    return build


@pytest.fixture(scope="session")
def alone_logits(bench_of: Callable[..., Bench], golden: dict[str, Tensor]) -> Callable[[OpOptions, int], Tensor]:
    """Logits of the golden's first positions, one decode step each, alone in the batch."""
    found: dict[OpOptions, Tensor] = {}
    benches: dict[OpOptions, tuple[Bench, Request]] = {}

    def logits(options: OpOptions, positions: int) -> Tensor:
        if options not in benches:
            bench = bench_of(options=options)
            benches[options] = bench, bench.admit(golden["ids"].tolist())
            found[options] = torch.empty(0, bench.model.config.vocab_size)
        bench, request = benches[options]
        if request.cached < positions:
            more = bench.decode(request, positions - request.cached)
            found[options] = torch.cat([found[options], more])
        return found[options][:positions]

    return logits
