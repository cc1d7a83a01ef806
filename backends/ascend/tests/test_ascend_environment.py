"""Vendor variables: set before the runtime starts, never against the user, refused by name when they break a level."""

from __future__ import annotations

import pytest

from deepinfer.accelerator.capabilities import Repeatability
from deepinfer.errors import DeterminismError
from deepinfer_ascend import environment

R1, R2 = Repeatability.RUN_TO_RUN, Repeatability.BATCH_INVARIANT


def test_a_start_sets_what_is_unset_and_keeps_every_level_open():
    environ = {"TASK_QUEUE_ENABLE": "0"}
    environment.apply_at_start(environ)
    assert environ == {"TASK_QUEUE_ENABLE": "0", "HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1"}
    environment.apply(R2, environ)


def test_a_users_value_is_never_overwritten_and_refused_where_it_breaks_the_level():
    environ = {"HCCL_DETERMINISTIC": "true", "TASK_QUEUE_ENABLE": "2"}
    environment.apply_at_start(environ)
    assert environ["HCCL_DETERMINISTIC"] == "true"
    assert not environment.problems(R1, {"HCCL_DETERMINISTIC": "true"})
    with pytest.raises(DeterminismError, match=r"TASK_QUEUE_ENABLE='2'.*HCCL_DETERMINISTIC='true'"):
        environment.apply(R2, environ)
    assert environ["TASK_QUEUE_ENABLE"] == "2"


def test_the_report_shows_every_variable():
    shown = environment.described({"LCCL_DETERMINISTIC": "1"})
    assert shown == "TASK_QUEUE_ENABLE=unset HCCL_DETERMINISTIC=unset LCCL_DETERMINISTIC=1"
