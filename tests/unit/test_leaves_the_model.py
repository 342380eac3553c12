"""Training a head beside a model and keeping its head leave the user's model as it was, in every family."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, TrainerCallback

from checkpoints import all_tensors, base_and_finetune, same, save_with_head, set_fields, split
from mtp_train.hooks.keep_head import keep_head
from mtp_train.hooks.train_beside import HeadBeside, train_head_beside
from mtp_train.trunk.load import Trunk
from preserving import load, make_trainer
from tiny import ALL_FAMILIES, family_of, random_tokens, tiny_head, tiny_model, tiny_trunk
from tiny_configs import tiny_config


def model_state(model: nn.Module) -> dict[str, object]:
    """Return every module's class, attributes, parameters, buffers and hooks, by the attribute's full name.

    Two models that were made alike have equal states.
    """
    found: dict[str, object] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"{name} class"] = type(module)
        found |= {f"{name}.{field}": _plain(value) for field, value in vars(module).items()}
    return found


def difference(first: Mapping[str, object], second: Mapping[str, object]) -> set[str]:
    """Return the names whose values differ, or that one of two states lacks."""
    absent = object()
    return {name for name in first.keys() | second.keys() if first.get(name, absent) != second.get(name, absent)}


def _plain(value: Any) -> object:
    """Return what is comparable between two objects that were made alike."""
    if isinstance(value, Tensor):
        content = hashlib.sha256(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        return (type(value), value.dtype, tuple(value.shape), value.requires_grad, content)
    if isinstance(value, nn.Module):
        # Its own attributes stand under its own name.
        return type(value)
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, (PretrainedConfig, GenerationConfig)):
        return (type(value), _plain(vars(value)))
    if isinstance(value, partial):
        return _plain(value.func)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return value if isinstance(value, (bool, int, float, str, type(None), torch.dtype)) else type(value)


# Families whose models the decoder changes: other classes, configs, settings or hooks than transformers'.
PREPARED = [name for name in ALL_FAMILIES if name in ("nemotron_h", "gemma2", "phi3", "glm5_next", "qwen4_exp")]
# transformers has no class of MiMo's own that a user could train.
TRAINED = [name for name in ALL_FAMILIES if name != "mimo"]
THE_SAVE = {".save_pretrained"}
"""The one attribute that keeping a head sets."""


def steps(model: Any, on_step: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Do two steps of training as a trainer would; return the logits, then the gradients of the last step."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for seed in range(2):
        optimizer.zero_grad()
        tokens_BT = random_tokens(10, 2, seed)
        output = model.train()(input_ids=tokens_BT, labels=tokens_BT)
        output.loss.backward()
        found.append(output.logits.detach())
        on_step()
        optimizer.step()
    found += [torch.zeros(()) if value.grad is None else value.grad.clone() for value in model.parameters()]
    model.zero_grad()
    return [*found, torch.get_rng_state(), torch.rand(1)]


def users_model(family_name: str) -> Any:
    model = tiny_model(family_name, tiny_config(family_name))
    if family_name == "gemma2":
        # The default of transformers 5.17; later releases refuse it together with bounds on scores.
        model.config._attn_implementation = "sdpa"
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
    if family_name == "hy_v4_vl":
        # transformers leaves these parameters as they are in memory.
        for parameter in model.model.vision_tower.patch_merger.parameters():
            torch.nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("family_name", TRAINED)
def test_training_and_saving_leave_the_model_as_it_was(family_name: str, tmp_path: Path) -> None:
    trunk = tiny_trunk(family_name)
    base = save_with_head(trunk, tiny_head(trunk), tmp_path / "base")
    Accelerator(cpu=True)
    alone = users_model(family_name)
    theirs = users_model(family_name)
    assert difference(model_state(alone), model_state(theirs)) == set()
    keep_head(theirs, base)
    head = HeadBeside(theirs, Accelerator(), lr=1e-3, num_depths=2, depth_decay=0.6)
    assert difference(model_state(alone), model_state(theirs)) == THE_SAVE
    arguments = SimpleNamespace(output_dir=str(tmp_path), world_size=1, load_best_model_at_end=False, learning_rate=1.0)
    control: Any = SimpleNamespace()
    state: Any = SimpleNamespace(global_step=0, best_model_checkpoint=None)
    optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}])
    head.on_train_begin(arguments, state, control)  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in head.named.items()}
    torch.manual_seed(1)
    found = steps(
        theirs,
        lambda: head.on_pre_optimizer_step(arguments, state, control, optimizer=optimizer),  # type: ignore[arg-type]
    )
    head.on_train_end(arguments, state, control)  # type: ignore[arg-type]
    torch.manual_seed(1)
    assert all(map(torch.equal, found, steps(alone)))
    assert any(not torch.equal(value, before[name]) for name, value in head.named.items()), "the head has learnt"
    assert difference(model_state(alone), model_state(theirs)) == THE_SAVE
    theirs.save_pretrained(tmp_path / "theirs")
    alone.save_pretrained(tmp_path / "alone")
    assert difference(model_state(alone), model_state(theirs)) == THE_SAVE


@pytest.mark.parametrize("family_name", PREPARED)
def test_a_trunk_of_ours_is_prepared_which_the_check_sees(family_name: str) -> None:
    """The control."""
    model = users_model(family_name)
    before = model_state(model)
    Trunk(model, family_of(family_name))
    assert difference(before, model_state(model))


@pytest.mark.parametrize("family_name", [name for name in PREPARED if name in ("nemotron_h", "phi3", "gemma2")])
def test_a_trainer_with_dropout_trains_the_same_model_with_the_head_and_without(
    family_name: str, tmp_path: Path
) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    set_fields(base, {"attention_dropout": 0.2})
    models = {}
    for name in ("alone", "beside"):
        models[name] = load(base)
        # NEFTune's noise is a hook on the embedding.
        trainer = make_trainer(models[name], tmp_path / name, max_steps=3, neftune_noise_alpha=1.0)
        if name == "beside":
            train_head_beside(trainer, lr=1e-2, num_depths=2)
        trainer.train()
    assert same(all_tensors(tmp_path / "alone" / "checkpoint-3"), split(tmp_path / "beside" / "checkpoint-3")[0])
    assert difference(*map(model_state, models.values())) == THE_SAVE


class Stop(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_training_leaves_no_hook_and_goes_on_later(base: Path, tmp_path: Path) -> None:
    model = load(base)
    trainer = make_trainer(model, tmp_path / "out", Stop(), max_steps=1)
    train_head_beside(trainer, lr=1e-2, num_depths=2)
    before = _hooks(model)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert _hooks(model) == before
    trainer.remove_callback(Stop)
    trainer.train()
    assert _hooks(model) == before


def _hooks(model: Any) -> dict[str, object]:
    return {name: value for name, value in model_state(model).items() if "_hooks" in name}
