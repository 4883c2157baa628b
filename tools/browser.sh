#!/usr/bin/env bash
# See to it that the browser tests find Chromium (or Chrome) and its driver; install them where that is ours to do.
set -euo pipefail

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
found() { browser >/dev/null && command -v chromedriver >/dev/null; }

if found; then
    say "browser: $(browser), $(command -v chromedriver)"
    exit 0
fi
if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing the system packages chromium and chromium-driver"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-liberation >/dev/null || true
    found && exit 0
fi
cat >&2 <<'TEXT'
error: the browser tests need Chromium (or Chrome) and chromedriver, and they are not here.
As root on Debian: apt install chromium chromium-driver
Elsewhere: install Chrome and the chromedriver of the same version so that both are on PATH.
Everything but the browser tests: make check
TEXT
exit 1
