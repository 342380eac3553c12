#!/usr/bin/env bash
# Run the fast tests with the oldest transformers that pyproject.toml allows, in ./.venv-oldest, which is created.
# Families that need a newer one are skipped, as their records declare.
#
#   scripts/test_oldest.sh              the fast tier
#   scripts/test_oldest.sh tests/unit   further arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

home=$PWD/.venv-oldest
if [ ! -x "$home/bin/python" ]; then
    python3 -m venv "$home"
fi
oldest=$(grep -o '"transformers>=[0-9.]*' pyproject.toml | head -1 | sed 's/.*>=//')
"$home/bin/python" -m pip install -qq --disable-pip-version-check --editable ".[dev]" "transformers==$oldest.0"
# Deprecations inside the old transformers do not count as errors.
exec "$home/bin/python" -m pytest -W default -m "not slow and not gpu" "$@"
