#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# exports_test.sh NM LIBRARY HEADERS: libscsa.so exports what the public headers declare, and no more.
set -euo pipefail
nm=$1 library=$2 headers=$3

exported=$("$nm" -D --defined-only -C "$library" | cut -d ' ' -f 3- | sed 's/\[abi:cxx11\]//' | sort -u)
failed=0
fail() {
  echo "$*"
  failed=1
}
difference() { # A B: lines of A that are not in B
  comm -23 <(sort -u <<<"$1") <(sort -u <<<"$2")
}

# C: the same names on both sides.
declared_c=$(sed -n 's/^SCSA_API .*[ *]\(scsa_[a-z0-9_]*\)(.*/\1/p' "$headers/scsa.h")
exported_c=$(grep '^scsa_' <<<"$exported")
(($(wc -l <<<"$declared_c") > 50)) || fail "scsa.h declares only: $declared_c"
for name in $(difference "$declared_c" "$exported_c"); do fail "declared in scsa.h, not exported: $name"; done
for name in $(difference "$exported_c" "$declared_c"); do fail "exported, not declared in scsa.h: $name"; done

# C++: functions of the namespace, declared at the start of a line, and the members of four classes.
cxx_headers=("$headers"/{audit,config,exact,layer,memory_budget,state,status,target,taus,types}.h)
declared_cxx=$(sed -n '/^constexpr/d; s/^[A-Za-z][A-Za-z:<>]*[ *&]* \**\([A-Z][A-Za-z]*\)(.*/\1/p; s/^const char\* \([A-Z][A-Za-z]*\)(.*/\1/p;
  s/^std::vector<std::string> \([A-Z][A-Za-z]*\)(.*/\1/p' "${cxx_headers[@]}")
(($(wc -l <<<"$declared_cxx") > 12)) || fail "the C++ headers declare only: $declared_cxx"
exported_cxx=$(grep -v '^scsa_' <<<"$exported")
functions=$(sed -n 's/^scsa::\([A-Za-z]*\)(.*/\1/p' <<<"$exported_cxx")
for name in $(difference "$declared_cxx" "$functions"); do fail "declared, not exported: scsa::$name"; done
for name in $(difference "$functions" "$declared_cxx"); do fail "exported, not declared: scsa::$name"; done
others=$(grep -vE '^scsa::[A-Za-z]*\(|^scsa::(Layer|MemoryBudget|State|Workspace)::(~|operator=)?[A-Za-z_]*\(' <<<"$exported_cxx" || true)
if [[ -n $others ]]; then fail "exported beyond the interface: $others"; fi
for class in Layer MemoryBudget State; do
  header=$(sed 's/\([a-z]\)\([A-Z]\)/\1_\2/g' <<<"$class")
  members=$(sed -n "/^class $class {/,/^ private:/{/constexpr/d; / impl() /d; s/^  [A-Za-z].*[ *&]\([A-Za-z_]*\)(.*/\1/p}" \
    "$headers/${header,,}.h" | sort -u)
  (($(wc -w <<<"$members") > 5)) || fail "class $class declares only: $members"
  while read -r member; do
    grep -q "^scsa::$class::$member(" <<<"$exported_cxx" || fail "not exported: scsa::$class::$member"
  done <<<"$members"
done

if ((failed)); then exit 1; fi
echo "$(wc -l <<<"$exported_c") functions of C and $(wc -l <<<"$functions") of C++ besides classes, as declared"
