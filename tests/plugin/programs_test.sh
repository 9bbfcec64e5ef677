#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The plugin in the pinned llama.cpp's own programs, unmodified. Usage: programs_test.sh CASE PLUGIN BIN_DIR MODEL_DIR
set -uo pipefail

case_name=$1
plugin=$2
bin=$3
model=$4/SmolLM2-135M-Instruct.Q4_1.gguf
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=passive  # so that a busy machine does not slow the tests down
unset LD_PRELOAD GGML_BACKEND_PATH "${!SCSA_@}"

fail() {
  echo "FAILED: $1" >&2
  for file in "$work"/*; do
    echo "--- $(basename "$file")" >&2
    tail -n 30 "$file" >&2
  done
  exit 1
}
need_program() { [ -x "$bin/$1" ] || fail "$bin/$1 is missing: build target $1 of llama.cpp"; }
need_model() { [ -f "$model" ] || fail "$model is missing: scripts/setup gets it"; }
expect() { grep -qE -- "$2" "$work/$1" || fail "no line like '$2' in $1"; }
expect_not() { ! grep -qE -- "$2" "$work/$1" || fail "unexpected line like '$2' in $1"; }
# Attention calls that the summary at exit reports.
calls() { sed -nE 's/.*attention calls ([0-9]+).*/\1/p' "$work/$1" | tail -n 1; }
expect_calls() { [ "$(calls "$1")" -gt 0 ] 2>/dev/null || fail "the summary in $1 shows no attention calls"; }

load_line='^scsa [0-9.]+: [A-Z0-9_]+, mode (auto|exact|off|limit), preset [a-z]+, tolerance [0-9.]+$'
prompt() {
  local i
  for i in $(seq 1 45); do
    echo "Entry $i: the lighthouse keeper wrote down the weather, the ships and the colour of the sea."
  done
}

case $case_name in
  inert)
    # A preloaded library is inherited by every child: nothing may happen in programs without ggml.
    LD_PRELOAD=$plugin SCSA_MODE=nonsense SCSA_STATS=1 bash -c 'env true && echo "$((6 * 7))"' \
      >"$work/out" 2>"$work/err" || fail "a shell does not run with the plugin preloaded"
    [ "$(cat "$work/out")" = 42 ] || fail "a shell printed something else"
    [ ! -s "$work/err" ] || fail "the plugin spoke in a program without ggml"
    ;;
  bench-path)
    need_program llama-bench
    need_model
    GGML_BACKEND_PATH=$plugin SCSA_STATS=1 "$bin/llama-bench" -m "$model" -p 0 -n 4 -d 600 -r 1 -t 2 -fa 1 \
      >"$work/out" 2>"$work/err" || fail "llama-bench failed"
    expect err "$load_line"
    [ "$(grep -cE "$load_line" "$work/err")" = 1 ] || fail "the load line appears more than once"
    expect out 'tg4 @ d600'
    expect_calls err
    ;;
  bench-restore)
    # llama-bench reads 680 tokens once; before every other repetition it restores the state that it saved then, also
    # into the context of the second test, which is a new one.
    need_program llama-bench
    need_model
    GGML_BACKEND_PATH=$plugin SCSA_STATS=1 SCSA_CROSSOVER=0 SCSA_CALIBRATE=2 "$bin/llama-bench" -m "$model" -p 0 \
      -n 3,5 -d 680 -r 3 -t 2 -fa 1 --progress >"$work/out" 2>"$work/err" || fail "llama-bench failed"
    [ "$(grep -c 'depth run .* (cached)' "$work/err")" = 5 ] || fail "llama-bench did not restore its state"
    expect out 'tg3 @ d680'
    expect out 'tg5 @ d680'
    # Of 30 layers: the first context calibrates on its prompt, in two batches (the warm-up has left something in the
    # cache), so that 9 steps are sparse; the second one on the first 2 of 15. Each context builds 2 blocks per layer,
    # for a restored state is the one that is there.
    expect err 'sparse 660, exact 60, calibration 60, limit 0\)'
    expect err ', 120 regions clustered in .*, 0 blocks dropped, 0 failures'
    ;;
  bench-auto)
    # Both ways at once, flash attention chosen by llama.cpp: it must stay on and be ours.
    need_program llama-bench
    need_model
    LD_PRELOAD=$plugin GGML_BACKEND_PATH=$plugin SCSA_STATS=1 "$bin/llama-bench" -m "$model" -p 0 -n 4 -d 600 -r 1 \
      -t 2 -fa auto -o json >"$work/out" 2>"$work/err" || fail "llama-bench failed"
    [ "$(grep -cE "$load_line" "$work/err")" = 1 ] || fail "the load line must appear once"
    expect_calls err
    ;;
  completion-preload)
    need_program llama-completion
    need_model
    prompt >"$work/prompt"
    run() {
      "$bin/llama-completion" -m "$model" -f "$work/prompt" -n 12 -c 2048 -t 2 --temp 0 -no-cnv --no-display-prompt \
        "$@"
    }
    run -fa auto >"$work/plain" 2>"$work/plain-err" || fail "llama-completion failed without the plugin"
    LD_PRELOAD=$plugin SCSA_STATS=1 run -fa auto >"$work/out" 2>"$work/err" || fail "llama-completion failed"
    expect err "$load_line"
    expect_calls err
    # The repeated pattern leaves no doubt about the next words.
    expect plain 'lighthouse'
    cmp -s "$work/plain" "$work/out" || fail "the text differs from the one without the plugin"
    LD_PRELOAD=$plugin SCSA_STATS=1 run -fa off >"$work/off" 2>"$work/off-err" || fail "llama-completion -fa off failed"
    expect off-err 'attention calls 0 '
    ;;
  server-preload)
    need_program llama-server
    need_model
    port=$((20000 + $$ % 20000))
    LD_PRELOAD=$plugin SCSA_STATS=1 "$bin/llama-server" -m "$model" -c 4096 -t 2 --port "$port" --host 127.0.0.1 \
      >"$work/out" 2>"$work/err" &
    server=$!
    request() { # METHOD PATH BODY
      exec 3<>"/dev/tcp/127.0.0.1/$port" || return 1
      printf '%s %s HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s' \
        "$1" "$2" "${#3}" "$3" >&3
      cat <&3
      exec 3>&-
    }
    ready=no
    for _ in $(seq 1 120); do
      if request GET /health '' 2>/dev/null | grep -q '"ok"'; then
        ready=yes
        break
      fi
      kill -0 "$server" 2>/dev/null || break
      sleep 0.5
    done
    [ "$ready" = yes ] || { kill "$server" 2>/dev/null; fail "llama-server does not answer"; }
    text=$(prompt | tr '\n' ' ')
    request POST /completion "{\"prompt\": \"$text\", \"n_predict\": 12, \"temperature\": 0}" >"$work/answer"
    kill -INT "$server"
    wait "$server"
    expect answer 'lighthouse'
    expect err "$load_line"
    expect_calls err
    ;;
  python-late)
    # A program whose ggml arrives by dlopen, privately.
    command -v python3 >/dev/null || { echo "SKIPPED: no python3"; exit 77; }
    LD_PRELOAD=$plugin python3 - "$bin/libllama.so" >"$work/out" 2>"$work/err" <<'PY' || fail "python failed"
import ctypes, sys
llama = ctypes.CDLL(sys.argv[1])
llama.llama_backend_init()
llama.llama_supports_gpu_offload()
PY
    expect err "$load_line"
    ;;
  bad-value)
    need_program llama-bench
    need_model
    for setting in SCSA_MODE=fast SCSA_PRESET=best SCSA_TOLERANCE=2 SCSA_CALIBRATE=-1 SCSA_CROSSOVER=4k \
      SCSA_AUDIT=1.5 SCSA_STATS=yes SCSA_MAX_MEM=2T SCSA_CHECKS=0 SCSA_DEVICE=gpu SCSA_TARGET=MMX; do
      name=${setting%%=*}
      env "$setting" LD_PRELOAD="$plugin" GGML_BACKEND_PATH="$plugin" "$bin/llama-bench" --list-devices \
        >"$work/out" 2>"$work/err" || fail "llama-bench failed with $setting"
      [ "$(grep -c '^scsa' "$work/err")" = 1 ] || fail "$setting must give one line"
      expect err "^scsa: .*$name.*${setting#*=}"
      expect_not out SCSA
    done
    ;;
  bad-taus)
    # Thresholds that cannot be used cost a calibration window, not the plugin.
    need_program llama-bench
    need_model
    echo '{"0:0": 1.5}' >"$work/taus.json"
    for file in "$work/taus.json" "$work/none.json"; do
      SCSA_TAUS=$file GGML_BACKEND_PATH=$plugin SCSA_STATS=1 SCSA_CROSSOVER=0 SCSA_CALIBRATE=2 "$bin/llama-bench" \
        -m "$model" -p 0 -n 4 -d 600 -r 1 -t 2 -fa 1 >"$work/out" 2>"$work/err" || fail "llama-bench failed"
      [ "$(grep -c '^scsa: SCSA_TAUS: .*; calibrating instead$' "$work/err")" = 1 ] || fail "no line about $file"
      expect err 'sparse [1-9][0-9]*, exact [1-9][0-9]*, calibration 0,'
      expect err 'prompts: .* [1-9][0-9]* rows calibrated on'
    done
    ;;
  modes)
    need_program llama-bench
    need_model
    for mode in exact limit off; do
      SCSA_MODE=$mode GGML_BACKEND_PATH=$plugin SCSA_STATS=1 "$bin/llama-bench" -m "$model" -p 0 -n 2 -d 600 -r 1 \
        -t 2 -fa 1 >"$work/out" 2>"$work/err-$mode" || fail "llama-bench failed in mode $mode"
      expect "err-$mode" "mode $mode,"
    done
    expect err-exact 'exact [1-9][0-9]*, calibration 0, limit 0\)'
    expect err-limit 'sparse 0, exact 0, calibration 0, limit [1-9]'
    expect err-off 'attention calls 0 '
    ;;
  *) fail "unknown case $case_name" ;;
esac
