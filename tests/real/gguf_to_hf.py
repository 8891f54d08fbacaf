#!/usr/bin/env python3
"""Turn a Llama-type GGUF file into a Hugging Face folder in bf16, which vLLM reads. Runs in vLLM's environment.

usage: gguf_to_hf.py FILE.gguf FOLDER      needs torch, transformers, gguf, accelerate, safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    found = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**found, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(**found).save_pretrained(folder)

    # save_pretrained() refuses a model that came from GGUF, so its tensors are written here.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    # The configuration last: serve_vllm.py takes it for the sign that the folder is whole.
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config.update(architectures=["LlamaForCausalLM"], dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config, default=str))


if __name__ == "__main__":
    main()
