"""Conversion of real checkpoints into gated ones."""

from .checkpoint import ConversionReport, convert_checkpoint


__all__ = ["ConversionReport", "convert_checkpoint"]
