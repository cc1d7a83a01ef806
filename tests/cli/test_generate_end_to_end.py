"""`deepinfer generate` with the library itself: the model of the package on the reference driver."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., object]

GREEDY = ("--accelerator", "cpu_ref", "--temperature", "0", "--max-tokens", "4")


def test_every_way_of_writing_shows_the_same_tokens(run: Run) -> None:
    lines = run("generate", "Why is the sky blue?", "Why does ice float?", *GREEDY, "--json").out.splitlines()
    first, second = (json.loads(line) for line in lines)
    assert (first["request_id"], second["request_id"]) == ("0", "1")
    for record in (first, second):
        (answer,) = record["outputs"]
        assert answer["finish_reason"] == "length"
        assert len(answer["token_ids"]) == 4
    assert first["outputs"][0]["text"] == " Because air scatters blue"
    whole = run("generate", "Why is the sky blue?", *GREEDY)
    streamed = run("generate", "Why is the sky blue?", *GREEDY, "--stream")
    assert whole.status == streamed.status == 0
    assert whole.out == streamed.out
    last = run("generate", "Why is the sky blue?", *GREEDY, "--stream", "--json").out.splitlines()[-1]
    assert json.loads(last)["outputs"] == first["outputs"]


def test_progress_and_log_go_to_standard_error(run: Run) -> None:
    ran = run("generate", "x", *GREEDY)
    assert "generating" in ran.err
    assert "accelerator: cpu_ref on CPU" in ran.err
    assert "generating" not in ran.out


def test_an_id_outside_the_vocabulary_fails_only_its_own_request(run: Run) -> None:
    ran = run("generate", "Why is the sky blue?", "--prompt-ids", "1,999999", *GREEDY, "--json")
    assert ran.status == 1
    fine, refused = (json.loads(line)["outputs"][0] for line in ran.out.splitlines())
    assert fine["finish_reason"] == "length"
    assert refused["finish_reason"] == "ignored"
    assert "999999" in ran.err


def test_a_directory_without_a_tokenizer_takes_ids_only(run: Run, tmp_path: Path) -> None:
    made = run("checkpoint", "make", "--config", "small", "--seed", 1, "--format", "released", tmp_path / "made")
    assert made.status == 0
    ran = run("generate", "--model", tmp_path / "made", "--prompt-ids", "1,2,3", *GREEDY)
    assert ran.status == 0
    assert len([int(word) for word in ran.out.split()]) == 4
    ran = run("generate", "--model", tmp_path / "made", "text", *GREEDY)
    assert ran.status == 2
    assert "give token ids" in ran.err


def test_an_unknown_accelerator_is_an_error_and_never_another_driver(run: Run) -> None:
    ran = run("generate", "x", "--accelerator", "cpu-ref")
    assert (ran.status, ran.out) == (2, "")
    assert "Did you mean 'cpu_ref'?" in ran.err


def test_ctrl_c_ends_with_status_130_and_no_traceback() -> None:
    command = [sys.executable, "-m", "deepinfer", "generate", "x", "--max-tokens", "4000", "--ignore-eos"]

    def heed_ctrl_c() -> None:  # a shell's background jobs ignore it, and hand that down
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
    ) as process:
        assert process.stderr is not None
        log = ""
        while "cache pools" not in log:  # the last line before the first step
            line = process.stderr.readline()
            assert line, log
            log += line
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=240)
    assert process.returncode == 130
    assert rest.endswith("interrupted\n")
    assert "Traceback" not in log + rest
