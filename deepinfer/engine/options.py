"""Every option of the engine: one frozen dataclass, validated once, at the edge.

Names, types and defaults: engine.md section 11.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, cast, get_args

import torch

from deepinfer.accelerator import KvCacheDtype, Numerics
from deepinfer.accelerator.collectives import DEADLINE_S
from deepinfer.engine.balancing_options import BalancingOptions, ExpertBalancing
from deepinfer.engine.other_names import ADVICE
from deepinfer.errors import ArgumentError
from deepinfer.model.draft import MOST_DRAFTS
from deepinfer.model.truncation import TruncationMode
from deepinfer.parallel.context import chunk_alignment
from deepinfer.parallel.ranks.groups import group_problems
from deepinfer.sampling.drafting import Verification
from deepinfer.settings import Settings

DtypeName = Literal["float32", "bfloat16", "float64"]
EngineType = Literal["normal", "prompt", "completion"]

_WHAT = "engine options"
_TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


class EngineKeywords(TypedDict, total=False):
    """The keyword arguments of :class:`deepinfer.LLM` beyond ``model`` and ``accelerator``."""

    dtype: DtypeName | None
    numerics: Numerics
    kv_cache_dtype: KvCacheDtype
    batch_invariant: bool | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_history_tokens: int | None
    block_size: int
    num_blocks: int | None
    num_state_slots: int | None
    memory_utilization: float
    engine_type: EngineType
    enable_chunked_prefill: bool
    stop_preempted_requests: bool
    prefill_attempt_interval: int
    prefill_any_attempt_interval: int
    num_speculative_tokens: int
    verification: Verification
    async_scheduling: bool | None
    variable_verification: bool | None
    cost_curves: str | None
    decode_graphs: bool | None
    graph_interval: int | None
    truncated_prefill: TruncationMode | None
    truncated_prefill_keep_tokens: int | None
    seed: int
    allow_fallback: tuple[str, ...]
    data_parallel_size: int | None
    expert_parallel_size: int
    redundant_experts: int | None
    expert_balancing: ExpertBalancing | None
    expert_balancing_interval: int | None
    expert_balancing_window: int | None
    context_parallel_size: int
    spread_ngram_tables: bool
    rank_deadline_s: float


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine computes, schedules and remembers.

    Attributes:
        dtype: activation dtype; None means float32 in portable numerics and bfloat16 in served numerics, whose
            rounding points are bfloat16 by definition.
        numerics: "portable" or "served" (model.md section 18).
        kv_cache_dtype: "released" records, or "float32": all three records and the index queries unquantised.
        batch_invariant: demand R2; None means what DEEPINFER_BATCH_INVARIANT says.
        max_model_len: positions a request may hold; None means the smaller of the model's limit and the pool.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: query budget of a prefill step.
        max_prefill_history_tokens: total history budget of a prefill step; None means no such limit.
        block_size: positions per block, even.
        num_blocks: blocks of the pool, the reserved block 0 included; None sizes it from the memory budget.
        num_state_slots: state slots, the reserved slot 0 included; None means ``int(1.2 * max_num_seqs) + 1``.
        memory_utilization: share of the free device memory that pools may take when they are sized from it.
        engine_type: "normal" (both kinds of step), "prompt" or "completion". This release cannot hand requests from one
            engine to another: a prompt engine takes max_tokens=1 only, and a completion engine refuses every prompt.
        enable_chunked_prefill: cut prompts at the query budget.
        stop_preempted_requests: end preempted requests instead of computing them again.
        prefill_attempt_interval: decode steps between chances for a prefill that every rank wants.
        prefill_any_attempt_interval: decode steps between chances for a prefill that any rank wants.
        num_speculative_tokens: drafts that each decode step verifies for a request, 0 for none; the model must have
            draft stages.
        verification: how drafts are judged (docs/drafts.md): "standard" keeps the distribution of the tokens,
            "coupled" the very tokens of a run without drafts.
        async_scheduling: plan and launch a decode step before the one before it has been read
            (docs/async-scheduling.md); the outputs are the same. None means what DEEPINFER_ZERO_OVERHEAD_SCHEDULING
            says, which is True unless it is set, and False for a prompt engine, which has no decode steps.
        variable_verification: let each step choose how many drafts each request verifies (docs/drafts.md); None means
            what DEEPINFER_ENABLE_MTP_VARLEN says, and no.
        cost_curves: directory that keeps what variable verification measures at start; None means what
            DEEPINFER_COST_CURVES says, and that nothing is kept.
        decode_graphs: record decode steps as graphs (docs/recorded-graphs.md); None means what DEEPINFER_DECODE_GRAPHS
            says, and then where the driver can and it saves time.
        graph_interval: graphs are recorded for 1, 2, 4, ... rows up to it, then for its multiples; None means what
            DEEPINFER_GRAPH_INTERVAL says.
        truncated_prefill: which rows of a prompt run the layers behind the last owner of long-range entries: all with
            "off", the last ones with "compact", and with "mask" the same the slow way. None means what
            DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE says. Prompt log-probabilities need "off".
        truncated_prefill_keep_tokens: how many last rows those are; None means what
            DEEPINFER_YOCO_PREFILL_KEEP_TOKENS says.
        seed: seeds the generator from which requests without a seed of their own draw theirs.
        allow_fallback: ops that may run on cpu_ref, added to what DEEPINFER_ALLOW_FALLBACK names.
        data_parallel_size: ranks, one process each with requests and caches of its own (docs/ranks.md); None means what
            a launcher has started, and 1 without one.
        expert_parallel_size: ranks over which the experts of a layer are spread; it divides the ranks. 1: every rank
            holds all experts.
        redundant_experts: slots for experts beyond one an expert, rounded up so that every rank has equally many
            (docs/expert-balancing.md); None means what DEEPINFER_REDUNDANT_EXPERTS says, and 0.
        expert_balancing: who plans moves of experts while they serve, "balanced" or "greedy", or "off". None means what
            DEEPINFER_EXPERT_BALANCING says, and then "balanced" where there are redundant slots, else "off".
        expert_balancing_interval: steps between plans; the first comes after a quarter. None means 10,000, and 1,000
            for a prompt engine.
        expert_balancing_window: steps whose load a plan is made from; None means a tenth of the interval.
        context_parallel_size: ranks that have the same requests and share the rows of every prompt step; it divides the
            ranks. 1: every rank has requests of its own.
        spread_ngram_tables: keep of each n-gram table only a share in every rank's host memory, and fetch the rows of a
            step from all ranks (docs/ranks.md). One rank keeps all of them either way.
        rank_deadline_s: seconds that ranks wait for one another before they give the group up.
    """

    dtype: DtypeName | None = None
    numerics: Numerics = "portable"
    kv_cache_dtype: KvCacheDtype = "released"
    batch_invariant: bool | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_history_tokens: int | None = None
    block_size: int = 128
    num_blocks: int | None = None
    num_state_slots: int | None = None
    memory_utilization: float = 0.9
    engine_type: EngineType = "normal"
    enable_chunked_prefill: bool = True
    stop_preempted_requests: bool = False
    prefill_attempt_interval: int = 70
    prefill_any_attempt_interval: int = 100
    num_speculative_tokens: int = 0
    verification: Verification = "standard"
    async_scheduling: bool | None = None
    variable_verification: bool | None = None
    cost_curves: str | None = None
    decode_graphs: bool | None = None
    graph_interval: int | None = None
    truncated_prefill: TruncationMode | None = None
    truncated_prefill_keep_tokens: int | None = None
    seed: int = 0
    allow_fallback: tuple[str, ...] = ()
    data_parallel_size: int | None = None
    expert_parallel_size: int = 1
    redundant_experts: int | None = None
    expert_balancing: ExpertBalancing | None = None
    expert_balancing_interval: int | None = None
    expert_balancing_window: int | None = None
    context_parallel_size: int = 1
    spread_ngram_tables: bool = False
    rank_deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        """Refuse bad values, all at once."""
        problems = self._problems()
        if problems:
            raise ArgumentError(_WHAT, problems)
        object.__setattr__(self, "allow_fallback", tuple(self.allow_fallback))

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> EngineOptions:
        """Build options from keyword arguments; refuse unknown names and bad values, all at once."""
        known = [field.name for field in fields(cls)]
        problems = [_unknown(name, known) for name in keywords if name not in known]
        try:
            options = cls(**{name: value for name, value in keywords.items() if name in known})
        except ArgumentError as error:
            problems += error.problems
        if problems:
            raise ArgumentError(_WHAT, problems)
        return options

    def under(self, settings: Settings) -> EngineOptions:
        """Return the options with what the environment says where they leave it to the environment."""
        mode, keep = self.truncated_prefill, self.truncated_prefill_keep_tokens
        if mode is None and self.context_parallel_size > 1:
            mode = "off"
        varies = self.variable_verification
        if varies is None:
            # Without drafts there is nothing that could vary, whatever the environment says.
            is_alone = self.expert_parallel_size == self.context_parallel_size == 1 and not self.spread_ngram_tables
            varies = settings.enable_mtp_varlen and self.num_speculative_tokens > 0 and is_alone
        ahead = self.async_scheduling
        if ahead is None:
            ahead = settings.zero_overhead_scheduling and self.engine_type != "prompt"
        balancing = self._balancing().under(
            settings, is_spread=self.expert_parallel_size > 1, has_prompts_only=self.engine_type == "prompt"
        )
        return replace(
            self,
            redundant_experts=balancing.redundant_experts,
            expert_balancing=balancing.policy,
            expert_balancing_interval=balancing.interval_steps,
            expert_balancing_window=balancing.window_steps,
            async_scheduling=ahead,
            decode_graphs=self.decode_graphs if self.expert_parallel_size == 1 else False,
            variable_verification=varies,
            cost_curves=self.cost_curves if self.cost_curves is not None else settings.cost_curves,
            truncated_prefill=cast("TruncationMode", mode or settings.yoco_prefill_truncation_mode),
            truncated_prefill_keep_tokens=keep if keep is not None else settings.yoco_prefill_keep_tokens,
        )

    @property
    def is_prefill_truncated(self) -> bool:
        """Whether some rows of a long prompt are left out of the last layers."""
        return self.truncated_prefill not in (None, "off")

    @property
    def activation_dtype(self) -> torch.dtype:
        """The torch dtype of activations."""
        if self.dtype is not None:
            return _TORCH_DTYPES[self.dtype]
        return torch.bfloat16 if self.numerics == "served" else torch.float32

    @property
    def state_slots(self) -> int:
        """Number of state slots, the reserved one included."""
        return self.num_state_slots if self.num_state_slots is not None else int(1.2 * self.max_num_seqs) + 1

    @property
    def backtrack(self) -> int:
        """Rows that a step may write and later disown (engine.md section 1)."""
        return self.num_speculative_tokens + 1

    def _balancing(self) -> BalancingOptions:
        return BalancingOptions(
            self.redundant_experts,
            self.expert_balancing,
            self.expert_balancing_interval,
            self.expert_balancing_window,
        )

    def _problems(self) -> list[str]:
        problems: list[str] = []
        _check_choice(problems, "dtype", self.dtype, (None, *get_args(DtypeName)))
        _check_choice(problems, "numerics", self.numerics, get_args(Numerics))
        _check_choice(problems, "kv_cache_dtype", self.kv_cache_dtype, get_args(KvCacheDtype))
        _check_choice(problems, "engine_type", self.engine_type, get_args(EngineType))
        _check_choice(problems, "verification", self.verification, get_args(Verification))
        _check_choice(problems, "truncated_prefill", self.truncated_prefill, (None, *get_args(TruncationMode)))
        for name in ("batch_invariant", "async_scheduling", "variable_verification", "decode_graphs"):
            _check_choice(problems, name, getattr(self, name), (None, True, False))
        if self.variable_verification is True and self.num_speculative_tokens == 0:
            problems.append("variable_verification=True chooses among drafts; set num_speculative_tokens as well")
        _check_path(problems, "cost_curves", self.cost_curves)
        if self.engine_type == "prompt" and self.async_scheduling is True:
            problems.append("engine_type='prompt' has no decode step to plan ahead; leave async_scheduling unset")
        for name in ("enable_chunked_prefill", "stop_preempted_requests", "spread_ngram_tables"):
            _check_choice(problems, name, getattr(self, name), (True, False))
        if self.numerics == "served" and self.dtype in ("float32", "float64"):
            problems.append(
                f"numerics 'served' rounds activations to bfloat16 by definition, dtype={self.dtype!r} contradicts it; "
                f"leave dtype unset or use numerics='portable'"
            )
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 2),
            ("prefill_attempt_interval", 1),
            ("prefill_any_attempt_interval", 1),
        ):
            _check_integer(problems, name, getattr(self, name), least)
        for name, least in (
            ("max_model_len", 1),
            ("max_prefill_history_tokens", 1),
            ("num_blocks", 2),
            ("num_state_slots", 2),
            ("truncated_prefill_keep_tokens", 1),
            ("graph_interval", 1),
        ):
            if getattr(self, name) is not None:
                _check_integer(problems, name, getattr(self, name), least)
        if isinstance(self.block_size, int) and self.block_size % 2:
            problems.append(f"block_size={self.block_size} is odd; a block must hold whole pairs, use an even size")
        _check_integer(problems, "num_speculative_tokens", self.num_speculative_tokens, 0, MOST_DRAFTS)
        if self.engine_type == "completion" and self.stop_preempted_requests is False:
            problems.append(
                "engine_type='completion' has no prompt step to recompute with; set stop_preempted_requests=True"
            )
        _check_integer(problems, "seed", self.seed, 0)
        problems += self._rank_problems()
        share = self.memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not math.isfinite(share):
            problems.append(f"memory_utilization={share!r} is not a number")
        elif not 0 < share <= 1:
            problems.append(f"memory_utilization={share!r} is outside (0, 1]")
        names = self.allow_fallback
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            problems.append(f"allow_fallback={names!r} is not a list of op names")
        return problems

    def _rank_problems(self) -> list[str]:
        problems: list[str] = []
        if self.data_parallel_size is not None:
            _check_integer(problems, "data_parallel_size", self.data_parallel_size, 1)
        _check_integer(problems, "expert_parallel_size", self.expert_parallel_size, 1)
        deadline = self.rank_deadline_s
        if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not math.isfinite(deadline):
            problems.append(f"rank_deadline_s={deadline!r} is not a number of seconds")
        elif deadline <= 0:
            problems.append(f"rank_deadline_s={deadline!r} leaves no time at all; give seconds above 0")
        _check_choice(problems, "expert_balancing", self.expert_balancing, (None, *get_args(ExpertBalancing)))
        for name, least in (
            ("redundant_experts", 0),
            ("expert_balancing_interval", 1),
            ("expert_balancing_window", 1),
        ):
            if getattr(self, name) is not None:
                _check_integer(problems, name, getattr(self, name), least)
        _check_integer(problems, "context_parallel_size", self.context_parallel_size, 1)
        if not problems:
            problems += self._balancing().problems(is_spread=self.expert_parallel_size > 1)
        if problems:
            return problems
        experts, context = self.expert_parallel_size, self.context_parallel_size
        if self.data_parallel_size is not None:
            problems += group_problems(self.data_parallel_size, experts, context)
        if self.decode_graphs is True and experts > 1:
            problems.append("decode_graphs=True cannot record exchanges between ranks; use expert_parallel_size=1")
        if self.variable_verification is True and (experts > 1 or context > 1 or self.spread_ngram_tables is True):
            problems.append(
                "variable_verification=True measures steps of one rank; use expert_parallel_size=1 and "
                "context_parallel_size=1, and leave spread_ngram_tables out"
            )
        return problems + self._context_problems()

    def _context_problems(self) -> list[str]:
        context, budget = self.context_parallel_size, self.max_num_batched_tokens
        if context == 1:
            return []
        problems = []
        if self.is_prefill_truncated:
            problems.append(
                f"truncated_prefill={self.truncated_prefill!r} leaves rows out that context_parallel_size={context} "
                f"would share; use one of the two"
            )
        if isinstance(budget, int) and budget < chunk_alignment(context):
            problems.append(
                f"max_num_batched_tokens={budget} is below {chunk_alignment(context)}, twice context_parallel_size: "
                f"chunks are cut in multiples of that"
            )
        return problems


def _unknown(name: str, known: list[str]) -> str:
    if name in ADVICE:
        return f"unknown option {name!r}; {ADVICE[name]}"
    accepted = ["model", "accelerator", *known]
    close = difflib.get_close_matches(name, accepted, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(accepted)}"
    return f"unknown option {name!r}; {hint}"


def _check_choice(problems: list[str], name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        problems.append(f"{name}={value!r} is not one of {listed}")


def _check_path(problems: list[str], name: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and value):
        problems.append(f"{name}={value!r} is no path in a string")


def _check_integer(problems: list[str], name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        problems.append(f"{name}={value!r} is not an integer")
    elif most is not None and not least <= value <= most:
        problems.append(f"{name}={value} is outside {least} .. {most}")
    elif not least <= value < 2**31:
        problems.append(f"{name}={value} is outside [{least}, 2^31)")
