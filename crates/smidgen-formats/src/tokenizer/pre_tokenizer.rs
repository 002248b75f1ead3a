//! How byte-level BPE tokenizers split text before merging, by the names that GGUF files use.
//! A GGUF file has only the name. The regexes here are those in the `tokenizer.json` of the original models,
//! so the ids are those that the models were trained with.
//! Left out: names of unsupported architectures; they are refused.

use serde_json::{Value as Json, json};

/// How text is split, and other settings that depend on the name.
pub(super) struct PreTokenizer {
    pub normalizer: Json,
    pub pre_tokenizer: Json,
    /// A piece of text that is a token is not merged, even if merges would not produce it.
    pub ignore_merges: bool,
    /// Whether BOS is added if the file does not say.
    pub add_bos: bool,
}

/// All names of a pre-tokenizer, and the pre-tokenizer.
type Named = (&'static [&'static str], fn() -> PreTokenizer);

/// The first name of each is the one that current converters write.
const NAMES: [Named; 11] = [
    (&["gpt-2", "phi-2", "mpt", "olmo"], gpt2),
    (&["smollm", "starcoder", "refact", "codeshell"], single_digits),
    (&["command-r"], command_r),
    (&["llama-bpe", "llama3", "llama-v3"], llama3),
    (&["glm4"], glm4),
    (&["dbrx", "smaug-bpe", "chatglm-bpe"], dbrx),
    (&["qwen2", "deepseek-r1-qwen"], qwen2),
    (&["seed-coder"], seed_coder),
    (&["gpt-4o", "llama4"], gpt4o),
    (&["tekken"], tekken),
    (&["default"], fallback),
];

pub(super) fn pre_tokenizer(name: &str) -> Option<PreTokenizer> {
    NAMES.iter().find(|(names, _)| names.contains(&name)).map(|(_, make)| make())
}

pub(super) fn supported_names() -> String {
    NAMES.iter().flat_map(|(names, _)| names.iter().copied()).collect::<Vec<_>>().join(", ")
}

/// The name of the pre-tokenizer that a `tokenizer.json` describes.
/// Converters name that of GLM 4 after the architecture, although it is that of Llama 3 without BOS.
pub(super) fn name_of(
    normalizer: &Json,
    pre_tokenizer: &Json,
    ignore_merges: bool,
    architecture: &str,
) -> Option<&'static str> {
    let is_same = |known: &PreTokenizer| {
        known.normalizer == *normalizer
            && known.ignore_merges == ignore_merges
            && comparable(&known.pre_tokenizer) == comparable(pre_tokenizer)
    };
    let same: Vec<&'static [&'static str]> =
        NAMES.iter().filter(|(_, make)| is_same(&make())).map(|(names, _)| *names).collect();
    let own = same.iter().find(|names| names.contains(&architecture));
    own.or(same.first())?.first().copied()
}

/// Removes `trim_offsets`, which does not change the tokens, and writes line ends in regexes as escapes.
fn comparable(step: &Json) -> Json {
    match step {
        Json::Object(keys) => {
            let kept = keys.iter().filter(|(key, _)| *key != "trim_offsets");
            kept.map(|(key, value)| (key.clone(), comparable(value))).collect()
        }
        Json::Array(steps) => steps.iter().map(comparable).collect(),
        Json::String(text) => json!(text.replace('\r', r"\r").replace('\n', r"\n")),
        other => other.clone(),
    }
}

/// Splits contractions, letters, digits and other characters, each with the space before it.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Maps bytes to letters. With `regex` it first splits the text as GPT-2 does.
fn byte_level(regex: bool) -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex})
}

pub(super) fn split_by(expression: &str) -> Json {
    json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false})
}

fn sequence(steps: Vec<Json>) -> Json {
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn plain(pre_tokenizer: Json) -> PreTokenizer {
    PreTokenizer { normalizer: Json::Null, pre_tokenizer, ignore_merges: false, add_bos: false }
}

fn gpt2() -> PreTokenizer {
    plain(byte_level(true))
}

fn single_digits() -> PreTokenizer {
    plain(sequence(vec![json!({"type": "Digits", "individual_digits": true}), byte_level(true)]))
}

fn command_r() -> PreTokenizer {
    PreTokenizer { normalizer: json!({"type": "NFC"}), ..single_digits() }
}

fn llama3() -> PreTokenizer {
    PreTokenizer { ignore_merges: true, add_bos: true, ..dbrx() }
}

fn glm4() -> PreTokenizer {
    PreTokenizer { ignore_merges: true, ..dbrx() }
}

fn dbrx() -> PreTokenizer {
    plain(sequence(vec![split_by(LLAMA3), byte_level(false)]))
}

fn qwen2() -> PreTokenizer {
    let pre_tokenizer = sequence(vec![split_by(QWEN2), byte_level(false)]);
    PreTokenizer { normalizer: json!({"type": "NFC"}), ..plain(pre_tokenizer) }
}

fn seed_coder() -> PreTokenizer {
    plain(sequence(vec![split_by(SEED), byte_level(false)]))
}

fn gpt4o() -> PreTokenizer {
    plain(sequence(vec![split_by(GPT4O), byte_level(false)]))
}

fn tekken() -> PreTokenizer {
    let pre_tokenizer = sequence(vec![split_by(TEKKEN), byte_level(false)]);
    PreTokenizer { ignore_merges: true, add_bos: true, ..plain(pre_tokenizer) }
}

/// What llama.cpp uses for models whose pre-tokenizer it does not know: four splits, one after the other.
fn fallback() -> PreTokenizer {
    let expressions = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];
    let mut steps: Vec<Json> = expressions.into_iter().map(split_by).collect();
    steps.push(byte_level(false));
    plain(sequence(steps))
}
