"""What the README promises exists: its commands parse, its recipe lines load, its families are the ones we know."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from mtp_train.cli.main import build_parser
from mtp_train.families import FAMILIES
from scripts.support_table import table, witnessed

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


def shell_commands() -> list[list[str]]:
    """Return the commands of the README's code blocks as words, continued lines joined, comments dropped."""
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`(mtp-train [a-z]+ [^`|\[]*--out [^`\[]*)`", README)
    words = [
        shlex.split(line, comments=True) for line in [*lines, *inline] if not line.startswith("mtp-train demo DIR")
    ]
    return [command for command in words if command]


def ours(program: str) -> list[list[str]]:
    return [command for command in shell_commands() if program in command]


def test_every_command_line_parses() -> None:
    commands = [command[1:] for command in ours("mtp-train") if "FINE_TUNE" not in command]
    assert len(commands) >= 3
    for command in commands:
        assert build_parser().parse_args(command).command == command[0]


def test_the_support_table_is_what_the_records_say() -> None:
    page = (REPOSITORY / "recipes" / "families.md").read_text(encoding="utf-8")
    assert table() in page
    of_releases = [family for family in FAMILIES if not family.attached]
    assert f"[{len(of_releases)} families](recipes/families.md)" in README
    assert f"to {len(FAMILIES) - len(of_releases)} more" in README


def test_no_engine_is_said_to_run_what_its_record_does_not_claim() -> None:
    families = {family.name: family for family in FAMILIES}
    for engine, name in witnessed():
        assert families[name].serving[engine].supported, (engine, name)


def test_the_page_on_attaching_names_every_model_that_it_is_for() -> None:
    page = " ".join((REPOSITORY / "recipes" / "attach.md").read_text(encoding="utf-8").split())
    assert [family.title for family in FAMILIES if family.attached and family.title not in page] == []


def test_every_file_it_points_to_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert len(links) > 3
    assert all((REPOSITORY / link).exists() for link in links)
    assert README.count("\n") < 200
