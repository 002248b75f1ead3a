#!/usr/bin/env bash
# Builds what a release consists of.
#
#     scripts/package.sh [--profile PROFILE] DESTINATION
#
# DESTINATION is a folder, which is created:
#   smidgen-VERSION-...whl                     for `pip install`; its tag states the oldest glibc that it runs on
#   smidgen-VERSION-x86_64-linux.tar.gz        the program, completions for bash, zsh and fish, manual pages, licence
#   smidgen-VERSION-x86_64-linux.debug.gz      release profile only: the line tables that the program was stripped of,
#                                              for `addr2line -e` and gdb
#   SHA256SUMS                                 of all of them
# PROFILE is Cargo's, `release` by default. maturin is installed once with pip into a folder under target/.
# A release whose program has more than 26 MB, or whose wheel has more than 12 MB, is refused.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
profile=release destination=''
while [ $# -gt 0 ]; do
    case $1 in
        --profile) [ $# -ge 2 ] || fail "\`--profile\` needs a name"; profile=$2; shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) fail "unknown option \`$1\`" ;;
        *) [ -z "$destination" ] || fail "two destinations: \`$destination\` and \`$1\`"; destination=$1 ;;
    esac
    shift
done
[ -n "$destination" ] || fail "no destination given"
mkdir -p "$destination"
destination=$(cd "$destination" && pwd)
rm -f "$destination"/smidgen-* "$destination/SHA256SUMS"
cd "$root"

tools=target/package-tools
[ -x "$tools/bin/maturin" ] || { python3 -m venv "$tools" && "$tools/bin/pip" install --quiet 'maturin>=1.9,<2'; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# First the same program with its line tables: only its last link differs.
if [ "$profile" = release ]; then
    cargo rustc --quiet --locked --release -p smidgen --bin smidgen -- -C strip=none
    cp "${CARGO_TARGET_DIR:-target}/release/smidgen" "$work/whole"
fi
"$tools/bin/maturin" build --quiet --profile "$profile" --out "$destination"

# The program of the wheel is the program of the archive.
wheel=$(echo "$destination"/smidgen-*.whl)
version=$(basename "$wheel" | cut -d- -f2)
name=smidgen-$version-x86_64-linux
mkdir -p "$work/$name/completions"
python3 -m zipfile -e "$wheel" "$work/wheel"
install -m 755 "$work/wheel/smidgen-$version.data/scripts/smidgen" "$work/$name/smidgen"
for shell in bash zsh fish; do
    "$work/$name/smidgen" completions "$shell" > "$work/$name/completions/smidgen.$shell"
done
"$work/$name/smidgen" man "$work/$name/man"
cp LICENSE README.md "$work/$name/"
tar -czf "$destination/$name.tar.gz" -C "$work" --owner=0 --group=0 "$name"
if [ "$profile" = release ]; then
    for program in "$work/whole" "$work/$name/smidgen"; do
        objcopy -O binary --only-section=.text "$program" "$work/$(basename "$program").code"
    done
    cmp "$work/whole.code" "$work/smidgen.code" || fail "the line tables are of another program"
    objcopy --only-keep-debug "$work/whole" "$work/$name.debug"
    gzip -9 < "$work/$name.debug" > "$destination/$name.debug.gz"
    for limit in "$work/$name/smidgen 26" "$wheel 12"; do
        [ "$(stat -c %s "${limit% *}")" -le "${limit##* }000000" ] || fail "\`${limit% *}\` has more than ${limit##* } MB"
    done
fi
(cd "$destination" && sha256sum smidgen-* | tee SHA256SUMS)
