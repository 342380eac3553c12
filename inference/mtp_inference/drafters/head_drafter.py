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

import torch
from torch import Tensor

from mtp_inference.cache.model_cache import AttentionStore, WindowCache
from mtp_inference.cache.window import Window, attending_in_windows
from mtp_inference.drafters.drafter import Drafter, Place, Size
from mtp_inference.drafters.pending import Pending
from mtp_inference.sampling.chooser import Chooser, DraftChoice, Drafts
from mtp_train.errors import UnsupportedModelError
from mtp_train.heads.module import MtpHead, OutputRows
from mtp_train.heads.step import StepOutput, mtp_keys, mtp_step
from mtp_train.trunk.load import Trunk


class ParallelDrafter:
    """Draft depth k with module k, all from the trunk's hidden state before the last committed token (Medusa).

    Args:
        trunk: The trunk.
        head: The head; its dtype may differ from the trunk's.
        logits: Function from the head's states (B, 1, D) to logits (B, 1, V).
        size: Number of rows, positions and places.
    """

    def __init__(self, trunk: Trunk, head: MtpHead, logits: Callable[[Tensor], Tensor], size: Size) -> None:
        self.trunk = trunk
        self.head = head
        self.logits = logits
        self.state_B1D = next(head.parameters()).new_zeros(size.num_rows, 1, head.state_width)
        self.position_B1 = torch.zeros(size.num_rows, 1, dtype=torch.long, device=self.state_B1D.device)

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`mtp_inference.drafters.drafter.Drafter`."""
        self.state_B1D[rows] = self._head_input(hidden_RTD[:, -1:])

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """See :class:`mtp_inference.drafters.drafter.Drafter`."""
        index_B11 = (num_kept_B - 1).clamp(min=0)[:, None, None]
        last_B1D = hidden_BTD.gather(1, index_B11.expand(-1, -1, hidden_BTD.shape[-1]))
        # An inactive row keeps no token.
        self.state_B1D.copy_(torch.where(num_kept_B[:, None, None] > 0, self._head_input(last_B1D), self.state_B1D))

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`mtp_inference.drafters.drafter.Drafter`."""
        choice = chooser.begin_draft(place.last_B, place.length_B)
        for depth_now in range(1, depth + 1):
            step = mtp_step(
                self.head,
                self.state_B1D,
                # In place of an embedding: these modules read no token.
                self.state_B1D,
                depth=depth_now,
                positions_BT=self.position_B1,
                mask_BTS=None,
                cache=None,
            )
            state_B1D = step.logit_hidden_BTD.to(self.trunk.lm_head_VD.dtype)
            choice.add(self.head.module_for(depth_now).project(state_B1D, self.logits))
        return choice.result()

    def settle(self, place: Place) -> None:
        """See :class:`mtp_inference.drafters.drafter.Drafter`. There are no pending tokens."""

    def keep_rows(self, rows_R: Tensor) -> None:
        """See :class:`mtp_inference.drafters.drafter.Drafter`."""
        self.state_B1D, self.position_B1 = self.state_B1D[rows_R], self.position_B1[rows_R]

    def _head_input(self, hidden: Tensor) -> Tensor:
        return self.trunk.head_input(hidden, self.head.convention).to(self.state_B1D.dtype)


KEYS_CHUNK = 2048
"""Largest number of prefix rows per call, to bound the memory of activations."""
SPARE_SLOTS = 8
"""Above the deepest draft, and a multiple of 8, which fused attention requires of masks."""
LogitsFn = Callable[[Tensor], Tensor]


class _HeadDrafter:
    """Base of drafters whose head has a KV cache: the cache and the pending rows.

    Args:
        trunk: The trunk whose embedding the head reads.
        head: The head; its dtype may differ from the trunk's.
        logits: Function from the head's states (B, 1, D) to logits (B, 1, V).
        size: Number of rows, positions and places.
        depth: Largest number of drafts per round.
    """

    def __init__(self, trunk: Trunk, head: MtpHead, logits: LogitsFn, size: Size, depth: int) -> None:
        self.trunk = trunk
        self.head = head
        self.logits = logits
        self.depth = depth
        weight = next(head.parameters())
        self.dtype = weight.dtype
        self.cache = WindowCache(
            head.config,
            num_rows=size.num_rows,
            # The deepest rows of a draft, and stale rows, are past the trunk's last position. Rows before position 0
            # wrap around to the last slots.
            capacity=size.capacity + size.num_pending + 2 * SPARE_SLOTS,
            max_window=max(KEYS_CHUNK, size.num_pending + depth),
            max_undecided=size.num_pending + depth,
        )
        self.pending = Pending(size, weight.device, head.state_width, weight.dtype)

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """See :class:`Drafter`."""
        self.pending.add(tokens_BT, num_kept_B, self._head_input(hidden_BTD))

    def keep_rows(self, rows_R: Tensor) -> None:
        """See :class:`Drafter`."""
        self.cache.keep_rows(rows_R)
        self.pending.keep_rows(rows_R)

    def _head_input(self, hidden: Tensor) -> Tensor:
        return self.head.read(self.trunk.head_input(hidden, self.head.convention).to(self.dtype))

    def _inputs(self, place: Place) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the tokens of the pending rows."""
        return self.pending.hidden_BPD[:, : place.pending], self.pending.tokens_BP[:, : place.pending]

    def _window(self, slots_BT: Tensor, place: Place) -> Window:
        used = place.used + SPARE_SLOTS
        # An inactive row may be at a position beyond all others, outside the keys in use.
        return Window(slice(0, len(slots_BT)), slots_BT.clamp(max=used - 1), used)

    def _run(self, depth: int, hidden_BTD: Tensor, tokens_BT: Tensor, window: Window) -> StepOutput:
        """Run consecutive head rows; each attends to all rows before it."""
        mask_B1TS = self._begin(depth, window)
        with attending_in_windows(self.head.config):
            return mtp_step(
                self.head,
                hidden_BTD,
                self.head.embedding(self.trunk.embed)(tokens_BT).to(self.dtype),
                depth=depth,
                positions_BT=self._positions(window, depth),
                mask_BTS=None if mask_B1TS is None else mask_B1TS[:, 0],
                cache=self.cache,
            )

    def _write_keys(self, depth: int, hidden_RTD: Tensor, tokens_RT: Tensor, window: Window) -> None:
        """Run rows that no draft starts from; stop after keys and values if later rows read nothing else."""
        for start in range(0, window.num_tokens, KEYS_CHUNK):
            part = slice(start, start + KEYS_CHUNK)
            keys_only = self._store(depth).keys_suffice
            slots_RT = window.positions_BT[:, part]
            chunk = Window(window.rows, slots_RT, window.used, keys_only=keys_only)
            if not chunk.keys_only:
                self._run(depth, hidden_RTD[:, part].to(self.dtype), tokens_RT[:, part], chunk)
                continue
            mask_B1TS = self._begin(depth, chunk)
            mtp_keys(
                self.head,
                hidden_RTD[:, part].to(self.dtype),
                self.head.embedding(self.trunk.embed)(tokens_RT[:, part]).to(self.dtype),
                depth=depth,
                positions_BT=self._positions(chunk, depth),
                mask_BTS=None if mask_B1TS is None else mask_B1TS[:, 0],
                cache=self.cache,
            )

    def _store(self, depth: int) -> AttentionStore:
        """Return the key store of the module that drafts at ``depth``."""
        stores = [layer for layer in self.cache.layers if isinstance(layer, AttentionStore)]
        return stores[0 if self.head.unroll == "recursive" else depth - 1]

    def _begin(self, depth: int, window: Window) -> Tensor | None:
        """Announce a window; return the mask of the module that drafts at ``depth``."""
        return self.cache.begin(window)[self._store(depth).kind]

    def _positions(self, window: Window, depth: int) -> Tensor:
        """Return the rotary positions: in a chained module k, a row's position is its slot plus k-1."""
        return window.positions_BT + (depth - 1) if self.head.unroll == "chained" else window.positions_BT

    def _logits(self, depth: int, hidden_B1D: Tensor) -> Tensor:
        module = self.head.module_for(depth)
        return module.project(hidden_B1D.to(self.trunk.lm_head_VD.dtype), self.logits)


class _TextDrafter(_HeadDrafter):
    """Base of drafters whose modules all read the committed text like the first module does.

    Rows of committed text only have to write their keys and values.
    """

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`Drafter`. All rows of the prompt but the last only write keys and values."""
        settled = prompt_RT.shape[1] - 1
        hidden_RTD = self._head_input(hidden_RTD)
        slots_RT = torch.arange(settled, device=prompt_RT.device).expand(len(prompt_RT), -1)
        self._write_text(1, hidden_RTD[:, :-1], prompt_RT[:, 1:], Window(rows, slots_RT, settled))
        self.pending.begin(rows, first_R, prompt_RT.shape[1] - 1, hidden_RTD[:, -1])

    def settle(self, place: Place) -> None:
        """See :class:`Drafter`."""
        self._settle_from(1, place)

    def _settle_from(self, first: int, place: Place) -> None:
        """Run the pending rows through the modules from number ``first`` on, and clear them."""
        self._write_text(first, *self._inputs(place), self._window(self.pending.positions(place), place))
        self.pending.take()

    def _write_text(self, first: int, hidden_RTD: Tensor, tokens_RT: Tensor, window: Window) -> None:
        last = 1 if self.head.unroll == "recursive" else self.depth
        for depth in range(first, last + 1):
            self._write_keys(depth, hidden_RTD, tokens_RT, window)


class RecursiveDrafter(_TextDrafter):
    """Draft every depth with the head's single module.

    The last pending row gives depth 1. Depth k + 1 is one more row: the output state of depth k, its drafted token, and
    the next position. It attends to the committed rows and to the drafted rows before it. The next round overwrites it.
    """

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`Drafter`."""
        step = self._run(1, *self._inputs(place), self._window(self.pending.positions(place), place))
        last_B = self.pending.last(place)
        self.pending.take()
        choice = chooser.begin_draft(place.last_B, place.length_B)
        choice.add(self._logits(1, self.pending.row(step.logit_hidden_BTD, last_B)))
        hidden_B1D = self.pending.row(step.recycled_BTD, last_B)
        for depth_now in range(2, depth + 1):
            window = self._window((self.pending.first_B + (depth_now - 2))[:, None], place)
            step = self._run(depth_now, hidden_B1D, choice.last_B1, window)
            choice.add(self._logits(depth_now, step.logit_hidden_BTD))
            hidden_B1D = step.recycled_BTD
        return choice.result()


class ChainedDraftsDrafter(_TextDrafter):
    """Draft depth k with module k, where every module reads committed text like the first; only drafted rows chain.

    With the last pending row at position s, module k also runs the rows s+1 to s+k-1. Row s+j reads draft j and the
    output state of module j at its last row. The next round overwrites these rows with rows of committed tokens.
    """

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`Drafter`. Modules beyond ``depth`` still write the keys and values of the pending rows."""
        choice = chooser.begin_draft(place.last_B, place.length_B)
        last_B = self.pending.last(place)
        inputs_BPD, tokens_BP = self._inputs(place)
        # The drafts of a batch row follow its own last pending row; other batch rows may have more pending rows.
        inputs_BWD = torch.nn.functional.pad(inputs_BPD, (0, 0, 0, depth - 1))
        tokens_BW = torch.nn.functional.pad(tokens_BP, (0, depth - 1))
        slots_BW = self.pending.positions(place._replace(pending=place.pending + depth - 1))
        for module in range(1, depth + 1):
            part, end_B = slice(place.pending + module - 1), last_B + (module - 1)
            window = self._window(slots_BW[:, part], place)
            step = self._run(module, inputs_BWD[:, part], tokens_BW[:, part], window)
            choice.add(self._logits(module, self.pending.row(step.logit_hidden_BTD, end_B)))
            if module < depth:
                next_B1 = (end_B + 1)[:, None]
                inputs_BWD[self.pending.rows_B1, next_B1] = self.pending.row(step.recycled_BTD, end_B)
                tokens_BW[self.pending.rows_B1, next_B1] = choice.last_B1
        self._settle_from(depth + 1, place)
        return choice.result()


class ChainedDrafter(_HeadDrafter):
    """Draft depth k with module k, where each module attends to its own rows.

    Row t of module k reads token t+k and the output state of module k-1 at row t. The last k-1 rows of module k read
    drafts; the next round runs them again with the committed tokens. With n rows pending from position s on, module k
    runs the rows s-(k-1) to s+n-1. For every module, their tokens are the pending tokens followed by the drafts so far.
    Their hidden inputs are one row carried over from the last round, followed by the output states of module k-1.
    """

    def __init__(self, trunk: Trunk, head: MtpHead, logits: LogitsFn, size: Size, depth: int) -> None:
        super().__init__(trunk, head, logits, size, depth)
        self.carried_KB1D = next(head.parameters()).new_zeros(depth, size.num_rows, 1, head.state_width)
        """Entry k-1 is the hidden input of module k at row s-(k-1). Entry 0 is unused."""

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`Drafter`. All modules but the last run in full, as the next module reads their output states."""
        num_tokens = prompt_RT.shape[1]
        hidden_RTD = self._head_input(hidden_RTD)
        inputs_RTD = hidden_RTD.to(self.dtype)
        self.carried_KB1D[:, rows] = 0
        for depth in range(1, min(self.depth, num_tokens) + 1):
            # Rows that only read prompt tokens. The row after them is pending, or carried over for a later module.
            settled = num_tokens - depth
            if depth > 1:
                self.carried_KB1D[depth - 1, rows] = inputs_RTD[:, settled:]
            slots_RT = torch.arange(settled, device=prompt_RT.device).expand(len(prompt_RT), -1)
            tokens_RT, inputs_RTD = prompt_RT[:, depth:], inputs_RTD[:, :settled]
            if depth == self.depth:
                self._write_keys(depth, inputs_RTD, tokens_RT, Window(rows, slots_RT, settled))
            else:
                inputs_RTD = self._recycled(depth, inputs_RTD, tokens_RT, Window(rows, slots_RT, settled))
        self.pending.begin(rows, first_R, prompt_RT.shape[1] - 1, hidden_RTD[:, -1])

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`Drafter`."""
        choice = chooser.begin_draft(place.last_B, place.length_B)
        self._advance(place, depth, choice)
        return choice.result()

    def settle(self, place: Place) -> None:
        """See :class:`Drafter`."""
        self._advance(place, 0, None)

    def keep_rows(self, rows_R: Tensor) -> None:
        """See :class:`Drafter`."""
        super().keep_rows(rows_R)
        self.carried_KB1D = self.carried_KB1D[:, rows_R]

    def _recycled(self, depth: int, hidden_RTD: Tensor, tokens_RT: Tensor, window: Window) -> Tensor:
        """Run prompts from position 0; return the output states that the next module reads."""
        recycled = [hidden_RTD[:, :0]]
        for start in range(0, window.num_tokens, KEYS_CHUNK):
            part = slice(start, start + KEYS_CHUNK)
            slots_RT = window.positions_BT[:, part]
            chunk = Window(window.rows, slots_RT, start + slots_RT.shape[1], start)
            recycled.append(self._run(depth, hidden_RTD[:, part], tokens_RT[:, part], chunk).recycled_BTD)
        return torch.cat(recycled, dim=1)

    def _advance(self, place: Place, depth: int, choice: DraftChoice | None) -> None:
        """Run every module: a skipped module would lack these rows when it drafts later."""
        last_B = self.pending.last(place)
        inputs_BTD, tokens_BT = self._inputs(place)
        tokens_BW = torch.nn.functional.pad(tokens_BT, (0, self.depth - 1))
        slots_BT = self.pending.positions(place)
        carried: list[Tensor] = []
        for module in range(1, self.depth + 1):
            if module > 1:
                inputs_BTD = torch.cat([self.carried_KB1D[module - 1], inputs_BTD], dim=1)
                # Each row is one slot earlier than in the previous module, and there is one row more.
                slots_BT = torch.cat([slots_BT[:, :1] - 1, slots_BT], dim=1)
            tokens_BT = tokens_BW[:, : inputs_BTD.shape[1]]
            step = self._run(module, inputs_BTD, tokens_BT, self._window(slots_BT, place))
            if choice is not None and module <= depth:
                choice.add(self._logits(module, self.pending.row(step.logit_hidden_BTD, last_B + (module - 1))))
                if module < self.depth:
                    tokens_BW[self.pending.rows_B1, (last_B + module)[:, None]] = choice.last_B1
            inputs_BTD = step.recycled_BTD
            carried.append(self.pending.row(inputs_BTD, last_B))
        for module, row_B1D in enumerate(carried[:-1], start=1):
            self.carried_KB1D[module] = row_B1D
        self.pending.take()


class HeadDrafting:
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
        >>> decoder.decode([[4, 5, 6]], max_new_tokens=8)[0].num_drafts > 0
        True
    """

    def __init__(self, head: MtpHead, draft_vocab_R: Tensor | None = None) -> None:
        self.head = head
        self.draft_vocab_R = draft_vocab_R

    def check(self, trunk: Trunk, depth: int) -> None:
        """See :class:`DrafterMaker`.

        Raises:
            UnsupportedModelError: The head has a module for each depth, and fewer than ``depth`` modules.
        """
        head = self.head
        if head.unroll != "recursive" and depth > len(head.blocks):
            raise UnsupportedModelError(
                f"depth: {depth}; expected at most {len(head.blocks)}, as this {head.family.title} head has one module "
                f"per depth. Use depth {len(head.blocks)}."
            )

    def make(self, trunk: Trunk, size: Size, depth: int) -> Drafter:
        """See :class:`DrafterMaker`."""
        trunk.show_layers(self.head.trunk_layers)
        logits: LogitsFn = trunk.project
        if self.draft_vocab_R is not None:
            weight_VD = trunk.lm_head_VD
            token_ids_R = self.draft_vocab_R.to(weight_VD.device)
            logits = OutputRows(weight_VD[token_ids_R], token_ids_R, len(weight_VD))
        if self.head.unroll == "parallel":
            return ParallelDrafter(trunk, self.head, logits, size)
        if self.head.unroll == "chained":
            return ChainedDrafter(trunk, self.head, logits, size, depth)
        kind = RecursiveDrafter if self.head.unroll == "recursive" else ChainedDraftsDrafter
        return kind(trunk, self.head, logits, size, depth)
