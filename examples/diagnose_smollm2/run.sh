#!/usr/bin/env bash
# Diagnoses SmolLM2-135M-Instruct (de-quantised to float32) and leaves the JSON and the pictures in results/.
set -euo pipefail
cd "$(dirname "$0")"
source=$(python -c "from gated_llama_cli.demo import find_smollm2; print(find_smollm2())")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd "$(dirname "$source")" && gated-llama diagnose "$(basename "$source")" --bos '<|endoftext|>' --tokens "${TOKENS:-2048}" --context 512 --out "$scratch/report" "$@")
mkdir -p results
cp "$scratch"/report/report.json "$scratch"/report/*.png results/
