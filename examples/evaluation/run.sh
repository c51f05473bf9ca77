#!/usr/bin/env bash
# Usage: run.sh SmolLM2.gguf DATA OUT [LIMIT]
#
# Compares SmolLM2-135M-Instruct with its identity retrofit. DATA holds `benchmarks` (data sets under their Hub ids) and
# `text` (<domain>/validation.jsonl). Every step can be interrupted and started again: answers are cached in OUT/answers,
# and a step whose report is there is skipped. Larger limits take over the answers of smaller ones; OPENINGS, GSM8K, MMLU and
# NOISE set those of the slow tasks.
set -euo pipefail
gguf=$1 data=$2 out=$3 limit=${4:-200}
openings=${OPENINGS:-6} gsm8k=${GSM8K:-20} mmlu=${MMLU:-3} noise=${NOISE:-20}
here=$(dirname "$0")
python "$here/prepare.py" "$gguf" "$out"

common=(--use_cache "$out/answers" --device cpu --data-root "$data/benchmarks" --data-root "$data/text")
common+=(--model_args dtype=float32)
quick=(hellaswag arc_easy piqa winogrande lambada_openai)

compare() {  # name, flags of `gated-llama eval`
  local report=$out/results/$1
  shift
  [ -f "$report/comparison.md" ] && return
  mkdir -p "$report"
  local start=$SECONDS
  gated-llama eval "$out/gated" --against "$out/base" "${common[@]}" --output_path "$report" "$@"
  echo $((SECONDS - start)) > "$report/seconds"
}

for task in "${quick[@]}"; do
  compare "$task-$limit" --tasks "$task" --limit "$limit" --batch_size 8 --noise-floor off
done
compare "mmlu-$mmlu" --tasks mmlu --num_fewshot 0 --limit "$mmlu" --batch_size 8 --noise-floor off
compare "gsm8k-$gsm8k" --tasks gsm8k --limit "$gsm8k" --noise-floor off
# Probes do not see what a cache answers, so this step has one of its own.
compare probes-2 --tasks hellaswag,perplexity_openings --limit 2 --noise-floor off --probes gates,sink \
  --use_cache "$out/measured"
compare "openings-$openings" --tasks perplexity_openings --limit "$openings" --batch_size 1 --noise-floor off \
  --bos "auto,<|endoftext|>"
compare "noise-$noise" --tasks hellaswag,piqa --limit "$noise" --batch_size 8

# The same answers again, from the cache, into the metadata of the model card.
gated-llama eval "$out/gated" "${common[@]}" --tasks "${quick[@]}" --limit "$limit" --batch_size 8 --card
python "$here/summary.py" "$out/results" "$out/summary"
