from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mtp_train.errors import TrainingError
from mtp_train.train import state as state_module
from mtp_train.train.state import Best, best_weights, load_moments, load_weights, newest_whole_step, save_state


class Net(nn.Module):
    """Two trained parameters, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 3))
        self.vector = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("bias", torch.randn(2))

    def forward(self, input_ND: torch.Tensor) -> torch.Tensor:
        return (input_ND @ self.matrix + self.vector).square().mean()


def net_and_optimizer(seed: int) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net()
    return net, torch.optim.AdamW([parameter for parameter in net.parameters() if parameter.requires_grad], lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        net(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained() -> tuple[Net, torch.optim.AdamW]:
    """Return a net and its optimiser after one step."""
    net, optimizer = net_and_optimizer(1)
    train(net, optimizer, 0, 1)
    return net, optimizer


def load_state(state_dir: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load both halves, with nothing wrapped in between."""
    step, _ = newest_whole_step(state_dir)
    if step:
        load_weights(state_dir, step, net)
        load_moments(state_dir, step, net, optimizer)
    return step


def latest(state_dir: Path) -> int:
    return newest_whole_step(state_dir)[0]


def saved(state_dir: Path) -> list[str]:
    return sorted(path.name for path in state_dir.iterdir())


def test_a_resumed_run_reaches_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    unbroken, optimizer = net_and_optimizer(1)
    train(unbroken, optimizer, 0, 3)
    save_state(tmp_path / "state", 3, unbroken, optimizer)
    train(unbroken, optimizer, 3, 6)
    resumed, optimizer = net_and_optimizer(2)
    assert load_state(tmp_path / "state", resumed, optimizer) == 3
    train(resumed, optimizer, 3, 6)
    torch.testing.assert_close(resumed.state_dict(), unbroken.state_dict(), atol=0, rtol=0)


def test_the_newest_state_wins_and_all_but_two_go(tmp_path: Path) -> None:
    net, optimizer = trained()
    for step in (1, 9, 10):
        with torch.no_grad():
            net.vector.fill_(step)
        save_state(tmp_path, step, net, optimizer)
        assert saved(tmp_path)[-1] == f"step-{step:08d}"
    assert saved(tmp_path) == ["step-00000009", "step-00000010"]
    resumed, optimizer = net_and_optimizer(2)
    assert load_state(tmp_path, resumed, optimizer) == 10
    assert resumed.vector.tolist() == [10.0] * 3


def test_a_run_killed_before_the_old_state_was_removed_resumes_from_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = trained()
    save_state(tmp_path, 99_999_999, net, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(state_module.shutil, "rmtree", lambda path, **rest: None)
        save_state(tmp_path, 100_000_000, net, optimizer)  # nine digits: the order is of numbers, not of names
    assert saved(tmp_path) == ["step-100000000", "step-99999999"]
    assert latest(tmp_path) == 100_000_000


def test_a_state_killed_half_way_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = trained()
    save_state(tmp_path, 1, net, optimizer)

    def pull_the_plug(*_: object) -> None:
        shutil.copytree(next(tmp_path.glob(".step-00000002.*")), tmp_path / ".step-00000002.killed")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(state_module, "write_json", pull_the_plug)
        with pytest.raises(KeyboardInterrupt):
            save_state(tmp_path, 2, net, optimizer)
    assert saved(tmp_path) == [".step-00000002.killed", "step-00000001"]
    assert saved(tmp_path / ".step-00000002.killed") == ["head.safetensors", "optimizer.safetensors"]
    assert load_state(tmp_path, *net_and_optimizer(2)) == 1
    save_state(tmp_path, 2, net, optimizer)
    assert latest(tmp_path) == 2


def test_a_process_that_does_not_write_leaves_nothing(tmp_path: Path) -> None:
    net, optimizer = trained()
    save_state(tmp_path, 1, net, optimizer, writes=False)
    assert latest(tmp_path) == 0


def test_the_state_of_another_head_is_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    save_state(tmp_path, 1, net, optimizer)
    other = nn.Linear(3, 3)
    with pytest.raises(TrainingError, match=r"step-00000001: holds the state of another head; .* Use another run_dir"):
        load_state(tmp_path, other, torch.optim.AdamW(other.parameters()))


def test_a_parameter_that_no_loss_has_reached_yet_is_saved_without_moments(tmp_path: Path) -> None:
    """The second module of a checkpoint whose first one drafts every depth gets no gradient."""
    net, optimizer = net_and_optimizer(1)
    net.vector.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_state(tmp_path, 1, net, optimizer)
    resumed, optimizer = net_and_optimizer(2)
    assert load_state(tmp_path, resumed, optimizer) == 1
    assert torch.equal(resumed.matrix, net.matrix)
    train(resumed, optimizer, 1, 2)


# Damage


def two_states(state_dir: Path) -> tuple[nn.Module, torch.optim.AdamW]:
    """Save steps 1 and 2, with all numbers of the vector equal to the step."""
    net, optimizer = trained()
    for step in (1, 2):
        with torch.no_grad():
            net.vector.fill_(step)
        save_state(state_dir, step, net, optimizer)
    return net, optimizer


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink], ids=["cut", "flipped", "missing"])
@pytest.mark.parametrize("file", ["head.safetensors", "optimizer.safetensors", "state.json", "sha256.json"])
def test_a_broken_state_is_named_and_the_older_one_is_used(
    harm: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    two_states(tmp_path)
    assert newest_whole_step(tmp_path) == (2, {})
    harm(tmp_path / "step-00000002" / file)
    step, broken = newest_whole_step(tmp_path)
    assert step == 1
    assert list(broken) == [tmp_path / "step-00000002"]
    # A checksum that changed is not told from a file that did.
    assert file in broken[tmp_path / "step-00000002"] or (harm, file) == (flip, "sha256.json")
    net, optimizer = net_and_optimizer(2)
    assert load_state(tmp_path, net, optimizer) == 1
    assert net.vector.tolist() == [1.0] * 3
    harm(tmp_path / "step-00000001" / "head.safetensors")
    with pytest.raises(TrainingError, match=r"no resume state is whole \(.*; .*\); expected one\. Restore one"):
        newest_whole_step(tmp_path)


def test_entries_that_are_not_states_are_left_alone(tmp_path: Path) -> None:
    net, optimizer = two_states(tmp_path)
    (tmp_path / "step-notes.txt").write_text("mine")
    (tmp_path / "step-copy").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    save_state(tmp_path, 3, net, optimizer)
    assert newest_whole_step(tmp_path) == (3, {})
    assert saved(tmp_path) == ["step-00000002", "step-00000003", "step-00000009", "step-copy", "step-notes.txt"]


def test_every_state_has_the_best_head(tmp_path: Path) -> None:
    net, optimizer = net_and_optimizer(1)
    save_state(tmp_path, 0, net, optimizer, Best(0))
    train(net, optimizer, 0, 1)
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2)):
        with torch.no_grad():
            net.vector.fill_(step)
        save_state(tmp_path, step, net, optimizer, Best(best))
        assert best_weights(tmp_path)["vector"].tolist() == [best] * 3
    flip(tmp_path / "step-00000004" / "best.safetensors")
    step, broken = newest_whole_step(tmp_path)
    assert (step, list(broken.values())) == (
        3,
        [f"{tmp_path}/step-00000004/best.safetensors: damaged since it was written"],
    )
    shutil.rmtree(tmp_path / "step-00000004")
    assert best_weights(tmp_path)["vector"].tolist() == [2.0] * 3
