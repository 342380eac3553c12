"""Teacher-forced acceptance by target, kept by prompt: what intervals and the entropy control rest on.

The trunk's own plain outputs go through the one MTP forward as in ``mtp_train.train.dense``, each prompt on its own.

Shapes: K depths, N target positions of all prompts together, R drafted vocabulary.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_train.arms import own_text
from mtp_train.data.pack import collate, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.errors import DataError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.heads.widen import many_rows
from mtp_train.study.records import Decoded, TaskPrompt
from mtp_train.train.dense_sums import target_figures
from mtp_train.train.module import Batch, aligned_rows
from mtp_train.weights.writing import write_bytes


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Every target position of some prompts' outputs, those of a prompt together and in order."""

    prompt_ids: NDArray[np.str_]
    """The prompts, shape (P,); also those without a position here."""
    groups: NDArray[np.str_]
    """Of each prompt, shape (P,): intervals leave out whole groups."""
    tasks: NDArray[np.str_]
    """Of each prompt, shape (P,)."""
    prompt_N: NDArray[np.int64]
    """Whose output it is: an index into :attr:`prompt_ids`."""
    entropy_N: NDArray[np.float32]
    """Of p, nats."""
    overlap_KN: NDArray[np.float32]
    """``sum_v min(p, q)``."""
    agreed_KN: NDArray[np.bool_]
    """Whether argmax q = argmax p."""
    valid_KN: NDArray[np.bool_]
    """Whether the depth has a target there: its start must lie in the text too."""

    def save(self, path: Path) -> None:
        """Write everything to one ``.npz`` file, in the place of an earlier one."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{field.name: vars(self)[field.name] for field in fields(self)})
        write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> DenseRows:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: The file is missing or damaged.
        """
        try:
            # Opened here: numpy leaves a damaged file open.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                return cls(**{field.name: stored[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(
                f"{path}: {' '.join(str(error).split())}; expected the teacher-forced figures of a study. Remove the "
                "file: they are measured again."
            ) from error


@torch.inference_mode()
def dense_rows(
    trunk: Trunk,
    head: MtpHead,
    prompts: Sequence[TaskPrompt],
    plain: Sequence[Decoded],
    num_depths: int,
    temperature: float,
    seq_len_tokens: int,
    draft_vocab_R: Tensor | None = None,
) -> DenseRows:
    """Measure a head on what its trunk said without drafts.

    Args:
        trunk: The trunk.
        head: The head.
        prompts: The prompts as they were decoded; those that were not are left out.
        plain: What plain decoding made of them.
        num_depths: K.
        temperature: p and q are ``softmax(logits / temperature)``. 0, where acceptance rests on the first choices
            alone, is measured at 1.
        seq_len_tokens: Texts are cut to this length, prompt included.
        draft_vocab_R: int, the tokens that the head may draft; None for all.

    Raises:
        ValueError: A prompt is not the one that was decoded, or none was.
    """
    outputs = {one.prompt_id: one for one in plain}
    decoded = [prompt for prompt in prompts if prompt.id in outputs]
    for prompt in decoded:
        if len(prompt.prompt_ids) != outputs[prompt.id].prompt_tokens:
            raise ValueError(
                f"prompt {prompt.id!r}: {len(prompt.prompt_ids)} tokens, {outputs[prompt.id].prompt_tokens} when it "
                "was decoded; expected the same prompt. Pass prompts and outputs of one context."
            )
    texts = own_text(decoded, [outputs[prompt.id].token_ids for prompt in decoded], seq_len_tokens)
    if not texts:
        raise ValueError(f"{len(prompts)} prompts, {len(plain)} outputs, none of the same prompt; expected a pair.")
    with many_rows(trunk, head) as run:
        parts = [_text_rows(trunk, run, text, num_depths, temperature or 1.0, draft_vocab_R) for text in texts]
    return DenseRows(
        prompt_ids=np.array([prompt.id for prompt in decoded], dtype=np.str_),
        groups=np.array([prompt.group for prompt in decoded], dtype=np.str_),
        tasks=np.array([prompt.task for prompt in decoded], dtype=np.str_),
        prompt_N=np.repeat(np.arange(len(parts)), [part.valid_KN.shape[1] for part in parts]),
        entropy_N=np.concatenate([part.entropy_N for part in parts]),
        overlap_KN=np.concatenate([part.overlap_KN for part in parts], axis=1),
        agreed_KN=np.concatenate([part.agreed_KN for part in parts], axis=1),
        valid_KN=np.concatenate([part.valid_KN for part in parts], axis=1),
    )


class _TextRows(NamedTuple):
    """The fields of :class:`DenseRows` that one text gives."""

    entropy_N: NDArray[np.float32]
    overlap_KN: NDArray[np.float32]
    agreed_KN: NDArray[np.bool_]
    valid_KN: NDArray[np.bool_]


def _text_rows(
    trunk: Trunk,
    head: MtpHead,
    text: Document,
    num_depths: int,
    temperature: float,
    draft_vocab_R: Tensor | None,
) -> _TextRows:
    """Measure one text, in a batch of its own and of its own length: nothing of another reaches it."""
    device = trunk.lm_head_VD.device
    columns = collate(pack_documents([text], len(text.input_ids), pack=False, seed=0, epoch=0))
    rows = aligned_rows(trunk, head, Batch(*(column.to(device) for column in columns.values())), num_depths)
    found = target_figures(rows, trunk, head, temperature=temperature, draft_vocab_R=draft_vocab_R)
    kept_N = rows.valid_KN.any(dim=0)
    return _TextRows(
        found.entropy_N[kept_N].cpu().numpy(),
        found.overlap_KN[:, kept_N].cpu().numpy(),
        found.agreed_KN[:, kept_N].cpu().numpy(),
        rows.valid_KN[:, kept_N].cpu().numpy(),
    )
