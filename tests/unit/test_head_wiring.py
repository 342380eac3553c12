"""How a family's record interprets a config that describes the head, or does not mention it."""

from __future__ import annotations

import pytest
import torch

from mtp_train.families import family_for
from tiny import ALL_FAMILIES, family_of, tiny_head, tiny_trunk
from tiny_configs import SLIDING_WINDOW, tiny_config


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, SLIDING_WINDOW),
        ({"layer_types": ["full_attention"] * 3}, 2048),
        ({"mtp_layer_types": ["full_attention"]}, 2048),
        ({"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [5]}, 5),
        ({"layer_types": ["full_attention"] * 3, "mtp_layer_types": ["sliding_attention"]}, SLIDING_WINDOW),
    ],
)
def test_a_k_exaone_head_slides_as_its_config_or_the_first_layer_of_the_trunk_does(
    fields: dict[str, list[str]], window: int
) -> None:
    config = tiny_config("exaone_moe")
    config.max_position_embeddings = 2048
    for name, value in fields.items():
        setattr(config, name, value)
    head = family_of("exaone_moe").layer.config(config, 1)
    assert (head.layer_types, head.sliding_window) == (["sliding_attention"], window)


def test_a_depth_ends_with_the_norm_of_its_module() -> None:
    head = tiny_head(tiny_trunk("glm4_moe"), num_modules=2)
    state_BTD = torch.randn(1, 3, 32)
    first, second = (module.final_norm(state_BTD) for module in head.blocks)
    assert not torch.equal(first, second)
    assert torch.equal(head.norm_for(2)(state_BTD), second)


@pytest.mark.skipif("dots3_note" not in ALL_FAMILIES, reason="this transformers has no dots3-note")
def test_a_head_with_an_embedding_of_its_own_reads_that_one_and_never_trains_it() -> None:
    trunk = tiny_trunk("dots3_note")
    tokens_T = torch.arange(9)
    own_VD = tiny_head(trunk).get_parameter("blocks.0.embedding.weight")
    assert not own_VD.requires_grad
    read_TD = tiny_head(trunk).embedding(trunk.embed)(tokens_T)
    assert torch.equal(read_TD, own_VD[tokens_T])
    assert (read_TD - trunk.embed(tokens_T)).abs().max() > 1e-2
    other = tiny_trunk("glm4_moe")
    assert torch.equal(tiny_head(other).embedding(other.embed)(tokens_T), other.embed(tokens_T))


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, ("sliding_attention", "sparse")),
        ({"mtp_layer_types": ["full_attention"]}, ("full_attention", "sparse")),
        ({"mtp_mlp_layer_types": ["dense"]}, ("sliding_attention", "dense")),
    ],
)
def test_a_mellum_head_is_of_the_kinds_that_its_config_or_transformers_says(
    fields: dict[str, list[str]], kinds: tuple[str, str]
) -> None:
    config = tiny_config("mellum")
    for name in ("mtp_layer_types", "mtp_mlp_layer_types"):
        setattr(config, name, fields.get(name))
    head = family_of("mellum").layer.config(config, 1)
    assert (head.layer_types, head.mlp_layer_types) == tuple([kind] for kind in kinds)


@pytest.mark.parametrize("kind", ["exaone4", "exaone4_5_text"])
def test_exaone_4_5_is_told_by_its_wrapper_whatever_its_text_is_called(kind: str) -> None:
    text = {"model_type": kind, "num_nextn_predict_layers": 1}
    assert family_for({"model_type": "exaone4_5", "text_config": text}, where="here") is family_of("exaone4_5")
    assert family_for({"model_type": "exaone4"}, where="here") is family_of("exaone4")


@pytest.mark.parametrize(("eps", "norm"), [(None, "Cohere2MoeLayerNorm"), (1e-4, "Cohere2MoeRMSNorm")])
def test_a_head_for_command_a_plus_has_the_norms_that_the_trunk_has(eps: float | None, norm: str) -> None:
    config = tiny_config("cohere2_moe")
    config.rms_norm_eps = eps
    built = family_of("cohere2_moe").classes.make_norm(config)
    assert (type(built).__name__, built.variance_epsilon) == (norm, eps or config.layer_norm_eps)
    assert type(family_of("cohere2_moe").classes.make_layer(config, 0).input_layernorm) is type(built)
