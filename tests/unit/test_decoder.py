"""What the decoder returns and counts, and what it drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from mtp_inference import SpeculativeDecoder, compare, generate_equal_length, plain_greedy
from mtp_inference.draft import make_drafter
from mtp_train.errors import MtpError, UnsupportedModelError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import mtp_step, unroll
from mtp_train.heads.trunk import Trunk
from scripted import ScriptedDecoder, ScriptedDrafter, random_prompt
from tiny import FAMILY_NAMES, tiny_head, tiny_trunk

PROMPT = random_prompt(5)


def scripted(accepted: Sequence[int], depth: int = 3, eos_ids: Sequence[int] = ()) -> ScriptedDecoder:
    trunk = tiny_trunk("glm4_moe")
    return ScriptedDecoder(trunk, tiny_head(trunk), depth, prompt=PROMPT, accepted=accepted, eos_ids=eos_ids)


def test_counts_are_marginal_and_leave_the_first_token_out() -> None:
    result = scripted([2, 0, 3]).generate(PROMPT, max_new_tokens=9)
    # 1 from prefill, then 3 + 1 + 4.
    assert len(result.token_ids) == 9
    assert (result.rounds, result.num_draft_tokens, result.accepted_per_pos) == (3, 9, (2, 2, 1))
    assert result.num_accepted_tokens == 5


def test_a_limit_inside_a_draft_cuts_the_text_and_not_the_counts() -> None:
    decoder = scripted([2, 0, 3])
    result = decoder.generate(PROMPT, max_new_tokens=6)
    assert list(result.token_ids) == decoder.plain[:6]
    assert (result.rounds, result.num_draft_tokens, result.accepted_per_pos) == (3, 9, (2, 2, 1))


def test_eos_inside_a_draft_ends_the_text_and_not_the_counts() -> None:
    plain = scripted([3]).plain
    # The first of three drafts that the second round accepts.
    assert plain[5] not in plain[:5]
    result = scripted([3], eos_ids=[plain[5]]).generate(PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == plain[:6]
    assert (result.rounds, result.num_draft_tokens, result.accepted_per_pos) == (2, 6, (2, 2, 2))


@pytest.mark.parametrize("case", ["eos", "limit"])
def test_a_text_that_ends_at_prefill_has_no_round(case: str) -> None:
    plain = scripted([3]).plain
    decoder = scripted([3], eos_ids=plain[:1] if case == "eos" else [])
    result = decoder.generate(PROMPT, max_new_tokens=1 if case == "limit" else 40)
    assert list(result.token_ids) == plain[:1]
    assert (result.rounds, result.num_draft_tokens, result.accepted_per_pos) == (0, 0, (0, 0, 0))


@pytest.mark.parametrize(("with_head", "depth"), [(True, 0), (False, 3)])
def test_plain_decoding_drafts_nothing(with_head: bool, depth: int) -> None:
    trunk = tiny_trunk("qwen3_5")
    decoder = SpeculativeDecoder(trunk, tiny_head(trunk) if with_head else None, depth, ())
    result = decoder.generate(PROMPT, max_new_tokens=8)
    assert list(result.token_ids) == plain_greedy(trunk, PROMPT, 8, ())
    assert (result.rounds, result.num_draft_tokens, result.accepted_per_pos) == (7, 0, ())


def test_results_pool_as_prompt_counts() -> None:
    counts = scripted([2, 0, 3]).generate(PROMPT, max_new_tokens=6).counts("a")
    assert (counts.prompt_id, counts.rounds, counts.num_draft_tokens, counts.new_tokens) == ("a", 3, 9, 6)
    assert counts.accepted_per_pos == (2, 2, 1)
    assert counts.seconds is not None
    assert counts.seconds > 0


def test_bad_requests_are_refused() -> None:
    trunk = tiny_trunk("glm4_moe")
    with pytest.raises(MtpError, match="depth: 8; expected 0 to 7"):
        SpeculativeDecoder(trunk, tiny_head(trunk), 8, ())
    decoder = SpeculativeDecoder(trunk, None, 0, ())
    with pytest.raises(MtpError, match="prompt: no token"):
        decoder.generate([], 4)
    with pytest.raises(MtpError, match="max_new_tokens: 0"):
        decoder.generate(PROMPT, 0)
    with pytest.raises(ValueError, match=r"prompts: lengths \[2, 3\]"):
        generate_equal_length(trunk, [[1, 2], [1, 2, 3]], 4, ())


def chained(trunk: Trunk, num_modules: int) -> MtpHead:
    """Return a head with a module for each depth, for a trunk whose family says so."""
    trunk.family = dataclasses.replace(trunk.family, unroll="chained")
    return tiny_head(trunk, num_modules=num_modules)


def test_a_chained_head_is_not_drafted_past_its_modules() -> None:
    trunk = tiny_trunk("glm4_moe")
    with pytest.raises(UnsupportedModelError, match="depth: 3; expected at most 2"):
        SpeculativeDecoder(trunk, chained(trunk, 2), 3, ())


def drafts_from_scratch(trunk: Trunk, head: MtpHead, tokens: Sequence[int], depth: int) -> list[int]:
    """Draft without any cache: every depth runs all rows anew."""
    recursive = head.family.unroll == "recursive"
    text = list(tokens)
    hidden_BTD = trunk.hidden(torch.tensor([text]))[:, :-1]
    for depth_now in range(1, depth + 1):
        first = 1 if recursive else depth_now
        embed_BTD = trunk.embed(torch.tensor([text[first:]]))
        num_rows = embed_BTD.shape[1]
        step = mtp_step(
            head,
            hidden_BTD,
            embed_BTD,
            depth=depth_now,
            positions_BT=torch.arange(first - 1, first - 1 + num_rows)[None],
            mask_BTS=torch.ones(1, num_rows, num_rows, dtype=torch.bool).tril(),
            cache=None,
        )
        text.append(int(trunk.logits(step.logit_hidden_BTD[0, -1]).argmax()))
        hidden_BTD = torch.cat([hidden_BTD, step.recycled_BTD[:, -1:]], dim=1) if recursive else step.recycled_BTD
    return text[len(tokens) :]


def drafts_of_training(trunk: Trunk, head: MtpHead, tokens: Sequence[int], drafts: list[int]) -> list[int]:
    """Return what the training unroll predicts at the last start row, its depths fed with the drafts."""
    tokens_BT = torch.tensor([[*tokens, *drafts]])
    outputs = unroll(
        head,
        trunk.hidden(tokens_BT),
        tokens_BT,
        trunk.embed,
        num_depths=len(drafts),
        positions_BT=torch.arange(tokens_BT.shape[1])[None],
        document_BT=torch.zeros_like(tokens_BT),
    )
    return [int(trunk.logits(output[0, len(tokens) - 2]).argmax()) for output in outputs]


def checked_drafts(trunk: Trunk, head: MtpHead, prompt: Sequence[int], depths: Sequence[int]) -> list[list[int]]:
    """Decode ten rounds, compare every draft with both recomputations, and return the drafts."""
    decoder = ScriptedDecoder(trunk, head, 4, prompt=prompt, accepted=[4, 0, 1, 2, 3])
    checked: list[list[int]] = []
    with torch.inference_mode():
        state = decoder.prefill(prompt)
        assert isinstance(state.drafter, ScriptedDrafter)
        for index in range(10):
            depth, before = depths[index % len(depths)], list(state.tokens)
            decoder.run_round(state, depth)
            if depth:
                drafts = state.drafter.real_drafts[-1][0].tolist()
                assert drafts == drafts_from_scratch(trunk, head, before, depth), index
                assert drafts == drafts_of_training(trunk, head, before, drafts), index
                checked.append(drafts)
    return checked


@pytest.mark.parametrize("depths", [[4], [4, 0, 0, 2, 1, 0, 4, 3]], ids=["fixed", "changing"])
@pytest.mark.parametrize("num_prompt_tokens", [1, 6])
@pytest.mark.parametrize("unroll_kind", ["recursive", "chained"])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_drafts_equal_a_full_recomputation_and_the_training_unroll(
    family_name: str, unroll_kind: str, num_prompt_tokens: int, depths: list[int]
) -> None:
    trunk = tiny_trunk(family_name)
    head = tiny_head(trunk) if unroll_kind == "recursive" else chained(trunk, 4)
    assert checked_drafts(trunk, head, random_prompt(num_prompt_tokens, seed=3), depths)


def test_drafts_follow_the_heads_convention() -> None:
    trunk = tiny_trunk("glm4_moe")
    head = tiny_head(trunk)
    default = checked_drafts(trunk, head, PROMPT[:1], [4])
    # Recycles the state before the final norm and reads no embedding at position 0.
    head.convention = trunk.family.conventions["vllm"]
    assert checked_drafts(trunk, head, PROMPT[:1], [4]) != default


def test_a_stale_row_in_the_heads_cache_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("qwen3_5")
    head = tiny_head(trunk)
    text = random_prompt(24)
    hidden_BTD = trunk.hidden(torch.tensor([text]))
    drafted: dict[str, list[list[int]]] = {}
    for name in ("right", "stale"):
        drafter = make_drafter(trunk, head, 4)
        if name == "stale":
            monkeypatch.setattr(drafter.cache, "crop", lambda tokens_to_remove: None)
        drafted[name] = []
        for end in range(4, 24, 4):
            drafter.extend(hidden_BTD[:, end - 4 : end], torch.tensor([text[end - 3 : end + 1]]))
            drafted[name].append(drafter.draft(4)[0].tolist())
    expected = [drafts_from_scratch(trunk, head, text[: end + 1], 4) for end in range(4, 24, 4)]
    assert drafted["right"] == expected
    assert drafted["stale"] != expected


def test_a_fp32_head_drafts_for_a_bf16_trunk() -> None:
    trunk = tiny_trunk("qwen3_5")
    head = tiny_head(trunk)
    result = SpeculativeDecoder(trunk.bfloat16(), head, 3, ()).generate(PROMPT, max_new_tokens=8)
    assert len(result.token_ids) == 8
    assert next(head.parameters()).dtype == torch.float32


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_equal_length_prompts_decode_together_as_alone(family_name: str) -> None:
    trunk = tiny_trunk(family_name)
    prompts = [random_prompt(4, seed) for seed in range(3)]
    alone = [plain_greedy(trunk, prompt, 16, ()) for prompt in prompts]
    eos = alone[1][5]
    texts = generate_equal_length(trunk, prompts, 16, [eos])
    assert texts == [plain_greedy(trunk, prompt, 16, [eos]) for prompt in prompts]
    assert len(texts[1]) <= 6
    assert [len(text) == 16 or text[-1] == eos for text in texts] == [True] * 3
    assert generate_equal_length(trunk, prompts, 16, [text[0] for text in alone]) == [text[:1] for text in alone]


def test_compare_tells_a_tie_from_a_divergence() -> None:
    trunk = tiny_trunk("glm4_moe")
    plain = plain_greedy(trunk, PROMPT, 6, ())
    twin = next(token for token in range(60) if token not in plain)
    other = next(token for token in range(60) if token not in [*plain, twin])
    with torch.no_grad():
        trunk.lm_head_VD[twin] = trunk.lm_head_VD[plain[3]]
    assert compare(plain, plain, trunk, PROMPT).verdict == "identical"
    tie = compare([*plain[:3], twin, 0, 0], plain, trunk, PROMPT)
    assert (tie.verdict, tie.position, tie.gap) == ("near_tie", 3, 0.0)
    worse = compare([*plain[:3], other, 0, 0], plain, trunk, PROMPT)
    assert (worse.verdict, worse.position) == ("divergence", 3)
    assert worse.gap is not None
    assert worse.gap > 1e-3
    assert compare(plain[:4], plain, trunk, PROMPT).verdict == "divergence"
