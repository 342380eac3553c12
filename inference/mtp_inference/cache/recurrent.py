"""The recurrent layers of a cache, with rollback inside the last window, and the inputs of short convolutions.

The states of all recurrent layers are in one pair of buffers, so that a window is committed in all layers at once: the
operations are small, and further layers do not make them slower. Inputs of other convolutions, and the last tokens, are
in rings by position, which need no rollback.

Shapes: L layers, B rows, R = L * B, T tokens of the window, N = W + T (W - 1 + T in rings), M tokens before a window, C
channels, W kernel width, Z places of a ring, H heads, Kd key width, Vd value width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mtp_inference.cache.delta import MAX_WINDOW, DeltaWindow, delta_token, delta_window, heads_first
from mtp_inference.cache.rows import PlacedState, RowState, places_from
from mtp_inference.cache.window import Window
from mtp_train.families import Family
from mtp_train.upstream.transformers_private import ACT2FN, LinearAttentionLayer, replacing


def mamba2_window(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor,
    **_unused: object,
) -> tuple[Tensor, DeltaWindow]:
    """Run a window of Mamba-2.

    The function replaces transformers' ``mamba2_chunk_scan``, hence the names and the unused arguments. It returns an
    undecided window in place of the state. Time steps are not clamped, as transformers does not clamp them when it
    decodes single tokens.

    Args:
        hidden_states: x, shape (B, T, H, P).
        dt: Time steps before their bias and softplus, shape (B, T, H).
        A: Negative numbers, shape (H,).
        B: Shape (B, T, G, Ns); G divides H.
        C: As ``B``.
        D: Shape (H,).
        dt_bias: Shape (H,).
        initial_states: Shape (B, H, P, Ns).

    Returns:
        y of shape (B, T, H, P), fp32, and the window for the commit.
    """
    num_rows, num_tokens, num_heads, _ = hidden_states.shape
    step_BTH = softplus(dt + dt_bias.to(dt.dtype)).float()
    added_NTP = heads_first(hidden_states.float() * step_BTH[..., None], num_heads)
    written_NTS, read_NTS = (heads_first(one.float(), num_heads) for one in (B, C))
    log_decay_NT1 = heads_first((step_BTH * A.float())[..., None], num_heads).cumsum(1)
    left_NTT = (log_decay_NT1 - log_decay_NT1.mT).exp().tril()
    state_NPS = initial_states.flatten(0, 1).float()
    y_NTP = log_decay_NT1.exp() * (read_NTS @ state_NPS.mT) + (read_NTS @ written_NTS.mT * left_NTT) @ added_NTP
    y_BTHP = y_NTP.view(num_rows, num_heads, num_tokens, -1).transpose(1, 2) + D[:, None] * hidden_states.float()
    return y_BTHP, DeltaWindow(added_NTP, written_NTS, log_decay_NT1, initial_states)


def window_conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_unused: object,
) -> Tensor:
    """Run the causal convolution and its activation over the few tokens of a window.

    The function replaces transformers' ``causal_conv1d_fn``, hence the names. The caller reads only the last T outputs,
    which belong to the window's tokens. General convolutions are slow at this size, and so are sums over the W taps of
    a channel: the taps are added one after the other, each over all channels.

    Args:
        hidden_states: Shape (B, C, N): the W inputs before the window, then the window's. Fastest if the channels of a
            position lie next to each other in memory.
        weight: Shape (C, W), one kernel per channel.
        bias: Shape (C,), added before the activation.
        activation: transformers' name of the activation; None for none.

    Returns:
        Shape (B, C, N - W).
    """
    width = weight.shape[-1]
    num_tokens = hidden_states.shape[-1] - width
    # Round once, as the replaced convolution does: with rounded products half of all bf16 texts differ from plain ones.
    known_BNC = hidden_states.transpose(1, 2).float()
    weight_WC = weight.t().float().contiguous()
    output_BTC = known_BNC[:, 1 : num_tokens + 1] * weight_WC[0]
    for tap in range(1, width):
        output_BTC.addcmul_(known_BNC[:, tap + 1 : tap + num_tokens + 1], weight_WC[tap])
    if bias is not None:
        output_BTC = output_BTC + bias
    output_BTC = output_BTC.to(hidden_states.dtype)
    return (output_BTC if activation is None else ACT2FN[activation](output_BTC)).transpose(1, 2)


_CONV = "causal_conv1d_fn"
"""The causal convolution with its activation, over several tokens, in every model's Python module."""


def most_undecided(family: Family) -> int | None:
    """Return the largest number of tokens of a window that a trunk's recurrent layers can undo; None for no limit."""
    kernels = family.trunk.recurrent
    return None if kernels is None or kernels.rule == "mamba2" else MAX_WINDOW


@contextmanager
def undecided_states(family: Family) -> Iterator[None]:
    """Make recurrent layers return undecided windows inside the block, for windows that continue an earlier state.

    The block has no effect for a family without recurrent layers.
    """
    kernels = family.trunk.recurrent
    if kernels is None:
        yield
        return
    module = importlib.import_module(family.classes.python_module)
    ours: dict[str, Callable[..., Any]] = {kernels.chunked: delta_window, kernels.single: delta_token}
    if kernels.rule == "mamba2":
        # For a single token, transformers' own function updates the state in place.
        ours = {kernels.chunked: mamba2_window}
    with replacing(module, **ours, **{_CONV: window_conv}):
        yield


class RecurrentStore(LinearAttentionLayer):
    """One recurrent layer with a convolution, with the cache interface of transformers' models.

    ``conv_BCW`` holds the last inputs of the convolution and ``state_BHKV`` the recurrent state, for all rows. Both are
    views of the buffers of :class:`RecurrentLayers`, and None until the first window is committed.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        # With this, transformers passes the convolution's inputs to the cache for single tokens too.
        self.activate_past_recording()
        self.conv_BCW: Tensor | None = None
        self.state_BHKV: Tensor | None = None
        self._window_conv: Tensor | None = None
        self._window_state: Tensor | DeltaWindow | None = None
        self._in_place = False

    def begin(self, window: Window) -> None:
        """Expose the states of the window's rows to the model."""
        earlier = not window.is_fresh
        self._in_place = earlier and window.num_tokens == 1
        self.has_previous_state[0] = earlier
        for ours, shown, known in (
            (self.conv_BCW, self.conv_states, self.is_conv_states_initialized),
            (self.state_BHKV, self.recurrent_states, self.is_recurrent_states_initialized),
        ):
            known[0] = earlier
            shown[0] = ours[window.rows] if earlier and ours is not None else None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **_unused: object
    ) -> Tensor:
        """Return the inputs before the window followed by the window's inputs, (B, C, W + T)."""
        before = self.conv_states[state_idx]
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size)
        self._window_conv = self.joined(before, conv_states)
        return self._window_conv

    @staticmethod
    def joined(before_BCW: Tensor, inputs_BCT: Tensor) -> Tensor:
        """Return the inputs before a window followed by the window's, (B, C, W + T)."""
        # Positions first, as projections return them: channels then lie next to each other in memory.
        return torch.cat([before_BCW.transpose(1, 2), inputs_BCT.transpose(1, 2)], dim=1).transpose(1, 2)

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **_unused: object) -> Any:
        """Store the kernel's result: the state after the window's last token, or an undecided window."""
        self._window_state = recurrent_states
        return recurrent_states

    def put_window(self, inputs_BCN: Tensor | None, result: Any) -> None:
        """Store what the two update methods would; None where the layer changed a tensor of :meth:`begin` in place."""
        self._window_conv, self._window_state = inputs_BCN, result

    def take_window(self) -> tuple[Tensor, Tensor | DeltaWindow]:
        """Return and clear the convolution's inputs, (B, C, W + T), and the kernel's result."""
        conv = self._window_conv
        state = self._window_state
        self._window_conv = self._window_state = None
        # For a single token, some models do not call the update methods: they change the tensors of begin() in place.
        if conv is None and self._in_place:
            conv = torch.nn.functional.pad(self.conv_states[0], (1, 0))
        if state is None and self._in_place:
            state = self.recurrent_states[0]
        if conv is None or state is None:
            raise RuntimeError("recurrent cache: no window ran; expected one forward before every commit.")
        return conv, state


class ConvolutionInputs(LinearAttentionLayer, PlacedState):
    """Inputs of a layer's convolutions, with the cache interface of transformers' models and of the head's.

    Args:
        max_undecided: Longest window whose tokens may be rejected.
    """

    def __init__(self, num_rows: int, max_undecided: int, num_convolutions: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=num_convolutions)
        PlacedState.__init__(self, num_rows)
        self.max_undecided = max_undecided

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **_unused: object
    ) -> Tensor:
        """Write the window's inputs (B, C, T); return the W - 1 earlier inputs followed by them, (B, C, N)."""
        inputs_BTC = conv_states.transpose(1, 2)
        window = self.window
        num_before = conv_kernel_size - 1
        # What belongs to position p is at place p % Z.
        ring_BZC = self.buffer(state_idx, inputs_BTC, num_before + self.max_undecided)
        positions_BN = places_from(window.positions_BT[:, 0] - num_before, num_before + window.num_tokens)
        places_BN = positions_BN % ring_BZC.shape[1]
        known_BNC = torch.cat([ring_BZC[window.row_index_B1, places_BN[:, :num_before]], inputs_BTC], dim=1)
        num_kept = min(window.num_tokens, ring_BZC.shape[1])
        ring_BZC[window.row_index_B1, places_BN[:, -num_kept:]] = inputs_BTC[:, -num_kept:]
        # Positions below 0 have no input. Rows of a chained module may start there.
        return known_BNC.masked_fill((positions_BN < 0)[..., None], 0.0).transpose(1, 2)

    def taps(self, inputs_BTC: Tensor, conv_idx: int, width: int) -> list[Tensor]:
        """Write the window's inputs; return the last ``width`` inputs up to each token, the token's own first."""
        known_BNC = self.update_conv_state(inputs_BTC.transpose(1, 2), conv_idx, width).transpose(1, 2)
        num_tokens = inputs_BTC.shape[1]
        return [known_BNC[:, first : first + num_tokens] for first in range(width - 1, -1, -1)]


_CONVOLUTION, _TOKENS = 1, 2
NGRAM_STATES = 3
"""States of such a layer: the recurrent layer's own convolution, a second convolution, and tokens."""


class NgramStore(RowState, RecurrentStore):
    """State of a recurrent layer with a second convolution that also reads the tokens before a window (Qwen4-Exp)."""

    def __init__(self, num_rows: int, max_undecided: int) -> None:
        super().__init__(NGRAM_STATES)
        self._inputs = ConvolutionInputs(num_rows, max_undecided, NGRAM_STATES)

    def begin(self, window: Window) -> None:
        """Expose the states of the window's rows, and the tokens before the window, to the model."""
        super().begin(window)
        self._inputs.window = window
        # Not every such layer reads tokens.
        earlier = not window.is_fresh and _TOKENS in self._inputs.buffers_BZ
        self.is_conv_states_initialized[_TOKENS] = self.has_previous_state[_TOKENS] = earlier
        self.conv_states[_TOKENS] = None
        if earlier:
            ring_BZ = self._inputs.buffers_BZ[_TOKENS]
            num_before = ring_BZ.shape[1] - self._inputs.max_undecided
            positions_BM = window.positions_BT[:, :1] + torch.arange(-num_before, 0, device=ring_BZ.device)
            self.conv_states[_TOKENS] = ring_BZ[window.row_index_B1, positions_BM % ring_BZ.shape[1]]

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **unused: object
    ) -> Tensor:
        """Store the window's inputs; return them after the earlier inputs, (B, C, W + T), and tokens unchanged."""
        if state_idx == _TOKENS:
            # The last tokens of a window, padding included if the text is shorter.
            num_places = conv_kernel_size + self._inputs.max_undecided
            kept_BT = conv_states[:, -num_places:]
            back_T = torch.arange(1 - kept_BT.shape[1], 1, device=kept_BT.device)
            places_BT = (self._inputs.window.positions_BT[:, -1:] + back_T) % num_places
            self._inputs.place(_TOKENS, kept_BT, places_BT, num_places)
            return conv_states
        if state_idx == _CONVOLUTION:
            # This convolution reads ``conv_kernel_size`` earlier inputs, not one less as others do.
            return self._inputs.update_conv_state(conv_states, state_idx, conv_kernel_size + 1)
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size, **unused)


class RecurrentLayers(RowState):
    """The recurrent layers of one cache.

    Args:
        conv_dtype: Dtype of the stored convolution inputs; None for the dtype of the first window.
    """

    _window: Window

    def __init__(self, stores: Sequence[RecurrentStore], num_rows: int, conv_dtype: torch.dtype | None) -> None:
        self.stores = stores
        self.num_rows = num_rows
        self.conv_dtype = conv_dtype
        self.conv_LBWC: Tensor | None = None
        """Inputs of the convolutions, with the channels of a position next to each other: see :func:`window_conv`."""
        self.state_LBHKV: Tensor | None = None

    def begin(self, window: Window) -> None:
        self._window = window
        for store in self.stores:
            store.begin(window)

    def commit(self, num_kept_B: Tensor | None) -> None:
        """Keep the first ``num_kept_B`` tokens of each row, None for all. A window of one token is always kept."""
        if not self.stores:
            return
        taken = [store.take_window() for store in self.stores]
        conv = [inputs_BCN.transpose(1, 2) for inputs_BCN, _ in taken]
        decided = [state for _, state in taken if isinstance(state, Tensor)]
        undecided = [state for _, state in taken if isinstance(state, DeltaWindow)]
        if undecided:
            self._commit_undecided(torch.stack(conv), undecided, num_kept_B)
        else:
            self._commit_decided(conv, decided)

    def keep_rows(self, rows_R: Tensor) -> None:
        super().keep_rows(rows_R)
        self._show()

    def _commit_decided(self, conv: list[Tensor], state: list[Tensor]) -> None:
        window = self._window
        # Slice before stacking: the inputs of a long prompt are large.
        new_LBWC = torch.stack([inputs_BNC[:, window.num_tokens :] for inputs_BNC in conv])
        conv_LBWC, state_LBHKV = self._buffers(new_LBWC, state[0])
        # In place, here and below: a captured round refers to these buffers by address.
        conv_LBWC[:, window.rows] = new_LBWC
        for ours_BHKV, new_BHKV in zip(state_LBHKV[:, window.rows], state, strict=True):
            # The rule for a single token updates the state in place.
            if new_BHKV.data_ptr() != ours_BHKV.data_ptr():
                ours_BHKV.copy_(new_BHKV)

    def _commit_undecided(self, new_LBNC: Tensor, windows: Sequence[DeltaWindow], num_kept_B: Tensor | None) -> None:
        window, conv_LBWC, state_LBHKV = self._window, self.conv_LBWC, self.state_LBHKV
        num_layers, num_rows = new_LBNC.shape[:2]
        if conv_LBWC is None or state_LBHKV is None or num_rows != self.num_rows:
            raise RuntimeError("recurrent cache: undecided; expected a prefill of all rows first, and all rows now.")
        if num_kept_B is None:
            num_kept_B = torch.full((num_rows,), window.num_tokens, device=new_LBNC.device)
        # The number of an inactive row may be out of range. From here on, layers are further rows.
        num_kept_R = num_kept_B.clamp(0, window.num_tokens).repeat(num_layers)
        state_RHKV = state_LBHKV.flatten(0, 1)
        keys, corrections, log_decays, _ = zip(*windows, strict=True)
        joined = DeltaWindow(torch.cat(keys), torch.cat(corrections), torch.cat(log_decays), state_RHKV)
        joined.commit(num_kept_R, state_RHKV)
        taken_RW = places_from(num_kept_R, conv_LBWC.shape[2])
        kept_RWC = new_LBNC.flatten(0, 1).take_along_dim(taken_RW[..., None], dim=1)
        conv_LBWC.copy_(kept_RWC.view_as(conv_LBWC))

    def _buffers(self, conv_LBWC: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of all layers; allocate them at the first window."""
        if self.conv_LBWC is None or self.state_LBHKV is None:
            shape = (len(self.stores), self.num_rows)
            dtype = self.conv_dtype or conv_LBWC.dtype
            self.conv_LBWC = conv_LBWC.new_zeros(*shape, *conv_LBWC.shape[2:], dtype=dtype)
            self.state_LBHKV = state_BHKV.new_zeros(*shape, *state_BHKV.shape[1:])
            self._show()
        return self.conv_LBWC, self.state_LBHKV

    def _show(self) -> None:
        if self.conv_LBWC is not None and self.state_LBHKV is not None:
            for store, conv_BWC, state_BHKV in zip(self.stores, self.conv_LBWC, self.state_LBHKV, strict=True):
                store.conv_BCW = conv_BWC.transpose(1, 2)
                store.state_BHKV = state_BHKV
