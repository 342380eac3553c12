"""The pages' figures of the real model are those of its records: ``real_model``, ``real_study`` and ``long_rows.json``.

A claim is a part of a sentence or of a table, with figures from the record. A page holds all of its claims in this
order, and no figure besides: a digit that changes on the page or in the record fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from json_files import read_json
from mtp_train.acceptance.counts import tau as counted_tau
from recorded_ablation import contrasts, pooled, prompt_counts
from repository import REPOSITORY

RECORD = read_json(REPOSITORY / "inference" / "benchmarks" / "real_model.json")
STUDY = read_json(REPOSITORY / "inference" / "benchmarks" / "real_study.json")
LONG_ROWS = read_json(REPOSITORY / "inference" / "benchmarks" / "long_rows.json")
HAND = {name: one["value"] for name, one in RECORD["by_hand"].items()}
CPU, H100 = "eagle3", "eagle3-2000-steps"
QUESTIONS, SUITE, CONTEXTS = "compare-held_out", "compare-builtin", "compare-contexts"
OWN_KL, OWN_CE, OLD_KL, OLD_CE = "self-exact-kl", "self-exact-ce", "corpus-exact-kl", "corpus-exact-ce"
BEFORE, LONGER, STALE = "before-exact-kl", "vanilla-exact-kl", "stale-exact-kl"
GAINS = {(one["cell"], one["temperature"]): one for one in STUDY["contrasts"] if one["against"] == OWN_KL}

# Digits that are no figures: names, dates, the trunk's shape, and settings that the commands of the record repeat.
NAMES = re.compile(
    r"SmolLM2-135M(-Instruct)?|EAGLE-3|H100|Zen 4|Apache 2\.0|30 layers, 576 channels|49,152 rows|bf16|fp32"
    r"|2026-\d\d-\d\d"
)


class Figure(NamedTuple):
    value: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        return f"{shown(self.value)} [{shown(self.interval[0])}, {shown(self.interval[1])}]"

    def __format__(self, alone: str) -> str:
        return shown(self.value) if alone else str(self)


def shown(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00")


def cell(
    study: str,
    arm: str = "retrained",
    depth: int = 3,
    *,
    task: str = "all",
    temperature: float = 0.0,
    context: Any = None,
) -> dict[str, Any]:
    names = ("arm", "depth", "task", "temperature", "context_tokens")
    wanted = (arm, depth, task, temperature, context)
    (found,) = (one for one in RECORD["cells"][study] if tuple(one[name] for name in names) == wanted)
    return dict(found)


def tau(*where: Any, **at: Any) -> Figure:
    found = cell(*where, **at)
    return Figure(found["tau"], found["tau_ci95"])


def speed(*where: Any, **at: Any) -> Figure:
    found = cell(*where, **at)
    return Figure(found["speedup"], found["speedup_ci95"])


def less(against: str, temperature: float) -> str:
    """Return by how much KL on own answers exceeds a cell of the study, with * where that survives the correction."""
    found = GAINS[against, temperature]
    sign = 1 if found["cell"] == OWN_KL else -1
    low, high = sorted(sign * bound for bound in found["gain_ci95"])
    return f"{Figure(sign * found['gain'], (low, high))}{' *' * found['survives']}"


def tau_over_seeds(cell: str, temperature: str, record: Any = STUDY) -> str:
    seeds = [prompt_counts(one, STUDY["groups"].items()) for one in record["counts"][cell][temperature]]
    return shown(counted_tau(pooled(seeds)))


def won_back() -> str:
    stale, kept, longer = (float(tau_over_seeds(one, "0")) for one in (STALE, OWN_KL, LONGER))
    # As the page says, a fifth.
    assert (kept - stale) / (longer - stale) == pytest.approx(0.2, abs=0.02)
    return f"{shown(kept - stale)} of the {shown(longer - stale)} tokens lost"


def run_of(name: str) -> dict[str, Any]:
    """Return command, time and memory of a run."""
    (found,) = (
        one for one in RECORD["commands"] if re.match(rf"mtp-train run \S+ run_dir=OUT/{name} ", one["command"])
    )
    return dict(found)


def field_of(name: str, field: str) -> int:
    """Return a number that a run's command sets."""
    return int(run_of(name)["command"].partition(f"{field}=")[2].split()[0])


def minutes(kind: str) -> str:
    return f"{run_of(kind)['cpu_seconds'] / 60:.0f}"


def plain_on_the_gpu() -> dict[str, str]:
    rate = cell(H100, "none", 0)["tokens_per_second"]
    share = HAND["trunk_bytes"] * rate / (HAND["h100_gb_per_second"] * 1e9)
    return {"rate": f"{rate:.0f} tokens/s", "token": f"{1e3 / rate:.1f} ms a token", "share": f"{100 * share:.1f} %"}


def claims_of_the_costs() -> Iterator[str]:
    settings = RECORD["settings"][CPU]
    yield f"torch {settings['torch'].rpartition('.')[0]}, transformers {settings['transformers'].rpartition('.')[0]}"
    yield f"from {field_of(CPU, 'head.draft_vocab'):,} tokens"
    yield f"{HAND['prompts']:,} prompts in {HAND['groups']} groups, {100 * HAND['held_out_share']:.0f} % of the groups"
    yield f"{HAND['answers']:,} answers of {HAND['answer_tokens']:,} tokens"
    yield f"took {HAND['answers_cpu_minutes']} CPU-minutes"
    yield f"{settings['train_steps']} steps of {settings['tokens_per_step']:,} tokens"
    yield f"took {minutes(CPU)} CPU-minutes more"
    yield f"MTP ({RECORD['settings']['mtp']['train_steps']} steps) {minutes('mtp')}."
    yield f"torch {RECORD['settings'][H100]['torch'].partition('.0+')[0]}"
    yield HAND["h100_command"].partition("real_model.py ")[2]
    curve = {f"{point['tokens'] / 1e6:.1f}": shown(point["tau"]) for point in RECORD["training"][H100]}
    yield f"reached {curve['6.6']} at 6.6 million tokens"
    assert curve["8.2"] == curve["6.6"]
    yield "no more at 8.2"


def claims_of_the_gates() -> Iterator[str]:
    settings = RECORD["settings"][CPU]
    yield f"speed at batch {settings['speed_batch_size']}"
    yield f"{settings['prompts']} held-out prompts of {settings['groups']} groups"
    yield f"EAGLE-3 {RECORD['gate'][CPU]['outcome']}**, with tau {tau(CPU)} and {speed(CPU)} times"
    yield f"three drafts, {tau(CPU, depth=2):alone} and **{speed(CPU, depth=2)}** at two"
    yield f"MTP head was {RECORD['gate']['mtp']['outcome']}**: {tau('mtp')} and {speed('mtp')}"
    yield f"{speed('mtp', depth=1)} at one"
    yield f"{RECORD['gate'][H100]['outcome']} with {tau(H100)} and {speed(H100)} times the speed"
    yield "{identical} of {checked} texts".format_map(RECORD["lossless"][H100])
    yield f"at two drafts {tau(H100, depth=2):alone} and {speed(H100, depth=2):alone}"
    yield f"at one {tau(H100, depth=1):alone} and {speed(H100, depth=1):alone}"
    gpu = plain_on_the_gpu()
    yield f"{gpu['rate']} with prefill, {gpu['token']} for {HAND['trunk_bytes'] / 1e9:.2f} GB of weights"
    yield gpu["share"]


def claims_of_other_prompts() -> Iterator[str]:
    yield "{prompts} other questions of {groups} groups".format_map(cell(QUESTIONS, "none", 0))
    rows = (("EAGLE-3", CPU, 0.0), ("EAGLE-3", CPU, 0.7), ("MTP", "mtp", 0.0), ("prompt lookup", "lookup", 0.0))
    for name, arm, warm in rows:
        both = (f"{read(QUESTIONS, arm, depth, temperature=warm)}" for depth in (1, 3) for read in (tau, speed))
        yield f"| {name}, {f'temperature {warm}' if warm else 'greedy'} | {' | '.join(both)} |"
    yield "{prompts} prompts unlike".format_map(cell(SUITE, "none", 0))
    yield f"EAGLE-3 {tau(SUITE, CPU)}, {speed(SUITE, CPU)} times the speed"
    yield f"at one draft {tau(SUITE, CPU, 1):alone} and {speed(SUITE, CPU, 1)}"
    yield f"MTP {tau(SUITE, 'mtp'):alone} and {speed(SUITE, 'mtp'):alone}"
    yield f"lookup gets {tau(SUITE, 'lookup')} and {speed(SUITE, 'lookup')}"
    short, long = (cell(CONTEXTS, "none", 0, context=tokens)["prompts"] for tokens in (512, 2048))
    yield f"contexts of 512 and 2,048 tokens ({short} and {long} prompts"
    for name, arm in (("EAGLE-3", CPU), ("MTP", "mtp"), ("lookup", "lookup")):
        found = (format(tau(CONTEXTS, arm, context=tokens), "alone") for tokens in (512, 2048))
        yield f"{name} {' and '.join(found)}"


def claims_of_the_study() -> Iterator[str]:
    train = STUDY["recipe"]["train"]
    more = train["max_steps"]
    yield f"head of {HAND['study_steps']} steps"
    yield f"for {more} steps of {train['tokens_per_step']:,} tokens more"
    yield f"answers to {STUDY['recipe']['data']['regenerate']['max_prompts']} prompts"
    yield f"on {STUDY['prompts']} held-out prompts of {len(set(STUDY['groups'].values()))} groups"
    yield "at temperature 1 with"
    yield f"transformers {STUDY['environment']['versions']['transformers'].rpartition('.')[0]}"
    yield "| head | greedy | temperature 1 |"
    rows = {
        "vanilla, before the fine-tune": BEFORE,
        f"vanilla, {more} steps longer": LONGER,
        "stale": STALE,
        "KL, the fine-tune's answers": OWN_KL,
        "CE, the same answers": OWN_CE,
        "KL, the old trunk's answers": OLD_KL,
        "CE, the old trunk's answers": OLD_CE,
    }
    for name, one in rows.items():
        yield f"| {name} | {tau_over_seeds(one, '0')} | {tau_over_seeds(one, '1')} |"
    yield "| less | greedy | temperature 1 |"
    for name in ("stale", f"vanilla, {more} steps longer", "CE, the same answers", "KL, the old trunk's answers"):
        yield f"| {name} | {less(rows[name], 0.0)} | {less(rows[name], 1.0)} |"
    longer = STUDY["more_steps"]
    taus = " and ".join(tau_over_seeds(OWN_KL, one, longer) for one in "01")
    yield f"{longer['steps']} steps (`study train.max_steps={longer['steps']}`, one seed) get to {taus}"
    yield f"**{more} steps win back"


def claims_of_long_rows() -> Iterator[str]:
    arms = LONG_ROWS["arms"]
    told = "from {trained_pages} pages of Python's documentation, {steps} steps of {losses:,} losses each"
    yield told.format_map(LONG_ROWS["settings"])
    yield "rows of 512 tokens, of 8,192"
    yield "or of 512"
    yield f"on {len(LONG_ROWS['pages'])} other pages"
    yield "| 512 tokens | 2,048 | 7,000 |"
    counted = "8,192, {positions:,} count".format_map(LONG_ROWS["settings"])
    for name, arm in (("512", "short"), ("512, offset", "offset"), (counted, "long")):
        yield f"| {name} | {' | '.join(str(Figure(mean, (low, high))) for mean, low, high in arms[arm]['tau'])} |"
    for arm in ("long", "offset"):
        mean, low, high = arms[arm]["above_short"][-1]
        yield str(Figure(mean, (low, high)))


def claims_of_the_page() -> list[str]:
    parts = (
        claims_of_the_costs,
        claims_of_the_gates,
        claims_of_other_prompts,
        claims_of_the_study,
        claims_of_long_rows,
    )
    return [claim for part in parts for claim in part()]


def claims_of_the_readme() -> list[str]:
    return [
        f"got to [{tau(H100):alone} tokens a round]",
        f"{speed(H100):alone} times our own plain decoding (no engine's) on one H100",
        f"got to {tau(CPU, depth=2):alone} and {speed(CPU, depth=2):alone} with two drafts",
        f"in {HAND['answers_cpu_minutes']} minutes of answers and {minutes(CPU)} of training and measuring",
        f"{STUDY['recipe']['train']['max_steps']} steps won back {won_back()}",
    ]


def claims_of_the_status() -> list[str]:
    gpu = plain_on_the_gpu()
    return [
        f"{HAND['trunk_bytes'] / 2e6:.0f}M parameters",
        f"{speed(H100):alone} times as fast",
        f"plain decoding of {gpu['rate']}",
        f"{gpu['share']} of the card's",
    ]


def part(page: str, first: str = "", last: str = "") -> str:
    """Return a page's text between two phrases on one line, without blocks of code and the targets of links."""
    text = " ".join(re.sub(r"```.*?```", "", (REPOSITORY / page).read_text(encoding="utf-8"), flags=re.DOTALL).split())
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return text[text.index(first) : text.index(last) if last else None]


PARTS = {
    "page": (part("recipes/real_model.md"), claims_of_the_page()),
    "readme": (part("README.md", "SmolLM2-135M", "[STATUS.md] lists"), claims_of_the_readme()),
    "status": (part("STATUS.md", "[a real model]", "`gpu.py` of"), claims_of_the_status()),
}


def faults(text: str, claims: list[str]) -> list[str]:
    """Return the claims that a text does not hold in their order, and the figures that are part of none."""
    others = ""
    for claim in claims:
        before, found, text_after = text.partition(claim)
        if not found:
            return [claim]
        others = f"{others} {before}"
        text = text_after
    return re.findall(r"\S*\d\S*", NAMES.sub("", f"{others} {text}"))


@pytest.mark.parametrize("name", PARTS)
def test_the_figures_of_the_real_model_are_those_of_its_record(name: str) -> None:
    assert faults(*PARTS[name]) == []


@pytest.mark.parametrize("name", PARTS)
def test_one_changed_digit_is_found(name: str) -> None:
    text, claims = PARTS[name]
    names = {index for found in NAMES.finditer(text) for index in range(*found.span())}
    digits = [index for index, letter in enumerate(text) if letter.isdigit() and index not in names]
    assert len(digits) > 8
    for index in digits:
        other = str((int(text[index]) + 1) % 10)
        assert faults(text[:index] + other + text[index + 1 :], claims), text[index - 30 : index + 10]


def test_every_text_was_that_of_plain_decoding() -> None:
    assert all(one["checked"] == one["identical"] > 0 for one in RECORD["lossless"].values())


def test_the_study_was_judged_as_it_is_now() -> None:
    assert json.loads(json.dumps(contrasts(STUDY))) == STUDY["contrasts"]


def test_what_was_recorded_by_hand_has_a_source() -> None:
    assert all(one["source"] for one in RECORD["by_hand"].values())
