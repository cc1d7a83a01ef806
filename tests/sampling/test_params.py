"""SamplingParams: names and defaults, types refused all at once, every limit at its boundary."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from deepinfer.sampling import SamplingLimits, SamplingParams

VOCABULARY = 101
LIMITS = SamplingLimits()


def problems(**values: object) -> tuple[str, ...]:
    return SamplingParams(**values).problems(vocab_size=VOCABULARY)


def test_names_and_defaults_are_the_documented_ones() -> None:
    assert {field.name: field.default for field in dataclasses.fields(SamplingParams)} == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 16,
        "min_tokens": 0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "logprobs": None,
        "raw_logprobs": False,
        "prompt_logprobs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "blacklist_token_ids": (),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "first_n_token_no_eos": 0,
        "golden_token_ids": None,
        "structured_outputs": None,
    }


def test_defaults_have_no_problems() -> None:
    assert problems() == ()


def test_values_are_stored_in_one_form() -> None:
    ids = [3, 4]
    bias = {3: 1}
    params = SamplingParams(
        temperature=0,
        stop="end",
        stop_token_ids=ids,
        allowed_token_ids=np.array([5, 6]),
        logit_bias=bias,
        seed=np.int64(4),
        top_p=np.float32(0.5),
        blacklist_token_ids=None,
        ignore_eos=np.bool_(1),
    )
    ids.append(5)
    bias[9] = 2
    assert params.temperature == 0.0
    assert isinstance(params.temperature, float)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.allowed_token_ids == (5, 6)
    assert params.logit_bias == {3: 1.0}
    assert type(params.seed) is int
    assert params.top_p == 0.5
    assert params.blacklist_token_ids == ()
    assert params.ignore_eos is True


def test_params_are_frozen_hashable_and_survive_a_process_boundary() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params  # noqa: S301
    assert copy.deepcopy(params) == params
    assert hash(params) == hash(copy.copy(params))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_a_wrong_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=rf"1 value of a wrong type\n  - {name}: "):
        SamplingParams(**{name: object()})


@pytest.mark.parametrize("name", ["n", "top_k", "max_tokens", "min_tokens", "first_n_token_no_eos", "seed", "logprobs"])
@pytest.mark.parametrize("value", [True, False, 1.0, 1e18, "5", [1], np.bool_(1), np.float64(2)])
def test_counts_are_integers_and_neither_booleans_nor_floats(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "max_tokens", "top_k", "temperature", "repetition_penalty", "ignore_eos"])
def test_none_is_refused_where_it_has_no_meaning(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: None})


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [True, "0.5", [0.5], 1j])
def test_numbers_are_real_and_not_booleans(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["ignore_eos", "raw_logprobs", "include_stop_str_in_output"])
@pytest.mark.parametrize("value", [0, 1, "yes"])
def test_flags_are_booleans(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["stop_token_ids", "blacklist_token_ids", "allowed_token_ids", "golden_token_ids"])
@pytest.mark.parametrize("value", [5, "5", b"5", {5: 5}, [1.5], ["5"], [None], [[5]], [True]])
def test_id_lists_hold_integers(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [[(1, 2.0)], {"1": 2.0}, {1: "2"}, {1.5: 2.0}, {1: None}, {True: 1.0}])
def test_a_bias_maps_integers_to_numbers(value: object) -> None:
    with pytest.raises(TypeError, match="logit_bias"):
        SamplingParams(logit_bias=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [b"x", ["x", 3], 7, [b"x"], {"x": 1}])
def test_stop_holds_strings(value: object) -> None:
    with pytest.raises(TypeError, match="stop"):
        SamplingParams(stop=value)  # type: ignore[arg-type]


def test_all_wrong_types_are_named_at_once() -> None:
    with pytest.raises(TypeError, match="3 values of a wrong type") as caught:
        SamplingParams(n="2", temperature=None, stop_token_ids=[1, "x"])  # type: ignore[arg-type,list-item]
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  - n",
        "  - temperature",
        "  - stop_token_ids",
    ]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_values_out_of_range_do_not_raise_when_they_are_set() -> None:
    SamplingParams(n=-1, temperature=math.nan, max_tokens=2**63, top_p=7, stop=[""], stop_token_ids=[-1])


BOUNDARIES = [
    ("n", 1, LIMITS.choices),
    ("max_tokens", 1, LIMITS.max_tokens),
    ("first_n_token_no_eos", 0, LIMITS.max_tokens),
    ("logprobs", 0, LIMITS.logprobs),
    ("prompt_logprobs", 0, LIMITS.logprobs),
    ("seed", -(2**63), 2**63 - 1),
]


@pytest.mark.parametrize(("name", "least", "most"), BOUNDARIES)
def test_counts_are_accepted_up_to_their_limits_and_refused_beyond(name: str, least: int, most: int) -> None:
    assert problems(**{name: least}) == ()
    assert problems(**{name: most}) == ()
    for value in (least - 1, most + 1, 2**64, 10**5000, -(10**5000)):
        (problem,) = problems(**{name: value})
        assert problem.startswith(f"{name} is ")
        assert str(most) in problem


def test_min_tokens_is_bounded_by_max_tokens() -> None:
    assert problems(min_tokens=16, max_tokens=16) == ()
    assert problems(min_tokens=17, max_tokens=16) == ("min_tokens is 17, above max_tokens, which is 16",)
    assert "2147483647" in problems(min_tokens=2**31, max_tokens=2**31 - 1)[0]
    assert problems(min_tokens=-1) != ()


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63, 10**18])
def test_max_tokens_refusals_name_the_limit(value: int) -> None:
    assert problems(max_tokens=value) == (f"max_tokens is {value}; give an integer from 1 to 2147483647",)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400)])
def test_nan_and_infinite_numbers_are_refused(name: str, value: float) -> None:
    (problem,) = problems(**{name: value})
    assert name in problem


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 1e-45, 5e-324, 1e308], [-5e-324, -1]),
        ("top_p", [0, 1e-9, 1 - 2**-53, 1], [-1e-9, 1 + 2**-52]),
        ("min_p", [0, 0.5, 1], [-1e-9, 1 + 2**-52]),
        ("presence_penalty", [-2, 2], [-2.01, 2.01]),
        ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
        ("repetition_penalty", [0.01, 100], [0, -1, 0.0099, 100.1, math.nan, math.inf]),
    ],
)
def test_numbers_are_accepted_up_to_their_bounds(name: str, good: list[float], bad: list[float]) -> None:
    assert [problems(**{name: value}) for value in good] == [()] * len(good)
    assert all(len(problems(**{name: value})) == 1 for value in bad)


@pytest.mark.parametrize("top_k", [-(10**9), -1, 0, 1, VOCABULARY, 10**9, 2**70])
def test_any_integer_is_a_top_k(top_k: int) -> None:
    assert problems(top_k=top_k) == ()


@pytest.mark.parametrize("name", ["stop_token_ids", "blacklist_token_ids", "allowed_token_ids", "golden_token_ids"])
@pytest.mark.parametrize("bad", [-2, VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, 2**64])
def test_ids_outside_the_vocabulary_are_refused_in_every_list(name: str, bad: int) -> None:
    assert problems(**{name: [0, VOCABULARY - 1, 0]}) == ()
    (problem,) = problems(**{name: [0, bad, 5]})
    assert name in problem
    assert str(bad) in problem


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**31])
def test_bias_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    assert problems(logit_bias={0: 1.0, VOCABULARY - 1: -1.0}) == ()
    (problem,) = problems(logit_bias={bad: 1.0})
    assert str(bad) in problem


def test_minus_one_is_an_id_only_in_a_forced_continuation() -> None:
    assert problems(golden_token_ids=[-1, 5, -1]) == ()
    assert problems(blacklist_token_ids=[-1]) != ()
    assert problems(stop_token_ids=[-1]) != ()
    assert problems(allowed_token_ids=[-1]) != ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.1e6, -1.1e6])
def test_a_bias_is_finite_and_bounded(value: float) -> None:
    assert problems(logit_bias={1: 1e6, 2: -1e6}) == ()
    (problem,) = problems(logit_bias={1: 0.0, 7: value, 8: value})
    assert problem.startswith("logit_bias[7] is ")
    assert "2 such in all" in problem


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("stop_token_ids", LIMITS.stop_token_ids),
        ("blacklist_token_ids", LIMITS.token_ids),
        ("allowed_token_ids", LIMITS.token_ids),
        ("golden_token_ids", LIMITS.golden_token_ids),
    ],
)
def test_lists_are_accepted_up_to_their_longest_and_refused_beyond(name: str, most: int) -> None:
    assert problems(**{name: [5] * most}) == ()
    assert problems(**{name: [5] * (most + 1)}) == (f"{name} has {most + 1} entries; the limit is {most}",)


def test_the_bias_list_has_a_longest() -> None:
    vocabulary = LIMITS.token_ids + 1
    longest = dict.fromkeys(range(vocabulary - 1), 1.0)
    assert SamplingParams(logit_bias=longest).problems(vocabulary) == ()
    assert len(SamplingParams(logit_bias=longest | {vocabulary - 1: 1.0}).problems(vocabulary)) == 1


def test_stop_strings_are_bounded_in_number_and_length() -> None:
    assert problems(stop=["x"] * LIMITS.stop_strings) == ()
    assert len(problems(stop=["x"] * (LIMITS.stop_strings + 1))) == 1
    assert problems(stop="x" * LIMITS.stop_characters) == ()
    assert len(problems(stop="x" * (LIMITS.stop_characters + 1))) == 1


def test_stop_strings_that_could_never_be_matched_sensibly_are_refused() -> None:
    assert "empty" in problems(stop="")[0]
    assert "empty" in problems(stop=["a", ""])[0]
    assert "surrogate" in problems(stop="a\ud800")[0]


def test_an_empty_allowed_list_is_refused_and_none_is_not() -> None:
    assert problems(allowed_token_ids=None) == ()
    assert "empty" in problems(allowed_token_ids=[])[0]


def test_the_limits_are_the_engines_to_set() -> None:
    params = SamplingParams(n=3, logprobs=6)
    assert params.problems(VOCABULARY, SamplingLimits(choices=2, logprobs=5)) == (
        "n is 3; give an integer from 1 to 2",
        "logprobs is 6; give an integer from 0 to 5",
    )


def test_all_problems_are_named_at_once() -> None:
    found = problems(
        n=0, temperature=math.nan, top_p=2, max_tokens=0, stop=[""], stop_token_ids=[-1], logit_bias={999: 1}
    )
    assert [problem.split(" ")[0] for problem in found] == [
        "n",
        "max_tokens",
        "temperature",
        "top_p",
        "stop",
        "stop_token_ids",
        "logit_bias",
    ]


def test_a_long_list_of_wrong_ids_is_shown_in_short() -> None:
    (problem,) = problems(blacklist_token_ids=list(range(200, 300)))
    assert problem == "blacklist_token_ids holds 200, 201, 202, 203, 204 and 95 more; give token ids from 0 to 100"
