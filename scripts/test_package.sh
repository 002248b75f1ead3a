#!/usr/bin/env bash
# Packs the program, installs the wheel into a clean environment, plans a run with it and tests the Python package.
# If pip cannot install maturin, the script says so and does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=target/package-tools
if [ ! -x "$tools/bin/maturin" ]; then
    if ! python3 -m venv "$tools" || ! "$tools/bin/pip" install --quiet --retries 1 --timeout 30 'maturin>=1.9,<2'; then
        rm -rf "$tools"
        echo "not packed: maturin could not be installed with pip" >&2
        exit 0
    fi
fi
folder=target/package
scripts/package.sh --profile dev "$folder"
(cd "$folder" && sha256sum --check --quiet SHA256SUMS)

rm -rf target/package-venv
python3 -m venv target/package-venv
target/package-venv/bin/pip install --quiet --no-index "$folder"/smidgen-*.whl
target/package-venv/bin/smidgen plan recipes/qwen2.5-7b-6gib.toml \
    model.path=recipes/shapes/qwen2.5-7b-instruct memory.profile=rtx-4090 --json | python3 -c '
import json, sys
plan = json.load(sys.stdin)
assert plan["fits"] and plan["peak_bytes"] <= plan["budget_bytes"], plan["peak_bytes"]
'
target/package-venv/bin/python python/tests/test_smidgen.py

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xzf "$folder"/smidgen-*.tar.gz -C "$work"
cd "$work"/smidgen-*
for page in smidgen smidgen-plan smidgen-train; do grep -q "^.TH" "man/$page.1"; done
for shell in bash zsh fish; do grep -q smidgen "completions/smidgen.$shell"; done
./smidgen --version
