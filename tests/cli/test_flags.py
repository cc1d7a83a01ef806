"""Every flag of every command is an interface: the lists are frozen, and defaults are the library's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
from typer.main import get_command

from deepinfer.cli.app import build
from deepinfer.engine.options import EngineOptions
from deepinfer.sampling.params import SamplingParams

# Adding, renaming or removing a flag means changing these lines, on purpose.
FROZEN_FLAGS = {
    "deepinfer": ["--debug", "--version"],
    "deepinfer generate": [
        "prompts",
        "--prompt-ids",
        "--model",
        "--accelerator",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--seed",
        "--max-tokens",
        "--min-tokens",
        "--n",
        "--stop",
        "--stop-token-ids",
        "--ignore-eos",
        "--logprobs",
        "--json-schema",
        "--regex",
        "--ebnf",
        "--dtype",
        "--numerics",
        "--kv-cache-dtype",
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--block-size",
        "--num-blocks",
        "--num-state-slots",
        "--memory-utilization",
        "--num-speculative-tokens",
        "--verification",
        "--variable-verification",
        "--cost-curves",
        "--decode-graphs",
        "--graph-interval",
        "--truncated-prefill",
        "--truncated-prefill-keep-tokens",
        "--async-scheduling",
        "--data-parallel-size",
        "--expert-parallel-size",
        "--redundant-experts",
        "--expert-balancing",
        "--expert-balancing-interval",
        "--expert-balancing-window",
        "--context-parallel-size",
        "--spread-ngram-tables",
        "--rank-deadline-s",
        "--json",
        "--stream",
        "--capture",
        "--capture-cases",
        "--capture-mib",
    ],
    "deepinfer devices": ["--json"],
    "deepinfer plan": [
        "--accelerator",
        "--dtype",
        "--numerics",
        "--kv-cache-dtype",
        "--max-num-seqs",
        "--num-state-slots",
        "--num-speculative-tokens",
        "--verification",
        "--decode-graphs",
        "--graph-interval",
        "--json",
    ],
    "deepinfer env": ["--json", "--markdown"],
    "deepinfer eval": [
        "--model",
        "--accelerator",
        "--tasks",
        "--limit",
        "--dtype",
        "--numerics",
        "--kv-cache-dtype",
        "--num-speculative-tokens",
        "--long-range",
        "--internals",
        "--save-loads",
        "--save-result",
    ],
    "deepinfer checkpoint": [],
    "deepinfer checkpoint inspect": ["directory", "--json"],
    "deepinfer checkpoint make": ["out", "--config", "--seed", "--format", "--shards"],
    "deepinfer bench": [],
    "deepinfer bench core": ["--running", "--steps", "--save-result"],
    "deepinfer bench sampler": [
        "--accelerator",
        "--rows",
        "--vocabulary",
        "--threads",
        "--repeats",
        "--seed",
        "--save-result",
    ],
    "deepinfer bench throughput": [
        "--model",
        "--format",
        "--batch-sizes",
        "--prompt-tokens",
        "--output-tokens",
        "--prompts",
        "--repeats",
        "--seed",
        "--accelerator",
        "--dtype",
        "--numerics",
        "--kv-cache-dtype",
        "--block-size",
        "--max-num-batched-tokens",
        "--async-scheduling",
        "--threads",
        "--drafts",
        "--varlen",
        "--acceptance",
        "--own-drafts",
        "--processor-time",
        "--alternate",
        "--save-result",
    ],
    "deepinfer bench latency": [
        "--model",
        "--format",
        "--batch-sizes",
        "--prompt-tokens",
        "--output-tokens",
        "--prompts",
        "--repeats",
        "--seed",
        "--accelerator",
        "--dtype",
        "--numerics",
        "--kv-cache-dtype",
        "--block-size",
        "--max-num-batched-tokens",
        "--async-scheduling",
        "--threads",
        "--drafts",
        "--varlen",
        "--acceptance",
        "--own-drafts",
        "--processor-time",
        "--alternate",
        "--save-result",
    ],
    "deepinfer bench balance": [
        "--loads",
        "--drifts",
        "--continuations",
        "--layers",
        "--experts",
        "--ranks",
        "--slots",
        "--recorded",
        "--seed",
        "--save-result",
    ],
    "deepinfer bench ranks": ["--ranks", "--votes", "--rows", "--seed", "--save-result"],
    "deepinfer balance": [],
    "deepinfer balance plan": [
        "loads",
        "--ranks",
        "--slots",
        "--current",
        "--policy",
        "--expert-bytes",
        "--output",
    ],
    "deepinfer simulate": [],
    "deepinfer simulate cluster": [
        "--ranks",
        "--trace",
        "--requests",
        "--rate",
        "--prompt-tokens",
        "--output-tokens",
        "--drafts",
        "--acceptance",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--num-blocks",
        "--all-interval",
        "--any-interval",
        "--decode-ms",
        "--decode-row-ms",
        "--prefill-ms",
        "--prefill-token-ms",
        "--policy",
        "--skew",
        "--redundant",
        "--replan-interval",
        "--seed",
        "--save-result",
    ],
    "deepinfer conformance": [],
    "deepinfer conformance run": [
        "--driver",
        "--profile",
        "--level",
        "--ops",
        "--report",
        "--seed",
        "--jobs",
        "--patience",
    ],
    "deepinfer conformance list": ["--profile", "--level", "--ops", "--seed", "--pages"],
    "deepinfer conformance replay": ["case", "--driver", "--seed", "--patience"],
    "deepinfer conformance verify": ["report"],
    "deepinfer conformance compare": ["left", "right"],
    "deepinfer conformance new-driver": ["name", "directory"],
}


def commands(command: object, path: str = "deepinfer") -> Iterator[tuple[str, object]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


COMMANDS = dict(commands(get_command(build())))


def flag(parameter: object) -> str:
    return parameter.opts[0]


def test_the_commands_are_exactly_the_frozen_list() -> None:
    assert list(COMMANDS) == list(FROZEN_FLAGS)


@pytest.mark.parametrize("path", FROZEN_FLAGS)
def test_the_flags_of_a_command_are_exactly_the_frozen_list(path: str) -> None:
    assert [flag(parameter) for parameter in COMMANDS[path].params] == FROZEN_FLAGS[path]


@pytest.mark.parametrize("path", FROZEN_FLAGS)
def test_every_flag_and_command_has_help(path: str) -> None:
    assert COMMANDS[path].help
    assert all(parameter.help for parameter in COMMANDS[path].params)


def test_defaults_of_generate_are_those_of_the_library() -> None:
    library = {field.name: field.default for field in (*fields(SamplingParams), *fields(EngineOptions))}
    library["seed"] = next(field.default for field in fields(SamplingParams) if field.name == "seed")
    shared = [parameter for parameter in COMMANDS["deepinfer generate"].params if parameter.name in library]
    assert len(shared) >= 20
    # An empty list and "not given" are the same to the library.
    given = {parameter.name: parameter.default if parameter.default != [] else None for parameter in shared}
    wanted = {name: library[name] if library[name] != () else None for name in given}
    assert given == wanted
