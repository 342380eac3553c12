"""Draft with an MTP head: run it over the committed tokens, then on its own drafts.

Head row t combines the trunk's hidden state after token t with token t+1 (``mtp_train.heads.alignment``). All pending
head rows of a batch row run in one call, and the last of them gives depth 1. The number of pending head rows differs
between batch rows. Rows past a batch row's own number are stale: they are written to slots that the next window
overwrites, and no valid row attends to them.

Shapes: B rows of the batch, R rows that start together (or tokens that may be drafted), T head rows of a call,
P pending places, W token places, S slots, D hidden, K depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtp_inference.cache.model_cache import AttentionStore, WindowCache
from mtp_inference.cache.window import Window, attending_in_windows
from mtp_inference.drafters.drafter import (
    BatchSize,
    Drafter,
    Pending,
    RoundPlan,
    StateDrafter,
    TrainedDrafting,
    state_at,
)
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.errors import UnsupportedModelError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import KeysWritten, StepOutput, mtp_step
from mtp_train.trunk.ends import draft_logits
from mtp_train.trunk.load import Trunk

LogitsFn = Callable[[Tensor], Tensor]
KEYS_CHUNK = 2048
"""Largest number of prefix rows per call, to bound the memory of activations."""


@dataclass(eq=False, repr=False)
class _HeadDrafter(Drafter):
    """Base of drafters with an MTP head."""

    trunk: Trunk
    head: Any
    """An ``MtpHead``, or a head of another class with the methods that the drafter calls; its dtype may differ from the
    trunk's."""
    logits: LogitsFn
    """Function from the head's states (B, 1, D) to logits (B, 1, V)."""
    size: BatchSize

    def __post_init__(self) -> None:
        self.weight = next(self.head.parameters())

    def read(self, hidden: Tensor) -> Tensor:
        """Return the head's input for hidden states of the trunk."""
        return self.head.read(self.trunk.head_input(hidden, self.head.convention).to(self.weight.dtype))

    def _logits(self, depth: int, hidden_B1D: Tensor) -> Tensor:
        hidden_B1D = hidden_B1D.to(self.trunk.lm_head_VD.dtype)
        return self.head.project(depth, hidden_B1D, self.logits)


class ParallelDrafter(_HeadDrafter, StateDrafter):
    """Draft depth k with module k, all from the trunk's hidden state before the last committed token (Medusa)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state_B1D = self.weight.new_zeros(self.size.num_rows, 1, self.head.state_width)

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        for depth in range(1, plan.depth + 1):
            # The state stands in place of an embedding too: these modules read no token.
            step = mtp_step(
                self.head,
                self.state_B1D,
                self.state_B1D,
                depth=depth,
                positions_BT=choice.length_B[:, None],
                mask_BTS=None,
                cache=None,
            )
            choice.add(self._logits(depth, step.logit_hidden_BTD))
        return choice.result()


class _CachedDrafter(_HeadDrafter):
    """Base of drafters whose head has a KV cache: the cache and the pending rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.size
        # Above the deepest draft, and a multiple of 8, which fused attention requires of masks.
        self.spare_slots = size.depth // 8 * 8 + 8
        self.cache = WindowCache(
            self.head.config,
            num_rows=size.num_rows,
            # The deepest rows of a draft, and stale rows, are past the trunk's last position. Rows before position 0
            # wrap around to the last slots.
            capacity=size.capacity + size.num_pending + 2 * self.spare_slots,
            max_window=max(KEYS_CHUNK, size.num_pending + size.depth),
            max_undecided=size.num_pending + size.depth,
        )
        self.pending = Pending(size, self.head.state_width, self.weight)

    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        self.pending.add(tokens_BT, num_kept_B, self.read(hidden_BTD))

    def _window(self, slots_BT: Tensor, plan: RoundPlan) -> Window:
        used = plan.used + self.spare_slots
        # An inactive row may be at a position beyond all others, outside the keys in use.
        return Window(slice(0, len(slots_BT)), slots_BT.clamp(max=used - 1), used)

    def _run(self, depth: int, hidden_BTD: Tensor, tokens_BT: Tensor, window: Window) -> StepOutput:
        """Run consecutive head rows; each attends to all rows before it.

        Raises:
            KeysWritten: The window is keys-only, and its keys are written.
        """
        mask_B1TS = self.cache.begin(window)[self._store(depth).kind]
        # In a chained module k, the rotary position of a row is its slot plus k-1.
        ahead = depth - 1 if self.head.chaining == "chained" else 0
        with attending_in_windows(self.head.config):
            return mtp_step(
                self.head,
                hidden_BTD,
                self.head.embedding(self.trunk.embed)(tokens_BT).to(self.weight.dtype),
                depth=depth,
                positions_BT=window.positions_BT + ahead,
                mask_BTS=None if mask_B1TS is None else mask_B1TS[:, 0],
                cache=self.cache,
            )

    def _run_text(
        self, depth: int, hidden_RTD: Tensor, tokens_RT: Tensor, window: Window, *, recycles: bool = False
    ) -> Tensor:
        """Run rows that no draft starts from; return the output states if the next module ``recycles`` them.

        Else stop after keys and values, if later rows read nothing else, and return no states. The start of a window
        is 0, or not known.
        """
        keys_only = self._store(depth).keys_suffice and not recycles
        recycled = [hidden_RTD[:, :0]]
        for start in range(0, window.num_tokens, KEYS_CHUNK):
            part = slice(start, start + KEYS_CHUNK)
            positions_RT = window.positions_BT[:, part]
            # Of prompts, each chunk attends to no more than it has to.
            used = window.used if window.start is None else start + positions_RT.shape[1]
            chunk = Window(window.rows, positions_RT, used, None if window.start is None else start, keys_only)
            with suppress(KeysWritten):
                recycled.append(self._run(depth, hidden_RTD[:, part], tokens_RT[:, part], chunk).recycled_BTD)
        return torch.cat(recycled, dim=1)

    def _store(self, depth: int) -> AttentionStore:
        return self.cache.attention[self.head.module_index(depth)]


class TextDrafter(_CachedDrafter):
    """Base of drafters whose modules all read the committed text like the first module does.

    Rows of committed text only have to write their keys and values.
    """

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """All rows of the prompt but the last only write keys and values."""
        settled = prompt_RT.shape[1] - 1
        hidden_RTD = self.read(hidden_RTD)
        window = Window.of_prompts(rows, settled, prompt_RT.device)
        self._write_text(1, hidden_RTD[:, :-1], prompt_RT[:, 1:], window)
        self.pending.begin(rows, first_R, settled, hidden_RTD[:, -1])

    def _write_pending(self, first: int, plan: RoundPlan) -> None:
        """Run the pending rows through the modules from number ``first`` on, and clear them."""
        slots_BT = self.pending.positions(plan.pending)
        hidden_BTD = self.pending.hidden_BPD[:, : plan.pending]
        tokens_BT = self.pending.tokens_BP[:, : plan.pending]
        self._write_text(first, hidden_BTD, tokens_BT, self._window(slots_BT, plan))
        self.pending.clear()

    def _write_text(self, first: int, hidden_RTD: Tensor, tokens_RT: Tensor, window: Window) -> None:
        last = 1 if self.head.chaining == "recursive" else self.size.depth
        for depth in range(first, last + 1):
            self._run_text(depth, hidden_RTD, tokens_RT, window)


class RecursiveDrafter(TextDrafter):
    """Draft every depth with the head's single module.

    The last pending row gives depth 1. Depth k + 1 is one more row: the output state of depth k, its drafted token, and
    the next position. It attends to the committed rows and to the drafted rows before it. The next round overwrites it.
    """

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        if plan.depth == 0:
            self._write_pending(1, plan)
            return choice.result()
        pending = self.pending
        num_rows = plan.pending
        window = self._window(pending.positions(num_rows), plan)
        step = self._run(1, pending.hidden_BPD[:, :num_rows], pending.tokens_BP[:, :num_rows], window)
        last_B = pending.last(plan)
        pending.clear()
        choice.add(self._logits(1, state_at(step.logit_hidden_BTD, last_B)))
        hidden_B1D = state_at(step.recycled_BTD, last_B)
        for depth in range(2, plan.depth + 1):
            window = self._window((pending.first_B + (depth - 2))[:, None], plan)
            step = self._run(depth, hidden_B1D, choice.last_B1, window)
            choice.add(self._logits(depth, step.logit_hidden_BTD))
            hidden_B1D = step.recycled_BTD
        return choice.result()


class ChainedDraftsDrafter(TextDrafter):
    """Draft depth k with module k, where every module reads committed text like the first; only drafted rows chain.

    With the last pending row at position s, module k also runs the rows s+1 to s+k-1. Row s+j reads draft j and the
    output state of module j at its last row. The next round overwrites these rows with rows of committed tokens.
    """

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        """Modules beyond ``depth`` still write the keys and values of the pending rows."""
        more = max(plan.depth - 1, 0)
        last_B = self.pending.last(plan)
        # The drafts of a batch row follow its own last pending row; other batch rows may have more pending rows.
        inputs_BWD = pad(self.pending.hidden_BPD[:, : plan.pending], (0, 0, 0, more))
        tokens_BW = pad(self.pending.tokens_BP[:, : plan.pending], (0, more))
        slots_BW = self.pending.positions(plan.pending + more)
        for module in range(1, plan.depth + 1):
            part = slice(plan.pending + module - 1)
            end_B = last_B + (module - 1)
            window = self._window(slots_BW[:, part], plan)
            step = self._run(module, inputs_BWD[:, part], tokens_BW[:, part], window)
            choice.add(self._logits(module, state_at(step.logit_hidden_BTD, end_B)))
            if module < plan.depth:
                next_B1 = (end_B + 1)[:, None]
                recycled_B1D = state_at(step.recycled_BTD, end_B)
                inputs_BWD.scatter_(1, next_B1[..., None].expand_as(recycled_B1D), recycled_B1D)
                tokens_BW.scatter_(1, next_B1, choice.last_B1)
        self._write_pending(plan.depth + 1, plan)
        return choice.result()


class ChainedDrafter(_CachedDrafter):
    """Draft depth k with module k, where each module attends to its own rows.

    Row t of module k reads token t+k and the output state of module k-1 at row t. The last k-1 rows of module k read
    drafts; the next round runs them again with the committed tokens. With n rows pending from position s on, module k
    runs the rows s-(k-1) to s+n-1. For every module, their tokens are the pending tokens followed by the drafts so far.
    Their hidden inputs are one row carried over from the last round, followed by the output states of module k-1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.carried_KB1D = self.weight.new_zeros(self.size.depth, self.size.num_rows, 1, self.head.state_width)
        """Entry k-1 is the hidden input of module k at row s-(k-1). Entry 0 is unused."""

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """All modules but the last run in full, as the next module reads their output states."""
        num_tokens = prompt_RT.shape[1]
        hidden_RTD = inputs_RTD = self.read(hidden_RTD)
        self.carried_KB1D[:, rows] = 0
        for depth in range(1, min(self.size.depth, num_tokens) + 1):
            # Rows that only read prompt tokens. The row after them is pending, or carried over for a later module.
            settled = num_tokens - depth
            if depth > 1:
                self.carried_KB1D[depth - 1, rows] = inputs_RTD[:, settled:]
            tokens_RT = prompt_RT[:, depth:]
            inputs_RTD = inputs_RTD[:, :settled]
            window = Window.of_prompts(rows, settled, prompt_RT.device)
            inputs_RTD = self._run_text(depth, inputs_RTD, tokens_RT, window, recycles=depth < self.size.depth)
        self.pending.begin(rows, first_R, num_tokens - 1, hidden_RTD[:, -1])

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        """Every module runs: a skipped module would lack these rows when it drafts later."""
        last_B = self.pending.last(plan)
        inputs_BTD = self.pending.hidden_BPD[:, : plan.pending]
        tokens_BW = pad(self.pending.tokens_BP[:, : plan.pending], (0, self.size.depth - 1))
        slots_BT = self.pending.positions(plan.pending)
        carried: list[Tensor] = []
        for module in range(1, self.size.depth + 1):
            if module > 1:
                inputs_BTD = torch.cat([self.carried_KB1D[module - 1], inputs_BTD], dim=1)
                # Each row is one slot earlier than in the previous module, and there is one row more.
                slots_BT = torch.cat([slots_BT[:, :1] - 1, slots_BT], dim=1)
            tokens_BT = tokens_BW[:, : inputs_BTD.shape[1]]
            step = self._run(module, inputs_BTD, tokens_BT, self._window(slots_BT, plan))
            if module <= plan.depth:
                choice.add(self._logits(module, state_at(step.logit_hidden_BTD, last_B + (module - 1))))
                if module < self.size.depth:
                    tokens_BW.scatter_(1, (last_B + module)[:, None], choice.last_B1)
            inputs_BTD = step.recycled_BTD
            carried.append(state_at(inputs_BTD, last_B))
        for module, row_B1D in enumerate(carried[:-1], start=1):
            self.carried_KB1D[module] = row_B1D
        self.pending.clear()
        return choice.result()


class HeadDrafting(TrainedDrafting):
    """Draft with an MTP head.

    Args:
        head: The head, on the trunk's device; its dtype may differ.
        draft_vocab_R: Token ids that may be drafted, integers of shape (R,); None for the whole vocabulary.

    Example:
        >>> import torch
        >>> from mtp_inference import HeadDrafting, SpeculativeDecoder
        >>> loaded = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
        >>> drafting = HeadDrafting(loaded.drafting.head, draft_vocab_R=torch.arange(100))
        >>> decoder = SpeculativeDecoder(loaded.trunk, drafting, depth=2, eos_ids=())
        >>> decoder.generate([[4, 5, 6]], max_new_tokens=8)[0].num_drafts > 0
        True
    """

    head: MtpHead

    def check(self, trunk: Trunk, depth: int) -> None:
        super().check(trunk, depth)
        head = self.head
        if head.chaining != "recursive" and depth > len(head.blocks):
            raise UnsupportedModelError(
                f"depth: {depth}; expected at most {len(head.blocks)}, as this {head.family.title} head has one module "
                f"per depth. Use depth {len(head.blocks)}."
            )

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        trunk.show_layers(self.head.trunk_layers)
        logits = draft_logits(trunk, self.draft_vocab_R, trunk.lm_head_VD.dtype)
        return _DRAFTERS[self.head.chaining](trunk, self.head, logits, size)


_DRAFTERS: dict[str, type[_HeadDrafter]] = {
    "parallel": ParallelDrafter,
    "recursive": RecursiveDrafter,
    "chained": ChainedDrafter,
    "chained_drafts": ChainedDraftsDrafter,
}
"""How a head's modules follow one another, to the drafter."""
