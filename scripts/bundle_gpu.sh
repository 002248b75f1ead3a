#!/usr/bin/env bash
# Collects what a GPU machine without Rust and without this repository needs.
#
#     scripts/bundle_gpu.sh [--tests] [--peft SITE_PACKAGES] DESTINATION
#
# DESTINATION is a folder (created, or refreshed if it is a bundle already) or a name that ends in `.tar.gz`.
#   --tests              only what `run.sh test` needs: no release build, no recipes
#   --peft SITE_PACKAGES also PEFT's Python package, for machines with PyTorch and transformers but without it
#
# Cargo builds what is not up to date. The bundle has `smidgen`, the test programs in `tests/`, stripped, with `fixtures/`,
# `benches/`, `recipes/` with the shapes, `built.json` (version and commit), and `run.sh`:
#     run.sh report                 what is there: driver, GPU, CUDA libraries, Python packages
#     run.sh test [ARGUMENTS]       benches/gpu_tests.py: every test that needs a GPU, into gpu-tests.json unless `--out`
#                                   is given; `--filter TEXT` selects tests by a part of their names
#     run.sh bench [ARGUMENTS]      benches/gpu_compare.py, into gpu.json next to run.sh unless `--out` is given
#     run.sh train RECIPE [MORE]    smidgen train
# Libraries are looked for as smidgen does: the loader's path, CUDA_HOME, pip's nvidia/*/lib.
# results/gpu-tests.json in the repository is the file that `run.sh test` wrote for the newest release.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
only_tests=false peft='' destination=''
while [ $# -gt 0 ]; do
    case $1 in
        --tests) only_tests=true ;;
        --peft) [ $# -ge 2 ] || fail "\`--peft\` needs a folder"; peft=$2; shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) fail "unknown option \`$1\`" ;;
        *) [ -z "$destination" ] || fail "two destinations: \`$destination\` and \`$1\`"; destination=$1 ;;
    esac
    shift
done
[ -n "$destination" ] || fail "no destination given"
[ -z "$peft" ] || [ -d "$peft/peft" ] || fail "\`$peft\` has no folder \`peft\`"
[[ $destination = /* ]] || destination=$PWD/$destination
cd "$root"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=$work/smidgen-gpu
mkdir -p "$folder/benches" "$folder/tests"

# The test programs that have a test which needs a GPU, named after their crate and target.
cargo test --locked -p smidgen -p smidgen-runtime --lib --test it --no-run --message-format json > "$work/messages"
python3 - "$work/messages" > "$work/programs" <<'PYTHON'
import json, sys
from pathlib import Path
for message in map(json.loads, open(sys.argv[1])):
    if message.get("executable") and message["profile"]["test"]:
        crate = Path(message["manifest_path"]).parent.name
        print(crate + ("-lib" if "lib" in message["target"]["kind"] else "-it"), message["executable"])
PYTHON
while read -r name program; do
    ! "$program" --list --ignored 2>/dev/null | grep -q ': test$' || strip -o "$folder/tests/$name" "$program"
done < "$work/programs"

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
commit=$(git describe --always --abbrev=40 --dirty --match '' 2>/dev/null || echo unknown)
echo "{\"smidgen\": \"$version\", \"commit\": \"$commit\"}" > "$folder/built.json"
cp benches/gpu_*.py benches/machine.py "$folder/benches/"
cp -R fixtures "$folder/"
if ! $only_tests; then
    cargo build --locked --release -p smidgen
    strip -o "$folder/smidgen" "${CARGO_TARGET_DIR:-target}/release/smidgen"
    cp -R recipes "$folder/"
fi
if [ -n "$peft" ]; then
    mkdir "$folder/python" && cp -R "$peft/peft" "$folder/python/"
fi
find "$folder" -name __pycache__ -prune -exec rm -rf {} +

cat > "$folder/run.sh" <<'RUN'
#!/usr/bin/env bash
# run.sh report | test [ARGUMENTS] | bench [ARGUMENTS] | train RECIPE [ARGUMENTS]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ ! -d "$here/python" ] || export PYTHONPATH="$here/python${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

report() {
    cat "$here/built.json"
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv || echo "nvidia-smi: missing or failed"
    python3 - <<'PYTHON' || echo "python3: missing or failed; \`bench\` needs it"
import ctypes, glob, importlib.metadata, os, site, sys

folders = [os.path.join(os.environ[name], part) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
           for part in ("lib64", "lib", "targets/x86_64-linux/lib")] + ["/usr/local/cuda/lib64"]
folders += [path for packages in site.getsitepackages() for path in glob.glob(packages + "/nvidia/*/lib")]
for name, versions in (("libcuda", ["1"]), ("libcublasLt", ["13", "12"]), ("libnvrtc", ["13", "12"]), ("libcudnn", ["9"])):
    short = [f"{name}.so.{version}" for version in versions]
    for file in short + [path for folder in folders for path in sorted(glob.glob(f"{folder}/{name}.so*"))]:
        try:
            print(f"{name}: {ctypes.CDLL(file)._name}")
            break
        except OSError:
            continue
    else:
        print(f"{name}: missing")
print("python", sys.version.split()[0])
for package in ("torch", "transformers", "peft", "accelerate", "bitsandbytes"):
    try:
        __import__(package)
        print(package, getattr(sys.modules[package], "__version__", "of unknown version"))
    except Exception as error:
        print(f"{package}: missing or broken ({error})")
PYTHON
}

case ${1:-} in
    report) report ;;
    test) shift; exec python3 "$here/benches/gpu_tests.py" "$here" --out "$here/gpu-tests.json" "$@" ;;
    bench) shift; exec python3 "$here/benches/gpu_compare.py" "$here/smidgen" --out "$here/gpu.json" "$@" ;;
    train) shift; exec "$here/smidgen" train "$@" ;;
    *) sed -n 2p "$here/run.sh" >&2; exit 2 ;;
esac
RUN
chmod +x "$folder/run.sh"

case $destination in
    *.tar.gz) mkdir -p "$(dirname "$destination")" && tar -czf "$destination" -C "$work" smidgen-gpu ;;
    *)  [ ! -e "$destination" ] || [ -e "$destination/run.sh" ] || [ -z "$(ls -A "$destination")" ] ||
            fail "\`$destination\` is neither empty nor a bundle"
        mkdir -p "$destination" && cp -R "$folder/." "$destination/" ;;
esac
(cd "$folder" && du -h smidgen tests/* 2>/dev/null || true)
echo "$destination"
