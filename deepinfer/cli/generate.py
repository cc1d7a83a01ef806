"""`deepinfer generate`: prompts in, text or JSON lines out."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from deepinfer.cli import options, show
from deepinfer.cli.generate_capture import CaptureRequest, capturing_llm
from deepinfer.cli.session import alone_problems
from deepinfer.cli.token_table import SpellToken, token_table
from deepinfer.errors import ArgumentError, DeepInferError

if TYPE_CHECKING:
    from deepinfer.engine.outputs import CompletionOutput, RequestOutput
    from deepinfer.llm import LLM
    from deepinfer.sampling.grammar.specification import StructuredOutputs
    from deepinfer.sampling.params import SamplingParams

DEFAULT_PROMPT: Final = "Why is the sky blue?"

_Prompts = list[str | list[int]]


def generate(
    ctx: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help=f"Texts to continue; without any, {DEFAULT_PROMPT!r}."),
    ] = None,
    *,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID,ID,...", help="A prompt as token ids. May be repeated; these prompts come after the texts."
        ),
    ] = None,
    model: options.Model = None,
    accelerator: options.Accelerator = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the most probable token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; -1 keeps all.")] = -1,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens up to this share.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this fraction as probable as the best.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Key of the random draws; unset: one per request, the same on every run.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to emit per answer.")] = 16,
    min_tokens: Annotated[int, typer.Option(help="No end before this many tokens.")] = 0,
    n: Annotated[int, typer.Option("--n", help="Answers per prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End when this text appears. May be repeated.")
    ] = None,
    stop_token_ids: Annotated[
        str | None, typer.Option(metavar="ID,ID,...", help="End when one of these tokens is emitted.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end at the model's end-of-sequence token.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="List the N best tokens per emitted token: a table, or with --json a field."),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="Answers are JSON of this schema (extra 'structured')."
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Answers match this regular expression (extra 'structured').")
    ] = None,
    ebnf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="Answers are of this grammar (extra 'structured')."
        ),
    ] = None,
    dtype: options.Dtype = None,
    numerics: options.Numerics = "portable",
    kv_cache_dtype: options.KvCacheDtype = "released",
    max_model_len: Annotated[int | None, typer.Option(help="Positions a request may hold; unset: what fits.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Query positions of a prefill step.")] = 2048,
    block_size: Annotated[int, typer.Option(help="Positions per cache block, even.")] = 128,
    num_blocks: Annotated[int | None, typer.Option(help="Cache blocks; unset: from the memory budget.")] = None,
    num_state_slots: Annotated[int | None, typer.Option(help="State slots; unset: from --max-num-seqs.")] = None,
    memory_utilization: Annotated[float, typer.Option(help="Share of free device memory for caches.")] = 0.9,
    num_speculative_tokens: options.Drafts = 0,
    verification: options.Verification = "standard",
    variable_verification: Annotated[
        bool | None,
        typer.Option(
            "--variable-verification/--no-variable-verification",
            help="Let each step choose how many drafts it verifies; unset: what the environment says, else no.",
        ),
    ] = None,
    cost_curves: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Keep measured step costs here; unset: the environment's, else nowhere."),
    ] = None,
    decode_graphs: options.DecodeGraphs = None,
    graph_interval: options.GraphInterval = None,
    truncated_prefill: Annotated[
        Literal["off", "mask", "compact"] | None,
        typer.Option(help="Rows of a prompt that run the last layers; unset: what the environment says, else all."),
    ] = None,
    truncated_prefill_keep_tokens: Annotated[
        int | None, typer.Option(help="Last rows that are kept; unset: what the environment says, else 140.")
    ] = None,
    async_scheduling: options.AsyncScheduling = None,
    data_parallel_size: options.DataParallelSize = None,
    expert_parallel_size: options.ExpertParallelSize = 1,
    redundant_experts: options.RedundantExperts = None,
    expert_balancing: options.ExpertBalancing = None,
    expert_balancing_interval: options.ExpertBalancingInterval = None,
    expert_balancing_window: options.ExpertBalancingWindow = None,
    context_parallel_size: options.ContextParallelSize = 1,
    spread_ngram_tables: options.SpreadNgramTables = False,
    rank_deadline_s: options.RankDeadline = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON line per request.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Write text as it comes; with --json a line per request and step.")
    ] = False,
    capture: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write calls of the driver's ops here, for `deepinfer conformance replay`."),
    ] = None,
    capture_cases: Annotated[
        int | None, typer.Option(help="With --capture: most calls per op, all of different shapes; unset: 8.")
    ] = None,
    capture_mib: Annotated[
        int | None, typer.Option(help="With --capture: most MiB of all files together; unset: 256.")
    ] = None,
) -> None:
    """Generate text for each PROMPT.

    Text goes to standard output with control characters escaped; progress and the log go to standard error. Without
    --model the small model of the package answers, which knows its own small world only (docs/small-model.md).
    """
    ctx.obj.start()
    problems: list[str] = []
    listed: _Prompts = list(prompts or ())
    listed += [options.token_ids("--prompt-ids", text, problems) for text in prompt_ids or ()]
    if not listed:
        listed = [DEFAULT_PROMPT]
    stop_ids = options.token_ids("--stop-token-ids", stop_token_ids, problems) if stop_token_ids is not None else []

    # From here on torch is imported: everything that can be refused without it has been looked at.
    from deepinfer.engine.options import EngineKeywords, EngineOptions
    from deepinfer.sampling.params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        structured_outputs=_form(json_schema, regex, ebnf, problems),
    )
    # The vocabulary is known once the model is loaded; the engine looks at ids again then.
    problems += params.problems(vocab_size=2**31 - 1)
    keywords = EngineKeywords(
        dtype=dtype,
        numerics=numerics,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        num_state_slots=num_state_slots,
        memory_utilization=memory_utilization,
        num_speculative_tokens=num_speculative_tokens,
        verification=verification,
        variable_verification=variable_verification,
        cost_curves=cost_curves,
        decode_graphs=decode_graphs,
        graph_interval=graph_interval,
        truncated_prefill=truncated_prefill,
        truncated_prefill_keep_tokens=truncated_prefill_keep_tokens,
        async_scheduling=async_scheduling,
        data_parallel_size=data_parallel_size,
        expert_parallel_size=expert_parallel_size,
        redundant_experts=redundant_experts,
        expert_balancing=expert_balancing,
        expert_balancing_interval=expert_balancing_interval,
        expert_balancing_window=expert_balancing_window,
        context_parallel_size=context_parallel_size,
        spread_ngram_tables=spread_ngram_tables,
        rank_deadline_s=rank_deadline_s,
    )
    try:
        EngineOptions.from_keywords(keywords)
    except ArgumentError as error:
        problems += error.problems
    captured = CaptureRequest(capture, capture_cases, capture_mib)
    problems += captured.problems()
    if capture is not None and (data_parallel_size or 1) * expert_parallel_size * context_parallel_size > 1:
        problems.append("--capture writes the calls of one driver; leave out --data-parallel-size and the like")
    if capture is not None:
        problems += [f"--capture: {problem}" for problem in alone_problems()]
    if problems:
        raise ArgumentError("deepinfer generate", problems)

    if capture is None:
        from deepinfer.llm import LLM

        llm = LLM(model, accelerator, **keywords)
        # Every process that a launcher has started finds the same answers; one of them writes.
        written = contextlib.nullcontext() if llm.rank == 0 else contextlib.redirect_stdout(io.StringIO())
        with _closing(llm):
            with written:
                failures = _answer(llm, listed, params, as_json=as_json, stream=stream)
            _report(failures)
    else:
        with capturing_llm(captured, capture, model, accelerator, keywords) as llm:
            failures = _answer(llm, listed, params, as_json=as_json, stream=stream)
        _report(failures)
    if failures:
        raise typer.Exit(1)


@contextlib.contextmanager
def _closing(llm: LLM) -> Iterator[None]:
    """Close the LLM at the end; what that raises never takes the place of an error that is on its way."""
    try:
        yield
    except BaseException:
        try:
            llm.close()
        except DeepInferError as error:
            _report([str(error)])
        raise
    llm.close()


def _report(failures: Iterable[str]) -> None:
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)


def _form(
    json_schema: Path | None, regex: str | None, ebnf: Path | None, problems: list[str]
) -> StructuredOutputs | None:
    from deepinfer.sampling.grammar.specification import StructuredOutputs

    schema_text = _form_text("--json-schema", json_schema, problems)
    ebnf_text = _form_text("--ebnf", ebnf, problems)
    if regex is None and schema_text is None and ebnf_text is None:
        return None
    return StructuredOutputs(json_schema=schema_text, regex=regex, ebnf=ebnf_text)


def _form_text(option: str, path: Path | None, problems: list[str]) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problems.append(f"{option} {path}: is not UTF-8 ({error.reason} at byte {error.start})")
        return None


def _answer(llm: LLM, prompts: _Prompts, params: SamplingParams, *, as_json: bool, stream: bool) -> list[str]:
    if not stream:
        return _write_all(llm, prompts, params, as_json=as_json)
    is_single = len(prompts) * params.n == 1
    records = llm.stream(prompts, params)
    return _write_stream(records, as_json=as_json, with_headings=not is_single, spell=_speller(llm))


def _write_all(llm: LLM, prompts: _Prompts, params: SamplingParams, *, as_json: bool) -> list[str]:
    failures: list[str] = []
    records = llm.generate(prompts, params, use_tqdm=True)
    spell = _speller(llm)
    is_single = len(records) == 1 and len(records[0].outputs) == 1
    for record in records:
        if as_json:
            print(show.line_json(record.as_json()))
        else:
            for answer in record.outputs:
                heading = "" if is_single else _heading(record, answer)
                print(f"{heading}{_body(answer, spell)}")
                _print_tokens(answer, spell)
        failures += _failures(record)
    return failures


def _write_stream(
    records: Iterable[RequestOutput], *, as_json: bool, with_headings: bool, spell: SpellToken | None
) -> list[str]:
    failures: list[str] = []
    printer = _StreamPrinter(with_headings=with_headings, spell=spell)
    for record in records:
        if as_json:
            print(show.line_json(record.as_json()), flush=True)
        else:
            printer.show(record)
        if record.finished:
            failures += _failures(record)
    return failures


class _StreamPrinter:
    """Writes growing answers one after the other: the first unfinished one lives, later ones wait their turn."""

    def __init__(self, *, with_headings: bool, spell: SpellToken | None) -> None:
        self._with_headings = with_headings
        self._spell = spell
        self._latest: dict[tuple[str, int], tuple[RequestOutput, CompletionOutput]] = {}
        self._order: list[tuple[str, int]] = []
        self._turn = 0
        self._is_begun = False
        self._written_characters = 0

    def show(self, record: RequestOutput) -> None:
        for answer in record.outputs:
            key = (record.request_id, answer.index)
            if key not in self._latest:
                self._order.append(key)
            self._latest[key] = (record, answer)
        while self._turn < len(self._order):
            owner, answer = self._latest[self._order[self._turn]]
            if self._with_headings and not self._is_begun:
                print(_heading(owner, answer), end="")
            self._is_begun = True
            body = _body(answer, self._spell)
            print(body[self._written_characters :], end="", flush=True)
            self._written_characters = len(body)
            if answer.finish_reason is None:
                return
            print()
            _print_tokens(answer, self._spell)
            self._turn += 1
            self._is_begun = False
            self._written_characters = 0


def _speller(llm: LLM) -> SpellToken | None:
    tokenizer = llm.get_tokenizer()
    return None if tokenizer is None else lambda token_id: tokenizer.token_bytes(token_id).decode(errors="replace")


def _print_tokens(answer: CompletionOutput, spell: SpellToken | None) -> None:
    if answer.logprobs is not None:
        print(f"\n{token_table(answer, spell)}\n")


def _heading(record: RequestOutput, answer: CompletionOutput) -> str:
    return f"[request {record.request_id}, answer {answer.index}]\n"


def _body(answer: CompletionOutput, spell: SpellToken | None) -> str:
    """Return the text, or the ids of a model that has no tokenizer."""
    has_text = bool(answer.text) or spell is not None
    return show.printable(answer.text) if has_text else " ".join(map(str, answer.token_ids))


def _failures(record: RequestOutput) -> list[str]:
    return [
        f"request {record.request_id}, answer {answer.index} ended as {answer.finish_reason!r}: {answer.message}"
        for answer in record.outputs
        if answer.message is not None
    ]
