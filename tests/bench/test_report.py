"""Reports, their environment, and the small tools of the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from deepinfer.bench.environment import computing_threads, cpu_model, describe_environment
from deepinfer.bench.memory import status_bytes
from deepinfer.bench.prompts import prompt_ids, read_prompts
from deepinfer.bench.report import BenchReport, quantile
from deepinfer.errors import ArgumentError


@dataclass(frozen=True)
class Asked:
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    size: int


def test_a_saved_report_holds_settings_environment_and_results(tmp_path: Path) -> None:
    report = BenchReport("toy", Asked((1, 2)), describe_environment(), (Found(1), Found(2)))
    report.save(tmp_path / "toy.json")
    saved = json.loads((tmp_path / "toy.json").read_text())
    assert saved["benchmark"] == "toy"
    assert saved["settings"] == {"sizes": [1, 2]}
    assert saved["results"] == [{"size": 1}, {"size": 2}]
    assert {"torch", "threads", "cpu_model", "load_average_1m"} <= set(saved["environment"])


def test_the_environment_is_that_of_this_process() -> None:
    facts = describe_environment()
    assert facts.torch == torch.__version__
    assert facts.threads == torch.get_num_threads()
    assert facts.cpu_model


def test_the_processor_is_named_by_the_system_or_else_by_python() -> None:
    assert cpu_model("processor : 0\nmodel name\t: Some CPU @ 3 GHz\nflags : a b\n") == "Some CPU @ 3 GHz"
    assert cpu_model("processor : 0\n")


def test_the_number_of_threads_comes_back_even_when_the_work_fails() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with computing_threads(before + 2):
            assert torch.get_num_threads() == before + 2
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert torch.get_num_threads() == before
    with computing_threads(None):
        assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.01, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.99, 4), (1.0, 4)]
)
def test_a_quantile_is_the_least_value_that_the_share_does_not_exceed(share: float, expected: int) -> None:
    assert quantile([4, 2, 1, 3], share) == expected


# In a process of its own: what else this one holds may be freed between the mark and the reading, and hide the growth.
GROWTH_OF_THE_PEAK = """
import numpy as np
from deepinfer.bench.memory import PeakMark
np.ones(100_000_000, dtype=np.uint8)  # a higher peak than the one to come, which the mark must forget
mark = PeakMark.set()
before = mark.read()
touched = np.ones(40_000_000, dtype=np.uint8)
print(before.since, mark.read().peak_resident_bytes - before.peak_resident_bytes)
"""


def test_the_peak_grows_by_what_is_touched_after_the_mark() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH_OF_THE_PEAK], capture_output=True, text=True, check=True)
    since, growth_bytes = done.stdout.split()
    lowest = 20_000_000 if since == "mark" else 0  # a system that cannot forget shows no growth, and says so
    assert lowest <= int(growth_bytes) < 60_000_000


def test_sizes_of_the_process_are_read_in_kilobytes_by_their_full_name() -> None:
    assert status_bytes("VmPeak:\t 99 kB\nVmHWM:\t  12 kB\nVmHWMx: 1 kB\n", "VmHWM") == 12 * 1024


def test_prompts_are_texts_or_token_ids_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n\n[1, 2, 3]\n')
    assert read_prompts(file) == ["one", [1, 2, 3]]
    assert prompt_ids([[1, 2, 3]], None) == [[1, 2, 3]]
    with pytest.raises(ArgumentError, match="tokenizer"):
        prompt_ids(["one"], None)


def test_every_line_that_is_no_prompt_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n[1, true]\n{\n""\n[]\n[-1]\n')
    with pytest.raises(ArgumentError) as caught:
        read_prompts(file)
    assert [problem.split()[1] for problem in caught.value.problems] == ["2", "3", "4", "5", "6"]
    file.write_text("\n")
    with pytest.raises(ArgumentError, match="no prompt"):
        read_prompts(file)
