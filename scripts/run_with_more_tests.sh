#!/bin/sh
# Runs a program that cargo built, `.cargo/config.toml` names it. Many tests wait for processes that they started, so twice
# as many of them run at a time as there are cores.
: "${RUST_TEST_THREADS:=$((2 * $(nproc || echo 2)))}"
export RUST_TEST_THREADS
exec "$@"
