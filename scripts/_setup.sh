# Sourced by demo.sh and test.sh. `setup EXTRA [FALLBACK]` sets PYTHON to an interpreter that has the dependencies of
# that extra of pyproject.toml, and does the least that is needed:
#
#   1. python3 has everything            -> python3 as it is, nothing is installed
#   2. python3 has a suitable torch      -> a venv that sees its packages; only what is missing is installed
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

make_venv() { # make_venv PYTHON
    if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    say "creating $VENV with $1"
    "$1" -m venv --clear "$VENV" >&2 && return
    say "'$1 -m venv' failed. On Debian or Ubuntu: apt-get install python3-venv; or set MXMOE_PYTHON"
    return 1
}

# Let the venv see what PYTHON has installed. --system-site-packages would not: where PYTHON lives in a venv itself, that
# option shows the interpreter behind it.
see_packages_of() { # see_packages_of PYTHON
    local site
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$1" -c 'import sys
print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' >"$site/_base_packages.pth"
}

# The rest must never pull another torch: pin what is installed, and triton if torch brought one.
install_missing() { # install_missing EXTRA [PIP OPTIONS...]
    local constraints=$VENV/constraints.txt requirement want=()
    "$VENV/bin/python" - >"$constraints" <<'PY'
from importlib import metadata
print("torch==" + metadata.version("torch"))
try:
    print("triton==" + metadata.version("triton"))
except metadata.PackageNotFoundError:
    print("triton==3.6.0")
PY
    while IFS= read -r requirement; do want+=("$requirement"); done < <(missing "$VENV/bin/python" "$1")
    [ ${#want[@]} -eq 0 ] && return 0
    say "installing ${want[*]}"
    pip_install -c "$constraints" "${@:2}" "${want[@]}"
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
        # Few retries: this may be a machine with no network, where FALLBACK does.
        if make_venv "$base" && see_packages_of "$base" && install_missing "$extra" --retries 1 --timeout 15; then
            touch "$stamp"
            PYTHON=$VENV/bin/python
        elif [ -n "$fallback" ] && [ -z "$(missing "$base" "$fallback")" ]; then
            say "nothing could be installed: going on with $base, without $(missing "$base" "$extra" | tr '\n' ' ')"
            PYTHON=$base
        else
            die "could not install $(missing "$base" "${fallback:-$extra}" | tr '\n' ' ')"
        fi
        return
    fi

    make_venv "$base" || exit 1
    if ! has_torch "$VENV/bin/python"; then
        local torch=${MXMOE_TORCH:-}
        if [ -z "$torch" ]; then
            torch="torch==2.13.0"
            if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then torch="torch>=2.11"; fi
        fi
        say "installing $torch (once; this takes a minute or more)"
        pip_install "$torch" numpy || die "could not install $torch"
    fi
    if install_missing "$extra"; then
        touch "$stamp"
    elif [ -n "$fallback" ] && [ -z "$(missing "$VENV/bin/python" "$fallback")" ]; then
        say "going on without $(missing "$VENV/bin/python" "$extra" | tr '\n' ' ')"
    else
        die "could not install $(missing "$VENV/bin/python" "${fallback:-$extra}" | tr '\n' ' ')"
    fi
    PYTHON=$VENV/bin/python
}
