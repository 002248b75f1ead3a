"""Checks smidgen's adapter files against the PEFT library itself.

    python scripts/check_peft.py SMIDGEN [--adapter FOLDER --base FOLDER] [--keep FOLDER] [--families [CASE...]]

SMIDGEN is the program. Needs torch, transformers, peft and safetensors; no network and no GPU.
For each kind of adapter PEFT makes a tiny model and an adapter with random values, `smidgen merge` merges them, and the result is compared with PEFT's `merge_and_unload`: every tensor within one rounding of its type, and all
other tensors byte for byte. `smidgen inspect` has to agree with PEFT on what an adapter holds.
With --adapter and --base an adapter that smidgen wrote is loaded with PEFT: no key may be missing or unexpected, and the
logits have to match those of the model that `smidgen merge` writes.
With --families that is all that is checked, for every recorded case with an adapter (or those named): smidgen trains the tiny
model of `fixtures/CASE` for ten steps, and PEFT loads what it wrote, also where the text model is beside a vision tower.
One line per check; the exit code is the number of failed checks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

KINDS = {
    "lora": {},
    "lora rank_pattern": {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"mlp.down_proj": 5}},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "rslora dora": {"use_dora": True, "use_rslora": True},
    "lora bias all": {"bias": "all"},
    "lora bias lora_only": {"bias": "lora_only"},
    "dora bias all": {"use_dora": True, "bias": "all"},
}
FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
# PEFT does not know LS-LoRA; folders that bitsandbytes quantized need a GPU, and GGUF files are no folders.
KINDS_OF_PEFT = ("lora", "rslora", "dora")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def make_base(folder, dtype):
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)


def load_base(folder, dtype):
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    # The fast matmuls of experts take no sizes as small as these.
    has_experts = hasattr(config.get_text_config(), "num_experts_per_tok") or hasattr(config.get_text_config(), "top_k_experts")
    eager = {"experts_implementation": "eager"} if has_experts else {}
    return auto.from_pretrained(folder, dtype=dtype, **eager).eval()


def make_adapter(folder, base, dtype, settings):
    """An adapter whose every trained tensor differs from its start."""
    torch.manual_seed(2)
    config = LoraConfig(
        r=6, lora_alpha=9, task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], **settings,
    )
    model = get_peft_model(load_base(base, dtype), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def load_weights(folder):
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def run_smidgen(program, *arguments):
    done = subprocess.run([program, *map(str, arguments), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"smidgen {arguments[0]}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def roundings(ours, theirs):
    """The largest distance between two tensors, in units of the last place of the larger value.

    Both sum in f32, in different orders: four units of f32 at the row's largest value are no distance yet. They matter
    where W and the adapter nearly cancel, and the result is far smaller than what it was made of."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (ours.dtype, theirs.dtype, ours.shape)
    a, b = ours.double(), theirs.double()
    size = torch.maximum(a.abs(), b.abs())

    def unit(size, dtype):
        info = torch.finfo(dtype)
        return info.eps * 2.0 ** torch.floor(torch.log2(size.clamp_min(info.tiny)))

    order = 4 * unit(size.amax(dim=-1, keepdim=True), torch.float32)
    return (((a - b).abs() - order).clamp_min(0) / unit(size, ours.dtype)).max().item()


def check_merge(program, root, dtype_name, kind, settings):
    dtype = DTYPES[dtype_name]
    base, adapter, output = root / f"base-{dtype_name}", root / "adapter", root / "merged"
    if not base.exists():
        make_base(base, dtype)
    make_adapter(adapter, base, dtype, settings)
    report = run_smidgen(program, "merge", adapter, "--output", output)
    ours, before = load_weights(output), load_weights(base)
    merged = PeftModel.from_pretrained(load_base(base, dtype), adapter).merge_and_unload()
    theirs = {name: tensor for name, tensor in merged.state_dict().items() if name in before}
    assert ours.keys() == before.keys() == theirs.keys(), ours.keys() ^ before.keys()
    changed = {name for name in before if not torch.equal(before[name], theirs[name])}
    same = [name for name in before if name not in changed]
    assert all(torch.equal(ours[name], before[name]) for name in same), "an unadapted tensor changed"
    assert len(changed) == report["folded"]["tensors"] + report["biases"], (len(changed), report)
    worst = max(roundings(ours[name], theirs[name]) for name in changed)
    assert worst <= 1, f"{worst} roundings apart"
    exact = sum((ours[name] == theirs[name]).sum().item() for name in changed)
    total = sum(ours[name].numel() for name in changed)
    # The folder is a model: transformers loads it, and it computes what PEFT's does.
    ids = torch.arange(40)[None] % 97
    with torch.no_grad():
        distance = (load_base(output, dtype)(ids).logits - merged(ids).logits).abs().max().item()
    return f"{len(changed)} tensors, worst {worst:.2f} roundings, {100 * exact / total:.2f} % equal, logits {distance:.1e}"


def check_inspect(program, root):
    report = run_smidgen(program, "inspect", root / "adapter", "--base", root / "base-f32")
    tensors = load_file(root / "adapter" / "adapter_model.safetensors")
    config = json.loads((root / "adapter" / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config["use_rslora"] else 1)
    worst = 0.0
    for module in report["modules"]:
        key = f"base_model.model.{module['module']}"
        a, b = tensors[f"{key}.lora_A.weight"].double(), tensors[f"{key}.lora_B.weight"].double()
        for ours, theirs in [(module["a_norm"], a.norm()), (module["b_norm"], b.norm()),
                             (module["product_norm"], (scale * b @ a).norm())]:
            worst = max(worst, abs(ours / theirs.item() - 1))
    assert report["parameters"] == sum(tensor.numel() for tensor in tensors.values()), report["parameters"]
    assert worst < 1e-6, worst
    return f"{len(report['modules'])} modules, norms within {worst:.0e}"


def check_old_biases(program, root):
    """Releases without `base_layer` named the bias of an adapted module `q_proj.bias`."""
    make_adapter(root / "new", root / "base-f32", torch.float32, {"bias": "all"})
    run_smidgen(program, "merge", root / "new", "--output", root / "of-new")
    (root / "old").mkdir()
    (root / "old" / "adapter_config.json").write_text((root / "new" / "adapter_config.json").read_text())
    tensors = load_file(root / "new" / "adapter_model.safetensors")
    renamed = {name.replace(".base_layer.bias", ".bias"): tensor for name, tensor in tensors.items()}
    save_file(renamed, root / "old" / "adapter_model.safetensors", {"format": "pt"})
    run_smidgen(program, "merge", root / "old", "--output", root / "of-old")
    old, new = load_weights(root / "of-old"), load_weights(root / "of-new")
    assert all(torch.equal(old[name], new[name]) for name in new)
    return f"{len(tensors)} tensors under either name"


def check_dtype(program, root):
    """`--dtype` converts every tensor, and transformers loads the result in that type."""
    make_adapter(root / "a", root / "base-f32", torch.float32, {})
    wide, narrow = root / "wide", root / "narrow"
    run_smidgen(program, "merge", root / "a", "--output", wide)
    run_smidgen(program, "merge", root / "a", "--output", narrow, "--dtype", "bf16")
    ours, expected = load_weights(narrow), load_weights(wide)
    assert all(torch.equal(ours[name], expected[name].to(torch.bfloat16)) for name in expected)
    loaded = AutoModelForCausalLM.from_pretrained(narrow)
    assert loaded.dtype == torch.bfloat16, loaded.dtype
    return "f32 to bf16, rounded once"


def check_written_adapter(program, adapter, base, root):
    """An adapter that smidgen wrote, loaded with PEFT: keys, config and logits."""
    with warnings.catch_warnings():
        # PEFT warns of missing and unexpected keys and goes on; here they are failures.
        warnings.simplefilter("error", UserWarning)
        model = PeftModel.from_pretrained(load_base(base, torch.float32), adapter)
    saved = root / "saved-by-peft"
    model.save_pretrained(saved)
    ours, theirs = load_file(Path(adapter) / "adapter_model.safetensors"), load_file(saved / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    text = json.dumps(config, indent=2, sort_keys=True)
    assert text == (Path(adapter) / "adapter_config.json").read_text(), "the config is not laid out as PEFT's"
    run_smidgen(program, "merge", adapter, "--base", base, "--dtype", "f32", "--output", root / "merged-written")
    ids = torch.arange(40)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        merged = load_base(root / "merged-written", torch.float32)(ids).logits
        distance = ((merged - model(ids).logits).abs().max() / merged.abs().max()).item()
    assert distance < 1e-4, distance
    return f"{len(ours)} tensors, logits of the merged model within {distance:.1e}"


def recorded_cases():
    """The recorded cases whose adapter PEFT can load on a CPU, with their recipes."""
    for file in sorted(FIXTURES.glob("*/expected.json")):
        recipe = json.loads(file.read_text())["recipe"]
        config = file.parent / "model" / "config.json"
        is_plain = config.exists() and "quantization_config" not in json.loads(config.read_text())
        if is_plain and recipe["adapter"]["kind"] in KINDS_OF_PEFT:
            yield file.parent, recipe


def toml(value):
    """A value of a recipe."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value)


def check_family(program, case, recipe, root):
    """Trains the adapter of a recorded case and loads the written one with PEFT."""
    output = root / "run"
    recipe = {**recipe, "model": {**recipe["model"], "base": "f32"}, "output": {"dir": str(output)}}
    recipe["data"] = {key: value for key, value in recipe["data"].items() if key != "eval"}
    sections = [f"[{name}]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in keys.items()) for name, keys in recipe.items()]
    text = "".join(sections)
    for path in ("model", "adapter", "data.jsonl"):
        text = text.replace(f'= "{path}"\n', f'= "{case / path}"\n')
    (root / "recipe.toml").write_text(text)
    run_smidgen(program, "train", root / "recipe.toml")
    return check_written_adapter(program, output / "adapter", case / "model", root)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--adapter", help="an adapter that smidgen wrote")
    parser.add_argument("--base", help="its base model")
    parser.add_argument("--keep", help="keep what is made in this folder")
    parser.add_argument("--families", nargs="*", metavar="CASE", help="check the recorded cases, and nothing else")
    arguments = parser.parse_args()
    program = str(Path(arguments.program).resolve())
    checks = []
    for dtype_name in DTYPES:
        for kind, settings in KINDS.items():
            checks.append((f"merge {dtype_name} {kind}", check_merge, (dtype_name, kind, settings)))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(arguments.keep or scratch)
        failed = 0

        def report(name, check):
            nonlocal failed
            try:
                print(f"ok      {name}: {check()}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"FAILED  {name}: {error}", flush=True)

        if arguments.families is not None:
            for case, recipe in recorded_cases():
                if not arguments.families or case.name in arguments.families:
                    place = root / case.name
                    place.mkdir()
                    report(f"family {case.name}", lambda: check_family(program, case, recipe, place))
            sys.exit(failed)
        for dtype_name in DTYPES:
            make_base(root / f"base-{dtype_name}", DTYPES[dtype_name])
        for number, (name, check, parameters) in enumerate(checks):
            place = root / f"{number}"
            place.mkdir(parents=True)
            for dtype_name in DTYPES:
                (place / f"base-{dtype_name}").symlink_to((root / f"base-{dtype_name}").resolve())
            report(name, lambda: check(program, place, *parameters))
            if "f32" in name and "pattern" not in name:
                report(name.replace("merge", "inspect"), lambda: check_inspect(program, place))
        report("old names of biases", lambda: check_old_biases(program, root))
        report("--dtype", lambda: check_dtype(program, root))
        if arguments.adapter:
            report("written adapter", lambda: check_written_adapter(program, arguments.adapter, arguments.base, root))
    sys.exit(failed)


if __name__ == "__main__":
    main()
