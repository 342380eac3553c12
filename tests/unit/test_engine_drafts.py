"""An engine's drafts are compared with ours, and the wiring that reproduces them is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from checkpoints import save_stripped, save_tensors, save_with_head
from draft_models import CHOSEN, NUM_LAYERS, DraftModelToWrite
from engines.ours import Subject, decode
from json_files import write_json, write_rows
from mtp_inference.opening import OWN, open_model
from mtp_train import probe_drafts
from mtp_train.families import of_kind
from mtp_train.heads.module import MtpHead
from mtp_train.runs.display import quiet_progress
from mtp_train.runs.engine_wirings import Replayed, load_known
from mtp_train.trunk.load import Trunk
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


def taking_numbers_of_rows(head: Any) -> None:
    rows = head.blocks[0].lm_head
    rows.token_ids_R = torch.arange(len(rows.token_ids_R))


def with_first_rows_of(trunk: Trunk) -> Fault:
    def fault(head: Any) -> None:
        rows = head.blocks[0].lm_head
        rows.weight.data = trunk.lm_head_VD[: len(rows.weight)].clone()

    return fault


def as_it_is(head: MtpHead) -> None:
    """The control."""


def record(out: Path, trunk: Path, head: str, fault: Fault, depth: int = 3) -> Path:
    """Decode with a head that a fault changed, and write the rounds as an engine's user does."""
    model = open_model(str(trunk), head)
    loaded = model.load_trunk(torch.device("cpu"), torch.float32)
    loaded.show_before_norm()
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


BLOCK_TRUNK = tiny_trunk("qwen3", num_layers=5)


def block_drafter(out: Path, **changes: Any) -> Path:
    """Write a DFlash drafter with random weights, as speculators does; its attention is sharp."""
    layers = {
        **BLOCK_TRUNK.config.to_dict(),
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    }
    config = {
        **{"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 6},
        **{"aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 5, "draft_vocab_size": len(CHOSEN)},
        **{"transformer_layer_config": layers, **changes},
    }
    family = of_kind(BLOCK_TRUNK.family, "dflash", {**layers, **config})
    head = family.kind.make_head(family, BLOCK_TRUNK.config, num_modules=1, convention=family.wiring.default)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name.removeprefix("blocks.0."): torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.5
        if value.ndim > 1
        else value * (8 if "q_norm" in name else 1) + torch.randn(value.shape, generator=generator) / 8
        for name, value in head.state_dict().items()
    }
    tensors["lm_head.weight"] = torch.randn(len(CHOSEN), BLOCK_TRUNK.config.hidden_size, generator=generator)
    tensors["d2t"] = CHOSEN - torch.arange(len(CHOSEN))
    out.mkdir()
    write_json(out / "config.json", config)
    save_tensors(tensors, out / "model.safetensors")
    return out


def masking_with(token: int) -> Fault:
    def fault(head: Any) -> None:
        head.mask_token = token

    return fault


def reading_layers(*layers: int) -> Fault:
    def fault(head: Any) -> None:
        head.trunk_layers = layers

    return fault


def attending_causally(head: Any) -> None:
    head.mask = lambda kind, places, keys: ((keys >= 0) & (keys <= places)).expand(-1, -1, places.shape[2], -1)


def drafting_a_row_early(head: Any) -> None:
    denoise = head.denoise
    head.denoise = lambda *given: pad(denoise(*given), (0, 0, 1, 0))[:, :-1]


def reading_raw_states(head: Any) -> None:
    head.module.hidden_norm = torch.nn.Identity()


def norming_keys_of_the_text_alike(head: Any, norm: str = "k_norm") -> None:
    parts = [getattr(layer.self_attn, norm) for layer in head.module.layers]
    weights = [part.weight for part in parts]
    write_keys = head.write_keys

    def write(*given: Any) -> None:
        for part in parts:
            part.weight = weights[0]
        write_keys(*given)
        for part, weight in zip(parts, weights, strict=True):
            part.weight = weight

    head.write_keys = write


def not_scaling_positions(head: Any) -> None:
    head.config.rope_parameters["rope_type"] = "default"
    head.rotary = type(head.rotary)(config=head.config)


BLOCK_FAULTS = {
    "as ours": as_it_is,
    "attending causally within its block": attending_causally,
    "drafting from the row before": drafting_a_row_early,
    "drafting the numbers of its rows as tokens": taking_numbers_of_rows,
    "drafting the token after each of its tokens": with_other_tokens,
    "norming the text's keys as those of its first layer": norming_keys_of_the_text_alike,
    "reading layers (0, 2)": reading_layers(0, 2),
    "reading layers (2, 4)": reading_layers(2, 4),
    "with mask token 0": masking_with(0),
    "with mask token 6": masking_with(6),
    "with rope_type default": not_scaling_positions,
    "with the first rows of the trunk's output matrix": with_first_rows_of(BLOCK_TRUNK),
    "without the norm of the states that it reads": reading_raw_states,
}


@pytest.mark.parametrize("verdict", BLOCK_FAULTS)
def test_the_wiring_of_a_block_drafter_is_named(verdict: str, tmp_path: Path) -> None:
    trunk = save_stripped(BLOCK_TRUNK, tmp_path / "trunk")
    drafter = block_drafter(tmp_path / "draft")
    drafts = record(tmp_path, trunk, str(drafter), BLOCK_FAULTS[verdict], depth=5)
    found = probe_drafts(trunk, drafts, head=drafter)
    assert (found.verdict, found.equal[verdict]) == (verdict, 1.0)


def test_rounds_that_are_replayed_together_draft_as_each_alone(tmp_path: Path) -> None:
    trunk = save_stripped(BLOCK_TRUNK, tmp_path / "trunk")
    drafter = block_drafter(tmp_path / "draft")
    probed = load_known(open_model(str(trunk), str(drafter)))
    text = tuple(random_tokens(12, 1)[0].tolist())
    together, *alone = (
        probed.margins([Replayed(text, starts, 3)], quiet_progress())
        for starts in (range(2, 9), *(range(start, start + 1) for start in range(2, 9)))
    )
    for name, (margins_KN,) in together.items():
        torch.testing.assert_close(margins_KN, torch.cat([one[name][0] for one in alone], dim=1))


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
        ("drafting the numbers of its rows as tokens", taking_numbers_of_rows),
        (
            "with the first rows of the trunk's output matrix",
            with_first_rows_of(tiny_trunk("llama", num_layers=NUM_LAYERS)),
        ),
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


@pytest.mark.parametrize(
    "options",
    [
        ["--from", "b", "--drafts", "f"],
        ["--from", "b", "--endpoint", "u"],
        ["--drafts", "f", "--endpoint", "u"],
        ["--drafts", "f", "--served-model", "m"],
        ["--from", "b", "--api-key-env", "K"],
        ["--head", "h"],
        [],
    ],
)
def test_the_options_of_the_three_probes_do_not_mix(options: list[str], capfd: Capture) -> None:
    assert "or --drafts FILE with --head, or --endpoint URL" in refusal(["probe", "m", *options], capfd)
