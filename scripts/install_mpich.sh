#!/usr/bin/env bash
# Installs MPICH once from PyPI into a folder under target/, and prints the path of its mpiexec: for tests of ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=target/mpich
if [ ! -x "$folder/bin/mpiexec" ]; then
    python3 -m venv "$folder" >&2
    "$folder/bin/pip" install --quiet --retries 3 --timeout 30 mpich >&2
fi
echo "$PWD/$folder/bin/mpiexec"
