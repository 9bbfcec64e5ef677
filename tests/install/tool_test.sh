#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tool_test.sh CMAKE BUILD_DIR WORK_DIR LIBDIR
# Installs the build; the tool must run from there, find the plugin, and have a manual page and a completion.
set -euo pipefail
cmake=$1 build=$2 work=$3 libdir=$4

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

rm -rf "$work"
"$cmake" --install "$build" --prefix "$work" >/dev/null
scsa=$work/bin/scsa
"$scsa" --version | grep -q '^scsa ' || fail "scsa --version"
[[ -f $work/$libdir/libggml-scsa.so ]] || fail "the plugin is not in $libdir"
"$scsa" exec -- printenv GGML_BACKEND_PATH | grep -qx "$work/$libdir/libggml-scsa.so" ||
  fail "scsa exec does not find the installed plugin"

# ---- manual page: what --help says of every command --------------------------------------------------------------------
page=$work/share/man/man1/scsa.1
plain=$(sed 's/\\-/-/g; s/\\fB//g; s/\\fI//g; s/\\fR//g' "$page")
for section in NAME SYNOPSIS DESCRIPTION OPTIONS COMMANDS ENVIRONMENT 'EXIT STATUS' EXAMPLES; do
  grep -qx "\.SH $section" "$page" || fail "the manual page has no section $section"
done
n_options=0
for command in run calibrate capture 'bench decode' 'bench prefill' 'bench quality' exec; do
  grep -qx "\.SS scsa $command" <<<"$plain" || fail "the manual page does not know scsa $command"
  # shellcheck disable=SC2086
  while read -r option; do
    [[ $option == --help ]] && continue
    n_options=$((n_options + 1))
    sed -n "/^\.SS scsa $command\$/,/^\.S[SH] /p" <<<"$plain" | grep -qE -- "(^|, )$option( |\$)" ||
      fail "the manual page does not know $option of scsa $command"
  done < <("$scsa" $command --help | sed -n '/^Options:/,/^[^ O]/p' | grep -oE '^ +(-[a-z],)?--[a-z-]+' | grep -oE -- '--[a-z-]+')
done
((n_options > 40)) || fail "only $n_options options found in the help texts"
if command -v groff >/dev/null; then
  warnings=$(groff -man -Tutf8 -ww -z "$page" 2>&1) || fail "groff cannot format the manual page"
  [[ -z $warnings ]] || fail "groff warns of the manual page: $warnings"
fi

# ---- completion --------------------------------------------------------------------------------------------------------
# complete EXPECTED WORD...: what the script offers for the last word, sorted, is EXPECTED.
complete_words() {
  local expected=$1
  shift
  local offered
  offered=$(cd "$work" && bash --norc -c '
    source share/bash-completion/completions/scsa
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _scsa
    printf "%s\n" "${COMPREPLY[@]}" | sort -u | paste -sd " "' completion "$@")
  [[ $offered == "$expected" ]] || fail "completion of '$*' offers '$offered', not '$expected'"
}
complete_words 'bench' scsa be
complete_words 'decode kernels prefill quality scaling' scsa bench ''
complete_words 'freerun' scsa eval ''
complete_words '--help -h' scsa bench -
complete_words '--preset' scsa run --pre
complete_words 'fast seed' scsa run --preset ''
complete_words 'seed' scsa bench decode --preset = s
complete_words 'auto' scsa exec --mode au
complete_words 'bin' scsa run -m bi
complete_words 'bin' scsa bench quality --capture bi
complete_words '' scsa run -n ''
complete_words '--tolerance' scsa bench decode -m bench --tol
complete_words 'sha256sum' scsa exec --stats -- sha256su
complete_words 'share' scsa exec -- llama-server -m sha
echo "the installed tool works"
