#!/usr/bin/env bash
# Compiles every CUDA kernel for every GPU architecture that is meant to run it, without a GPU.
# NVRTC is installed once from PyPI into a folder under target/; if that fails, the script says so and does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=target/nvrtc
if [ ! -d "$folder/lib" ]; then
    if ! python3 -m venv "$folder" || ! "$folder/bin/pip" install --quiet --retries 1 --timeout 30 nvidia-cuda-nvrtc; then
        rm -rf "$folder"
        echo "kernels not compiled: NVRTC could not be installed with pip" >&2
        exit 0
    fi
fi
# All of the workspace, as the gate has built it: a single crate would be rebuilt with other features.
VIRTUAL_ENV="$PWD/$folder" cargo test --locked --workspace --test it -- --ignored kernels_compile
