#!/usr/bin/env bash
# Usage: run.sh WORK RECIPE [options of `gated-llama train`]
#
# Runs a recipe of this folder in WORK, which prepare.py made. It can be stopped at any point; the same command
# continues, and does nothing once the run is complete.
set -euo pipefail
[ $# -ge 2 ] || { echo "Usage: run.sh WORK RECIPE [options of \`gated-llama train\`]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
cd "$1"
recipe=$2
shift 2
config=$recipe.yaml
[ -f "$config" ] || config=$here/$recipe.yaml
exec gated-llama train "$config" "$@"
