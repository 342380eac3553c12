# Sourced by the scripts beside it. use_environment [EXTRAS] leaves `python` standing for an environment that holds this
# repository, installed editable: the active one, or ./.venv, which it makes where none is active.

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

# Print the directory of the active environment; conda's base counts as none, it is the machine's own.
active_environment() {
    if [ -x "${VIRTUAL_ENV:-}/bin/python" ]; then
        echo "$VIRTUAL_ENV"
    elif [ -x "${CONDA_PREFIX:-}/bin/python" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
        echo "$CONDA_PREFIX"
    fi
}

# The stamp names the checkout and its pyproject.toml, so that a second run needs no network and no pip.
is_installed() {
    [ -f "$1" ] && [ "$(cat "$1")" = "$2" ] &&
        python -c 'import importlib.metadata as m; m.version("mtp-train")' > /dev/null 2>&1
}

use_environment() {
    local extras=${1:-} home stamp wanted
    home=$(active_environment)
    if [ -z "$home" ]; then
        home=$repository/.venv
        if ! "$home/bin/python" -m pip --version > /dev/null 2>&1; then
            echo "making $home" >&2
            "$(find_python)" -m venv --clear "$home"
        fi
    fi
    PATH=$home/bin:$PATH
    export PATH
    stamp=$home/.mtp-train-installed$extras
    wanted="$repository $(cksum < "$repository/pyproject.toml")"
    if ! is_installed "$stamp" "$wanted"; then
        echo "installing mtp-train$extras into $home (the first time takes some minutes)" >&2
        python -m pip install -qq --disable-pip-version-check --editable "$repository$extras"
        echo "$wanted" > "$stamp"
    fi
}
