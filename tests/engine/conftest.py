"""Engines over a tiny model, driven step by step and audited: every record is kept, every book is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.accelerator import AcceleratorDriver, OpOptions
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.outputs import CompletionOutput, RequestOutput, StepRecord
from deepinfer.model.checkpoint import make_checkpoint
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram_hash import engram_primes
from deepinfer.model.presets import preset
from deepinfer.settings import Settings
from deepinfer_conformance.drivers import NullDriver, OracleDriver, oracle_tokens
from deepinfer_cpu_ref import Driver as ReferenceDriver

BLOCK_SIZE = 4
VOCAB_SIZE = 101
END = 1

# One layer of each kind: window only, pair-merged owner, ratio-1 owner, and a reader of it; n-gram memory on one.
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 6,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "max_position_embeddings": 65536,
    "engram_layer_ids": [1],
    "engram_vocab_size": 30,
    "engram_compressed_vocab_size": VOCAB_SIZE,
    "num_nextn_predict_layers": 0,
    "hc_sinkhorn_iters": 4,
    "image_token_id": 99,
    "eos_token_id": END,
}


class UniformDriver(NullDriver):
    """Computes nothing but samples in earnest: all logits are 0, so tokens depend on seeds and settings alone."""

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        return {**super().op_groups(options), "sampling": ReferenceDriver().op_groups(options)["sampling"]}


class Driven:
    """An engine in the hand.

    Attributes:
        records: every record that each request gave, by id, of its latest life.
        steps: what each step did.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.records: dict[str, list[RequestOutput]] = {}
        self.steps: list[StepRecord] = []
        self._start = engine.stats()

    def add(self, request_id: str, prompt: Sequence[int], **params: Any) -> None:
        self.engine.add_request(request_id, prompt, SamplingParams(**params))
        self.records[request_id] = []

    def fork(self, parent: str, child: str, **params: Any) -> None:
        self.engine.fork_request(parent, child, SamplingParams(**params))
        self.records[child] = []

    def step(self, count: int = 1) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for _ in range(count):
            outputs = self.engine.step()
            self.engine.check_invariants()
            self.steps.append(self.engine.last_step)
            for output in outputs:
                assert not any(record.finished for record in self.records[output.request_id]), output
                self.records[output.request_id].append(output)
        return outputs

    def drain(self, limit: int = 2000) -> None:
        """Step until nothing is left, then audit."""
        for _ in range(limit):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        self.audit()

    def audit(self) -> None:
        """Everything went back and every request gave exactly one terminal record, its last."""
        stats = self.engine.stats()
        assert (stats.free_blocks, stats.free_state_slots) == (self._start.free_blocks, self._start.free_state_slots)
        assert (stats.num_waiting, stats.num_running, stats.num_unfinished) == (0, 0, 0)
        assert not self.engine.has_unfinished_requests()
        self.engine.check_invariants()
        for request_id, records in self.records.items():
            assert [record.finished for record in records] == [False] * (len(records) - 1) + [True], request_id

    def answer(self, request_id: str, index: int = 0) -> CompletionOutput:
        return self.records[request_id][-1].outputs[index]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return list(self.answer(request_id, index).token_ids)

    def chunks(self, request_id: str) -> list[tuple[int, int, int]]:
        """The (cached, q, k) of each prefill step of a request."""
        return [
            (row.cached, row.q, row.k)
            for step in self.steps
            if step.kind == "prefill"
            for row in step.rows
            if row.request_id == request_id
        ]

    def unowned(self) -> tuple[list[int], list[int]]:
        """Numbers of the blocks and state slots that nobody owns, the reserved number 0 among them."""
        memory = self.engine._books.scheduler.memory
        pools = (memory.blocks.reference_counts(), memory.slots.reference_counts())
        blocks, slots = ([number for number, count in enumerate(counts) if not count] for counts in pools)
        return blocks, slots

    def poison(self, fill: str) -> None:
        """Overwrite all memory that nobody owns."""
        pools = self.engine.worker.pools
        blocks, slots = self.unowned()
        for pool, numbers in ((pools.block_bytes_Nb, blocks), (pools.slot_bytes_Zb, slots)):
            pool.view(torch.float32)[numbers] = FILLS[fill]


FILLS = {
    "zeros": torch.zeros(1),
    "nan": torch.full((1,), -1, dtype=torch.int32).view(torch.float32),  # bytes 255: NaN as float32, E4M3 and UE8M0
    "large": torch.full((1,), 1e30),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    described = preset("tiny8").to_hf()
    text = {key: value for key, value in described.pop("text_config").items() if not key.startswith("dspark")}
    primes = engram_primes(1, text["engram_max_ngram_size"], text["engram_n_heads"], TINY["engram_vocab_size"])
    return ModelConfig.from_hf({**described, **text, **TINY, "engram_num_embeddings": [sum(each) for each in primes]})


@pytest.fixture(scope="session")
def tiny_directory(tiny_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, without a tokenizer."""
    return make_checkpoint(tiny_config, 7, tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def drive(tiny_directory: Path) -> Callable[..., Driven]:
    """Build an engine on a driver, by default the null driver, with blocks of 4 positions, one step at a time."""

    def build(
        driver: AcceleratorDriver | None = None, *, model: Path | None = tiny_directory, **options: Any
    ) -> Driven:
        sizes = {"block_size": BLOCK_SIZE, "num_blocks": 64, "max_num_seqs": 8}
        given = {**sizes, "async_scheduling": False, **options}
        engine = build_engine_on(driver or NullDriver(), model, EngineOptions(**given), Settings())
        return Driven(engine)

    return build


@pytest.fixture(scope="session")
def in_hand() -> Callable[[Engine], Driven]:
    """Take an engine in the hand."""
    return Driven


@pytest.fixture
def oracle(drive: Callable[..., Driven]) -> Callable[..., Driven]:
    """Build an engine whose tokens are a hash of everything that its rows read."""
    return lambda **options: drive(OracleDriver(), **options)


@pytest.fixture
def uniform(drive: Callable[..., Driven]) -> Callable[..., Driven]:
    """Build an engine that draws from equal logits."""
    return lambda **options: drive(UniformDriver(), **options)


@pytest.fixture
def reference(drive: Callable[..., Driven]) -> Callable[..., Driven]:
    """Build an engine on cpu_ref."""
    return lambda **options: drive(ReferenceDriver(), **options)


@pytest.fixture
def expected(tiny_config: ModelConfig) -> Callable[[Sequence[int], int], list[int]]:
    """The tokens that the oracle ought to give after a prompt."""
    return lambda prompt, count: oracle_tokens(list(prompt), count, tiny_config, tiny_config.vocab_size)


@pytest.fixture(scope="session")
def prompt_of() -> Callable[..., list[int]]:
    """Make a prompt of some length; another seed gives another prompt."""

    def make(length: int, seed: int = 0) -> list[int]:
        return [2 + (31 * seed + 7 * place * place + 3 * place) % (VOCAB_SIZE - 4) for place in range(length)]

    return make
