# Sourced by demo.sh and test.sh. `setup EXTRA [FALLBACK]` sets PYTHON to an interpreter that has the dependencies of
# that extra of pyproject.toml, and does the least that is needed:
#
#   1. python3 has everything            -> python3 as it is, nothing is installed
#   2. python3 has a suitable torch      -> a venv on top of it (--system-site-packages), only what is missing
#   3. otherwise                         -> a venv with torch (CPU build or CUDA build) and the rest
#
# A second run finds the venv's stamp and takes a moment. Where nothing can be installed, FALLBACK (a smaller extra) will do.
#
#   MXMOE_VENV    where the venv goes             (default: .venv in the repository)
#   MXMOE_TORCH   the torch to install            (default: torch==2.13.0; torch>=2.11 where there is an NVIDIA GPU)
#   MXMOE_PYTHON  use this interpreter as it is, install nothing

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false
VENV=${MXMOE_VENV:-$ROOT/.venv}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

missing() { "$1" "$ROOT/scripts/_requirements.py" "$2" 2>/dev/null || echo "a Python that can read pyproject.toml"; }

# Metadata can lie (a broken install); torch must really import.
has_torch() {
    "$1" -c 'import torch, sys; v = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(v < (2, 11))' >/dev/null 2>&1
}

find_python() {
    local p
    for p in python3 python3.12 python3.11 python3.13 python; do
        if command -v "$p" >/dev/null 2>&1 &&
            "$p" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 15)))' >/dev/null 2>&1; then
            command -v "$p"
            return
        fi
    done
    die "no Python 3.11 or newer found; install one, or name it with MXMOE_PYTHON"
}

pip_install() {
    local quiet=-q
    [ -t 2 ] && quiet=
    "$VENV/bin/python" -m pip install --disable-pip-version-check $quiet "$@" >&2
}

make_venv() { # make_venv PYTHON [--system-site-packages]
    if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    say "creating $VENV with $1"
    local base=$1
    shift
    "$base" -m venv --clear "$@" "$VENV" >&2 ||
        die "'$base -m venv' failed. On Debian or Ubuntu: apt-get install python3-venv; or set MXMOE_PYTHON"
}

# The rest must never pull another torch: pin what is installed, and triton if torch brought one.
install_missing() { # install_missing EXTRA
    local constraints=$VENV/constraints.txt want
    "$VENV/bin/python" - >"$constraints" <<'PY'
from importlib import metadata
print("torch==" + metadata.version("torch"))
try:
    print("triton==" + metadata.version("triton"))
except metadata.PackageNotFoundError:
    print("triton==3.6.0")
PY
    mapfile -t want < <(missing "$VENV/bin/python" "$1")
    [ ${#want[@]} -eq 0 ] && return 0
    say "installing ${want[*]}"
    pip_install -c "$constraints" "${want[@]}"
}

setup() { # setup EXTRA [FALLBACK]
    local extra=$1 fallback=${2:-} base stamp
    if [ -n "${MXMOE_PYTHON:-}" ]; then
        PYTHON=$MXMOE_PYTHON
        has_torch "$PYTHON" || die "MXMOE_PYTHON=$PYTHON cannot import torch >= 2.11"
        return
    fi
    base=$(find_python) || exit 1

    if [ -z "$(missing "$base" "$extra")" ] && has_torch "$base"; then
        PYTHON=$base
        return
    fi

    stamp=$VENV/.ready-$extra-$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/_setup.sh" | cksum | cut -d' ' -f1)
    if [ -e "$stamp" ] && [ -x "$VENV/bin/python" ]; then
        PYTHON=$VENV/bin/python
        return
    fi

    if has_torch "$base"; then
        say "using the torch of $base"
        make_venv "$base" --system-site-packages
    else
        make_venv "$base"
        if ! has_torch "$VENV/bin/python"; then
            local torch=${MXMOE_TORCH:-}
            if [ -z "$torch" ]; then
                torch="torch==2.13.0"
                if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then torch="torch>=2.11"; fi
            fi
            say "installing $torch (once; this takes a minute or more)"
            pip_install "$torch" numpy || die "could not install $torch"
        fi
    fi

    if install_missing "$extra"; then
        touch "$stamp"
        PYTHON=$VENV/bin/python
    elif [ -n "$fallback" ] && has_torch "$base" && [ -z "$(missing "$base" "$fallback")" ]; then
        say "nothing could be installed: going on with $base, which lacks: $(missing "$base" "$extra" | tr '\n' ' ')"
        PYTHON=$base
    elif [ -n "$fallback" ] && [ -z "$(missing "$VENV/bin/python" "$fallback")" ]; then
        say "going on without: $(missing "$VENV/bin/python" "$extra" | tr '\n' ' ')"
        PYTHON=$VENV/bin/python
    else
        die "could not install: $(missing "$VENV/bin/python" "${fallback:-$extra}" | tr '\n' ' ')"
    fi
}
