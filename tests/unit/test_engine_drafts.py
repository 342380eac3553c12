"""An engine's drafts are compared with ours, and the wiring that reproduces them is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import save_with_head
from draft_models import CHOSEN, DraftModelToWrite
from engines.ours import Subject, decode, with_state_before_norm
from json_files import write_rows
from mtp_inference.opening import OWN, open_model
from mtp_train import probe_drafts
from mtp_train.heads.module import MtpHead
from runs import Capture, document, refusal
from tiny import ALL_FAMILIES, VOCAB_SIZE, random_tokens, tiny_head, tiny_trunk

Fault = Callable[[MtpHead], object]


def reading_before_norm(head: MtpHead) -> None:
    head.convention = replace(head.convention, hidden="before_final_norm")


def with_halves_swapped(head: MtpHead) -> None:
    weight = head.get_parameter("blocks.0.proj.weight")
    weight.data = weight.data.roll(weight.shape[1] // 2, 1)


def rotating_all_channels(head: MtpHead) -> None:
    head.config.rope_parameters["partial_rotary_factor"] = 1.0
    head.rotary = type(head.rotary)(config=head.config)


def reading_later_layers(head: MtpHead) -> None:
    head.trunk_layers = (3, 5, 7)


def with_other_tokens(head: MtpHead) -> None:
    rows: Any = head.blocks[0].lm_head
    rows.token_ids_R = (rows.token_ids_R + 1) % VOCAB_SIZE


def as_it_is(head: MtpHead) -> None:
    """The control."""


def record(out: Path, trunk: Path, head: str, fault: Fault, depth: int = 3) -> Path:
    """Decode with a head that a fault changed, and write the rounds as an engine's user does."""
    model = open_model(str(trunk), head)
    loaded = with_state_before_norm(model.load_trunk(torch.device("cpu"), torch.float32))
    drafting: Any = model.load_drafting(loaded)
    fault(drafting.head)
    subject, prompts, rows = Subject(loaded, drafting.head), random_tokens(9, 3).tolist(), []
    for text in decode(subject, prompts, depth=depth, max_new_tokens=14, eos_ids=(), leading_row=False):
        token_ids = [*text.prompt_ids]
        for one in text.rounds:
            rows.append({"token_ids": [*token_ids], "drafts": one.drafts})
            token_ids += one.committed
    return write_rows(out / "drafts.jsonl", rows)


def own_head(family_name: str, out: Path) -> Path:
    trunk = tiny_trunk(family_name)
    return save_with_head(trunk, tiny_head(trunk), out / family_name)


MTP_FAULTS = {
    "as ours": as_it_is,
    "reading the hidden state before the final norm": reading_before_norm,
    "with the halves of its projection swapped": with_halves_swapped,
    "with partial_rotary_factor 1": rotating_all_channels,
}


@pytest.mark.parametrize("verdict", MTP_FAULTS)
@pytest.mark.parametrize("family_name", ["qwen3_5", "glm4_moe"])
def test_the_wiring_of_an_mtp_head_is_named(family_name: str, verdict: str, tmp_path: Path, capfd: Capture) -> None:
    checkpoint = own_head(family_name, tmp_path)
    drafts = record(tmp_path, checkpoint, OWN, MTP_FAULTS[verdict])
    found = document(["probe", checkpoint, "--drafts", drafts], capfd)
    assert (found["verdict"], found["equal"][verdict]) == (verdict, 1.0)


@pytest.mark.parametrize(
    ("verdict", "fault"),
    [
        ("as ours", as_it_is),
        ("reading layers (3, 5, 7)", reading_later_layers),
        ("drafting the token after each of its tokens", with_other_tokens),
    ],
)
def test_the_wiring_of_a_draft_model_is_named(verdict: str, fault: Fault, tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write()
    drafts = record(tmp_path, written.source.path, str(written.out), fault)
    found = probe_drafts(written.source.path, drafts, head=written.out)
    assert (found.verdict, found.equal[verdict]) == (verdict, 1.0)


def test_drafts_of_no_known_wiring_name_none(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "drafts.jsonl", [{"token_ids": [one, 3, 5], "drafts": [one, 7]} for one in range(66)])
    found = probe_drafts(own_head("qwen3_5", tmp_path), rows)
    assert (found.verdict, found.rounds) == ("none of the known", 33)


def test_wirings_that_do_not_differ_on_the_texts_are_undecided(tmp_path: Path) -> None:
    checkpoint = own_head("qwen3_5", tmp_path)
    drafts = record(tmp_path, checkpoint, OWN, with_halves_swapped, depth=1)
    drafts.write_text(drafts.read_text().splitlines()[3])
    found = probe_drafts(checkpoint, drafts)
    assert [found.verdict, *found.fits] == [
        "undecided",
        "with the halves of its projection swapped",
        "with all its norms minus one",
    ]
    assert "swapped / with all" in str(found)


@pytest.mark.parametrize("family_name", ALL_FAMILIES)
def test_every_family_drafts_in_its_known_wirings(family_name: str, tmp_path: Path) -> None:
    checkpoint = own_head(family_name, tmp_path)
    drafts = write_rows(tmp_path / "drafts.jsonl", [{"token_ids": [5, 6, 7, 8], "drafts": [9]}])
    assert len(probe_drafts(checkpoint, drafts).equal) > 4


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"token_ids": [1, 2], "drafts": ["3"]}', "line 2, drafts.0: Input should be a valid integer"),
        ('{"token_ids": [1, 67], "drafts": [3]}', "line 2, token_ids.1: Value error, token 67 is not in range(0, 67)"),
        ("[1", "line 2, JSON: Invalid JSON"),
    ],
)
def test_a_malformed_line_is_refused_by_its_number_and_field(
    line: str, found: str, tmp_path: Path, capfd: Capture
) -> None:
    checkpoint = own_head("qwen3_5", tmp_path)
    file = tmp_path / "drafts.jsonl"
    file.write_text('{"token_ids": [1, 2], "drafts": [3]}\n' + line)
    assert refusal(["probe", checkpoint, "--drafts", file], capfd).partition("drafts.jsonl, ")[2].startswith(found)


@pytest.mark.parametrize("options", [["--from", "b", "--drafts", "f"], ["--head", "h"], []])
def test_the_options_of_the_two_probes_do_not_mix(options: list[str], capfd: Capture) -> None:
    assert "or --drafts FILE with --head" in refusal(["probe", "m", *options], capfd)
