"""What recurrent layers do with the stand-ins of installed kernels: ``python kernel_jobs.py KIND...``.

A process of its own: transformers chooses kernels when a model is imported. Prints what came of it as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import stub_kernels
from mtp_inference import HeadDrafting, Request, SpeculativeDecoder
from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.forward import prefill_chunks
from mtp_train.train.packed_rows import isolated_hidden
from mtp_train.trunk import recurrent_kernels
from mtp_train.trunk.load import Trunk
from simulated_device import DEVICE
from simulated_jobs import everything_there
from stub_kernels import KERNELS
from tiny import CACHE_KINDS, VOCAB_SIZE, tiny_head, tiny_trunk

CHUNK = 8
# Three chunks; as many and one token, which runs in the kernel of single tokens; less than a chunk.
LENGTHS = (3 * CHUNK, 3 * CHUNK + 1, 5)
DOCUMENT = [[0] * 5 + [1] * 3 + [2] * 2 + [-1] * 2, [0] * 12]


def tokens(num_tokens: int) -> Tensor:
    """Return a random row of tokens."""
    return torch.randint(VOCAB_SIZE, (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens))


def calls() -> list[Any]:
    """Return the distinct calls since the last time."""
    found = sorted(set(KERNELS.calls))
    KERNELS.calls.clear()
    return found


def texts(trunk: Trunk, drafting: HeadDrafting) -> list[list[int]]:
    """Return what the decoder says after prompts of these lengths."""
    decoder = SpeculativeDecoder(trunk, drafting, 2, (), max_batch=len(LENGTHS), prefill_chunk=CHUNK)
    requests = [Request(prompt_ids=tokens(length)[0].tolist(), max_new_tokens=4) for length in LENGTHS]
    return [list(result.token_ids) for result in decoder.decode(requests)]


def states(trunk: Trunk, chunk: int) -> Tensor:
    """Return the hidden states of a prompt that is prefilled in chunks."""
    device, num_tokens = trunk.lm_head_VD.device, LENGTHS[0]
    cache = WindowCache(trunk.config, num_rows=1, capacity=64, max_window=64)
    chunks = prefill_chunks(trunk, cache, slice(0, 1), tokens(num_tokens).to(device), chunk)
    with torch.inference_mode():
        return torch.cat([hidden_1TD.cpu() for hidden_1TD in chunks], dim=1).float()


def packed(trunk: Trunk) -> Tensor:
    """Return the trunk's states of packed documents."""
    device = trunk.lm_head_VD.device
    tokens_BT = torch.cat([tokens(12), tokens(12).flip(1)]).to(device)
    return isolated_hidden(trunk, tokens_BT, torch.tensor(DOCUMENT, device=device)).cpu()


def of_kind(kind: str, device: torch.device, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a kind of layer does in bf16, on the CPU and on the device, without kernels and with them."""
    trunk = tiny_trunk(CACHE_KINDS[kind]).bfloat16()
    head = tiny_head(trunk).bfloat16()
    found: dict[str, Any] = {"texts": [texts(trunk, HeadDrafting(head))], "packed": []}
    trunk, head = trunk.to(device), head.to(device)
    # As a device is seen that the packages have no kernels for.
    with patch.context() as without:
        without.setattr(recurrent_kernels, "KERNEL_DEVICES", ())
        found["texts"].append(texts(trunk, HeadDrafting(head)))
        found["packed"].append(packed(trunk).tolist())
    found["without"] = calls()
    found["texts"].append(texts(trunk, HeadDrafting(head)))
    found["decoded"] = calls()
    found["packed"].append(packed(trunk).tolist())
    found["trained"] = calls()
    whole, in_chunks = states(trunk, LENGTHS[0]), states(trunk, CHUNK)
    KERNELS.forgets = True
    forgotten = states(trunk, CHUNK)
    KERNELS.forgets = False
    unit = torch.finfo(torch.bfloat16).eps * float(whole.abs().max())
    found["apart"], found["forgotten"] = (float((one - whole).abs().max()) / unit for one in (in_chunks, forgotten))
    calls()
    states(trunk.float(), CHUNK)
    found["in_fp32"] = calls()
    return found


def refusals(device: torch.device) -> list[str]:
    """Return what the stand-in of the chunked rule says of wrong arguments, one at a time."""
    rule = stub_kernels.PLACES["fla.ops.gated_delta_rule"][0]

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.rand(shape).to(dtype).to(device)

    right = {
        **{"q": drawn(1, 4, 2, 8), "k": drawn(1, 4, 2, 8), "v": drawn(1, 4, 4, 6)},
        **{"g": -drawn(1, 4, 4, dtype=torch.float32), "beta": drawn(1, 4, 4)},
        **{"initial_state": drawn(1, 4, 8, 6, dtype=torch.float32), "use_qk_l2norm_in_kernel": True},
    }
    rule(**right)
    wrong: list[dict[str, Any]] = [
        {"q": right["q"].transpose(1, 2)},
        {"q": right["q"].float()},
        {"k": right["k"].cpu()},
        {"v": drawn(1, 4, 3, 6)},
        {"g": drawn(1, 4, 4, 8)},
        {"initial_state": right["initial_state"].bfloat16()},
        {"initial_state": drawn(1, 4, 6, 8, dtype=torch.float32).mT},
        {"use_qk_l2norm_in_kernel": False},
        {"cu_seqlens": torch.tensor([0, 4]).to(device)},
        {"head_first": False},
    ]
    said = []
    for one in wrong:
        try:
            rule(**{**right, **one})
        except (TypeError, ValueError) as error:
            said.append(str(error))
    calls()
    return said


def main() -> None:
    """Run the kinds that the command line names."""
    stub_kernels.install()
    with everything_there() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent_kernels, "KERNEL_DEVICES", (DEVICE,))
        found = {kind: of_kind(kind, device, patch) for kind in sys.argv[1:]}
        said = refusals(device)
    print(json.dumps({"kinds": found, "refused": said}))


if __name__ == "__main__":
    main()
