#!/usr/bin/env bash
# Build the wheel and the source package of this commit into dist/, and run README's commands from the wheel alone.
#
#   scripts/release.sh          a trial of any commit
#   scripts/release.sh v0.1.0   a release: the tag is that of the version, and CHANGELOG.md has its date
#
# The wheel is built from the source package, so that nothing is missing in either. The commands run in an environment of
# its own outside of the clone; further arguments of pip for it, such as another index, come from PIP_* variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment "[dev]"

version=$(python -c 'import mtp_train; print(mtp_train.__version__)')
if [ $# -gt 0 ]; then
    if [ "$1" != "v$version" ]; then
        echo "$1: the package has version $version; expected the tag v$version. Correct __version__, or the tag." >&2
        exit 2
    fi
    if ! grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)" CHANGELOG.md; then
        echo "CHANGELOG.md: no '## $version (YYYY-MM-DD)'; expected the day of the release. Write it there." >&2
        exit 2
    fi
fi
rm -rf dist build
python -m build --no-isolation --outdir dist . > /dev/null
rm -rf build

away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
python -m venv "$away/env"
"$away/env/bin/python" -m pip install -q --disable-pip-version-check "dist/mtp_train-$version-py3-none-any.whl"
wheel=$PWD/dist
cd "$away"
PATH=$away/env/bin:$PATH
mtp-train --version
mtp-train demo demo
mtp-train inspect demo/finetune --base demo/base
settings=(data.regenerate.max_prompts=64 train.max_steps=10 evaluate.prompts=8)
mtp-train rescue demo/finetune --from demo/base --data demo/prompts.jsonl --out rescued --set "${settings[@]}"
mtp-train generate rescued --chat --prompt "Describe os.path.join(a, *p)" --max-new-tokens 32
echo "built and run: $(ls "$wheel" | tr '\n' ' ')"
