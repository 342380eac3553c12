"""What the pages promise exists: commands parse, recipe lines load, families are known, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mtp_train.cli.main import build_parser
from mtp_train.families import FAMILIES, of_kind
from mtp_train.families.kinds.assistant import GEMMA4
from mtp_train.recipe.loading import load_recipe
from repository import RECIPES, REPOSITORY, shell_commands
from scripts.commands_page import page
from scripts.support_table import table, witnessed

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    path
    for path in REPOSITORY.rglob("*.md")
    if not {".venv", ".git", "build"} & set(path.relative_to(REPOSITORY).parts)
)


def named(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def overrides(words: list[str]) -> list[str]:
    """Return the changes to a recipe in a command."""
    return [word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+=.*|run_dir=.*", word, flags=re.DOTALL)]


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_command_line_of_a_page_parses(path: Path) -> None:
    for words in shell_commands(path.read_text(encoding="utf-8")):
        if words[0] == "mtp-train" and "..." not in words:
            assert build_parser().parse_args(words[1:]).command == words[1]
        if "mtp_train" in words or words[:2] == ["mtp-train", "run"]:
            stem = Path(words[2] if words[0] == "mtp-train" else words[words.index("mtp_train") + 1]).stem
            shipped = RECIPES / f"{stem}.yaml"
            # A recipe of the reader's own is one that init would write.
            load_recipe(shipped if shipped.exists() else RECIPES / "retrain_head.yaml", overrides(words))


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_override_in_the_text_of_a_page_loads(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for shown in re.findall(r"`([^`]*=[^`]*)`", text):
        if overrides(shlex.split(shown)[:1]):
            assert load_recipe(RECIPES / "retrain_head.yaml", overrides(shlex.split(shown))), shown


def test_a_mistyped_recipe_line_would_be_seen() -> None:
    assert overrides(["accelerate", "model.trnk=x", "--n=3"]) == ["model.trnk=x"]
    with pytest.raises(Exception, match=r"model\.trnk: unknown"):
        load_recipe(RECIPES / "retrain_head.yaml", ["model.trnk=x"])


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(path: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        target = (path.parent / link).resolve() if link else path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings], link


def test_the_generated_pages_are_up_to_date() -> None:
    assert table() in (RECIPES / "families.md").read_text(encoding="utf-8"), "scripts/support_table.py --write"
    assert page() == (RECIPES / "commands.md").read_text(encoding="utf-8"), "python scripts/commands_page.py"


def test_no_engine_is_said_to_run_what_its_record_does_not_claim() -> None:
    families = {family.name: family for family in (*FAMILIES, of_kind(GEMMA4, "assistant"))}
    for engine, name in witnessed():
        assert families[name].serving[engine].supported, (engine, name)
