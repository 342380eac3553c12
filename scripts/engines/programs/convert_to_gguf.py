"""Run llama.cpp's converter on a tokenizer that it does not know: ``PYTHON convert_to_gguf.py CONVERTER PRE ...``.

``CONVERTER`` is ``convert_hf_to_gguf.py`` in llama.cpp's folder. It recognises tokenizers by a hash; ``PRE`` is the one
to take instead. All further arguments are the converter's. The interpreter needs torch, transformers, gguf and
sentencepiece.
"""

import runpy
import sys
from pathlib import Path

converter, pre = sys.argv[1:3]
sys.argv = [converter, *sys.argv[3:]]
sys.path.insert(0, str(Path(converter).resolve().parent))

from conversion.base import TextModel  # noqa: E402 - from the added path
from conversion.gemma import Gemma4Model  # noqa: E402

# A Gemma 4 model of ours has a tokenizer like the others.
Gemma4Model.set_vocab = TextModel._set_vocab_gpt2
TextModel.get_vocab_base_pre = lambda *_: pre
runpy.run_path(converter, run_name="__main__")
