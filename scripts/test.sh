#!/usr/bin/env bash
# Check the repository: ruff, mypy, then the tests.
#
#   scripts/test.sh                     the fast tier
#   scripts/test.sh --all               every tier; tests that need an accelerator are skipped by name where there is none
#   scripts/test.sh [--all] tests/unit  anything further goes to pytest
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
# Whole files side by side, one a core: what a file prepares once is not prepared twice. The slow tier races a clock, and
# a device is not shared: both run alone.
workers=()
if [ -n "$tier" ] && [ $# -eq 0 ]; then
    workers=(-n auto --maxprocesses 8 --dist loadfile)
fi
use_environment "$extras"

# Every check runs, whatever the one before it said; pytest is last, so that its closing line is.
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
