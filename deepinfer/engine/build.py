"""From a directory and a driver to an engine that is ready: every check happens here, before anything is served."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Protocol

import torch

from deepinfer.accelerator import AcceleratorDriver, OpOptions, Plan, Repeatability, make_plan, registry
from deepinfer.accelerator.ops import Feature, Ops
from deepinfer.accelerator.plan import REFERENCE
from deepinfer.accelerator.selection import select
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.engine.balancing import spread_experts
from deepinfer.engine.cost_curves import facts_of
from deepinfer.engine.engine import Engine
from deepinfer.engine.forms import CompilerMaker
from deepinfer.engine.graphs.buffers import StepExtents
from deepinfer.engine.graphs.planning import plan_graphs
from deepinfer.engine.graphs.trial_steps import TrialSteps
from deepinfer.engine.memory import PoolPlan, draft_pool_bytes, plan_pools
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.speculation import ModelSpeculation, Speculation
from deepinfer.engine.startup import Startup, measured_sizes, progress_bar, variation_problems
from deepinfer.engine.step_costs import Clock
from deepinfer.engine.worker import PrefillRows, Worker
from deepinfer.errors import ArgumentError
from deepinfer.model.checkpoint import Checkpoint, Progress, packaged_model_path
from deepinfer.model.config import ModelConfig
from deepinfer.model.draft import DraftModel
from deepinfer.model.draft_weights import load_draft
from deepinfer.model.engram_hash import token_map
from deepinfer.model.linear_shapes import linear_shapes
from deepinfer.model.roles import derive_roles
from deepinfer.model.rotary import rotary_tables
from deepinfer.model.transformer import Transformer
from deepinfer.model.truncation import truncation_problems
from deepinfer.model.weights import TransformerWeights, load_model
from deepinfer.parallel.context import chunk_alignment
from deepinfer.parallel.ranks.context import SplitContext
from deepinfer.parallel.ranks.groups import RankGroups
from deepinfer.parallel.ranks.tables import SpreadTables
from deepinfer.sampling.drafting import DEFAULT_CAPACITY, DraftPolicy
from deepinfer.scheduling.config import EngineType, SchedulerConfig
from deepinfer.settings import Settings
from deepinfer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


class SpeculationMaker(Protocol):
    """Makes the drafts of an engine."""

    def __call__(
        self,
        config: ModelConfig,
        ops: Ops,
        policy: DraftPolicy,
        *,
        drafts: int,
        num_slots: int,
        device: torch.device,
    ) -> Speculation:
        """Return drafts for an engine of this model."""


def build_engine(
    model: str | PathLike[str] | None = None,
    accelerator: str | None = None,
    options: EngineOptions | None = None,
    settings: Settings | None = None,
) -> Engine:
    """Select a driver, plan its ops, load the model, size the pools, and return the engine.

    Args:
        model: checkpoint directory; None means the packaged model.
        accelerator: driver name; None means the environment's, or the first that is available.
        options: the engine's options; None means the defaults.
        settings: the environment's settings; None reads them.
    """
    settings = settings if settings is not None else Settings.from_environment()
    return build_engine_on(select(accelerator, settings).driver(), model, options, settings)


def build_engine_on(
    driver: AcceleratorDriver,
    model: str | PathLike[str] | None = None,
    options: EngineOptions | None = None,
    settings: Settings | None = None,
    *,
    worker_type: type[Worker] = Worker,
    speculation_of: SpeculationMaker | None = None,
    clock: Clock = time.perf_counter,
    ranks: RankGroups | None = None,
    make_compiler: CompilerMaker | None = None,
    beside: Engine | None = None,
) -> Engine:
    """Do the same on a driver that the caller has made; it must be available.

    ``worker_type``, ``speculation_of`` and ``make_compiler`` let a simulation put parts of its own in the place of the
    ordinary ones, and ``clock`` its own time, by which the costs of decode steps are measured. ``ranks`` are the groups
    of an engine that is one of several. The weights of ``beside``, an engine of the same checkpoint and driver, serve
    this one too: they lie in memory once, in the same pages for both.
    """
    settings = settings if settings is not None else Settings.from_environment()
    options = (options if options is not None else EngineOptions()).under(settings)
    sizes_asked = (options.data_parallel_size or 1, options.expert_parallel_size, options.context_parallel_size)
    if ranks is None and max(sizes_asked) > 1:
        raise ArgumentError("engine options", ["one engine is one rank; deepinfer.LLM starts and drives many"])
    directory = Path(model) if model is not None else packaged_model_path()
    plan = plan_ops(driver, options, settings)
    graphs = plan_graphs(driver, plan, options, settings)
    if problems := variation_problems(options, plan):
        raise ArgumentError("engine options", problems)
    checkpoint = Checkpoint.open(directory)
    for notice in checkpoint.notices:
        _LOG.info("%s: %s", directory, notice)
    config = checkpoint.config
    prefill = PrefillRows.of(options)
    if problems := truncation_problems(config, prefill.mode, prefill.keep_tokens, options.backtrack):
        raise ArgumentError("engine options", problems)
    drafts = options.num_speculative_tokens
    has_stages = bool(drafts) and speculation_of is None
    if plan.options.batch_invariant:
        driver.set_determinism(
            Repeatability.BATCH_INVARIANT, linear_shapes(config, plan.options, with_drafts=has_stages)
        )

    tokenizer = Tokenizer.from_directory(directory)
    if beside is None:
        weights = _load(config, checkpoint, plan, driver, tokenizer, options, ranks)
    else:
        weights = _shared_weights(beside, config, plan)
    draft = None
    if has_stages and beside is not None and isinstance(beside.worker.speculation, ModelSpeculation):
        draft = beside.worker.speculation.weights
    elif has_stages:
        draft_checkpoint = Checkpoint.open(directory, groups=("draft",))
        draft = load_draft(config, draft_checkpoint, plan.ops, driver.device, weights.outer)
    layout = CacheLayout.from_config(
        config,
        derive_roles(config),
        block_size=options.block_size,
        backtrack=options.backtrack,
        kv_cache_dtype=options.kv_cache_dtype,
        draft_stages=config.num_nextn_predict_layers if has_stages else 0,
    )
    draft_bytes = draft_pool_bytes(options, draft_policy(config, options).capacity)

    def pools_for(asked: EngineOptions) -> PoolPlan:
        return plan_pools(asked, layout, driver.memory(), config.max_position_embeddings, draft_bytes)

    pool_plan = pools_for(options) if ranks is None else agreed_pools(pools_for, options, driver, ranks)
    # A warning where the caller's own numbers let a request outgrow the pool.
    level = logging.WARNING if pool_plan.longest_request < pool_plan.max_model_len else logging.INFO
    _LOG.log(level, "%s", pool_plan.arithmetic)
    pools = CachePools.allocate(layout, driver, num_blocks=pool_plan.num_blocks, num_slots=pool_plan.num_state_slots)
    rotary = rotary_tables(config, pool_plan.max_model_len).to(driver.device)
    speculation: Speculation | None = None
    sizes = {"drafts": drafts, "num_slots": pool_plan.num_state_slots}
    if draft is not None:
        drafting = DraftModel(config, draft, plan.ops, rotary)
        speculation = ModelSpeculation(drafting, draft_policy(config, options), **sizes, device=driver.device)
    elif drafts and speculation_of is not None:
        speculation = speculation_of(config, plan.ops, draft_policy(config, options), **sizes, device=driver.device)
    context = None if ranks is None or ranks.context is None else SplitContext(ranks.context)
    transformer = Transformer(config, weights, plan.ops, rotary, context)
    worker = worker_type(transformer, pools, driver, plan.ops, prefill, speculation, clock)
    scheduling = scheduler_config(config, options, pool_plan)
    extents = StepExtents(
        rows_per_request=1 + drafts,
        table_blocks=scheduling.max_table_blocks,
        block_size=options.block_size,
        ring=layout.ring,
        max_position=pool_plan.max_model_len,
        look_back=scheduling.history_tokens + 1,
    )
    trial = TrialSteps(worker.decode_steps, pools, plan.ops, extents, vocab_size=config.vocab_size)
    startup = Startup(worker, graphs, extents, trial, clock)
    startup.record()
    if options.variable_verification and speculation is not None:
        facts = facts_of(
            driver,
            plan,
            config,
            options,
            weight_form=checkpoint.form,
            sizes=measured_sizes(graphs),
            is_padded=graphs.is_recorded,
        )
        startup.vary_lengths(speculation, facts, options.cost_curves)
    if weights.spread is not None:
        weights.spread.begin_serving()
    stream = driver.new_stream() if options.async_scheduling else None
    return Engine(config, options, pool_plan, scheduling, worker, plan, tokenizer, stream, ranks, make_compiler)


def agreed_pools(
    pools_for: Callable[[EngineOptions], PoolPlan], options: EngineOptions, driver: AcceleratorDriver, ranks: RankGroups
) -> PoolPlan:
    """Return the pools that every rank of a group can have: sizes are agreed, never local.

    Ranks whose caches lie in the memory of one host share it.
    """
    sharing = ranks.place.local_world_size if driver.device.type == "cpu" and options.num_blocks is None else 1
    if sharing > 1:
        options = replace(options, memory_utilization=options.memory_utilization / sharing)
    mine = pools_for(options)
    num_blocks, max_model_len = ranks.votes.least(mine.num_blocks, mine.max_model_len)
    if (num_blocks, max_model_len) == (mine.num_blocks, mine.max_model_len):
        return mine
    return pools_for(replace(options, num_blocks=num_blocks, max_model_len=max_model_len))


def plan_ops(driver: AcceleratorDriver, options: EngineOptions, settings: Settings) -> Plan:
    """Make the plan of a driver that was selected, with the fallbacks that options and environment allow."""
    invariant = options.batch_invariant if options.batch_invariant is not None else settings.batch_invariant
    op_options = OpOptions(
        activation_dtype=options.activation_dtype,
        numerics=options.numerics,
        kv_cache_dtype=options.kv_cache_dtype,
        batch_invariant=invariant,
    )
    allowed = {*settings.allow_fallback, *options.allow_fallback}
    reference: AcceleratorDriver | None = None
    if driver.name != REFERENCE and (allowed or driver.capabilities().declared_fallbacks):
        reference = registry.load(REFERENCE)()
    features: tuple[Feature, ...] = ("drafts",) if options.num_speculative_tokens else ()
    plan = make_plan(driver, op_options, allow_fallback=allowed, reference=reference, features=features)
    if plan.fallbacks:
        _LOG.warning("%d ops run on %s: %s", len(plan.fallbacks), REFERENCE, ", ".join(plan.fallbacks))
    return plan


def draft_policy(config: ModelConfig, options: EngineOptions) -> DraftPolicy:
    """Return how an engine with these options draws and judges drafts."""
    return DraftPolicy(options.verification, capacity=min(DEFAULT_CAPACITY, config.vocab_size))


def scheduler_config(config: ModelConfig, options: EngineOptions, pools: PoolPlan) -> SchedulerConfig:
    """Return what the scheduler must know of an engine with these options and pools."""
    return SchedulerConfig(
        num_blocks=pools.num_blocks,
        num_state_slots=pools.num_state_slots,
        max_model_len=pools.max_model_len,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_history_tokens=options.max_prefill_history_tokens,
        chunk_align=chunk_alignment(options.context_parallel_size),
        engine_type=EngineType(options.engine_type),
        enable_chunked_prefill=options.enable_chunked_prefill,
        stop_preempted_requests=options.stop_preempted_requests,
        prefill_attempt_interval=options.prefill_attempt_interval,
        prefill_any_attempt_interval=options.prefill_any_attempt_interval,
        history_tokens=max(config.engram_max_ngram_size - 1, 0),
        num_speculative_tokens=options.num_speculative_tokens,
        async_scheduling=bool(options.async_scheduling),
    )


def _load(
    config: ModelConfig,
    checkpoint: Checkpoint,
    plan: Plan,
    driver: AcceleratorDriver,
    tokenizer: Tokenizer | None,
    options: EngineOptions,
    ranks: RankGroups | None,
) -> TransformerWeights:
    mapping = token_map(tokenizer.backend if tokenizer is not None else None, config)
    spread = spread_experts(config, options, ranks, driver.device)
    tables = None if ranks is None or ranks.tables is None else SpreadTables(ranks.tables)
    with progress_bar("loading", "B", is_wanted=ranks is None or ranks.rank == 0) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total_bytes
            bar.update(progress.done_bytes - bar.n)

        weights = load_model(
            config,
            checkpoint,
            plan.ops,
            driver.device,
            token_map=mapping,
            progress=show,
            spread=spread,
            tables=tables,
        )
    if weights.table_bytes:
        share = "" if ranks is None or tables is None else f", this rank's share of {ranks.world_size}"
        _LOG.info("n-gram tables in host memory: %s B%s", f"{weights.table_bytes:,}", share)
    return weights


def _shared_weights(beside: Engine, config: ModelConfig, plan: Plan) -> TransformerWeights:
    """Return the weights of another engine; raise if they are not as this one would have loaded them."""
    weights = beside.worker.weights
    problems = []
    if beside.config != config:
        problems.append("its model has another configuration")
    theirs, ours = ((each.driver, each.options) for each in (beside.plan, plan))
    if theirs != ours:
        problems.append(f"its weights are prepared for {theirs}, this engine's are for {ours}")
    if weights.spread is not None:
        problems.append("it is one of several ranks, each with experts of its own")
    if problems:
        raise ArgumentError("engine beside", problems)
    return weights
