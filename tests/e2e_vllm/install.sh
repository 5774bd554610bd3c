#!/bin/bash
# Make the environment with a real vLLM for the CPU, and print its folder. It is named after a hash
# of the lock file, so that another lock file makes another one; one that is there is used again.
#
#     install.sh FOLDER-OF-ENVIRONMENTS
set -euo pipefail
lock="$(dirname "$0")/requirements.lock"
target="$1/$(sha256sum "$lock" | cut -c1-16)"
if ! [ -e "$target/ready" ]; then
    rm -rf "$target"
    mkdir -p "$1"
    python3 -m venv "$target" >&2
    # The lock names every package, so that nothing has to be resolved.
    "$target/bin/pip" install --quiet --no-deps --no-cache-dir -r "$lock" >&2
    "$target/bin/python" -c 'import torch; assert not torch.cuda.is_available()' >&2
    touch "$target/ready"
fi
echo "$target"
