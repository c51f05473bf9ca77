#!/usr/bin/env bash
# Usage: ruler.sh OUT [LIMIT] [LENGTHS...]
#
# RULER before and after YaRN x2, on the folders that run.sh made in OUT. Can be started again like run.sh.
set -euo pipefail
out=$1 limit=${2:-5}
lengths=("${@:3}")
[ ${#lengths[@]} -gt 0 ] || lengths=(1024 2048 4096)
python -m gated_llama.evaluation.ruler --base "$out/base" --gated "$out/gated" --factor 2 \
  --lengths "${lengths[@]}" --tasks niah_single_1 ruler_vt ruler_cwe ruler_fwe \
  --out "$out/ruler" --limit "$limit" --use_cache "$out/answers" --device cpu --model_args dtype=float32
