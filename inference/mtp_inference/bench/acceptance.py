"""A drafter whose drafts are right as often as one likes, at the cost of the real head.

What drafts gain depends on how often they are right; what they cost does not. So a head of any quality, a random one
too, shows the cost, and its tokens are replaced by the text's own or by wrong ones.

Shapes: B rows of the batch, S positions, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_inference.chooser import Chooser, Drafts
from mtp_inference.draft import Drafter, DrafterMaker, Place, Size
from mtp_train.heads.trunk import Trunk


class SetAcceptance:
    """Wrap what makes drafters; every draft is right with a given chance.

    Whether a draft is right is decided once for each position of each row. A position's draft is verified at most once
    with all before it right, so that rounds accept ``a + a^2 + ... + a^K`` drafts on average.

    Args:
        drafting: What is paid for.
        chance: a, 0 to 1.
        num_rows: B.
        num_positions: S.
        vocab_size: Of the trunk.
        device: The trunk's.
        seed: Of the decisions.
    """

    def __init__(
        self,
        drafting: DrafterMaker,
        chance: float,
        *,
        num_rows: int,
        num_positions: int,
        vocab_size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.drafting = drafting
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(seed)
        is_right_BS = torch.rand(num_rows, num_positions, generator=generator) < chance
        self.is_right_BS = is_right_BS.to(device)
        self.text_BS = torch.zeros(num_rows, num_positions, dtype=torch.long, device=device)

    def expect(self, texts: Sequence[Sequence[int]]) -> None:
        """Say which texts come next, prompts included: one for each row, in order."""
        # In place: captured rounds know the tensor by its address.
        self.text_BS.copy_(torch.tensor(texts))

    def check(self, trunk: Trunk, depth: int) -> None:
        """See :class:`DrafterMaker`."""
        self.drafting.check(trunk, depth)

    def make(self, trunk: Trunk, size: Size, depth: int) -> Drafter:
        """See :class:`DrafterMaker`."""
        return _SetDrafter(self, self.drafting.make(trunk, size, depth))


class _SetDrafter:
    def __init__(self, maker: SetAcceptance, drafter: Drafter) -> None:
        self.maker = maker
        self.drafter = drafter

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`Drafter`."""
        self.drafter.start(rows, hidden_RTD, prompt_RT, first_R)

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """See :class:`Drafter`."""
        self.drafter.extend(hidden_BTD, tokens_BT, num_kept_B)

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`Drafter`."""
        self.drafter.draft(depth, place, chooser)
        maker = self.maker
        ahead_K = torch.arange(1, depth + 1, device=place.length_B.device)
        # A row that has ended drafts on; nobody counts what.
        places_BK = (place.length_B[:, None] + ahead_K).clamp(max=maker.text_BS.shape[1] - 1)
        right_BK = maker.text_BS.gather(1, places_BK)
        is_right_BK = maker.is_right_BS.gather(1, places_BK)
        return Drafts(torch.where(is_right_BK, right_BK, (right_BK + 1) % maker.vocab_size))

    def settle(self, place: Place) -> None:
        """See :class:`Drafter`."""
        self.drafter.settle(place)
