"""L6 and L7: requests that are aborted, preempted and forked, and a soak of all of that.

The yardstick is the driver itself: what it says to a prompt alone. In batch-invariant mode (which L2 has proved) a
request must say the same in any company and after any accident, and when all have ended nothing may be held. Pools are
full of NaN when an engine is born, so that memory which was not written shows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case, Law
from deepinfer_conformance.end_to_end import VOCABULARY
from deepinfer_conformance.end_to_end.engines import answers, can_be_invariant, drain, greedy, make_engine
from deepinfer_conformance.outcomes import Finding

TOKENS = 6
LENGTHS = (3, 17, 26, 8)
MOMENTS = (0, 1, 2, 4, 6)


def abort(bench: Bench, case: Case) -> Sequence[Finding]:
    """Abort a request in every state it passes: waiting, between chunks, decoding, about to end; others go on."""
    engine, prompts, alone = _prepared(bench, case)
    problems: list[str] = []
    aborted_states = set()
    for moment in MOMENTS:
        for number, prompt in enumerate(prompts[:3]):
            engine.add_request(f"kept/{number}", prompt, greedy(TOKENS))
        engine.add_request("victim", prompts[3] + prompts[1], greedy(TOKENS))
        ended: dict[str, RequestOutput] = {}
        for _ in range(moment):
            ended |= {output.request_id: output for output in engine.step() if output.finished}
        stats = engine.stats()
        was_alive = "victim" not in ended
        if was_alive:
            aborted_states.add((stats.num_waiting > 0, stats.num_running))
            if not engine.abort_request("victim"):
                problems.append(f"step {moment}: abort says that a living request has ended")
        ended |= drain(engine)
        if was_alive and ended["victim"].outputs[0].finish_reason != "abort":
            problems.append(f"step {moment}: the aborted request ended as {ended['victim'].outputs[0].finish_reason!r}")
        problems += [
            f"step {moment}: request {number} says something else beside an aborted one"
            for number in range(3)
            if ended[f"kept/{number}"].outputs[0].token_ids != alone[number]
        ]
        problems += _held(engine, f"step {moment}: ")
        if problems:
            return _findings(problems)
    if len(aborted_states) < 3:
        problems.append(f"only {len(aborted_states)} states were met")
    return _findings(problems)


def preemption(bench: Bench, case: Case) -> Sequence[Finding]:
    """So few blocks that requests lose their memory and are computed again; they must say the same."""
    _, prompts, alone = _prepared(bench, case)
    engine = make_engine(bench.driver, case.options, batch_invariant=can_be_invariant(bench.driver), num_blocks=10)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy(TOKENS))
    ended = drain(engine)
    problems = [
        f"request {number} says {ended[str(number)].outputs[0].token_ids}, alone {tokens}"
        for number, tokens in enumerate(alone)
        if ended[str(number)].outputs[0].token_ids != tokens
    ]
    if engine.stats().preemptions == 0:
        problems.append("nothing was preempted: the case shows nothing")
    return _findings(problems + _held(engine, ""))


def fork(bench: Bench, case: Case) -> Sequence[Finding]:
    """Fork at every step of a decode: the child goes on as its parent would, whole and half-full blocks alike."""
    engine, prompts, alone = _prepared(bench, case)
    problems: list[str] = []
    for number, prompt in enumerate(prompts[1:3], start=1):
        for moment in (2, 3):
            engine.add_request("parent", prompt, greedy(TOKENS))
            ended = {}
            said: tuple[int, ...] = ()
            while len(said) < moment:
                for output in engine.step():
                    if output.request_id == "parent":
                        said = output.outputs[0].token_ids
            engine.fork_request("parent", "child", greedy(TOKENS - len(said)))
            ended = drain(engine)
            child = (*said, *ended["child"].outputs[0].token_ids)
            for who, tokens in (("parent", ended["parent"].outputs[0].token_ids), ("child", child)):
                if tokens != alone[number]:
                    problems.append(
                        f"prompt {number}, fork after {len(said)} tokens: the {who} says {tokens}, not {alone[number]}"
                    )
            problems += _held(engine, f"prompt {number}, fork after {moment}: ")
            if problems:
                return _findings(problems)
    return _findings(problems)


def leaks(bench: Bench, case: Case) -> Sequence[Finding]:
    """After many requests of every end nothing is held, and each has ended for its own reason."""
    engine, prompts, _ = _prepared(bench, case)
    problems: list[str] = []
    for turn in range(3):
        wanted = {}
        for number, prompt in enumerate(prompts):
            name = f"{turn}/{number}"
            engine.add_request(name, prompt, greedy(1 + (turn + number) % 4))
            wanted[name] = "length"
        engine.add_request(f"{turn}/refused", [VOCABULARY + 7], greedy(2))
        wanted[f"{turn}/refused"] = "ignored"
        for name, output in drain(engine).items():
            reason = output.outputs[0].finish_reason
            if reason != wanted.pop(name):
                problems.append(f"request {name} ended as {reason!r}")
        problems += [f"request {name} has no end" for name in wanted]
        problems += _held(engine, f"turn {turn}: ")
        if problems:
            break
    return _findings(problems)


def soak(bench: Bench, case: Case) -> Sequence[Finding]:
    """Seeded arrivals and aborts in a tight pool; every answer is compared with the one that is given alone."""
    _, prompts, alone = _prepared(bench, case)
    engine = make_engine(bench.driver, case.options, batch_invariant=can_be_invariant(bench.driver), num_blocks=16)
    chance = random.Random(f"soak/{case.seed}")
    problems: list[str] = []
    asked: dict[str, tuple[int, int]] = {}
    compared = 0
    steps = int(str(case.facts["steps"]))
    for number in range(steps):
        if chance.random() < 0.5 and len(asked) < 8:
            prompt, length = chance.randrange(len(prompts)), chance.randint(1, TOKENS)
            name = f"request {number}"
            engine.add_request(name, prompts[prompt], greedy(length))
            asked[name] = (prompt, length)
        if asked and chance.random() < 0.08:
            engine.abort_request(chance.choice(sorted(asked)))
        for output in engine.step():
            if output.finished:
                prompt, length = asked.pop(output.request_id)
                compared += _compare(
                    output.outputs[0].token_ids,
                    alone[prompt],
                    length,
                    output.outputs[0].finish_reason,
                    problems,
                    number,
                )
        if number % 25 == 0:
            engine.check_invariants()
        if problems:
            break
    for output in drain(engine).values():
        prompt, length = asked.pop(output.request_id)
        compared += _compare(
            output.outputs[0].token_ids, alone[prompt], length, output.outputs[0].finish_reason, problems, steps
        )
    if compared < steps // 20:
        problems.append(f"only {compared} answers were compared")
    return _findings(problems + _held(engine, "at the end: "))


LAWS: Mapping[str, Law] = {"abort": abort, "preemption": preemption, "fork": fork, "leaks": leaks, "soak": soak}


def _compare(
    tokens: tuple[int, ...], alone: tuple[int, ...], length: int, reason: str | None, problems: list[str], step: int
) -> int:
    """Note a difference; return 1 if the whole answer was compared, 0 for an aborted one."""
    if tokens != alone[: len(tokens)] or (reason != "abort" and len(tokens) != length):
        problems.append(f"step {step}: an answer that ended as {reason!r} is {tokens}, alone {alone[:length]}")
    return int(reason != "abort")


def _prepared(bench: Bench, case: Case) -> tuple[Engine, list[list[int]], list[tuple[int, ...]]]:
    """Return an engine, a few prompts, and what the driver says to each of them alone."""
    ids: list[int] = case.inputs().tensor("ids_P").tolist()
    prompts = [ids[start : start + length] for start, length in enumerate(LENGTHS)]
    engine = make_engine(bench.driver, case.options, batch_invariant=can_be_invariant(bench.driver))
    return engine, prompts, answers(engine, prompts, TOKENS)


def _held(engine: Engine, where: str) -> list[str]:
    """Return what an idle engine still holds."""
    engine.check_invariants()
    stats = engine.stats()
    problems = []
    if stats.free_blocks != stats.usable_blocks:
        problems.append(f"{where}{stats.usable_blocks - stats.free_blocks} blocks are held by nobody")
    if stats.free_state_slots != stats.usable_state_slots:
        problems.append(f"{where}{stats.usable_state_slots - stats.free_state_slots} state slots are held by nobody")
    if stats.num_unfinished:
        problems.append(f"{where}{stats.num_unfinished} requests are unfinished")
    return problems


def _findings(problems: Sequence[str]) -> list[Finding]:
    return [Finding("problems", float(len(problems)), 0.0, "; ".join(problems[:5]))]
