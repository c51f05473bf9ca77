"""The two models of this example: SmolLM2-135M-Instruct as it is, and the same with gates that change nothing."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gated_llama.convert import convert_checkpoint


def main(gguf: Path, out: Path) -> None:
    """Writes `out/base` and `out/gated` from a .gguf file, in float32; what is there already stays."""
    if not (out / "base").is_dir():
        options = {"gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
        model.config.__dict__.pop("quantization_config", None)  # weights are de-quantised; it would refuse to save
        model.hf_quantizer = None
        model.save_pretrained(out / "base.partial")
        AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(out / "base.partial")
        (out / "base.partial").rename(out / "base")
    if not (out / "gated").is_dir():
        convert_checkpoint(gguf, out / "gated", granularity="headwise")
    print(f"{out / 'base'}\n{out / 'gated'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
