"""What a launcher says in the environment: a place, nothing, or an error that lists everything that is wrong."""

from __future__ import annotations

import os

import pytest

from deepinfer.errors import ConfigurationError
from deepinfer.settings import LaunchedRank

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_a_launcher_is_understood() -> None:
    expected = LaunchedRank(3, 4, 1, 2, "10.0.0.7", 29500, has_store=True, attempt="2")
    assert LaunchedRank.from_environment(TORCHRUN) == expected


def test_what_only_torchrun_sets_may_be_missing() -> None:
    given = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert LaunchedRank.from_environment(given) == LaunchedRank(3, 4, 3, 4, "10.0.0.7", 29500)


@pytest.mark.parametrize("environ", [{}, {"RANK": "0"}, {**TORCHRUN, "WORLD_SIZE": "1"}, {"WORLD_SIZE": " "}])
def test_one_process_is_no_group(environ: dict[str, str]) -> None:
    assert LaunchedRank.from_environment(environ) is None


def test_everything_that_is_wrong_is_listed() -> None:
    with pytest.raises(ConfigurationError) as refused:
        LaunchedRank.from_environment({"WORLD_SIZE": "two", "RANK": "-1"})
    text = str(refused.value)
    for words in ("WORLD_SIZE='two'", "RANK='-1'", "MASTER_PORT=''", "MASTER_ADDR is not set", "unset WORLD_SIZE"):
        assert words in text
    with pytest.raises(ConfigurationError, match="RANK=4 is outside a group of 4"):
        LaunchedRank.from_environment({**TORCHRUN, "RANK": "4"})


def test_a_rank_of_our_own_launcher_looks_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    place = LaunchedRank(1, 2, 1, 2, "127.0.0.1", 4000)
    place.enter()
    assert LaunchedRank.from_environment() == place
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
