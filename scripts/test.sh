#!/usr/bin/env bash
# Check the repository: ruff, mypy, then the tests.
#
#   scripts/test.sh                     the fast tier
#   scripts/test.sh --all               every tier; tests that need an accelerator are skipped by name where there is none
#   scripts/test.sh [--all] tests/unit  further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

tier="not slow and not gpu"
extras="[dev]"
if [ "${1:-}" = --all ]; then
    tier=""
    if [ "$(uname)" = Linux ]; then
        extras="[dev,deepspeed]"
    fi
    shift
fi
# Run test files in parallel, one per core. Tests of one file stay in one process, which shares their fixtures. The slow
# tier measures time, and GPU tests share a device: both run in one process.
workers=()
if [ -n "$tier" ] && [ $# -eq 0 ]; then
    workers=(-n auto --maxprocesses 8 --dist loadfile)
fi
use_environment "$extras"

# Run every check, also after a failure. pytest is last, so that its summary is the last line.
failed=""
check() {
    echo "== $1"
    "${@:2}" || failed="$failed${failed:+, }$1"
}
check "ruff check" python -m ruff check .
check "ruff format" python -m ruff format --check --quiet .
check mypy python -m mypy
check pytest python -m pytest -m "$tier" "${workers[@]+"${workers[@]}"}" "$@"

if [ -n "$failed" ]; then
    echo "failed: $failed" >&2
    exit 1
fi
