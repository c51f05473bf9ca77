"""
Conversion of checkpoints: into gated ones, and from gated ones to what engines serve.

convert_checkpoint("HuggingFaceTB/SmolLM2-135M", "gated")
export_checkpoint("gated", "served", target="qwen3_5_text")
"""

from typing import TYPE_CHECKING, Any

from .checkpoint import ConversionReport, convert_checkpoint


if TYPE_CHECKING:
    from .export import ExportReport, export_checkpoint


__all__ = ["ConversionReport", "ExportReport", "convert_checkpoint", "export_checkpoint"]


def __getattr__(name: str) -> Any:
    # Late, since the comparison after an export brings in modelling code of the library that converting needs not.
    if name in ("ExportReport", "export_checkpoint"):
        from . import export

        return getattr(export, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
