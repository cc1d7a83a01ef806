"""Layer roles: the released table of owners, and its small copies."""

from __future__ import annotations

import pytest

from deepinfer.model import derive_roles
from deepinfer.model.presets import preset

FLASH = derive_roles(preset("v41-flash"))


@pytest.mark.parametrize(("layer", "kv_owner", "topk_owner"), [(5, 2, 2), (22, 20, 20), (27, 20, 24), (36, 20, 36)])
def test_owners_of_released_layers(layer: int, kv_owner: int, topk_owner: int) -> None:
    assert (FLASH[layer].kv_owner, FLASH[layer].topk_owner) == (kv_owner, topk_owner)


def test_the_released_table_of_special_layers() -> None:
    def layers(attribute: str) -> list[int]:
        return [role.layer for role in FLASH if getattr(role, attribute) not in (None, False)]

    assert layers("owns_kv") == layers("owns_index_keys") == [2, 8, 14, 20]
    assert layers("has_indexer") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers("publishes_candidates") == [20]
    assert layers("uses_candidates") == [24, 28, 32, 36]
    assert [(role.layer, role.engram_index) for role in FLASH if role.engram_index is not None] == [(1, 0), (14, 1)]
    assert layers("is_tap") == [37, 38, 39]


def test_window_only_layers_rotate_plainly_and_read_nobody() -> None:
    for role in FLASH:
        is_window_only = role.layer in (0, 1, 40, 41, 42)
        assert (role.rope == "plain") == is_window_only
        assert (role.kv_owner is None) == is_window_only
        assert (role.topk_owner is None) == is_window_only
        assert (role.ratio == 0) == is_window_only


def test_draft_stages_follow_the_text_layers_under_their_own_names() -> None:
    assert [role.stem for role in FLASH[38:]] == ["layers.38", "layers.39", "mtp.0", "mtp.1", "mtp.2"]
    assert [role.is_draft for role in FLASH[38:]] == [False, False, True, True, True]


def test_without_a_candidate_source_no_layer_limits_its_picks() -> None:
    mapping = preset("tiny8").to_hf(nested=False)
    config = type(preset("tiny8")).from_hf({**mapping, "candidate_source_layer_id": None})
    assert not any(role.publishes_candidates or role.uses_candidates for role in derive_roles(config))


def test_the_tiny_configuration_has_every_kind_of_layer() -> None:
    roles = derive_roles(preset("tiny8"))
    assert [role.kv_owner for role in roles] == [None, None, 2, 2, 4, 4, 4, 4, None, None]
    assert [role.topk_owner for role in roles] == [None, None, 2, 2, 4, 4, 6, 6, None, None]
    assert [role.uses_candidates for role in roles].count(True) == 1
