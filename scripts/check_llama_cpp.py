"""Compares GGUF files with llama.cpp itself: those that `smidgen export` writes, and those of the fixtures.

    pip install xllamacpp==2026.10.11549
    python scripts/check_llama_cpp.py SMIDGEN [--gguf FILE]... [--keep FOLDER]
    python scripts/check_llama_cpp.py --fixtures [CASE...]

SMIDGEN is the program. Needs torch, transformers, peft, tokenizers, gguf and xllamacpp, which carries llama.cpp; no
network and no GPU. For each architecture but `muse-glimmer`, which transformers has only inside a model for images, a tiny
model with a tiny tokenizer and a random adapter are made with transformers and PEFT.
They go through `smidgen export`, and llama.cpp loads the result: the whole model with the adapter merged, in f32, f16
and q8_0, and the base with a separate adapter file. Its log-probabilities after several prefixes of a sequence are compared
with those of transformers + PEFT in f32; the distance is the largest difference divided by their standard deviation.
With --gguf a real model is checked too: transformers decodes it, and llama.cpp runs it as stored with the exported adapter.
llama.cpp rounds activations to 8 bits before it multiplies with quantized weights and to f16 before f16 ones, so
only f32 can be close. For q8_0 the blocks are judged: they have to be those that the gguf package makes of the f32
export, bit for bit. The distances of llama.cpp with quantized weights come from its own arithmetic: they are printed
with those of the same model without the adapter, and not judged.
With --fixtures each GGUF case of `fixtures/` is compared with the model that made it, run by hand after generating: as
stored, loosely, which shows that both decode the blocks alike, and with the same weights rewritten as F32, tightly,
which shows that names, order and metadata mean the same. It leaves out adapters, and the short factors of longrope,
which llama.cpp picks by the size of its context and not by the row.
One line per check, `ok` or `FAILED`, or `seen` if nothing is judged; the exit code is the number of failed checks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy
import torch
import transformers
import xllamacpp
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
PREFIXES = (5, 17, 33, 40)
VOCABULARY = 320
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 128, "num_hidden_layers": 3}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# Windows are shorter than the sequences, so that they matter.
SLIDING = {"sliding_window": 16, "num_hidden_layers": 4}
PAIRS = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "phi3": {"model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 256},
    "gemma2": {"model_type": "gemma2", **GEMMA},
    "gemma3": {"model_type": "gemma3_text", **GEMMA},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma4": {"model_type": "gemma4_text", **PAIRS, "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True,
               "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None},
    "gemma4, embeddings of layers": {
        "model_type": "gemma4_text", **PAIRS, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "granite": {"model_type": "granite", "embedding_multiplier": 6.0, "attention_multiplier": 0.2,
                "residual_multiplier": 0.7, "logits_scaling": 2.5},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", **SLIDING, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 32},
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "cohere2": {"model_type": "cohere2", **SLIDING},
    "cohere2, no windows": {"model_type": "cohere2", "layer_types": ["full_attention"] * 2},
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
}
KINDS = {
    "lora": {},
    "rslora, patterns": {"use_rslora": True, "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"down_proj": 5}},
    "dora": {"use_dora": True},
}
# The GELU of llama.cpp is a table of f16, and its f32 sums have another order.
BOUNDS = {"f32": 3e-3, "f16": 3e-2, "blocks": 0.3}


def make_tokenizer(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = ["the cat sat on the mat and the dog ran to the cat", "it is what it is, and that is that; 1 2 3 10 100"]
    tokenizer.train_from_iterator(text * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")
    fast.save_pretrained(folder)


def make_model(folder, settings):
    settings = {**SHAPE, **settings}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer(folder)


def make_adapter(folder, model, settings, spread):
    """An adapter whose B is not zero."""
    torch.manual_seed(2)
    config = LoraConfig(r=6, lora_alpha=9, task_type="CAUSAL_LM", target_modules="all-linear", **settings)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(spread * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted.eval()


def run_smidgen(program, *arguments):
    done = subprocess.run([program, *map(str, arguments), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"smidgen {arguments[0]}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def start_server(path, adapter=None):
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    if adapter is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


def llama_cpp_log_probabilities(server, ids, vocabulary):
    # The server leaves the probabilities out where the chosen token is half a character. A bias chooses another token; the
    # probabilities are those before the bias.
    for favourite in (None, *range(64, 128)):
        answer = server.handle_completions({
            "prompt": ids, "n_predict": 1, "n_probs": vocabulary, "temperature": 0.0, "cache_prompt": False,
            "logit_bias": [[favourite, 1000.0]] if favourite else [],
        })
        if "choices" not in answer:
            raise AssertionError(f"llama.cpp: {answer}")
        if answer["choices"][0]["logprobs"] is not None:
            break
    found = {entry["id"]: entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    assert len(found) == vocabulary, f"{len(found)} of {vocabulary} log-probabilities"
    return torch.tensor([found[i] for i in range(vocabulary)])


def reference(model, vocabulary):
    """Sequences and what transformers makes of them."""
    torch.manual_seed(3)
    ids = torch.randint(3, vocabulary - 8, (max(PREFIXES),)).tolist()
    with torch.no_grad():
        return [(ids[:n], model(torch.tensor([ids[:n]])).logits[0, -1].float().log_softmax(dim=0)) for n in PREFIXES]


def distance(server, expected):
    worst = 0.0
    for ids, ours in expected:
        theirs = llama_cpp_log_probabilities(server, ids, len(ours))
        worst = max(worst, ((ours - theirs).abs().max() / ours.std()).item())
    return worst


def differing_blocks(narrow, wide):
    """Q8_0 blocks of one file that are not those which the gguf package makes of the other, and all of them."""
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(wide).tensors}
    differing, blocks = 0, 0
    for tensor in gguf.GGUFReader(narrow).tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:
            ours = numpy.array(tensor.data).reshape(-1, 34)
            theirs = gguf.quantize(numpy.array(weights[tensor.name]), gguf.GGMLQuantizationType.Q8_0).reshape(-1, 34)
            differing, blocks = differing + int((ours != theirs).any(axis=1).sum()), blocks + len(ours)
    return differing, blocks


class Report:
    failed = 0

    def check(self, name, measure):
        """`measure` gives a distance, the largest one allowed or None, and words about it."""
        try:
            found, bound, words = measure()
            assert bound is None or found <= bound, f"{found:.1e} apart, allowed are {bound:.1e}{words}"
            print(f"{'seen' if bound is None else 'ok':<7} {name}: {found:.1e} apart{words}", flush=True)
        except (AssertionError, RuntimeError) as error:
            self.failed += 1
            print(f"FAILED  {name}: {error}", flush=True)


def check_adapted(report, program, name, root, base, expected, unadapted, kind, types):
    """The exports of one base and one adapter; `base` is a folder or a file."""
    adapter = root / "adapter"
    moved = max(((ours - plain).abs().max() / plain.std()).item() for (_, ours), (_, plain) in zip(expected, unadapted))

    def export(source, output, *more):
        run_smidgen(program, "export", source, "--output", root / output, *more)
        return root / output

    for matrices in types:
        def merged_model():
            output = export(adapter, f"merged-{matrices}.gguf", "--base", base, "--merged", "--type", matrices)
            found = distance(start_server(output), expected)
            if matrices in BOUNDS:
                return found, BOUNDS[matrices], f"; the adapter moves {moved:.1f}"
            without = export(base, f"without-{matrices}.gguf", "--merged", "--type", matrices)
            alone = distance(start_server(without), unadapted)
            return found, None, f", {alone:.1e} without the adapter; it moves {moved:.1f}"

        def blocks():
            differing, blocks = differing_blocks(root / "merged-q8_0.gguf", root / "merged-f32.gguf")
            return differing, 0, f" in {blocks} blocks"

        report.check(f"{name}, {kind}, merged, {matrices}", merged_model)
        if matrices == "q8_0":
            report.check(f"{name}, {kind}, merged, q8_0 and the reference quantizer", blocks)
    if kind == "dora":
        return

    def separate():
        plain = export(base, "plain.gguf", "--merged", "--type", "f32")
        separate = export(adapter, "adapter.gguf", "--base", base)
        return distance(start_server(plain, separate), expected), BOUNDS["f32"], f"; the adapter moves {moved:.1f}"

    def as_stored():
        alone = distance(start_server(base), unadapted)
        found = distance(start_server(base, root / "adapter.gguf"), expected)
        return found, None, f", {alone:.1e} without the adapter; it moves {moved:.1f}"

    report.check(f"{name}, {kind}, separate adapter, base in f32", separate)
    if Path(base).is_file():
        report.check(f"{name}, {kind}, separate adapter, base as stored", as_stored)


def check_fixtures(report, names):
    """The GGUF cases of the fixtures, all of them where no name is given."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(FIXTURES))
    from cases import CASES, DEFAULTS
    from checkpoint import load_base, row_logits
    from gguf_file import write_gguf

    for name in names or [name for name, case in CASES.items() if "gguf" in case]:
        case = {**DEFAULTS, **CASES[name], "path": "model.gguf"}
        os.chdir(FIXTURES / name)
        ids = json.loads(Path("data.jsonl").read_text().splitlines()[1])["input_ids"]
        model = load_base(case, torch.float32)
        longer_than = case["config"].get("original_max_position_embeddings", 0)
        with torch.no_grad():
            logits = lambda ids: row_logits(model, {"input_ids": ids})[-1]
            expected = [(ids[:n], logits(ids[:n]).log_softmax(dim=0)) for n in PREFIXES if n > longer_than]
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "plain.gguf"
            write_gguf(model, {**case, "gguf": {"": "F32"}}, plain)
            for path, words, bound in (("model.gguf", "as stored", "blocks"), (plain, "weights as F32", "f32")):
                measure = lambda: (distance(start_server(path), expected), BOUNDS[bound], "")
                report.check(f"{name}, {words}", measure)


def check_exports(report, arguments):
    """What the program exports of tiny models, and of the real ones that are given."""
    program = str(Path(arguments.program).resolve())
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(arguments.keep or scratch)
        for number, (name, settings) in enumerate(MODELS.items()):
            base = root / f"{number}" / "base"
            make_model(base, settings)
            load = lambda: AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
            unadapted = reference(load(), VOCABULARY)
            for kind, adapter in KINDS.items():
                place = root / f"{number}" / kind.split(",")[0]
                place.mkdir()
                expected = reference(make_adapter(place / "adapter", load(), adapter, 0.1), VOCABULARY)
                types = ["f32", "f16", "q8_0"] if kind == "lora" else ["f32"]
                check_adapted(report, program, name, place, base, expected, unadapted, kind, types)
        for number, file in enumerate(map(Path, arguments.gguf)):
            place = root / f"gguf-{number}"
            place.mkdir()
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            vocabulary = model.config.vocab_size
            unadapted = reference(model, vocabulary)
            expected = reference(make_adapter(place / "adapter", model, {}, 0.02), vocabulary)
            check_adapted(
                report, program, file.stem, place, file, expected, unadapted, "lora", ["f32", "f16", "q8_0"]
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", nargs="?")
    parser.add_argument("--fixtures", nargs="*", metavar="CASE", help="compare the GGUF files of the fixtures instead")
    parser.add_argument("--gguf", action="append", default=[], help="a real model")
    parser.add_argument("--keep", help="keep what is made in this folder")
    arguments = parser.parse_args()
    if (arguments.program is None) == (arguments.fixtures is None):
        parser.error("give either SMIDGEN or --fixtures")
    report = Report()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.fixtures is not None:
        check_fixtures(report, arguments.fixtures)
    else:
        check_exports(report, arguments)
    sys.stdout.flush()
    os._exit(report.failed)  # the servers' threads do not end by themselves


if __name__ == "__main__":
    main()
