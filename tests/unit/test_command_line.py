"""The command line itself: misspelt options, examples in help, a closed pipe."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launching import environment
from mtp_train.cli.main import EXAMPLES, build_parser, main, parse

Capture = pytest.CaptureFixture[str]


def test_a_misspelt_option_is_an_error_of_its_command(capfd: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "x.yaml", "--jsn", "train.lr=1"])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert said.startswith("usage: mtp-train run ")
    assert "unrecognized arguments: --jsn" in said


def test_a_misspelt_command_is_told_the_nearest(capfd: Capture) -> None:
    for word, near in (("inspct", "did you mean inspect?"), ("xyz", "choose from")):
        with pytest.raises(SystemExit) as ended:
            main([word])
        assert ended.value.code == 2
        assert near in capfd.readouterr().err


@pytest.mark.parametrize("name", ["probe", "rescue", "graft", "inspect", "init"])
def test_the_base_is_named_by_either_word(name: str) -> None:
    words = {"init": ["a.yaml", "--trunk", "a"], "inspect": ["a"]}.get(name, ["a", "--out", "b"])
    for option in ("--base", "--from"):
        assert parse(build_parser(), [name, *words, option, "c"]).base == "c"


def test_changes_to_a_recipe_may_follow_options() -> None:
    args = parse(build_parser(), ["check", "x.yaml", "seed=1", "--device", "h100", "train.lr=1", "--json"])
    assert args.overrides == ["seed=1", "train.lr=1"]


def test_no_command_prints_help(capfd: Capture) -> None:
    assert main([]) == 0
    assert "rescue" in capfd.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_of_a_command_ends_with_an_example_that_it_takes(name: str, capfd: Capture) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = " ".join(capfd.readouterr().out.split()).rpartition("example: mtp-train ")[2]
    assert parse(build_parser(), shlex.split(shown)).command == name


def test_verbose_shows_where_an_error_came_from_and_quiet_no_progress(
    inputs: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set by -v otherwise, for this process and those that later tests start.
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    assert main(["inspect", "nowhere", "-v"]) == 2
    assert "Traceback" in capfd.readouterr().err
    monkeypatch.setattr("mtp_train.progress.LINE_SECONDS", -1.0)
    for quiet in ([], ["-q"]):
        assert main(["inspect", str(inputs / "base"), *quiet]) == 0
        printed = capfd.readouterr()
        assert ": healthy\n" in printed.out
        assert ("looking for NaN" in printed.err) is not bool(quiet)


def test_a_reader_that_closes_the_pipe_gets_no_traceback() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    settings = {"env": environment(), "stdout": writes, "stderr": subprocess.PIPE, "check": False}
    refused, listed = (
        subprocess.run([sys.executable, "-m", "mtp_train", *words], **settings)
        for words in (["demo", "--json", os.devnull + "/x"], ["recipes"])
    )
    os.close(writes)
    assert refused.returncode == 2
    assert (listed.returncode, listed.stderr) == (141, b"")


@pytest.mark.parametrize(("line", "found"), [("mtp-train insp", ["inspect"]), ("mtp-train graft a --fr", ["--from"])])
def test_a_shell_is_told_what_completes_a_word(tmp_path: Path, line: str, found: list[str]) -> None:
    out = tmp_path / "found"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "IFS": "\n"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    command = [sys.executable, "-c", "from mtp_train.cli.main import main; main()"]
    subprocess.run(command, env=environment() | asked, check=True)
    assert [word.strip() for word in out.read_text().split("\x0b")] == found
