"""A head in a known wrong form drafts better when that form is undone, and the probe names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from rich.progress import Progress

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_inference.opening import OWN, open_model
from mtp_train import demo_path
from mtp_train.answers.store import answer_document
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.data.tokenize import Document, Prompt
from mtp_train.evaluation.dense import better_wiring, wirings
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk

Change = Callable[[MtpHead], MtpHead]


@cache
def demo(alike: bool = False) -> tuple[Trunk, Callable[[], HeadDrafting], list[Document]]:
    """Return the demo's base, a maker of its head, and what the base writes on prompts of code, or on chats alike."""
    model = open_model(str(demo_path("base")), OWN)
    trunk = model.load_trunk(torch.device("cpu"))
    tokenizer = load_tokenizer(model.checkpoint)
    given = [json.loads(line)["text"] for line in demo_path("code").read_text().splitlines()[:80:8]]
    if alike:
        chats = ([{"role": "user", "content": f"Tell me about number {number} and why."}] for number in range(8))
        given = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [
        Prompt(str(number), str(number), tuple(tokenizer(text)["input_ids"][:48])) for number, text in enumerate(given)
    ]
    plain = SpeculativeDecoder(trunk, None, 0, frozenset()).generate([one.prompt_ids for one in prompts], 24)
    texts = [answer_document(prompt, one.token_ids, 1 << 12) for prompt, one in zip(prompts, plain, strict=True)]

    def head() -> HeadDrafting:
        drafting = model.load_drafting(trunk)
        assert isinstance(drafting, HeadDrafting)
        return drafting

    return trunk, head, texts


def best(damage: Change | None) -> str | None:
    trunk, make, texts = demo()
    drafting = make()
    if damage is not None:
        damage(drafting.head)
    return better_wiring(trunk, drafting, texts, 2, Progress(disable=True))


def test_the_demo_s_head_fits_best_as_it_is() -> None:
    assert best(None) is None


def test_answers_that_are_nearly_one_text_name_no_wrong_form() -> None:
    trunk, make, texts = demo(alike=True)
    assert better_wiring(trunk, make(), texts, 2, Progress(disable=True)) is None


@pytest.mark.parametrize(
    ("damage", "cure"),
    [
        ("with the halves of its projection swapped", "with the halves of its projection swapped"),
        ("with its square matrices transposed", "with its square matrices transposed"),
        ("with the norms before its projection plus one", "with the norms before its projection minus one"),
        ("with all its norms minus one", "with all its norms plus one"),
    ],
)
def test_a_wrong_form_is_found_by_undoing_it(damage: str, cure: str) -> None:
    change = wirings(demo()[1]().head)[damage]
    # A shift by one barely matters where norms are large: by three it does, and one step back is better already.
    times = 3 if "norms before" in damage else 1

    def repeated(head: MtpHead) -> MtpHead:
        for _ in range(times):
            change(head)
        return head

    assert (best(repeated) or "").startswith(f"The head drafts better {cure}: ")
