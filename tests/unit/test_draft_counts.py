from __future__ import annotations

import pytest

from mtp_train.answers.draft_counts import SpecCounts, increase, read_counters, response_counts
from mtp_train.errors import DataError

VLLM = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a, b"}} {drafts}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="a, b"}} 1.0e+01
vllm:spec_decode_num_drafts_created{{engine="0",model_name="a, b"}} 1.7953286522299652e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a, b"}} 36.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="a, b"}} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a, b",position="0"}} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="1",model_name="a, b",position="0"}} 2.0 1395066363000
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a, b",position="1"}} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a, b",position="2"}} 0.0
vllm:generation_tokens_total{{engine="0",model_name="a, b"}} 40.0
vllm:num_requests_running{{engine="0",model_name="a, b"}} 3.0
"""


def drafts(text: str, before: str = "", server: str = "vllm") -> tuple[int, SpecCounts]:
    return increase(read_counters(before), read_counters(text), server)


def test_counters_are_summed_over_engines_and_positions() -> None:
    found = SpecCounts(rounds=22, draft_tokens=36, accepted_tokens=9, accepted_per_pos=(8, 1, 0))
    assert drafts(VLLM.format(drafts=12)) == (40, found)


def test_a_server_without_drafts_counts_none() -> None:
    assert drafts('vllm:generation_tokens_total{engine="0"} 40.0') == (40, SpecCounts())
    assert read_counters("# nothing") == {}


def test_what_was_gained_is_the_difference() -> None:
    _, gained = drafts(VLLM.format(drafts=17), VLLM.format(drafts=12))
    assert gained == SpecCounts(rounds=5, draft_tokens=0, accepted_tokens=0, accepted_per_pos=(0, 0, 0))
    # A position seen for the first time stood at 0.
    first = "llamacpp:spec_decode_num_drafts_total 4\n"
    new = 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3\n'
    assert drafts(first + new, first, "llamacpp")[1].accepted_per_pos == (3,)


def test_a_counter_that_fell_is_an_error_though_their_sum_rose() -> None:
    before = VLLM.format(drafts=12)
    now = VLLM.format(drafts=3).replace("1.0e+01", "9.0e+01")
    with pytest.raises(DataError, match=r"drafts\{engine=\"0\".*was 12 and is now 3; .*was restarted"):
        drafts(now, before)
    with pytest.raises(DataError, match="was 12 and is now missing"):
        drafts("", before)


def test_counters_that_are_rounded_are_an_error_where_they_are() -> None:
    text = "spec_decode_num_drafts_total 1.23457e+06"
    assert drafts(f"vllm:{text}")[1].rounds == 1_234_570
    with pytest.raises(DataError, match="above 1000000, where it rounds"):
        drafts(f"llamacpp:{text}", server="llamacpp")


def test_timings_of_llama_server_have_no_rounds_and_no_positions() -> None:
    timings = {"predicted_n": 53, "draft_n": 45, "draft_n_accepted": 37, "prompt_ms": 11.2}
    counts = response_counts({"timings": timings})
    assert counts == SpecCounts(rounds=15, draft_tokens=45, accepted_tokens=37, accepted_per_pos=None)
    # Of a text that ends behind accepted drafts a round is missing, which is no draft more in every round.
    assert SpecCounts(rounds=438, draft_tokens=1326, accepted_tokens=974, accepted_per_pos=None).depth == 3
    assert response_counts({"timings": {"predicted_n": 53}}) == SpecCounts()


HISTOGRAM = [3, 4, 0, 2]
EXPECTED = SpecCounts(rounds=9, draft_tokens=27, accepted_tokens=10, accepted_per_pos=(6, 2, 2))
NAMES = [
    ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
    ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
]


@pytest.mark.parametrize(("accepted", "drafted", "histogram"), NAMES)
def test_sglang_tells_it_under_three_generations_of_names(accepted: str, drafted: str, histogram: str) -> None:
    # spec_accept_length divides the prefill's token too, and is not read.
    told = {"spec_verify_ct": 9, accepted: 10, drafted: 27, histogram: HISTOGRAM, "spec_accept_length": 20 / 9}
    counts = response_counts({"meta_info": told})
    assert counts == EXPECTED
    without = response_counts({"meta_info": {**told, histogram: []}})
    assert without == SpecCounts(rounds=9, draft_tokens=27, accepted_tokens=10, accepted_per_pos=None)
    assert without.depth == 3
    # A histogram of something else is not believed.
    assert response_counts({"meta_info": {**told, histogram: [9]}}) == without


def test_a_response_without_drafts_has_no_rounds() -> None:
    assert response_counts({}) is None
    assert response_counts({"meta_info": {"completion_tokens": 3}}) == SpecCounts()


def test_counts_are_pooled() -> None:
    more = SpecCounts(rounds=1, draft_tokens=1, accepted_tokens=1, accepted_per_pos=(1,))
    assert SpecCounts() + EXPECTED == EXPECTED
    assert (EXPECTED + more).accepted_per_pos == (7, 2, 2)
    silent = SpecCounts(rounds=2, draft_tokens=4, accepted_tokens=1, accepted_per_pos=None)
    pooled = EXPECTED + silent
    assert (pooled.accepted_per_pos, pooled.rounds) == (None, 11)


def test_rounds_without_drafts_are_rounds_too() -> None:
    # The first of eleven tokens is prefill's, three are accepted drafts, and each of the others ended a round.
    assert SpecCounts(rounds=2, accepted_tokens=3).rounds_of(11) == 7
    # Two of the accepted drafts are behind the end of the text.
    assert SpecCounts(rounds=4, accepted_tokens=8).rounds_of(11) == 4
    assert SpecCounts().rounds_of(22, prompts=2) == 20
