"""Rounds with fused kernels: the text of torch's operations, in a fraction of the launches, on devices that have them.

On a CPU, a fused operation computes with torch, so these tests cover everything but the kernels themselves
(``parity/test_fused_kernels.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtp_inference.decoder
import mtp_inference.kernels.attention
from mtp_inference import HeadDrafting, Request, SpeculativeDecoder, plain_greedy
from mtp_inference.batch import HELD
from mtp_inference.bench.launches import launches_of_a_round
from mtp_inference.cache.window import Window, window_attention
from mtp_inference.decoder import Needs, fused_kernels, make_batch
from mtp_inference.forward import prefill_chunks, window_states
from mtp_inference.kernels import trial
from mtp_inference.kernels.attention import attend_window
from mtp_inference.kernels.conv_delta import conv_window, delta_token, delta_window
from mtp_inference.kernels.fused import FusedKernels
from mtp_inference.kernels.norms import NormFormula, fused_norm, norm_formula, rms_norm
from mtp_inference.kernels.rotary import fused_rotary, rotate
from mtp_train.trunk.load import Trunk
from scripted import BatchRun
from tiny import ALL_FAMILIES, CACHE_KINDS, IS_OLD, VOCAB_SIZE, tiny_head, tiny_trunk
from tolerances import assert_differs, assert_same, num_terms

CPU = torch.device("cpu")
LAUNCHES = {
    "full": (453, 192),
    "recurrent": (366, 167),
    "sliding": (263, 116),
    "mixed": (274, 118),
    "latent": (567, 249),
    "indexed": (785, 316),
    "channels": (666, 290),
    "sinks": (367, 195),
    "mamba": (444, 232),
    "blocks": (684, 272),
    "compressed": (3307, 1994),
    "convolved": (967, 465),
    "pools": (1751, 1210),
    "ngrams": (1268, 576),
}
"""Launches of a round of the tiny trunks with three drafts, or as many as the head has modules, and without drafts."""


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make decoders choose as on a device that runs the kernels."""
    monkeypatch.setattr(mtp_inference.decoder, "runs_kernels", lambda device: True)


def half_trunk(name: str, num_layers: int | None = None) -> Trunk:
    trunk = tiny_trunk(name, num_layers=num_layers)
    trunk.causal_lm.to(torch.bfloat16)
    return trunk


def counted(trunk: Trunk, monkeypatch: pytest.MonkeyPatch, *, fuses: bool) -> tuple[int, int]:
    """Return the launches of a round with drafts and without; as on a GPU, in the stored dtype."""
    monkeypatch.setattr(mtp_inference.decoder, "choose_widening", lambda *_: HELD)
    head = tiny_head(trunk).to(torch.bfloat16)
    drafting = HeadDrafting(head)
    deepest = 3 if head.unroll == "recursive" else min(3, len(head.blocks))
    found = []
    for maker, depth in ((drafting, deepest), (None, 0)):
        fused = fused_kernels(trunk, maker) if fuses else None
        found.append(sum(launches_of_a_round(trunk, maker, depth, fused).values()))
    return found[0], found[1]


NEEDS_NEWEST = pytest.mark.skipif(
    IS_OLD,
    reason="launches are those of transformers 5.23; the layers of 5.17 repeat keys themselves",
)


@NEEDS_NEWEST
def test_a_round_of_32_layers_has_few_launches(fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = half_trunk("qwen3_5", num_layers=32)
    drafting, plain = counted(trunk, monkeypatch, fuses=True)
    assert drafting <= 1060
    assert plain <= 860
    # What torch's operations take, so that the count is known to see them.
    drafting, plain = counted(trunk, monkeypatch, fuses=False)
    assert drafting > 3000
    assert plain > 2400


@NEEDS_NEWEST
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_no_kind_of_cache_takes_more_launches(kind: str, fusing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = counted(half_trunk(CACHE_KINDS[kind]), monkeypatch, fuses=True)
    assert (drafting <= LAUNCHES[kind][0], plain <= LAUNCHES[kind][1]) == (True, True), (drafting, plain)


def requests() -> list[Request]:
    """Return requests of other lengths and depths for two rows, so that a row is used again."""
    generator = torch.Generator().manual_seed(5)
    return [
        Request(
            prompt_ids=torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist(),
            max_new_tokens=14,
            mtp=mtp,
        )
        for length, mtp in ((7, "on"), (5, "on"), (6, "off"))
    ]


@pytest.mark.parametrize(
    "name",
    # One of each kind of cache; all in the slow tier.
    [name if name in CACHE_KINDS.values() else pytest.param(name, marks=pytest.mark.slow) for name in ALL_FAMILIES],
)
def test_every_family_has_the_same_text_and_drafts(name: str, fusing: None) -> None:
    trunk = tiny_trunk(name)
    head = tiny_head(trunk)
    depth = 3 if head.unroll == "recursive" else min(3, len(head.blocks))
    found = [
        [
            (result.token_ids, result.accepted_per_pos)
            for result in SpeculativeDecoder(trunk, head, depth, (), max_batch=2, fuses=fuses).decode(requests())
        ]
        for fuses in (True, False)
    ]
    assert found[0] == found[1]
    for request, (tokens, _) in zip(requests(), found[0], strict=True):
        assert list(tokens) == plain_greedy(trunk, request.prompt_ids, request.max_new_tokens, ())


WINDOW_BT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]) % VOCAB_SIZE


@torch.inference_mode()
def window_logits(trunk: Trunk, fused: FusedKernels | None, window_BT: Tensor, fuses: bool | None = None) -> Tensor:
    """Return the logits of two windows of two rows that follow a prompt, with the states they leave.

    Attention and recurrent layers run in fused kernels where the norms do, or as ``fuses`` says.
    """
    needs = Needs(num_rows=2, capacity=24, max_window=8, depth=3, num_stops=0, penalises=False)
    cache = make_batch(trunk, None, needs, "argmax", 8).cache
    prompt_RT = torch.arange(10).view(2, 5)
    for _ in prefill_chunks(trunk, cache, slice(0, 2), prompt_RT, 8):
        pass
    logits = []
    length_B = torch.tensor([5, 5])
    for kept in range(2):
        positions_BT = length_B[:, None] + torch.arange(window_BT.shape[1])
        window = Window(slice(0, 2), positions_BT, 24, fuses=fused is not None if fuses is None else fuses)
        with nullcontext() if fused is None else fused.used():
            hidden_BTD = window_states(trunk, cache, window_BT, window)
        logits.append(trunk.logits(hidden_BTD))
        # Each row keeps another number of tokens.
        kept_B = torch.tensor([1, max(1, window_BT.shape[1] - kept)])
        cache.commit(kept_B)
        length_B = length_B + kept_B
    return torch.stack(logits)


@pytest.mark.parametrize("num_tokens", [4, 1])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_every_kind_of_cache_has_the_same_logits(kind: str, num_tokens: int) -> None:
    trunk = tiny_trunk(CACHE_KINDS[kind])
    fused = FusedKernels([trunk.causal_lm])
    window_BT = WINDOW_BT[:, :num_tokens]
    expected = window_logits(trunk, None, window_BT)
    assert_same(window_logits(trunk, fused, window_BT), expected, num_terms(trunk))
    assert_differs(window_logits(trunk, fused, (window_BT + 1) % VOCAB_SIZE), expected, num_terms(trunk))


@pytest.mark.parametrize("kind", ["full", "sliding", "mixed", "latent"])
def test_norms_and_rotations_round_where_torch_rounds(kind: str) -> None:
    trunk = half_trunk(CACHE_KINDS[kind])
    found = window_logits(trunk, FusedKernels([trunk.causal_lm]), WINDOW_BT, fuses=False)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, window_logits(trunk, None, WINDOW_BT))


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_attention_that_the_kernel_does_not_compute_gets_a_mask(
    sliding_window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    # The second row has turned around in its buffer, where there is a sliding window.
    positions_BT = torch.tensor([[0, 1, 2], [9, 10, 11] if sliding_window is None else [20, 21, 22]])
    window = Window(slice(0, 2), positions_BT, 24)
    module = nn.Module()
    module.num_key_value_groups = 2

    def attend(mask: Tensor | None, **options: Any) -> Tensor:
        return window_attention(module, query, key, value, mask, scaling=0.3, **options)[0]

    indices_BTK = torch.tensor([0, 3, 10]).expand(2, 3, -1)
    for options in ({"indices": indices_BTK}, {}):
        expected = attend(window.mask(12, sliding_window, always=True), **options)
        assert torch.equal(attend(window.reach(12, sliding_window), **options), expected)
        # Now the keys are too wide.
        monkeypatch.setattr(mtp_inference.kernels.attention, "MAX_KEY_BYTES", 16)


@pytest.mark.parametrize(("most_bytes", "reads_lengths"), [(1024, True), (16, False)])
def test_a_cache_of_wide_keys_needs_masks(
    most_bytes: int, reads_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_inference.kernels.attention, "MAX_KEY_BYTES", most_bytes)
    trunk = tiny_trunk("mistral")
    run = BatchRun(trunk, None, [[3, 1, 4]], depth=0, fused=FusedKernels([trunk.causal_lm]))
    assert run.cache.reads_lengths == run.batch.reads_lengths == reads_lengths
    (mask,) = run.cache.begin(Window(slice(0, 1), torch.tensor([[3, 4]]), 24, fuses=True)).values()
    assert mask is not None
    assert (mask.dtype == torch.bool) != reads_lengths


def test_a_fused_norm_of_another_formula_is_seen_in_the_logits() -> None:
    trunk = tiny_trunk("qwen3_5")
    expected = window_logits(trunk, None, WINDOW_BT)
    fused = FusedKernels([trunk.causal_lm])
    norm = trunk.layers[0].input_layernorm
    fused._norms[norm] = lambda x: rms_norm(x, norm.weight, None, 1e-6, 0.0, False, "")
    assert_differs(window_logits(trunk, fused, WINDOW_BT), expected, num_terms(trunk))


def state_of(trunk: Trunk) -> dict[str, Any]:
    module = trunk.family.classes.python_module
    functions = {name: value for name, value in vars(sys.modules[module]).items() if callable(value)}
    return {name: dict(part.__dict__) for name, part in trunk.causal_lm.named_modules()} | {module: functions}


def test_the_model_is_left_as_it_was(fusing: None) -> None:
    trunk = tiny_trunk("qwen3_5")
    before = state_of(trunk)
    decoder = SpeculativeDecoder(trunk, tiny_head(trunk), 3, ())
    decoder.decode(requests())
    assert state_of(trunk) == before
    fused = FusedKernels([trunk.causal_lm])
    with pytest.raises(KeyError), fused.used():
        raise_if_changed(trunk, before)
    assert state_of(trunk) == before


def raise_if_changed(trunk: Trunk, before: dict[str, Any]) -> None:
    if state_of(trunk) != before:
        raise KeyError


def test_weights_are_read_at_each_round(fusing: None) -> None:
    trunk = tiny_trunk("qwen3_5")
    decoder = SpeculativeDecoder(trunk, None, 0, ())
    request = requests()[0]
    before = decoder.decode([request])
    with torch.no_grad():
        for layer in trunk.layers:
            layer.input_layernorm.weight.add_(torch.linspace(-1, 1, len(layer.input_layernorm.weight)))
    (after,) = decoder.decode([request])
    assert after.token_ids != before[0].token_ids
    assert list(after.token_ids) == plain_greedy(trunk, request.prompt_ids, request.max_new_tokens, ())


@pytest.mark.parametrize(
    ("name", "path", "formula"),
    [
        ("qwen3_5", "layers.0.input_layernorm", NormFormula(1.0, False, "")),
        ("qwen3_5", "layers.0.linear_attn.norm", NormFormula(0.0, True, "silu")),
        ("glm4_moe", "norm", NormFormula(0.0, True, "")),
        ("gpt_oss", "norm", NormFormula(0.0, False, "")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_formula_is_found(name: str, path: str, formula: NormFormula, dtype: torch.dtype) -> None:
    module = tiny_trunk(name).decoder.get_submodule(path).to(dtype)
    with torch.no_grad():
        # Weights of 1 would hide how products are rounded.
        module.weight.fill_(1.0)
    assert norm_formula(module) == formula


def test_a_norms_hooks_are_neither_run_nor_copied() -> None:
    norm = tiny_trunk("qwen3_5").decoder.norm
    before = norm.weight.clone()

    class Uncopied:
        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("copied")

        def run(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            raise AssertionError("ran")

    norm.register_forward_pre_hook(Uncopied().run)
    assert norm_formula(norm) == NormFormula(1.0, False, "")
    assert torch.equal(norm.weight, before)


class ForeignRMSNormGated(nn.Module):
    """A norm of a package whose kernels do not run on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        raise ValueError("Pointer argument cannot be accessed from Triton")


class GroupedRMSNorm(nn.Module):
    """A norm over halves: its parts are those of an RMSNorm, its formula is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        halves = x.unflatten(-1, (2, -1))
        return self.weight * (halves * torch.rsqrt(halves.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)


def test_other_formulas_keep_their_own_forward() -> None:
    assert fused_norm(GroupedRMSNorm()) is None
    assert fused_norm(ForeignRMSNormGated()) is None
    assert fused_norm(nn.LayerNorm(8)) is None
    norm = tiny_trunk("glm4_moe").decoder.norm
    assert fused_norm(norm) is not None
    # As a weight is that is sharded over processes.
    norm.weight = nn.Parameter(torch.empty(0))
    assert fused_norm(norm) is None

    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = [torch.stack((-one[..., 1::2], one[..., ::2]), -1).flatten(-2) for one in (q, k)]
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    assert fused_rotary(interleaved) is None


def test_calls_that_no_kernel_covers_go_to_the_models_own_rotation() -> None:
    calls = []

    def stock(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        calls.append(unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turned = [torch.cat((-one[..., one.shape[-1] // 2 :], one[..., : one.shape[-1] // 2]), -1) for one in (q, k)]
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    rotation = fused_rotary(stock)
    assert rotation is not None
    calls.clear()
    q, k, table = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 3, 8)
    torch.testing.assert_close(rotation(q, k, table, table), stock(q, k, table, table))
    assert calls == [1]
    rotation(q.transpose(1, 2), k.transpose(1, 2), table, table, unsqueeze_dim=2)
    rotation(q, k, table.double(), table.double())
    assert calls == [1, 2, 1]


def test_a_cpu_and_a_shared_trunk_run_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tiny_trunk("glm4_moe")
    assert not trial.runs_kernels(CPU)
    assert fused_kernels(trunk, None) is None
    monkeypatch.setattr(mtp_inference.decoder, "runs_kernels", lambda device: True)
    assert fused_kernels(trunk, None) is not None
    trunk.offloaded = True
    assert fused_kernels(trunk, None) is None


@pytest.mark.parametrize("operation", [rms_norm, conv_window, delta_window, delta_token, rotate, attend_window])
def test_an_operation_runs_its_own_program_on_gpus(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = operation._name
    programs: Any = ModuleType("programs")
    vars(programs)[f"launch_{name}"] = lambda *arguments: (name, *arguments)
    monkeypatch.setitem(sys.modules, "mtp_inference.kernels.programs", programs)
    assert operation._backend_fns["cuda"](1, 2.0) == (name, 1, 2.0)


def test_the_trial_passes_on_right_kernels_and_names_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial.why_wrong(CPU) is None
    names = ("rms_norm", "conv_window", "delta_window", "delta_token", "rotate", "attend_window")
    stock = {name: vars(trial)[name] for name in names}
    for name, operation in stock.items():
        monkeypatch.setattr(trial, name, wrong(operation))
        assert trial.why_wrong(CPU) == name.partition("_")[0] if "delta" in name else name
        monkeypatch.setattr(trial, name, operation)


def wrong(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation whose first result is NaN in one place."""

    def run(*args: Any) -> Any:
        outputs = operation(*args)
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        first.view(-1)[3] = float("nan")
        return outputs

    return run


def test_a_device_that_cannot_compile_is_told_and_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> str:
        raise OSError("no C compiler")

    monkeypatch.setattr(trial, "why_wrong", fails)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.warns(UserWarning, match=r"fused kernels do not run on cuda:7 \(OSError: no C compiler\)"):
        assert not trial.runs_kernels(torch.device("cuda:7"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not trial.runs_kernels(torch.device("cuda:6"))
    trial.runs_kernels.cache_clear()
