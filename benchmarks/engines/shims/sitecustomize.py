"""
On the path of vLLM's processes: declares two operators of torchvision before anything imports it.

The wheel on PyPI is a CUDA build whose library does not load beside a CPU build of torch, and its Python part then
fails on operators that nobody declared ("operator torchvision::nms does not exist"). No model here needs them.
"""

import importlib.util
from importlib.metadata import PackageNotFoundError, version


try:
    needed = importlib.util.find_spec("torch") is not None and "+cpu" not in version("torchvision")
except PackageNotFoundError:
    needed = False

if needed:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
