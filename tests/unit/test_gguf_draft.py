"""An EAGLE-3 head for a trunk that is a GGUF file becomes a draft GGUF, as llama.cpp's converter writes one."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from draft_models import CHOSEN, NUM_LAYERS, DraftModelToWrite
from gguf_files import finish, metadata, values
from mtp_train import inspect
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.gguf.model_file import open_gguf, write_draft_gguf
from mtp_train.families import of_kind
from mtp_train.runs.display import quiet_progress
from mtp_train.runs.export import serves_of
from mtp_train.runs.run_directory import PROVENANCE_FILE
from runs import write_recipe
from tiny import family_of

TOKENS = ["a", "b", "c"]


def write_trunk(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(4, dtype=np.float32))
    finish(writer)
    return path


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Put the two halves of each head's rows in turns, by hand."""
    size = len(rows) // num_heads
    order = [
        head * size + half * size // 2 + row for head in range(num_heads) for row in range(size // 2) for half in (0, 1)
    ]
    return rows[order]


def test_a_draft_model_has_the_trunks_vocabulary_and_llama_cpps_order(tmp_path: Path) -> None:
    made = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    stored, config = made.write()
    trunk = open_gguf(write_trunk(tmp_path / "trunk.gguf"))
    out = tmp_path / "draft.gguf"
    write_draft_gguf(open_checkpoint(made.out), trunk, out, "f32", quiet_progress())
    reader = gguf.GGUFReader(out)
    told = metadata(reader)
    chosen = next(one for one in reader.tensors if one.name == "d2t")
    reader.tensors.remove(chosen)
    found = values(reader)
    assert told["general.architecture"] == "eagle3"
    assert told["tokenizer.ggml.tokens"] == TOKENS
    assert told["tokenizer.ggml.pre"] == "smollm"
    assert told["eagle3.target_layers"] == [2, NUM_LAYERS // 2, NUM_LAYERS - 3]
    assert told["eagle3.target_hidden_size"] == config["hidden_size"]
    assert told["eagle3.norm_before_residual"] is config["norm_before_residual"]
    assert told["eagle3.rope.dimension_count"] == config["head_dim"]
    # Whole token ids in place of offsets.
    assert chosen.data.tolist() == CHOSEN.tolist()
    wanted = {
        "fc.weight": stored["fc.weight"],
        "output_norm.weight": stored["norm.weight"],
        "output.weight": stored["lm_head.weight"],
        "blk.0.attn_norm.weight": stored["midlayer.input_layernorm.weight"],
        "blk.0.attn_norm_2.weight": stored["midlayer.hidden_norm.weight"],
        "blk.0.ffn_norm.weight": stored["midlayer.post_attention_layernorm.weight"],
        "blk.0.attn_q.weight": interleaved(stored["midlayer.self_attn.q_proj.weight"], config["num_attention_heads"]),
        "blk.0.attn_k.weight": interleaved(stored["midlayer.self_attn.k_proj.weight"], config["num_key_value_heads"]),
        "blk.0.attn_v.weight": stored["midlayer.self_attn.v_proj.weight"],
        "blk.0.attn_output.weight": stored["midlayer.self_attn.o_proj.weight"],
        **{f"blk.0.ffn_{part}.weight": stored[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")},
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(torch.tensor(found[name]), value.float()), name
    looked_at = inspect(out)
    assert str(looked_at.serves["llama.cpp"]).startswith(
        f"llama-server -m TRUNK.gguf -md {out} --spec-type draft-eagle3"
    )
    assert (looked_at.status, looked_at.cure) == ("healthy", None)


def test_a_run_on_a_gguf_file_is_told_to_export_one(tmp_path: Path) -> None:
    """The converter needs the trunk's checkpoint, which there is none of."""
    family = of_kind(family_of("llama"), "eagle3")
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    trunk = str(write_trunk(tmp_path / "trunk.gguf"))
    write_recipe(run_dir / "recipe.yaml", tmp_path, run_dir, model__trunk=trunk, head__kind="eagle3")
    # A recipe of the user's beside an output is none of a run.
    assert "convert_hf_to_gguf.py" in serves_of(run_dir / "export", family, 2)["llama.cpp"]
    (run_dir / PROVENANCE_FILE).write_text("{}")
    told = serves_of(run_dir / "export", family, 2)
    assert told["llama.cpp"] == (
        f"mtp-train export '{run_dir}' --out '{run_dir}-head' --gguf q8_0 && llama-server -m {trunk} "
        f"-md '{run_dir}-head'/eagle3-*.gguf --spec-type draft-eagle3 --spec-draft-n-max 2"
    )
    # The control: an export of any other place is of a checkpoint.
    assert "convert_hf_to_gguf.py" in serves_of(tmp_path / "export", family, 2)["llama.cpp"]
