# ruff: noqa: ARG001 - all laws share one signature
"""L4: streams and events keep order; recorded graphs give what eager calls give, with new values at old addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer_conformance.bench import Bench, effects, invoke
from deepinfer_conformance.case import Case
from deepinfer_conformance.checks.comparison import bit_finding
from deepinfer_conformance.data.call import tensors
from deepinfer_conformance.data.row_views import row_count, with_rows
from deepinfer_conformance.outcomes import Finding


def order(bench: Bench, case: Case) -> Sequence[Finding]:
    """Events of a stream are done once it has been waited for, in any number and across streams."""
    driver, problems = bench.driver, []
    first, second = driver.new_stream(), driver.new_stream()
    marks = [first.record_event() for _ in range(3)]
    second.wait_event(marks[-1])
    after = second.record_event()
    after.wait()
    if not after.done():
        problems.append("an event that was waited for is not done")
    if not all(mark.done() for mark in marks):
        problems.append("an event of the first stream is not done although the second waited for it")
    driver.synchronize()
    late = first.record_event()
    driver.synchronize()
    if not late.done():
        problems.append("an event is not done after synchronize()")
    return [Finding("problems", float(len(problems)), 0.0, "; ".join(problems))]


def graph_against_eager(bench: Bench, case: Case) -> Sequence[Finding]:
    """Record one call, replay it on the recorded values, then on other values at the same addresses."""
    driver, options = bench.driver, case.options
    groups = bench.groups(driver, options)
    call = bench.prepared(case.inputs(), options)
    other = with_rows(call, torch.arange(row_count(call) - 1, -1, -1))
    arguments = bench.placed(driver, call, options)
    invoke(groups, call.op, arguments, driver)  # what a library sets up at first use must not be recorded
    graph = driver.new_graph()
    group, _, name = call.op.partition(".")
    graph.capture_begin()
    with torch.inference_mode():
        result = getattr(groups[group], name)(**arguments)
    graph.capture_end()
    findings = []
    for current, where in ((call, "replayed: "), (other, "replayed with other values: ")):
        fresh = bench.placed(driver, current, options)
        with torch.inference_mode():
            for (_, recorded), (_, value) in zip(tensors(arguments), tensors(fresh), strict=True):
                recorded.copy_(value)
            for _, stale in tensors(result):
                stale.fill_(1)
        graph.replay()
        driver.synchronize()
        replayed = {part: tensor.clone() for part, tensor in effects(call.op, result, arguments).items()}
        eager = bench.run(current, options)
        findings += [bit_finding(part, replayed[part], eager[part], where) for part in eager]
    return findings
