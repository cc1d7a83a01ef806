"""Seeds of requests that have none: drawn where requests arrive, so that their answers do not depend on the ranks."""

from __future__ import annotations

import random
from dataclasses import replace

from deepinfer.engine.admission import AdmissionRules, Submission
from deepinfer.sampling.streams import random_seed


def with_seed(submission: Submission, rules: AdmissionRules, seeds: random.Random) -> Submission:
    """Return the request with a seed; one that will be refused draws none, as in an engine of its own."""
    if submission.params.seed is not None or rules.refusals(submission):
        return submission
    return replace(submission, params=replace(submission.params, seed=random_seed(seeds)))
