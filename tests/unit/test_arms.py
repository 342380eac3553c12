"""Arms at the settings that a trunk is served with: lossless as greedy ones are, and counted by group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rich.progress import Progress

from mtp_inference import HeadDrafting, TextCheck
from mtp_train.acceptance.names import PLAIN
from mtp_train.data.tokenize import Prompt
from mtp_train.evaluation.decoding import (
    SPEED_PROMPTS,
    TrunkArms,
    measure_trunk,
    speed_prompts,
)
from mtp_train.evaluation.grid import greedy
from mtp_train.evaluation.prompt_records import Setting
from mtp_train.evaluation.statistics import MeasuredArm, Measurements, assemble, lossless
from mtp_train.trunk.load import Trunk
from tiny import tiny_head, tiny_trunk

DEPTH, TOKENS = 2, 16
GREEDY = greedy(DEPTH)
WARM = Setting(0.8, None, DEPTH, "argmax", top_p=0.9, top_k=40)
DRAWN_WARM = replace(WARM, rule="sampled")
DRAWN = Setting(0.8, None, DEPTH, "sampled")
SETTINGS = (GREEDY, WARM, DRAWN_WARM, DRAWN)
SHALLOW = replace(GREEDY, depth=1)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("qwen3_5")


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    return [
        Prompt(
            id=f"p{number}",
            group=f"g{number // 2}",
            prompt_ids=tuple(torch.randint(0, 60, (5 + number,), generator=generator).tolist()),
        )
        for number in range(SPEED_PROMPTS + 2)
    ]


def decode(trunk: Trunk, settings: tuple[Setting, ...], seed: int = 0) -> list[MeasuredArm]:
    arms = TrunkArms(
        trunk=trunk,
        name="finetune",
        drafting={"retrained": HeadDrafting(tiny_head(trunk))},
        head_names={"retrained": "run/head"},
        max_new_tokens=TOKENS,
        eos_ids=(),
        seed=seed,
    )
    shallow = [("retrained", SHALLOW)] if settings[0] == GREEDY else []
    return measure_trunk(arms, {None: prompts()}, settings, Progress(disable=True), shallow=shallow)


@pytest.fixture(scope="module")
def served(trunk: Trunk) -> list[MeasuredArm]:
    return decode(trunk, SETTINGS)


def test_every_setting_decodes_every_prompt_and_times_some(served: list[MeasuredArm]) -> None:
    plain, retrained = served
    chosen = speed_prompts(prompts(), 0)
    # As evenly over the groups as possible.
    assert len(chosen) == SPEED_PROMPTS < len(prompts())
    assert {one.group for one in chosen} == {one.group for one in prompts()}
    for arm in served:
        for setting, records in arm.decoded.items():
            if setting == SHALLOW:
                continue
            assert [(one.prompt_id, one.group) for one in records] == [(one.id, one.group) for one in prompts()]
            assert {one.seconds_prefill for one in records} == {None}
        for records in arm.timed.values():
            assert [one.prompt_id for one in records] == [one.id for one in chosen]
            assert all(one.seconds_prefill is not None and one.check is None for one in records)
    # Settings that differ in the rule alone share one plain decoding.
    assert list(plain.decoded) == [GREEDY.plain, WARM.plain, DRAWN.plain]
    assert retrained.settings == [*SETTINGS, SHALLOW]
    texts = [tuple(one.token_ids for one in records) for records in plain.decoded.values()]
    assert len(set(texts)) == 3


def test_every_text_is_checked_against_plain_decoding_of_the_same_seed(served: list[MeasuredArm]) -> None:
    def verdicts(arm: MeasuredArm, setting: Setting) -> set[str | None]:
        return {one.check and one.check.verdict for one in arm.decoded[setting]}

    plain, retrained = served
    assert {setting: verdicts(retrained, setting) for setting in retrained.settings} == {
        GREEDY: {"identical"},
        WARM: {"identical"},
        # Other texts of the same distribution: their rounds are checked.
        DRAWN_WARM: {"sampled"},
        DRAWN: {"sampled"},
        SHALLOW: {None},
    }
    assert [verdicts(plain, setting) for setting in plain.settings] == 3 * [{"plain"}]
    found = lossless(served)
    number = len(prompts())
    assert (found.checked, found.identical, found.sampled, found.faults) == (4 * number, 2 * number, 2 * number, ())
    # Controls: a text that differs, in one lane; errors of plain decoding.
    broken = TextCheck(verdict="divergence", position=3, follows_rule=False)
    noisy = TextCheck(verdict="plain", measured=40, over_limit=40)
    for arm, setting, check in ((retrained, WARM, broken), (plain, GREEDY.plain, noisy)):
        first, *rest = arm.decoded[setting]
        faulty = replace(arm, decoded={**arm.decoded, setting: [replace(first, check=check), *rest]})
        (fault,) = lossless([faulty]).faults
        assert fault.startswith(f"{arm.name}, {setting.name}: ")


def test_a_report_has_a_cell_of_each_arm_at_each_setting(served: list[MeasuredArm]) -> None:
    report = assemble(Measurements(served), GREEDY, {"seed": 0})
    by_place = {(cell.arm, cell.setting): cell for cell in report.cells}
    assert list(by_place) == [
        *((PLAIN, setting) for setting in (GREEDY.plain, WARM.plain, DRAWN.plain)),
        *(("retrained", setting) for setting in (*SETTINGS, SHALLOW)),
    ]
    cell = by_place["retrained", WARM]
    assert (cell.prompts, cell.groups, cell.depth) == (len(prompts()), 5, DEPTH)
    assert len(cell.overlap or ()) == DEPTH
    assert report.arms["retrained"] == by_place["retrained", GREEDY].result
    assert report.arms[PLAIN].speedup == 1.0
    assert by_place["retrained", SHALLOW].speedup is not None
