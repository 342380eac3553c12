"""Check ``recipes/``: recipes load, headers and generated files are up to date, machine settings have their effect."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from torch.distributed.run import get_args_parser

from mtp_train.recipe.loading import dump_recipe, load_recipe
from repository import REPOSITORY

MACHINES = sorted((REPOSITORY / "recipes" / "accelerate").glob("*.yaml"))
RECIPES = sorted(path for path in (REPOSITORY / "recipes").rglob("*.yaml") if path not in MACHINES)
FIELDS = REPOSITORY / "recipes" / "fields.md"
NODES = REPOSITORY / "recipes" / "distributed.md"
SLURM = REPOSITORY / "recipes" / "slurm" / "nodes.sh"
SCHEMA = REPOSITORY / "mtp_train" / "recipe" / "schema.json"


def named(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_recipe_loads_and_survives_writing(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_recipe_is_a_program_with_a_header(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env -S python -m mtp_train"
    # Editors look for the schema in the directory of the recipe.
    named_schema = lines[1].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named_schema).resolve() == SCHEMA
    starts = ("# Trains: ", "# Needs: ", "# Launch: ", "# Your model: ")
    assert all(line.startswith(start) for line, start in zip(lines[2:6], starts, strict=True))
    assert lines[6] == ""
    assert named(path) in lines[4]
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_override_example_of_the_header_loads(path: Path) -> None:
    example = path.read_text(encoding="utf-8").splitlines()[5]
    overrides = [word for word in shlex.split(example.removeprefix("# ")) if "=" in word]
    assert overrides
    assert load_recipe(path, overrides).model.trunk == "DIR"


@pytest.mark.parametrize(
    ("command", "path"),
    [("json_schema fields", FIELDS), ("json_schema", SCHEMA)],
    ids=["fields", "schema"],
)
def test_files_generated_from_the_fields_are_up_to_date(command: str, path: Path) -> None:
    words = [sys.executable, "-m", *f"mtp_train.recipe.{command}".split()]
    printed = subprocess.run(words, capture_output=True, check=True, cwd=REPOSITORY).stdout
    assert printed == path.read_bytes(), f"run: python -m mtp_train.recipe.{command} > new && mv new {named(path)}"


@pytest.mark.parametrize("path", MACHINES, ids=named)
def test_machine_settings_are_known_to_accelerate_and_leave_precision_alone(path: Path) -> None:
    settings = ClusterConfig.from_yaml_file(path)
    assert settings.mixed_precision == "no"
    assert settings.num_machines == (2 if path.stem.endswith("_nodes") else 1)


# Several nodes


def accelerate_words(text: str) -> list[list[str]]:
    """Return the arguments of each ``accelerate launch`` of a text."""
    lines = [line for line in text.splitlines() if line.startswith("accelerate launch")]
    return [shlex.split(line)[2:] for line in lines]


def assert_two_nodes(words: list[str], node: int, address: str) -> None:
    """Check that accelerate's launcher reads a node of two with 8 GPUs each, and shards."""
    args = launch_command_parser().parse_args(words)
    assert (args.machine_rank, args.main_process_ip, args.module) == (node, address, True)
    file = ClusterConfig.from_yaml_file(REPOSITORY / args.config_file)
    assert (file.num_machines, file.distributed_type) == (2, DistributedType.FSDP)
    assert (args.num_processes or file.num_processes) == 16
    assert args.num_machines in (None, 2)
    assert [args.training_script, *args.training_script_args][:2] == ["mtp_train", "my-27b.yaml"]


def test_the_commands_for_several_nodes_are_ones_that_the_launchers_read() -> None:
    section = NODES.read_text(encoding="utf-8").split("\n## Several nodes\n")[1]
    text = section.replace("\\\n", " ").replace("$NODE", "1")
    (words,) = accelerate_words(text)
    assert_two_nodes(words, 1, "node-0")
    (line,) = [line for line in text.splitlines() if " torchrun " in line]
    variables, command = line.split(" torchrun ")
    assert variables.split() == ["ACCELERATE_USE_FSDP=true", "FSDP_VERSION=2"]
    args = get_args_parser().parse_args(shlex.split(command))
    assert (args.nnodes, args.nproc_per_node, args.node_rank, args.master_port) == ("2", "8", 1, 29500)
    assert (args.master_addr, args.module, args.training_script) == ("node-0", True, "mtp_train")
    (script,) = [line.split()[1] for line in text.splitlines() if line.startswith("sbatch ")]
    assert REPOSITORY / script == SLURM


# Each stands in for a program of Slurm, or prints how accelerate would be started.
PROGRAMS = {
    "scontrol": "printf 'node-a\\nnode-b\\n'",
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; for id in 0 1; do SLURM_NODEID=$id "$@" || exit; done',
    "accelerate": "echo accelerate $*",
}


def test_the_slurm_script_starts_one_launcher_on_each_node(tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    assert os.access(SLURM, os.X_OK)
    for name, script in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(SLURM), "my-27b.yaml", "train.lr=1e-4"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": path, **job},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nodes = accelerate_words(done.stdout)
    assert len(nodes) == 2
    for node, words in enumerate(nodes):
        assert_two_nodes(words, node, "node-a")
        assert launch_command_parser().parse_args(words).main_process_port == 23456
        assert words[-1] == "train.lr=1e-4"


def test_the_tests_that_pages_name_exist() -> None:
    defined = {
        name
        for file in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    pages = [*(REPOSITORY / "recipes").glob("*.md"), REPOSITORY / "README.md", REPOSITORY / "STATUS.md"]
    named_tests = {name for page in pages for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert len(named_tests) > 30
    assert named_tests <= defined, sorted(named_tests - defined)
