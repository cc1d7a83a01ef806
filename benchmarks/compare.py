r"""Compare deepinfer's CPU reference with the installed peers: prefill and decode, in alternating rounds.

    python benchmarks/compare.py [--model DIR] [--llama-model FILE.gguf] [--batches 1 8 32] [--rounds 5] [--threads 2] \
        [--save-result FILE]

Every peer lives in one process per batch size, which loads its model once and then waits: a round asks one peer after
the other, so that a neighbour's load falls on all of them. The table shows the median of each peer's rounds and the
median of the ratio within a round. A peer that is not installed is named as absent. llama.cpp takes part when
`llama-bench` is found on PATH and `--llama-model` names a file for it; it loads anew for every round, untimed.

The peers hold random weights of the same widths, not the same model: transformers has DeepSeek-V4, whose layers
compress and select differently from V4.1's. Its modules are compared with ours where they agree
(`backends/cpu_ref/tests/test_transformers_modules.py`). llama.cpp computes what its file holds, in the file's format.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from rounds import LLAMA, LLAMA_BENCH, PEERS, Speed, Workload

PRESET = "mini276"
OURS = "deepinfer"
Result = dict[str, Any]


def absent_peers(llama_model: Path | None, batches: list[int]) -> dict[str, str]:
    """Return why each peer that is not compared is absent."""
    absent = {}
    if importlib.util.find_spec("transformers") is None:
        absent["transformers"] = "the package is not installed"
    if shutil.which(LLAMA_BENCH) is None:
        absent[LLAMA] = f"there is no {LLAMA_BENCH} on PATH"
    elif llama_model is None:
        absent[LLAMA] = f"{LLAMA_BENCH} is there, but no file was named for it (--llama-model)"
    elif any(batch > 1 for batch in batches):
        absent[f"{LLAMA} above batch 1"] = f"{LLAMA_BENCH} decodes one sequence"
    return absent


class Peer:
    """A peer in a process of its own, loaded and waiting for rounds."""

    def __init__(self, name: str, work: Workload, model: Path) -> None:
        """Start the process; ``model`` is what the peer loads."""
        self.name = name
        environment = os.environ | {"OMP_NUM_THREADS": str(work.threads), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, __file__, "--model", str(model), "--worker", name, json.dumps(asdict(work))]
        self._process = subprocess.Popen(  # noqa: S603 - this very script
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self) -> Speed:
        """Run one round and wait for it."""
        _pipe(self._process.stdin).write("go\n")
        _pipe(self._process.stdin).flush()
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; its message stands above")
        return Speed(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        _pipe(self._process.stdin).close()
        self._process.wait()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("the process was started without pipes")
    return pipe


def serve(name: str, work: Workload, model: Path) -> None:
    """Run a round for every line of the standard input; the first one warms up and is not reported."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(work.threads)
    run = PEERS[name](work, model)
    run()
    for _ in sys.stdin:
        answers.write(json.dumps(asdict(run())) + "\n")
        answers.flush()


def compare(work: Workload, models: dict[str, Path], rounds: int) -> list[Result]:
    """Return one result per peer for one batch size; ``models`` says what each loads, ours first."""
    names = list(models)
    peers = [Peer(name, work, model) for name, model in models.items()]
    try:
        speeds: dict[str, list[Speed]] = {name: [] for name in names}
        for _ in range(rounds):
            for peer in peers:
                speeds[peer.name].append(peer.run())
    finally:
        for peer in peers:
            peer.close()
    base = speeds[OURS]
    return [
        asdict(work)
        | {
            "peer": name,
            "prefill_tokens_per_s": statistics.median(each.prefill for each in speeds[name]),
            "decode_tokens_per_s": statistics.median(each.decode for each in speeds[name]),
            "decode_step_ms": 1e3 * work.batch / statistics.median(each.decode for each in speeds[name]),
            "prefill_ratio": statistics.median(o.prefill / t.prefill for o, t in zip(base, speeds[name], strict=True)),
            "decode_ratio": statistics.median(o.decode / t.decode for o, t in zip(base, speeds[name], strict=True)),
        }
        for name in names
    ]


def main() -> None:
    """Read the arguments, compare, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help=f"checkpoint directory; by default one is made from {PRESET!r}")
    parser.add_argument("--llama-model", type=Path, help="a GGUF file for llama-bench")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--save-result", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        serve(given.worker[0], Workload(**json.loads(given.worker[1])), given.model)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model or _made_model(Path(scratch))
        absent = absent_peers(given.llama_model, given.batches)
        models = {name: given.llama_model if name == LLAMA else model for name in PEERS if name not in absent}
        results: list[Result] = []
        _say(f"both {given.dtype}, {given.threads} threads, prompt {given.prompt_tokens}, {given.rounds} rounds")
        _say("batch  peer          prefill tok/s  ours/peer  decode tok/s  ms a step  ours/peer")
        for batch in given.batches:
            work = Workload(batch, given.prompt_tokens, given.decode_tokens, given.threads, given.dtype)
            # llama-bench has no batches.
            taking_part = {name: path for name, path in models.items() if name != LLAMA or batch == 1}
            for result in compare(work, taking_part, given.rounds):
                results.append(result)
                _say(
                    "{batch:5}  {peer:12}  {prefill_tokens_per_s:13.1f}  {prefill_ratio:9.2f}  "
                    "{decode_tokens_per_s:12.1f}  {decode_step_ms:9.1f}  {decode_ratio:9.2f}".format(**result)
                )
    for name, reason in absent.items():
        _say(f"{name}: absent ({reason})")
    if given.save_result is not None:
        given.save_result.write_text(json.dumps({"results": results, "absent": absent}, indent=1) + "\n")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _made_model(scratch: Path) -> Path:
    from deepinfer.model.checkpoint import make_checkpoint
    from deepinfer.model.presets import preset

    return make_checkpoint(preset(PRESET), 1, scratch / PRESET)


if __name__ == "__main__":
    main()
