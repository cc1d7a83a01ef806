"""Judging a choice of the best: exact where scores are exact, fair where two scores lie within their errors.

A driver may order two competitors either way only if their exact scores are closer than the sum of both bounds. In
specimens of whole numbers scores are exact in any arithmetic, bounds are zero, and ties must go to the lower number.

Legend: T rows, J index heads, I index width, K picked, n competitors, E experts.
"""

from __future__ import annotations

import math

import torch

from deepinfer.accelerator import IndexCache, OpOptions, StepLayout
from deepinfer.accelerator.ops.experts import RouterWeights
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer.numerics import Float32Record
from deepinfer_conformance.bench import Effects
from deepinfer_conformance.checks.comparison import bit_finding, bound_finding, shape_finding
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.outcomes import Finding
from deepinfer_conformance.tolerance import growth, tol

MISPLACED = "misplaced picks"
INFINITY = math.inf


def selection(
    call: OpCall, options: OpOptions, got: Effects, exact: Effects, peer: Effects, *, is_exact: bool
) -> list[Finding]:
    """Judge `selection.top_entries`."""
    step, rule = call.at("step"), call.at("rule")
    if not isinstance(step, StepLayout) or not isinstance(rule, SelectionRule):
        raise TypeError("selection.top_entries: no step or no rule")
    parts = ["result.entries_TK", *(["result.candidates_TB"] if rule.publish else [])]
    findings: list[Finding] = []
    for part in parts:
        if part not in got:
            return [Finding(MISPLACED, 1.0, 0.0, f"{part} is missing", part=part)]
        wrong = shape_finding(part, got[part], peer[part])
        if wrong is not None:
            return [wrong]
        if is_exact:
            findings.append(bit_finding(part, got[part], exact[part]))
    if is_exact:
        return findings
    wrong_rows = {part: _WrongRows() for part in parts}
    for row in range(step.rows):
        score_n, error_n = _scores(call, options, step, row)
        block_n, block_error_n = _blocks(score_n, error_n, rule.candidate_block_size)
        if not rule.publish:
            score_n = _restricted(score_n, call.arguments["candidates_TB"], row, rule.candidate_block_size)
        wrong_rows[parts[0]].judge(row, got[parts[0]][row], score_n, error_n)
        if rule.publish:
            wrong_rows[parts[1]].judge(row, got[parts[1]][row], block_n, block_error_n)
    return [rows.finding(part) for part, rows in wrong_rows.items()]


class _WrongRows:
    """Counts rows whose picks cannot be right."""

    def __init__(self) -> None:
        self._count = 0
        self._first = ""

    def judge(self, row: int, picked_K: torch.Tensor, score_n: torch.Tensor, error_n: torch.Tensor) -> None:
        """Compare one row's picks, ascending and then -1, with the scores; -inf competes, NaN marks what may not."""
        problem = _problem(picked_K.tolist(), score_n, error_n)
        if problem:
            self._count += 1
            self._first = self._first or f"row {row}: {problem}"

    def finding(self, part: str) -> Finding:
        """Return what was counted."""
        return Finding(MISPLACED, float(self._count), 0.0, self._first, reference_error=0.0, part=part)


def _problem(picked: list[int], score_n: torch.Tensor, error_n: torch.Tensor) -> str:
    competes = ~score_n.isnan()
    wanted = min(len(picked), int(competes.sum()))
    chosen, rest = picked[:wanted], picked[wanted:]
    if any(entry != -1 for entry in rest) or chosen != sorted(set(chosen)):
        return f"picked {picked}; {wanted} in ascending order and then -1 are wanted"
    if any(not 0 <= entry < len(score_n) or not bool(competes[entry]) for entry in chosen):
        return f"picked {picked}; some of them do not compete"
    left = competes.clone()
    left[chosen] = False
    if not chosen or not bool(left.any()):
        return ""
    place = torch.tensor(chosen)
    weakest = (score_n[place] + error_n[place]).min()
    strongest = (score_n - error_n).masked_fill(~left, -INFINITY).max()
    if weakest < strongest:
        return f"picked {picked}; one scores at most {float(weakest):.9g}, one left out at least {float(strongest):.9g}"
    return ""


def _scores(call: OpCall, options: OpOptions, step: StepLayout, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exact scores of the visible entries and their bounds."""
    keys = call.at("keys")
    if not isinstance(keys, IndexCache):
        raise TypeError("selection.top_entries: no keys")
    request = int(step.request_T[row])
    visible = (int(step.position_T[row]) + 1) // keys.ratio if bool(step.valid_T[row]) else 0
    entry_n = torch.arange(visible)
    block_n = step.block_table_RB[request][entry_n // keys.entries_per_block]
    used = keys.entries_per_block * keys.format.nbytes
    sections = keys.format.block_sections(keys.bytes_Nb[block_n, :used], keys.entries_per_block)
    place = (torch.arange(visible), entry_n % keys.entries_per_block)
    key_nI = keys.format.decode_parts(type(sections)(sections.data[place], sections.scales[place])).to(torch.float64)
    query_JI = call.tensor("query_TJI")[row]
    if not isinstance(keys.format, Float32Record):
        query_JI = keys.format.round_trip(query_JI)
    query_JI = query_JI.to(torch.float64)
    weight_J1 = call.tensor("head_weight_TJ")[row].to(torch.float64).unsqueeze(1)
    wide = torch.float64 if options.activation_dtype == torch.float64 else torch.float32
    factors = tol(call.op, wide, query_JI.shape[1])
    relu_Jn = torch.relu(query_JI @ key_nI.T)
    terms_Jn = query_JI.abs() @ key_nI.abs().T
    score_n = (weight_J1 * relu_Jn).sum(0)
    error_n = (weight_J1.abs() * factors.terms * terms_Jn).sum(0)
    error_n = error_n + growth(query_JI.shape[0], wide) * (weight_J1.abs() * relu_Jn).sum(0)
    return torch.where(score_n.isnan(), -INFINITY, score_n), error_n.nan_to_num(0.0)


def _restricted(score_n: torch.Tensor, candidates: object, row: int, size: int) -> torch.Tensor:
    if not isinstance(candidates, torch.Tensor):
        return score_n
    blocks = candidates[row]
    allowed = torch.isin(torch.arange(len(score_n)) // size, blocks[blocks >= 0])
    return torch.where(allowed, score_n, float("nan"))


def _blocks(score_n: torch.Tensor, error_n: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the candidate blocks' scores, the newest one's infinite, and their bounds."""
    if len(score_n) == 0:
        return score_n, error_n
    missing = -len(score_n) % size
    score_b = torch.nn.functional.pad(score_n, (0, missing), value=-INFINITY).view(-1, size).amax(1)
    error_b = torch.nn.functional.pad(error_n, (0, missing)).view(-1, size).amax(1)
    score_b[-1] = INFINITY
    return score_b, error_b


def routing(
    call: OpCall, options: OpOptions, got: Effects, exact: Effects, peer: Effects, *, is_exact: bool
) -> list[Finding]:
    """Judge `experts.route`: the order of the experts, then the weights of those that were chosen."""
    experts_part, weights_part = "result.experts_Tk", "result.weights_Tk"
    for part in (experts_part, weights_part):
        wrong = shape_finding(part, got[part], peer[part])
        if wrong is not None:
            return [wrong]
    biased_TE, _, error_TE = _router_scores(call, options)
    findings = [bit_finding(experts_part, got[experts_part], exact[experts_part])] if is_exact else []
    chosen_Tk, valid_T = got[experts_part], call.tensor("valid_T")
    if not is_exact:
        problems = [
            f"row {row}: {problem}"
            for row in range(len(chosen_Tk))
            if (
                problem := _order_problem(
                    chosen_Tk[row].tolist(), biased_TE[row], error_TE[row], valid=bool(valid_T[row])
                )
            )
        ]
        findings.append(
            Finding(
                MISPLACED, float(len(problems)), 0.0, "; ".join(problems[:1]), reference_error=0.0, part=experts_part
            )
        )
    if any(not finding.holds for finding in findings):
        return findings
    weight_Tk, bound_Tk = routed_weights(call, options, chosen_Tk)
    findings.append(bound_finding(weights_part, got[weights_part], weight_Tk, bound_Tk, peer[weights_part]))
    return findings


def routed_weights(call: OpCall, options: OpOptions, chosen_Tk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact weights of chosen experts and their bounds, [T, k]; 0 and 0 where the expert is -1."""
    _, score_TE, error_TE = _router_scores(call, options)
    place_Tk = chosen_Tk.clamp(min=0)
    weight_Tk, error_Tk = score_TE.gather(1, place_Tk), error_TE.gather(1, place_Tk)
    wide = torch.float64 if options.activation_dtype == torch.float64 else torch.float32
    factors = tol(call.op, wide, chosen_Tk.shape[1])
    scale = float(call.arguments["scale"])  # type: ignore[arg-type]
    if chosen_Tk.shape[1] > 1:
        total_T1 = weight_Tk.sum(1, keepdim=True) + 1e-20
        error_Tk = error_Tk / total_T1 + weight_Tk / total_T1**2 * error_Tk.sum(1, keepdim=True)
        weight_Tk = weight_Tk / total_T1
    weight_Tk = weight_Tk * scale
    bound_Tk = error_Tk * scale + (factors.result + factors.terms) * weight_Tk + factors.floor
    return weight_Tk.masked_fill(chosen_Tk < 0, 0.0), bound_Tk.masked_fill(chosen_Tk < 0, 0.0)


def _router_scores(call: OpCall, options: OpOptions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float64 biased scores, scores, and the scores' bounds, all [T, E]."""
    router = call.at("router")
    if not isinstance(router, RouterWeights):
        raise TypeError("experts.route: no router")
    x_TD, gate_ED = call.tensor("x_TD").to(torch.float64), router.gate_ED.to(torch.float64)
    wide = torch.float64 if options.activation_dtype == torch.float64 else torch.float32
    factors = tol(call.op, wide, x_TD.shape[1])
    logit_TE, terms_TE = x_TD @ gate_ED.T, x_TD.abs() @ gate_ED.abs().T
    soft_TE = torch.nn.functional.softplus(logit_TE)
    score_TE = soft_TE.sqrt()
    # The root of a softplus: slope sigmoid(x) / (2 sqrt(softplus(x))), never above the root itself for negative x.
    slope_TE = torch.sigmoid(logit_TE) / (2 * score_TE)
    bias_TE = torch.where(call.tensor("image_T").unsqueeze(1), router.image_bias_E, router.bias_E).to(torch.float64)
    error_TE = slope_TE * factors.terms * terms_TE + factors.elementary * (score_TE + bias_TE.abs())
    return score_TE + bias_TE, score_TE, error_TE


def _order_problem(chosen: list[int], score_E: torch.Tensor, error_E: torch.Tensor, *, valid: bool) -> str:
    if not valid:
        return "" if set(chosen) <= {-1} else f"a padding row chose {chosen}; it must choose -1"
    if len(set(chosen)) != len(chosen) or not all(0 <= expert < len(score_E) for expert in chosen):
        return f"chose {chosen}; distinct experts are wanted"
    left = torch.ones(len(score_E), dtype=torch.bool)
    for expert in chosen:
        left[expert] = False
        if not bool(left.any()):
            return ""
        strongest = (score_E - error_E).masked_fill(~left, -INFINITY)
        if score_E[expert] + error_E[expert] < strongest.max():
            return f"chose {chosen}; expert {expert} comes before {int(strongest.argmax())}, which scores higher"
    return ""
