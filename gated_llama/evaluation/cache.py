"""Names for the harness's response cache, one for each model and way of running it."""

import hashlib
import json
from pathlib import Path

import torch

from .harness import GatedLlamaLM


# Views of a tensor's bits that can be summed exactly.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cache_name(path: str, model: GatedLlamaLM) -> str:
    """
    `path` with a suffix that depends on everything that an answer depends on but the harness's keys leave out.

    Its keys are the text of a request alone: under one name, a second model would be given the answers of the first.
    """
    described = {
        "weights": fingerprint(model.model),
        "config": {key: value for key, value in model.model.config.to_dict().items() if not key.startswith("_")},
        "source": model.pretrained if isinstance(model.pretrained, str) else None,
        "tokenizer": model.tokenizer.name_or_path,
        "beginning": (model.bos, model.prefix_token_id, model.add_bos_token),
        "length": (model.max_length, model.on_truncation),
        "batch_size": model.batch_size,
        "generation": (model.model.generation_config.to_dict() if model.model.can_generate() else None),
        "thinking": model.think_end_token,
        "precision": [str(dtype) for dtype in (model.model.dtype, model.softmax_dtype, model.mixed_precision_dtype)],
        "attention": str(model.model.config._attn_implementation),
    }
    digest = hashlib.sha256(json.dumps(described, default=str, sort_keys=True).encode()).hexdigest()[:12]
    return f"{Path(path)}-{digest}"


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> str:
    """Digest of names, shapes and the exact sums of the bits of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total = None if tensor.device.type == "meta" else int(bits(tensor).sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total};".encode())
    return digest.hexdigest()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    return (
        tensor.view(INTEGERS[tensor.element_size()])
        if tensor.ndim
        else tensor.reshape(1).view(INTEGERS[tensor.element_size()])
    )
