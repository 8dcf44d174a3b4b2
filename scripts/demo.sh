#!/usr/bin/env bash
# The demo, from nothing: sets itself up (see _setup.sh), then runs `python -m mxmoe demo` with the arguments given.
#   scripts/demo.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
setup demo
exec "$PYTHON" -m mxmoe demo "$@"
