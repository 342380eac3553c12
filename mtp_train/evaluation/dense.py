"""Teacher-forced metrics of every target position, by prompt, for intervals and for comparisons at equal entropy.

The trunk's own plain outputs pass through the MTP forward as in ``mtp_train.train.teacher_forced``, one prompt at a
time.

Shapes: K depths, N target positions of all prompts together, R drafted vocabulary.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_inference import HeadDrafting
from mtp_train.checkpoints.writing import write_bytes
from mtp_train.data.pack import collate, pack_documents
from mtp_train.data.tokenize import Document, Prompt
from mtp_train.errors import DataError
from mtp_train.evaluation.decoding import DecodingOptions
from mtp_train.evaluation.prompt_records import PromptRecord, TaskPrompt
from mtp_train.heads.module import MtpHead
from mtp_train.train.packed_rows import PackedBatch, aligned_rows
from mtp_train.train.teacher_forced import many_rows, target_figures
from mtp_train.trunk.load import Trunk


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Metrics of every target position of some outputs; positions of a prompt are contiguous and in order."""

    prompt_ids: NDArray[np.str_]
    """Ids of the prompts, shape (P,), including prompts without a target position."""
    groups: NDArray[np.str_]
    """Group of each prompt, shape (P,); intervals leave out whole groups."""
    tasks: NDArray[np.str_]
    """Task of each prompt, shape (P,)."""
    prompt_N: NDArray[np.int64]
    """Index into :attr:`prompt_ids` of each position's prompt."""
    entropy_N: NDArray[np.float32]
    """Entropy of p, nats."""
    overlap_KN: NDArray[np.float32]
    """``sum_v min(p, q)``."""
    agreed_KN: NDArray[np.bool_]
    """Whether argmax q = argmax p."""
    valid_KN: NDArray[np.bool_]
    """Whether the depth has a target at the position: the depth's start must lie in the text too."""

    def save(self, path: Path) -> None:
        """Write all arrays to one ``.npz`` file, replacing an earlier one."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{field.name: vars(self)[field.name] for field in fields(self)})
        write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> DenseRows:
        """Read a file that :meth:`save` wrote.

        Raises:
            DataError: The file is missing or damaged.
        """
        try:
            # numpy.load would leave a damaged file open.
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
    drafting: HeadDrafting,
    prompts: Sequence[TaskPrompt],
    plain: Sequence[PromptRecord],
    num_depths: int,
    temperature: float,
    options: DecodingOptions,
) -> DenseRows:
    """Return a head's teacher-forced metrics on its trunk's plain outputs.

    Args:
        trunk: The trunk.
        drafting: The head, and the tokens that it may draft.
        prompts: The prompts; prompts without a record are ignored.
        plain: Records of plain decoding.
        num_depths: K.
        temperature: p and q are ``softmax(logits / temperature)``. Temperature 0, where acceptance depends on the
            argmax tokens alone, is measured at 1.
        options: Limits of the texts; prompts past ``dense_tokens`` are left out, except for the first.
    """
    head, draft_vocab_R, outputs = drafting.head, drafting.draft_vocab_R, {one.prompt_id: one for one in plain}
    decoded = [prompt for prompt in prompts if prompt.id in outputs]
    texts = own_text(decoded, [outputs[prompt.id].token_ids for prompt in decoded], options.seq_len_tokens)
    if options.dense_tokens is not None:
        ends = np.cumsum([len(text.input_ids) for text in texts])
        num_texts = max(1, int((ends <= options.dense_tokens).sum()))
        decoded, texts = decoded[:num_texts], texts[:num_texts]
    with many_rows(trunk, head) as run:
        parts = [_text_rows(trunk, run, text, num_depths, temperature or 1.0, draft_vocab_R) for text in texts]
    entropies, overlaps, agreed, valid = zip(*parts, strict=True)
    return DenseRows(
        prompt_ids=np.array([prompt.id for prompt in decoded], dtype=np.str_),
        groups=np.array([prompt.group for prompt in decoded], dtype=np.str_),
        tasks=np.array([prompt.task for prompt in decoded], dtype=np.str_),
        prompt_N=np.repeat(np.arange(len(parts)), [len(entropy_N) for entropy_N in entropies]),
        entropy_N=np.concatenate(entropies),
        overlap_KN=np.concatenate(overlaps, axis=1),
        agreed_KN=np.concatenate(agreed, axis=1),
        valid_KN=np.concatenate(valid, axis=1),
    )


def replayed(rows: DenseRows, plain: Sequence[PromptRecord], depth: int) -> list[PromptRecord]:
    """Return the rounds of greedy decoding at a depth, as the drafts at every position of the plain texts give them.

    A round drafts the same tokens here as in decoding: those after its last committed token. Rounds that reach past the
    end of a text are left out with their tokens.

    Args:
        rows: Metrics of the plain texts at temperature 0, of this depth at least.
        plain: Records of plain decoding.
        depth: Drafts a round.
    """
    texts, found = {one.prompt_id: one for one in plain}, []
    for number, prompt_id in enumerate(rows.prompt_ids.tolist()):
        text, of_text_N = texts[prompt_id], rows.prompt_N == number
        agreed_KT = (rows.agreed_KN & rows.valid_KN)[:depth, of_text_N]
        last, accepted = 0, list[int]()
        # No depth predicts the first new token of a prompt of one token, which has no start.
        while text.prompt_tokens > 1 and last + depth < agreed_KT.shape[1]:
            accepted.append(int(agreed_KT[np.arange(depth), last + 1 + np.arange(depth)].cumprod().sum()))
            last += accepted[-1] + 1
        drafted = (depth,) * len(accepted)
        found.append(replace(text, token_ids=text.token_ids[: last + 1], drafted=drafted, accepted=tuple(accepted)))
    return found


def own_text(prompts: Sequence[Prompt], outputs: Sequence[tuple[int, ...]], seq_len_tokens: int) -> list[Document]:
    """Return prompts and outputs as documents for teacher-forced metrics: only the output's tokens are targets."""
    documents = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = (prompt.prompt_ids + output)[:seq_len_tokens]
        mask = ((False,) * len(prompt.prompt_ids) + (True,) * len(output))[:seq_len_tokens]
        documents.append(Document(tokens, mask, prompt.group, prompt.id))
    return documents


def _text_rows(
    trunk: Trunk,
    head: MtpHead,
    text: Document,
    num_depths: int,
    temperature: float,
    draft_vocab_R: Tensor | None,
) -> tuple[NDArray[Any], ...]:
    """Return entropy, overlap, agreement and validity of one text, measured in a batch of its own without padding."""
    device = trunk.lm_head_VD.device
    columns = collate(pack_documents([text], len(text.input_ids), pack=False, seed=0, epoch=0))
    rows = aligned_rows(trunk, head, PackedBatch(*(column.to(device) for column in columns.values())), num_depths)
    found = target_figures(rows, trunk, head, temperature=temperature, draft_vocab_R=draft_vocab_R)
    kept_N = rows.valid_KN.any(dim=0)
    figures = (found.entropy_N, found.overlap_KN, found.agreed_KN, rows.valid_KN)
    return tuple(one[..., kept_N].cpu().numpy() for one in figures)
