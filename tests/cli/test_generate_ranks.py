"""`deepinfer generate` on several ranks: started by itself and by torchrun, one answer to each prompt, in order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

ARGUMENTS = [
    *("generate", "Hello", "a b", "The cat", "--max-tokens", "4", "--ignore-eos", "--json"),
    *("--accelerator", "cpu_ref", "--max-model-len", "64", "--max-num-seqs", "2", "--rank-deadline-s", "40"),
]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(before: Sequence[str], *more: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", *before, "deepinfer", *ARGUMENTS, *more]
        return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)

    return run


@pytest.mark.parametrize("ranks", ["--data-parallel-size", "torchrun"])
def test_two_ranks_write_what_one_does(command: Callable[..., subprocess.CompletedProcess[str]], ranks: str) -> None:
    alone = command([])
    many = command(TORCHRUN) if ranks == "torchrun" else command([], ranks, "2")
    assert (alone.returncode, many.returncode) == (0, 0), many.stderr
    assert many.stdout == alone.stdout
    assert [json.loads(line)["request_id"] for line in many.stdout.splitlines()] == ["0", "1", "2"]
    for rank in (0, 1):
        assert f"[rank {rank}] INFO deepinfer" in many.stderr


def test_a_group_that_the_launcher_did_not_start_is_refused(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    refused = command([], "--expert-parallel-size", "2", "--data-parallel-size", "3")
    assert refused.returncode == 2
    assert "does not divide the 3 ranks" in refused.stderr
