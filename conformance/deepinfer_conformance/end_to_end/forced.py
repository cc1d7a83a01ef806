"""L5: the same tokens through both engines, in the same numerics and cache formats, position by position.

**Tolerance of a logit.** Every op of the L layers adds to the residual streams a relative error of about one roundoff u
of the activation dtype, independently: with some 24 ops a layer, the relative error of the last hidden state is at most
``6 * sqrt(24 L) * u`` (the confidence of `tolerance`). Records that are quantised add a term: an error e before a codec
flips a code's rounding with probability e / step and then costs a whole step, so the expected square of the error grows
from e^2 to e * step; with relative steps of 2^-3, e becomes ``sqrt(e * 2^-3)``, of which attention averages the
window's keys: divided by the root of their number. The last norm makes the hidden state's root mean square 1, so an
error of random direction moves a logit by that times the head row's norm, which is the root mean square of that logit
over the positions.

**What is asserted.** float32: wherever the reference's margin exceeds four tolerances, the driver's best token is the
reference's, and at least half of the positions are decided that way. bfloat16 and served numerics: their roundings add
up to more than any margin of a small model with random weights, so besides the rule of margins the logits' root mean
square error must stay below a quarter of their own deviation: bfloat16 against float64 is at 0.12 on the reference,
outputs that had nothing to do with each other would be at 1.4.

Legend: P positions, V vocabulary, D hidden size, n slots.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.engine.engine import Engine
from deepinfer.sampling.params import SamplingParams
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case, Law
from deepinfer_conformance.checks.comparison import SHARE
from deepinfer_conformance.end_to_end import CONTINUATION, PROMPT
from deepinfer_conformance.end_to_end.engines import answers, drain, greedy, make_engine
from deepinfer_conformance.outcomes import Finding
from deepinfer_conformance.tolerance import CONFIDENCE, UNIT_ROUNDOFF

OPS_PER_LAYER = 24
COARSEST_STEP = 2.0**-3
MARGINS = 4.0
LARGEST_SHARE_OF_DEVIATION = 0.25
_STEPS = {"window": 2.0**-3, "long-range": 2.0 / 6, "index": 2.0 / 6}
"""Largest distance of two neighbouring codes, as a share of a block's maximum: e4m3, and e2m1 between 4 and 6."""


def reference_options(options: OpOptions) -> OpOptions:
    """Return the yardstick's options: float64 in portable numerics; served numerics round to bfloat16 by definition."""
    if options.numerics == "served":
        return options
    return dataclasses.replace(options, activation_dtype=torch.float64)


def hidden_error(options: OpOptions, layers: int, window: int) -> float:
    """Return the relative error of a hidden state after so many layers; see the head of this module."""
    unit = UNIT_ROUNDOFF[torch.bfloat16 if options.numerics == "served" else options.activation_dtype]
    error = CONFIDENCE * math.sqrt(OPS_PER_LAYER * layers) * unit
    if options.kv_cache_dtype == "released" or options.numerics == "served":
        error += math.sqrt(error * COARSEST_STEP / window)
    return min(error, 1.0)


def logits(bench: Bench, case: Case) -> Sequence[Finding]:
    """Best tokens of the prefill path at every position, and of the decode path along the continuation."""
    ids = _ids(case)
    mine, theirs = _both(bench, case)
    exact_PV = theirs.compute_logits("forced", ids).to(torch.float64)
    got_PV = mine.compute_logits("forced", ids).to(torch.float64)
    norm_V = exact_PV.square().mean(0).sqrt()
    tolerance_V = hidden_error(case.options, mine.config.num_hidden_layers, mine.config.sliding_window) * norm_V
    top_P2, id_P2 = exact_PV.topk(2, dim=1)
    decided_P = (top_P2[:, 0] - top_P2[:, 1]) > tolerance_V[id_P2].amax(1) * MARGINS
    wrong_P = decided_P & (got_PV.argmax(1) != id_P2[:, 0])
    wrong_decoded = [
        position
        for position, token in _decoded_best(mine, ids).items()
        if bool(decided_P[position]) and token != int(id_P2[position, 0])
    ]
    error_PV = (got_PV - exact_PV).abs()
    detail = (
        f"{int(wrong_P.sum())} of {int(decided_P.sum())} decided positions differ in prefill, first {_first(wrong_P)}; "
        f"{len(wrong_decoded)} in decode; largest error {float(error_PV.max()):.3g}; {len(ids)} positions"
    )
    findings = [
        Finding("broken logits", float((~got_PV.isfinite()).sum()), 0.0, "logits hold NaN or infinity"),
        Finding("wrong best tokens", float(wrong_P.sum()) + len(wrong_decoded), 0.0, detail),
    ]
    deviation = float(exact_PV.std())
    if case.options.activation_dtype == torch.float32:
        undecided = float((~decided_P).sum()) / len(ids)
        findings.append(Finding("undecided share", undecided, 0.5, "too few margins exceed four tolerances"))
        share = float((error_PV / tolerance_V).amax())
        findings.append(Finding(SHARE, share, MARGINS, f"a logit is {share:.3g} tolerances off"))
    else:
        rms = float(error_PV.square().mean().sqrt()) / deviation
        findings.append(
            Finding(
                "error / deviation", rms, LARGEST_SHARE_OF_DEVIATION, f"logits are {rms:.3g} of their own deviation off"
            )
        )
    return findings


def tokens(bench: Bench, case: Case) -> Sequence[Finding]:
    """Free-running tokens: reported beside the reference's, and the same when asked twice."""
    prompt = _ids(case)[:PROMPT]
    mine, theirs = _both(bench, case)
    first, second = answers(mine, [prompt, prompt], CONTINUATION)
    (reference,) = answers(theirs, [prompt], CONTINUATION)
    differing = sum(one != other for one, other in zip(first, second, strict=True))
    parted = next((place for place, (one, other) in enumerate(zip(first, reference, strict=True)) if one != other), -1)
    return [
        Finding(
            "tokens that differ when repeated",
            float(differing),
            0.0,
            f"the same prompt gave {first} and then {second}",
            data={"tokens": list(first), "reference_tokens": list(reference), "first_divergence": [parted]},
        )
    ]


def records(bench: Bench, case: Case) -> Sequence[Finding]:
    """Decoded cache records of every layer: within one step of their format and the error of what was stored."""
    ids = _ids(case)
    mine, theirs = _both(bench, case)
    for engine in (mine, theirs):
        engine.add_request("forced", ids, greedy(1))
        drain(engine)
    findings = []
    theirs_by_name = dict(_decoded_records(theirs))
    for name, got_nC in _decoded_records(mine):
        exact_nC = theirs_by_name[name].to(torch.float64)
        layer = int(name.rpartition(" ")[2])
        relative = hidden_error(case.options, layer + 1, theirs.config.sliding_window)
        scale_n1 = exact_nC.square().mean(1, keepdim=True).sqrt() + exact_nC.abs().amax(1, keepdim=True)
        step = 0.0 if case.options.kv_cache_dtype == "float32" else _STEPS[name.partition(" ")[0]]
        bound_nC = relative * scale_n1 + step * exact_nC.abs().amax(1, keepdim=True)
        both_empty = got_nC.isnan() & exact_nC.isnan()
        share = torch.where(both_empty, 0.0, (got_nC.to(torch.float64) - exact_nC).abs() / bound_nC).nan_to_num(
            nan=math.inf
        )
        worst = float(share.max())
        findings.append(
            Finding(SHARE, worst, 1.0, f"{name}: slot {int(share.amax(1).argmax())} is {worst:.3g} of its bound off")
        )
    return findings


LAWS: Mapping[str, Law] = {"logits": logits, "tokens": tokens, "records": records}


def _ids(case: Case) -> list[int]:
    ids: list[int] = case.inputs().tensor("ids_P").tolist()
    return ids


def _both(bench: Bench, case: Case) -> tuple[Engine, Engine]:
    mine = make_engine(bench.driver, case.options)
    return mine, make_engine(bench.reference, reference_options(case.options))


def _decoded_best(engine: Engine, ids: Sequence[int]) -> dict[int, int]:
    """Return the best token after each position of the continuation, from decode steps that are fed the given ids."""
    forced = tuple(ids[PROMPT:])
    params = SamplingParams(
        temperature=1.0, max_tokens=len(forced), ignore_eos=True, golden_token_ids=forced, logprobs=1, raw_logprobs=True
    )
    engine.add_request("decoded", ids[:PROMPT], params)
    (output,) = drain(engine).values()
    listed = output.outputs[0].logprobs or ()
    return {PROMPT - 1 + place: max(entry, key=entry.__getitem__) for place, entry in enumerate(listed)}


def _decoded_records(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every record of every layer, decoded by the driver's own gather ops; unwritten ones are NaN."""
    pools, codec = engine.worker.pools, engine.plan.ops.codec
    for section in pools.layout.rings:
        window = pools.window(section.layer)
        slots = torch.arange(window.bytes_ZRb.shape[0] * window.ring, device=window.bytes_ZRb.device)
        yield f"window records of layer {section.layer}", codec.gather_window(window, slots).cpu()
    for owner in pools.layout.owners:
        entries, index = pools.entries(owner.layer), pools.index_keys(owner.layer)
        slots = torch.arange(entries.bytes_NEb.shape[0] * entries.entries_per_block, device=entries.bytes_NEb.device)
        yield f"long-range records of layer {owner.layer}", codec.gather_entries(entries, slots).cpu()
        yield f"index keys of layer {owner.layer}", codec.gather_index_keys(index, slots).cpu()


def _first(wrong_P: torch.Tensor) -> int:
    return int(wrong_P.nonzero()[0]) if bool(wrong_P.any()) else -1
