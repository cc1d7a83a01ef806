"""L5 to L7: the packaged small model on the driver, through the real engine.

This is the one room of the suite that knows the engine; it is imported when a case of these levels runs, not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from deepinfer_conformance.case import Case, Profile, case_id
from deepinfer_conformance.cases.axes import BF16, F32, SERVED
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.outcomes import Finding, Level

if TYPE_CHECKING:
    from deepinfer_conformance.bench import Bench

VOCABULARY: Final = 1376
PROMPT, CONTINUATION = 29, 8
_F32_CACHE: Final = replace(F32, kv_cache_dtype="float32")
_L5_OPTIONS: Final = (F32, SERVED, _F32_CACHE, BF16)
_FULL_ONLY: Final = (_F32_CACHE, BF16)
_SKILL_OPTIONS: Final = (F32, SERVED)
_SKILL_ITEMS: Final[Mapping[Profile, int]] = {"quick": 2, "full": 16}
_L6_CHECKS: Final = ("abort", "preemption", "fork", "leaks")


def cases(seed: int) -> Iterator[Case]:
    """Yield the cases of L5, L6 and L7."""
    for check in ("logits", "tokens", "records"):
        for options in _L5_OPTIONS:
            yield Case(
                id=case_id(Level.L5, "", check, "small_model", options),
                level=Level.L5,
                check=check,
                op="",
                options=options,
                seed=seed,
                law=partial(_forced, check),
                build=partial(_prompt, seed),
                profile="full" if options in _FULL_ONLY else "quick",
                timeout_s=300.0,
            )
    for options in _SKILL_OPTIONS:
        for profile, items in _SKILL_ITEMS.items():
            yield Case(
                id=case_id(Level.L5, "", "skills", f"{items}_a_row", options),
                level=Level.L5,
                check="skills",
                op="",
                options=options,
                seed=seed,
                law=_skilled,
                build=partial(_prompt, seed),
                profile=profile,
                timeout_s=1800.0 if profile == "full" else 300.0,
                facts={"items": items},
            )
    for check in _L6_CHECKS:
        yield _living(Level.L6, check, seed, steps=0, profile="quick")
    yield _living(Level.L7, "soak", seed, steps=60, profile="quick")
    yield _living(Level.L7, "soak", seed, steps=4000, profile="full")


def _living(level: Level, check: str, seed: int, *, steps: int, profile: str) -> Case:
    name = f"{steps}_steps" if steps else "small_model"
    return Case(
        id=case_id(level, "", check, name, F32),
        level=level,
        check=check,
        op="",
        options=F32,
        seed=seed,
        law=partial(_lived, check),
        build=partial(_prompt, seed),
        profile="full" if profile == "full" else "quick",
        timeout_s=1800.0 if profile == "full" else 300.0,
        facts={"steps": steps},
    )


def _prompt(seed: int) -> OpCall:
    """Return the ids that the model is made to read, as the inputs of the case."""
    ids = Draws(seed, "small model").integers("ids", 3, VOCABULARY - 2, PROMPT + CONTINUATION)
    return OpCall("model", {"ids_P": ids})


def _forced(check: str, bench: Bench, case: Case) -> Sequence[Finding]:
    from deepinfer_conformance.end_to_end import forced

    return forced.LAWS[check](bench, case)


def _skilled(bench: Bench, case: Case) -> Sequence[Finding]:
    from deepinfer_conformance.end_to_end import skills

    return skills.skills(bench, case)


def _lived(check: str, bench: Bench, case: Case) -> Sequence[Finding]:
    from deepinfer_conformance.end_to_end import living

    return living.LAWS[check](bench, case)
