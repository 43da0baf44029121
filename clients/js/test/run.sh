#!/usr/bin/env bash
# Installs what the JavaScript client's tests need, from the package registries alone, and runs them in Node and in Chromium.
# PYTHON names a Python with burnish's test extras.
set -eu
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-python3}

if ! command -v npm >/dev/null || [ "$(node -p 'process.versions.node.split(".")[0]')" -lt 20 ]; then
    echo "The JavaScript client's tests need Node 20 or newer, with npm: install them (on Debian: nodejs and npm) and run this again." >&2
    exit 1
fi
npm ci --ignore-scripts --no-audit --no-fund
npm run --silent build

# Python gets the ONNX Runtime that Node has: bits are compared.
version=$(node -p 'require("onnxruntime-node/package.json").version')
if [ ! -d ".python/onnxruntime-$version.dist-info" ]; then
    rm -rf .python
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target .python "onnxruntime==$version"
fi
export PYTHONPATH="$PWD/.python${PYTHONPATH:+:$PYTHONPATH}"

if [ -z "${CHROMIUM:-}" ] && [ ! -x /usr/bin/chromium ]; then
    if command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ]; then
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends chromium
    else
        echo "The tests in a browser need Chromium: install it (on Debian: apt-get install chromium), or set CHROMIUM to its path." >&2
        exit 1
    fi
fi
BURNISH_CLIENT_FIXTURES=$(mktemp -d)
export BURNISH_CLIENT_FIXTURES
trap 'rm -rf "$BURNISH_CLIENT_FIXTURES"' EXIT
node --test --test-concurrency=1 --test-reporter=spec test/node/*.test.mjs test/browser/*.test.mjs
