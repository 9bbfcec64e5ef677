# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034
#
# Sourced by every script: messages, the folders, and running a long command with a log.

# shellcheck source=scripts/pins.sh
source "$(dirname "${BASH_SOURCE[0]}")/pins.sh"

QUIET=0

say() { if ((!QUIET)); then printf '%s\n' "$*"; fi; }
warn() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() {
  warn "$*"
  exit 1
}

# Twelve hex digits that differ between CPUs for which a native build differs.
cpu_key() {
  {
    grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true
    uname -m
  } | sha256sum | cut -c1-12
}

SCSA_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CPU_KEY=$(cpu_key)

# The same rule as cmake/ScsaPaths.cmake.
CACHE=${SCSA_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:?HOME is not set; set SCSA_CACHE_DIR to a folder for downloads}/.cache}/scsa}
if [[ $CACHE != /* ]]; then CACHE=$PWD/$CACHE; fi
DOWNLOAD_DIR=$CACHE/downloads
SOURCE_DIR=$CACHE/src
MODEL_DIR=$CACHE/models
TEXT_DIR=$CACHE/texts
STATE_DIR=$CACHE/states
STAMP_DIR=$CACHE/stamps
LOG_DIR=$CACHE/logs
LLAMA_SOURCE=$SOURCE_DIR/$LLAMA_ARCHIVE_ROOT/$LLAMA_SUBDIR
LLAMA_BUILD=$CACHE/llama.cpp-$CPU_KEY
LLAMA_OTHER_BUILDS=$CACHE/versions-$CPU_KEY
# Apart for each CPU, for ccache takes -march=native literally.
LLAMA_CCACHE=$CACHE/ccache-$CPU_KEY
# Clones in other folders share what ccache holds: paths below the clone count relative to it.
export CCACHE_BASEDIR=$SCSA_ROOT CCACHE_NOHASHDIR=1
TEXT_FILE=$TEXT_DIR/perl.txt

# python_environment: sets `python` to the interpreter of a virtual environment with what builds and tests the Python
# package, and with llama-cpp-python's own Python code on the libraries of scripts/setup. Makes it where it is missing.
python_environment() {
  local base candidate version venv stamp site
  # One that can make virtual environments and has the headers for extension modules.
  for candidate in python3 /usr/bin/python3; do
    if "$candidate" -c 'import ensurepip, os, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' >/dev/null 2>&1; then
      base=$candidate
      break
    fi
  done
  [[ -n ${base-} ]] || die "no python3 with venv and headers; on Debian: apt-get install python3-venv python3-dev"
  version=$("$base" -c 'import platform; print(platform.python_version())')
  venv=$CACHE/python-$version
  python=$venv/bin/python
  stamp="$version ${PYTHON_PACKAGES[*]} $LLAMA_PACKAGE==$LLAMA_VERSION"
  if [[ -x $python && -f $STAMP_DIR/python-$version && $(<"$STAMP_DIR/python-$version") == "$stamp" ]]; then return; fi
  rm -rf "$venv"
  "$base" -m venv "$venv"
  run_logged "$LOG_DIR/python.log" "Installing Python packages" \
    "$python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "${PYTHON_PACKAGES[@]}"
  # llama-cpp-python without building llama.cpp a second time.
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  cp -r "$SOURCE_DIR/$LLAMA_ARCHIVE_ROOT/llama_cpp" "$site/"
  rm -rf "$site/llama_cpp/lib"
  ln -s "$LLAMA_BUILD/bin" "$site/llama_cpp/lib"
  printf '%s' "$stamp" >"$STAMP_DIR/python-$version"
}

jobs() { nproc 2>/dev/null || echo 2; }

# run_logged LOG WHAT COMMAND...: on a terminal the command shows its own progress. Otherwise its output goes to LOG, a
# line a minute tells that it is alive, and a failure shows the end of the log.
run_logged() {
  local log=$1 what=$2
  shift 2
  mkdir -p "$(dirname "$log")"
  # The lock of set-up (descriptor 9) must not outlive it in a child.
  if ((!QUIET)) && [[ -t 1 ]]; then
    say "$what"
    "$@" 9>&- || die "$what: failed"
    return
  fi
  say "$what (log: $log)"
  local heartbeat status=0 minute=0
  (while sleep 60 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    minute=$((minute + 1))
    say "  $minute min: $(tail -n 1 "$log" | cut -c1-110)"
  done) 9>&- &
  heartbeat=$!
  "$@" >"$log" 2>&1 9>&- || status=$?
  kill "$heartbeat" 2>/dev/null || true
  if ((status != 0)); then
    tail -n 40 "$log" >&2
    die "$what: failed; the whole log is $log"
  fi
}
