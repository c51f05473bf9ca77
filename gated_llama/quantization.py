"""
What a quantiser of Transformers is to leave alone in a gated model.

A list of one's own replaces the quantisers' default, which spares the output head, so a complete one names it too.
"""

# The output heads and the gates. Names are matched from their start or at their end, and torchao asks for names of
# tensors: it would not find a plain `g_proj` in `...self_attn.g_proj.weight`.
SKIP_MODULES = ["lm_head", "score", "qa_outputs", r".*\.g_proj"]
