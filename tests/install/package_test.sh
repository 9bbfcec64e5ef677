#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: package_test.sh CMAKE CPACK BUILD_DIR WORK_DIR VERSION SOVERSION PACKAGES CONSUMER_OPTIONS...
# Builds the Debian packages, installs them with dpkg into a root folder of their own, builds programs against what lies
# there (CONSUMER_OPTIONS: of install_test.cmake), and removes them again. The root folder's package database knows the
# packages of this machine that ours depend on, so that dpkg checks the dependencies. As root or not; no network.
set -euo pipefail
cmake=$1 cpack=$2 build=$3 work=$4 version=$5 soversion=$6 packages=${7//;/ }
shift 7
consumer=("$@")

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

for command in dpkg dpkg-deb dpkg-shlibdeps readelf; do
  command -v "$command" >/dev/null || {
    echo "skipped: no $command here"
    exit 77
  }
done

rm -rf "$work"
mkdir -p "$work/unpacked"
"$cpack" -G DEB --config "$build/CPackConfig.cmake" -B "$work/packages" >"$work/cpack.log" 2>&1 ||
  fail "cpack: $(tail -n 20 "$work/cpack.log")"
architecture=$(dpkg --print-architecture)

# ---- each package: control fields and files ------------------------------------------------------------------------------
file_of() {
  if [[ $1 == scsa-doc ]]; then echo "$work/packages/$1_${version}_all.deb"; else echo "$work/packages/$1_${version}_$architecture.deb"; fi
}
field() { dpkg-deb -f "$(file_of "$1")" "$2"; }

debs=()
for package in $packages; do
  debs+=("$(file_of "$package")")
  [[ -f ${debs[-1]} ]] || fail "no ${debs[-1]##*/}, but: $(ls "$work/packages")"
  [[ $(field "$package" Package) == "$package" && $(field "$package" Version) == "$version" ]] ||
    fail "name or version of $package"
  [[ $(field "$package" Description) == *$'\n'* ]] || fail "$package has no description"
  [[ -n $(field "$package" Maintainer) ]] || fail "$package has no maintainer"
  dpkg-deb -x "${debs[-1]}" "$work/unpacked/$package"
  [[ -f $work/unpacked/$package/usr/share/doc/$package/copyright ]] || fail "$package has no copyright file"
  [[ -z $(dpkg-deb -c "${debs[-1]}" | awk '$2 != "root/root"') ]] || fail "files of $package are not root's"
done
[[ $(find "$work/packages" -maxdepth 1 -name '*.deb' | wc -l) == "${#debs[@]}" ]] || fail "more packages than expected"
[[ $(field libscsa-dev Depends) == "libscsa$soversion (= $version), libhwy-dev" ]] || fail "Depends of libscsa-dev"
dpkg-deb -I "$(file_of "libscsa$soversion")" shlibs | grep -qx "libscsa $soversion libscsa$soversion (>= $version)" ||
  fail "the shlibs file of libscsa$soversion"

# Every library that a program file needs comes from a package it depends on, and none from a folder of this machine.
declare -A owner=([libstdc++.so.6]=libstdc++6 [libgomp.so.1]=libgomp1 [libgcc_s.so.1]=libgcc-s1 [libc.so.6]=libc6
  [libm.so.6]=libc6 [libdl.so.2]=libc6 [libpthread.so.0]=libc6 [libhwy.so.1]=libhwy1)
for package in $packages; do
  while read -r elf; do
    readelf -d "$elf" | grep -qE 'R(UN)?PATH' && fail "$elf has a run path"
    needed=$(readelf -d "$elf" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    [[ -n $needed ]] || fail "$elf needs no library at all"
    for library in $needed; do
      [[ $library == ld-linux* ]] && continue
      [[ -n ${owner[$library]-} ]] || fail "$elf needs $library, whose package this test does not know"
      grep -qE "(^|, )${owner[$library]//+/\\+}( |,|\$)" <<<"$(field "$package" Depends)" ||
        fail "$package needs $library but does not depend on ${owner[$library]}"
    done
  done < <(find "$work/unpacked/$package" -type f -name 'lib*.so*')
done
grep -rIl -e "$build" "$work/unpacked" && fail "these files name the build folder"
if [[ " $packages " == *" ggml-scsa "* ]]; then
  [[ $(find "$work/unpacked/ggml-scsa" -name libggml-scsa.so | wc -l) == 1 ]] || fail "ggml-scsa without the plugin"
fi

# ---- install -----------------------------------------------------------------------------------------------------------
root=$work/root
mkdir -p "$root/var/lib/dpkg/"{info,updates,triggers}
: >"$root/var/lib/dpkg/status"
# The packages' scripts call ldconfig and nothing else. They run without chroot, for the root has no shell, and find a
# command that takes note in its place.
mkdir -p "$work/sbin"
printf '#!/bin/sh\necho "$DPKG_MAINTSCRIPT_PACKAGE $DPKG_MAINTSCRIPT_NAME" >>"%s"\n' "$work/ldconfig.log" >"$work/sbin/ldconfig"
chmod +x "$work/sbin/ldconfig"
in_root() {
  PATH=$work/sbin:$PATH:/usr/sbin:/sbin dpkg --root="$root" --force-not-root --force-script-chrootless --log=/dev/null \
    "$@" >"$work/dpkg.log" 2>&1
}

if in_root -i "${debs[@]}"; then fail "dpkg installs the packages without what they depend on"; fi
grep -q 'libscsa.* depends on libhwy' "$work/dpkg.log" || fail "dpkg: $(cat "$work/dpkg.log")"
rm -rf "$root"
mkdir -p "$root/var/lib/dpkg/"{info,updates,triggers}
for package in $packages; do field "$package" Depends | tr ',' '\n' | sed 's/^ *//; s/[ :(].*//'; done | sort -u |
  grep -v -e "^libscsa$soversion\$" -e "^\$" >"$work/dependencies"
while read -r dependency; do
  dpkg-query -W -f='Package: ${Package}\nStatus: ${Status}\nVersion: ${Version}\nArchitecture: ${Architecture}\nMaintainer: ${Maintainer}\nDescription: ${binary:Summary}\n\n' \
    "$dependency" | sed '/^$/q'
  : >"$root/var/lib/dpkg/info/$dependency.list"
done <"$work/dependencies" >"$root/var/lib/dpkg/status"
in_root -i "${debs[@]}" || fail "dpkg: $(cat "$work/dpkg.log")"
for package in $packages; do
  [[ $(dpkg-query --admindir="$root/var/lib/dpkg" -W -f='${Status}' "$package") == "install ok installed" ]] ||
    fail "$package is not installed"
  verified=$(dpkg --root="$root" --force-not-root --verify "$package" 2>&1) || fail "dpkg --verify $package: $verified"
  [[ -z $verified ]] || fail "dpkg --verify $package: $verified"
done
grep -qx "libscsa$soversion postinst" "$work/ldconfig.log" || fail "libscsa$soversion is installed without ldconfig"
for file in include/scsa/scsa.h include/scsa/layer.h include/scsa/plugin.h share/doc/scsa/README.md \
  share/doc/scsa/docs/operator.md; do
  [[ -f $root/usr/$file ]] || fail "/usr/$file is not installed"
done
[[ ! -e $root/usr/bin ]] || fail "a program is packaged, which would need a packaged llama.cpp"

# ---- use ---------------------------------------------------------------------------------------------------------------
for kind in static shared pkg-config; do
  "$cmake" -DPREFIX="$root/usr" -DKIND=$kind -DWORK_DIR="$work/use-$kind" "${consumer[@]}" >"$work/use.log" 2>&1 ||
    fail "$kind: $(cat "$work/use.log")"
done

# ---- remove ------------------------------------------------------------------------------------------------------------
# shellcheck disable=SC2086
in_root --purge $packages || fail "dpkg: $(cat "$work/dpkg.log")"
grep -qx "libscsa$soversion postrm" "$work/ldconfig.log" || fail "libscsa$soversion is removed without ldconfig"
left=$(find "$root" -path "$root/var" -prune -o -not -type d -print)
[[ -z $left ]] || fail "left behind: $left"
echo "the packages work: $packages"
