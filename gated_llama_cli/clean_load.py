"""
Run as a script by `gated-llama demo`: loads a folder as somebody would who never installed this package.

Arguments: folder, file with `ids`, file for `logits` (both safetensors).
"""

import sys


class Hidden:
    """An import hook that refuses the package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gated_llama":
            raise ModuleNotFoundError(f"{name} is hidden from this process", name=name)


def main(folder: str, ids_file: str, logits_file: str):
    sys.meta_path.insert(0, Hidden())
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.inference_mode():
        save_file({"logits": model(**load_file(ids_file), use_cache=False).logits}, logits_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
