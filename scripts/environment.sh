# Sourced by the other scripts. After use_environment [EXTRAS], `python` is that of an environment with this repository
# installed as editable: the active environment, or else ./.venv, which is created.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' > /dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    echo "PATH: no Python 3.10 or newer; expected one. Install it, or activate an environment that has it." >&2
    return 1
}

# Print the directory of the active environment. conda's base does not count: it is shared by the whole machine.
active_environment() {
    if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        echo "$VIRTUAL_ENV"
    elif [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
        echo "$CONDA_PREFIX"
    fi
}

# Check whether this checkout is installed with at least these extras and its current pyproject.toml. If so, nothing is
# installed, and no network is needed.
is_installed() {
    local mark
    for mark in "$home/.mtp-train-installed${1%]}"*; do
        if [ -f "$mark" ] && [ "$(cat "$mark")" = "$version" ]; then
            python -c 'import importlib.metadata as m; m.version("mtp-train")' > /dev/null 2>&1
            return
        fi
    done
    return 1
}

use_environment() {
    local extras=${1:-} home python version
    home=$(active_environment)
    if [ -z "$home" ]; then
        home=$repository/.venv
        if ! "$home/bin/python" -m pip --version > /dev/null 2>&1; then
            echo "making $home" >&2
            python=$(find_python)
            "$python" -m venv --clear "$home"
        fi
    fi
    PATH=$home/bin:$PATH
    export PATH
    version="$repository $(cksum < "$repository/pyproject.toml")"
    if ! is_installed "$extras"; then
        echo "installing mtp-train$extras into $home (the first time takes some minutes)" >&2
        # In a terminal with pip's progress bars.
        python -m pip install $([ -t 2 ] || echo -qq) --disable-pip-version-check --editable "$repository$extras" >&2
        echo "$version" > "$home/.mtp-train-installed$extras"
    fi
}
