#!/usr/bin/env bash
# Collects what a GPU machine without Rust and without this repository needs.
#
#     scripts/bundle_gpu.sh [--build] [--peft SITE_PACKAGES] DESTINATION
#
# DESTINATION is a folder (created, or refreshed if it is a bundle already) or a name that ends in `.tar.gz`.
#   --build              build the release binary and the tests first; otherwise those in the target folder are used
#   --peft SITE_PACKAGES also PEFT's Python package, for machines with PyTorch and transformers but without it
#
# The bundle: `smidgen` and `runtime-tests`, stripped; `benches/`, `recipes/` with the shapes; `run.sh`:
#     run.sh report                 what is there: driver, GPU, CUDA libraries, Python packages
#     run.sh test [FILTER]          the tests that need a GPU, one at a time; FILTER is part of a name
#     run.sh bench [ARGUMENTS]      benches/gpu_compare.py, into gpu.json next to run.sh unless `--out` is given
#     run.sh train RECIPE [MORE]    smidgen train
# Libraries are looked for as smidgen does: the loader's path, CUDA_HOME, pip's nvidia/*/lib.
# Left out: models, the tests that read fixtures (their folder is compiled in).
set -euo pipefail

fail() { echo "error: $*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=false peft='' destination=''
while [ $# -gt 0 ]; do
    case $1 in
        --build) build=true ;;
        --peft) [ $# -ge 2 ] || fail "\`--peft\` needs a folder"; peft=$2; shift ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) fail "unknown option \`$1\`" ;;
        *) [ -z "$destination" ] || fail "two destinations: \`$destination\` and \`$1\`"; destination=$1 ;;
    esac
    shift
done
[ -n "$destination" ] || fail "no destination given"
[ -z "$peft" ] || [ -d "$peft/peft" ] || fail "\`$peft\` has no folder \`peft\`"

target=${CARGO_TARGET_DIR:-$root/target}
! $build || (cd "$root" && cargo build --locked --release -p smidgen && cargo test --locked -p smidgen-runtime --test it --no-run)

# Several crates call their tests `it`, and old builds stay: the newest one that has CUDA's tests.
find_tests() {
    local file
    while IFS= read -r file; do
        if "$file" --list 2>/dev/null | grep -q '^cuda_agrees::'; then echo "$file"; return; fi
    done < <(find "$target/debug/deps" "$target/release/deps" -name 'it-*' -type f -perm -u+x -printf '%T@ %p\n' 2>/dev/null |
        sort -rn | cut -d' ' -f2-)
}

[ -x "$target/release/smidgen" ] || fail "\`$target/release/smidgen\` is missing; \`--build\` makes it"
tests=$(find_tests)
[ -n "$tests" ] || fail "no tests of smidgen-runtime in \`$target\`; \`--build\` makes them"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=$work/smidgen-gpu
mkdir -p "$folder/benches" "$folder/recipes"
strip -o "$folder/smidgen" "$target/release/smidgen"
strip -o "$folder/runtime-tests" "$tests"
cp "$root"/benches/gpu_*.py "$root"/benches/machine.py "$folder/benches/"
cp -R "$root"/recipes/. "$folder/recipes/"
if [ -n "$peft" ]; then
    mkdir "$folder/python" && cp -R "$peft/peft" "$folder/python/"
    find "$folder/python" -name __pycache__ -prune -exec rm -rf {} +
fi

cat > "$folder/run.sh" <<'RUN'
#!/usr/bin/env bash
# run.sh report | test [FILTER] | bench [ARGUMENTS] | train RECIPE [ARGUMENTS]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ ! -d "$here/python" ] || export PYTHONPATH="$here/python${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

report() {
    "$here/smidgen" --version
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
    # One at a time: they share one GPU.
    test) exec "$here/runtime-tests" "${2:-cuda}" --ignored --test-threads 1 ;;
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
echo "$destination: smidgen $(stat -c %s "$folder/smidgen") bytes, tests $(stat -c %s "$folder/runtime-tests") bytes"
