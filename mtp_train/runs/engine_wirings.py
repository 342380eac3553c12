"""The known wirings of a head or a block drafter, and what it would draft in each of them after given tokens.

A wiring is a change of a copy of the head. Drafts are teacher-forced: a draft of depth k is computed after the text's
own tokens, so that one other draft does not hide those after it.

Shapes: T tokens, N starts of rounds, K drafts of a round, J tokens of a block, D hidden, R tokens that may be drafted,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import pad

from mtp_inference import HeadDrafting
from mtp_inference.drafters.block_drafter import BlockDrafting
from mtp_inference.opening import OpenModel
from mtp_train.errors import DataError
from mtp_train.evaluation.arms import load_arm_trunk, local_device
from mtp_train.evaluation.dense import rewired, wirings
from mtp_train.families import Convention
from mtp_train.heads.dflash import DFlashHead
from mtp_train.heads.head import Head
from mtp_train.train.teacher_forced import many_rows
from mtp_train.trunk.ends import draft_logits
from mtp_train.trunk.load import Trunk

OURS, UNDECIDED, NONE = "as ours", "undecided", "none of the known"
TIE = 2.0**-6
"""Margins within this may be of either sign in another engine: two to four steps of bf16."""
Logits = Callable[[Tensor], Tensor]
Wirings = Mapping[str, Callable[[Any], Any]]
"""Names to changes of a copy of the head; some change nothing in some heads."""


def named(fits: Sequence[str], *, is_ours: bool) -> str:
    """Return the verdict on an engine's wiring from the known ones that reproduce what it did."""
    return OURS if is_ours else UNDECIDED if fits[1:] else [*fits, NONE][0]


class Replayed(NamedTuple):
    """A text, and the rounds of drafts in it."""

    token_ids: tuple[int, ...]
    starts: range
    """Positions of the last committed tokens, 1 or later."""
    depth: int
    """Drafts of each round; those beyond the text have no token."""


class Probed(NamedTuple):
    """A trunk, and a head or a block drafter whose wirings are known."""

    trunk: Trunk
    drafting: HeadDrafting | BlockDrafting

    @torch.inference_mode()
    def margins(self, texts: Sequence[Replayed], progress: Progress) -> dict[str, list[Tensor]]:
        """Return the margins (K, N) of each text's tokens as drafts, by wiring, ours first.

        A margin is the logit of the text's token less the best logit of another token, as a part of the best one: above
        0 for a first choice. Of tokens beyond the text it means nothing.
        """
        trunk = self.trunk
        found = {}
        with many_rows(trunk, self.drafting.head) as head:
            near = {layer + step for layer in head.trunk_layers for step in (-1, 0, 1)}
            trunk.show_layers(tuple(sorted(near & {*range(len(trunk.layers)), *head.trunk_layers})))
            device = trunk.lm_head_VD.device
            hidden = [trunk.hidden(torch.tensor([text.token_ids], device=device)) for text in texts]
            logits = draft_logits(trunk, self.drafting.draft_vocab_R, hidden[0].dtype)
            known = known_wirings(trunk, head, self.drafting.draft_vocab_R)
            for name, change in progress.track(known.items(), description="drafting in known wirings"):
                changed = change(deepcopy(head))
                found[name] = [
                    _margins(trunk, changed, logits, text, read) for text, read in zip(texts, hidden, strict=True)
                ]
        return found


def load_known(model: OpenModel) -> Probed:
    """Load a trunk and its head, with the states of the trunk that every wiring reads.

    Raises:
        DataError: The wirings of what drafts are not known.
    """
    trunk = load_arm_trunk(model, local_device())
    trunk.show_before_norm()
    drafting = model.load_drafting(trunk)
    if not isinstance(drafting, HeadDrafting | BlockDrafting):
        raise DataError(f"--head: {model.head} has no known wirings; expected an MTP head or a draft model. Name one.")
    return Probed(trunk, drafting)


def _margins(trunk: Trunk, head: Any, logits: Logits, text: Replayed, hidden_1TD: Tensor) -> Tensor:
    """Return the margins (K, N) of a text in one wiring.

    Args:
        logits: For heads without an output matrix.
        hidden_1TD: The trunk's states of the text, with those of all layers that some wiring reads.
    """
    starts_N = torch.arange(text.starts.start, text.starts.stop, device=hidden_1TD.device)
    tokens_T = torch.tensor(text.token_ids, device=hidden_1TD.device)
    read_1TD = trunk.head_input(_of_layers(trunk, head.trunk_layers, hidden_1TD), head.convention)
    own_logits = _block_logits if isinstance(head, DFlashHead) else _chained_logits
    found = []
    ahead_T = pad(tokens_T, (0, text.depth))
    for depth, found_NV in enumerate(own_logits(trunk, head, logits, read_1TD, ahead_T, starts_N), start=1):
        logits_NV = found_NV.float()
        own_N1 = ahead_T[starts_N + depth][:, None]
        rival_N = logits_NV.scatter(1, own_N1, -torch.inf).amax(dim=-1)
        found.append((logits_NV.gather(1, own_N1)[:, 0] - rival_N) / logits_NV.amax(dim=-1).abs())
    return torch.stack(found)


def _of_layers(trunk: Trunk, layers: Sequence[int], hidden_1TD: Tensor) -> Tensor:
    """Return hidden states with those of the given layers in the place of all layers that the trunk shows."""
    if not layers:
        return hidden_1TD
    width = trunk.config.hidden_size
    last, shown = hidden_1TD.tensor_split([-len(trunk.shown_layers) * width], dim=-1)
    parts = shown.split(width, dim=-1)
    return torch.cat([last, *(parts[trunk.shown_layers.index(layer)] for layer in layers)], dim=-1)


def _chained_logits(
    trunk: Trunk, head: Any, logits: Logits, read_1TD: Tensor, ahead_T: Tensor, starts_N: Tensor
) -> Iterator[Tensor]:
    """Yield the logits (N, V) of each depth of an MTP head, as many as there are places behind the text."""
    tokens_1T = ahead_T[None, : read_1TD.shape[1]]
    states = head.unroll(
        read_1TD,
        tokens_1T,
        head.embedding(trunk.embed),
        num_depths=len(ahead_T) - tokens_1T.shape[1],
        positions_BT=torch.arange(tokens_1T.shape[1], device=ahead_T.device)[None],
        document_BT=torch.zeros_like(tokens_1T),
    )
    for depth, state_1TD in enumerate(states, start=1):
        # The head's row before the last committed token.
        yield head.project(depth, state_1TD[0, starts_N - 1], logits)


def _block_logits(
    trunk: Trunk, head: Any, logits: Logits, read_1TD: Tensor, ahead_T: Tensor, starts_N: Tensor
) -> Iterator[Tensor]:
    """Yield the logits (N, V) of each draft of the blocks that begin at the starts, run together."""
    num_tokens = read_1TD.shape[1]
    state_NJD = head.blocks_at(read_1TD, ahead_T[None], starts_N, trunk.embed)
    correct = head.correcting(state_NJD, ahead_T[starts_N][:, None])
    for ahead in range(len(ahead_T) - num_tokens):
        row = head.first_row + ahead
        logits_N1V = head.project(1, state_NJD[:, row : row + 1], logits)
        yield correct(row, logits_N1V, ahead_T[starts_N + ahead][:, None])[:, 0]


def known_wirings(trunk: Trunk, head: Any, draft_vocab_R: Tensor | None) -> Wirings:
    """Return the known wirings of a head on a trunk that shows the layers around those that the head reads."""
    of_kind = _of_blocks if isinstance(head, DFlashHead) else _of_chains
    changes = of_kind(trunk, head) | _of_layer_ids(trunk, head) | _of_rotary(head) | _of_output(head, draft_vocab_R)
    forms = {} if isinstance(head, DFlashHead) else wirings(head)
    return {OURS: lambda same: same, **forms, **{name: partial(rewired, *change) for name, change in changes.items()}}


Changes = dict[str, tuple[str, Any]]
"""Names of wirings to the attribute of the head that is replaced, and its value."""


def _of_chains(trunk: Trunk, head: Any) -> Changes:
    changes: Changes = {
        "reading the state of one token earlier": (
            "read",
            lambda state_BTD: head.read(pad(state_BTD[:, :-1], (0, 0, 1, 0))),
        )
    }
    if head.convention.hidden == "after_final_norm":
        changes["reading the hidden state normed twice"] = (
            "read",
            lambda state_BTD: head.read(trunk.head_input(state_BTD, Convention())),
        )
    return changes


def _of_blocks(trunk: Trunk, head: Any) -> Changes:
    def causal(kind: str, places: Tensor, keys: Tensor) -> Tensor:
        return head.mask(kind, places, keys) & (keys <= places)

    # As vLLM 0.32 does on a CPU.
    normed = deepcopy(head)
    first = normed.module.layers[0].self_attn
    name = "k_norm" if hasattr(first, "k_norm") else "kv_norm"
    for layer in normed.module.layers:
        setattr(layer.self_attn, name, getattr(first, name))
    # The row after, where the anchor's gives the first draft.
    step, side = (1, "before") if head.first_row else (-1, "after")
    eos = trunk.config.eos_token_id
    tokens = {0, head.mask_token - 1, head.mask_token + 1, *(eos if isinstance(eos, list) else [eos])}
    return {
        "attending causally within its block": ("mask", causal),
        f"drafting from the row {side}": ("denoise", lambda *given: head.denoise(*given).roll(step, dims=1)),
        "norming the text's keys as those of its first layer": ("write_keys", normed.write_keys),
        "without the norm of the states that it reads": ("read", lambda read_BTD: head.module.fc(read_BTD)),
        **{
            f"with mask token {token}": ("mask_token", token)
            for token in sorted({*range(trunk.config.vocab_size)} & tokens - {head.mask_token})
        },
    }


def _of_layer_ids(trunk: Trunk, head: Head) -> Changes:
    shifted = [tuple(layer + step for layer in head.trunk_layers) for step in (-1, 1)]
    shown = {*trunk.shown_layers}
    return {f"reading layers {one}": ("trunk_layers", one) for one in shifted if one and {*one} <= shown}


def _of_rotary(head: Any) -> Changes:
    changes: Changes = {}
    if head.rotary is None:
        return changes
    known = ("rope_theta", 10000.0, "10000"), ("partial_rotary_factor", 1.0, "1"), ("rope_type", "default", "default")
    for name, wrong, shown in known:
        config = deepcopy(head.rotary.config)
        given = config.rope_parameters
        # Factors and sections of channels would be too few for more of them.
        fixed = name != "rope_type" and given.keys() & {"mrope_section", "short_factor"}
        if given.get("mrope_interleaved", not fixed):
            given[name] = wrong
            rotary = type(head.rotary)(config=config).to(next(head.parameters()).device)
            changes[f"with {name} {shown}"] = ("rotary", rotary)
    return changes


def _of_output(head: Any, draft_vocab_R: Tensor | None) -> Changes:
    """Return wrong uses of the output matrix and of the tokens that its rows stand for."""
    rows = head.blocks[0].lm_head
    ids_R: Any = draft_vocab_R if rows is None else getattr(rows, "token_ids_R", None)

    def as_tokens(*given: Any) -> Tensor:
        logits = head.project(*given)
        return pad(logits[..., ids_R], (0, logits.shape[-1] - len(ids_R)), value=-torch.inf)

    def first_rows(_depth: int, state: Tensor, shared: Logits) -> Tensor:
        logits = shared(state)
        return torch.full_like(logits, -torch.inf).index_copy(-1, ids_R, logits[..., : len(ids_R)])

    changes: dict[str, Any] = {
        "drafting the token after each of its tokens": lambda *given: head.project(*given).roll(1, dims=-1)
    }
    if ids_R is not None:
        changes["drafting the numbers of its rows as tokens"] = as_tokens
    if rows is not None:
        changes["with the trunk's output matrix"] = lambda _depth, state, shared: shared(state)
        if ids_R is not None:
            changes["with the first rows of the trunk's output matrix"] = first_rows
    return {name: ("project", change) for name, change in changes.items()}
