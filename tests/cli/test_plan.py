"""`deepinfer plan`: one line per op, or the refusal with every reason."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from deepinfer.accelerator import all_op_names
from deepinfer_cpu_ref import Driver

Run = Callable[..., object]


def test_every_op_of_the_contract_has_a_line(run: Run) -> None:
    ran = run("plan", "--accelerator", "cpu_ref")
    assert ran.status == 0
    lines = ran.out.partition("------\n")[2].splitlines()
    assert [line.split()[0] for line in lines if "." in line.split()[0]] == list(all_op_names())


def test_json_names_driver_options_and_every_op(run: Run) -> None:
    ran = run("plan", "--accelerator", "cpu_ref", "--dtype", "float64", "--kv-cache-dtype", "float32", "--json")
    made = json.loads(ran.out)
    assert (made["driver"], made["dtype"], made["kv_cache_dtype"]) == ("cpu_ref", "float64", "float32")
    assert [row["op"] for row in made["ops"]] == list(all_op_names())


def test_the_environment_demands_batch_invariance(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(run("plan", "--accelerator", "cpu_ref", "--json").out)["batch_invariant"] is False
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    assert json.loads(run("plan", "--accelerator", "cpu_ref", "--json").out)["batch_invariant"] is True


@pytest.mark.parametrize("name", ["nvidia", "ascend"])
def test_a_driver_without_its_device_is_refused_with_remedies_and_never_replaced(run: Run, name: str) -> None:
    ran = run("plan", "--accelerator", name)
    assert ran.status == 1
    assert ran.out == ""
    assert f"accelerator '{name}'" in ran.err
    assert "To do:" in ran.err
    assert "Installed drivers: ascend, cpu_ref, faulty, null, nvidia, oracle" in ran.err


def test_the_variables_of_the_vendors_runtime_are_shown_with_what_is_in_force(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "runtime_variables", lambda driver: {"HCCL_DETERMINISTIC": "strict", "LCCL": ""})
    lines = [line.split(maxsplit=1) for line in run("plan", "--accelerator", "cpu_ref").out.splitlines()]
    assert ["HCCL_DETERMINISTIC", "strict"] in lines
    assert ["LCCL", "not set"] in lines
    shown = json.loads(run("plan", "--accelerator", "cpu_ref", "--json").out)["runtime_variables"]
    assert shown == {"HCCL_DETERMINISTIC": "strict", "LCCL": ""}


def test_a_driver_without_variables_shows_none(run: Run) -> None:
    assert json.loads(run("plan", "--accelerator", "cpu_ref", "--json").out)["runtime_variables"] == {}


def test_the_plan_says_which_graphs_are_recorded_or_why_none_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("plan", "--accelerator", "cpu_ref").out
    assert "decode_graphs    not recorded: driver 'cpu_ref' computes on the host" in out
    asked = ["plan", "--accelerator", "cpu_ref", "--decode-graphs", "--max-num-seqs", "4"]
    assert "decode_graphs    recorded, rows 1, 2, 4, 8, 16, 24\n" in run(*asked, "--num-speculative-tokens", "5").out
    monkeypatch.setenv("DEEPINFER_DECODE_GRAPHS", "1")
    monkeypatch.setenv("DEEPINFER_GRAPH_INTERVAL", "2")
    made = json.loads(run("plan", "--accelerator", "cpu_ref", "--max-num-seqs", "5", "--json").out)["decode_graphs"]
    assert made == {"recorded": True, "sizes": [1, 2, 4, 5], "why_not": ""}
    made = json.loads(run("plan", "--accelerator", "cpu_ref", "--no-decode-graphs", "--json").out)["decode_graphs"]
    assert (made["recorded"], made["why_not"]) == (False, "decode_graphs is off")


def test_graphs_of_a_driver_without_them_are_refused_when_asked_for(run: Run) -> None:
    assert (
        "not recorded: driver 'null' does not claim the capability 'graphs'" in run("plan", "--accelerator", "null").out
    )
    ran = run("plan", "--accelerator", "null", "--decode-graphs")
    assert ran.status == 1
    assert "driver 'null' does not claim the capability 'graphs'" in ran.err


def test_contradicting_options_are_refused(run: Run) -> None:
    ran = run("plan", "--accelerator", "cpu_ref", "--numerics", "served", "--dtype", "float64")
    assert ran.status == 2
    assert "contradicts" in ran.err


def test_an_unknown_fallback_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ALLOW_FALLBACK", "linear.dence")
    ran = run("plan", "--accelerator", "cpu_ref")
    assert ran.status == 1
    assert "linear.dense" in ran.err


def test_the_plan_says_what_drafts_take(run: Run) -> None:
    """Each of 5 drafts of 77 slots: id, chance and sum, and 1,024 kept tokens with their weights."""
    asked = ["plan", "--accelerator", "cpu_ref", "--num-speculative-tokens", "5"]
    assert (
        "draft_pool       77 state slots x 5 drafts x 12,308 B = 4,738,580 B, of the memory budget\n" in run(*asked).out
    )
    made = json.loads(run(*asked, "--verification", "coupled", "--num-state-slots", "10", "--json").out)["draft_pool"]
    assert made == {"state_slots": 10, "drafts": 5, "verification": "coupled", "bytes": 10 * 5 * 20}
    assert "draft_pool       no drafts\n" in run("plan", "--accelerator", "cpu_ref").out
