#!/usr/bin/env bash
# Run the fast tests with the oldest torch and transformers that pyproject.toml allows, in ./.venv-oldest, which is
# created. On Linux this torch may be a CUDA build of several GB. Families that need a newer transformers are skipped,
# as their records declare.
#
#   scripts/test_oldest.sh              the fast tier
#   scripts/test_oldest.sh tests/unit   further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

home=$PWD/.venv-oldest
if [ ! -x "$home/bin/python" ]; then
    python3 -m venv "$home"
fi
oldest() {
    grep -o "\"$1>=[0-9.]*" pyproject.toml | head -1 | sed 's/.*>=//'
}
"$home/bin/python" -m pip install -qq --disable-pip-version-check --editable ".[dev]" \
    "torch==$(oldest torch).*" "transformers==$(oldest transformers).0"
# Deprecations inside the old packages do not count as errors.
exec "$home/bin/python" -m pytest -W default -m "not slow and not gpu" "$@"
