#!/usr/bin/env bash
# Builds what a release consists of.
#
#     scripts/package.sh [--profile PROFILE] DESTINATION
#
# DESTINATION is a folder, which is created:
#   smidgen-VERSION-...whl                     for `pip install`; its tag states the oldest glibc that it runs on
#   smidgen-VERSION-x86_64-linux.tar.gz        the program, completions for bash, zsh and fish, manual pages, licence
#   SHA256SUMS                                 of both
# PROFILE is Cargo's, `release` by default. maturin is installed once with pip into a folder under target/.
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
"$tools/bin/maturin" build --quiet --profile "$profile" --out "$destination"

# The program of the wheel is the program of the archive.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
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
(cd "$destination" && sha256sum "$name.tar.gz" "$(basename "$wheel")" | tee SHA256SUMS)
