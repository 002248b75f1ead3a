//! Which tool a configuration file belongs to, detected from keys that only one tool has.
//!
//! A file with keys of two tools is refused: half of it could only be guessed at.
//! The name and folder of the file do not count, because they say little.

use super::document::{Content, Entry};
use super::llama_factory_v1::shows_v1;
use super::mlx_lm::MLX_KEYS;
use super::torchtune::components;
use super::trainer::{TRAINING_KEYS, TRL_KEYS};
use super::unsloth::UNSLOTH_KEYS;

/// Tools whose files can be imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    DeepSpeed,
    Accelerate,
    /// TRL's SFT script, or TrainingArguments alone.
    Trl,
    Axolotl,
    LlamaFactory,
    Peft,
    Torchtune,
    Unsloth,
    MlxLm,
}

/// The tool, and how it was detected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub tool: Tool,
    /// The reason, which follows a colon in the notes.
    pub because: String,
}

/// Why the tool is unclear.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unrecognized(String);

impl Tool {
    pub const ALL: [Tool; 9] = [
        Tool::DeepSpeed,
        Tool::Accelerate,
        Tool::Trl,
        Tool::Axolotl,
        Tool::LlamaFactory,
        Tool::Peft,
        Tool::Torchtune,
        Tool::Unsloth,
        Tool::MlxLm,
    ];

    /// The word for `--from`.
    pub fn word(self) -> &'static str {
        self.texts()[0]
    }

    pub fn name(self) -> &'static str {
        self.texts()[1]
    }

    /// The file as a noun: "a DeepSpeed configuration".
    pub fn file(self) -> &'static str {
        self.texts()[2]
    }

    /// Word, name and file.
    fn texts(self) -> [&'static str; 3] {
        match self {
            Tool::DeepSpeed => ["deepspeed", "DeepSpeed", "a DeepSpeed configuration"],
            Tool::Accelerate => ["accelerate", "accelerate", "an accelerate configuration"],
            Tool::Trl => ["trl", "TRL", "arguments of TRL or Hugging Face's Trainer"],
            Tool::Axolotl => ["axolotl", "Axolotl", "an Axolotl configuration"],
            Tool::LlamaFactory => ["llama-factory", "LLaMA-Factory", "a LLaMA-Factory configuration"],
            Tool::Peft => ["peft", "PEFT", "PEFT's adapter_config.json"],
            Tool::Torchtune => ["torchtune", "torchtune", "a torchtune configuration"],
            Tool::Unsloth => ["unsloth", "Unsloth", "arguments of Unsloth"],
            Tool::MlxLm => ["mlx-lm", "mlx-lm", "a LoRA configuration of mlx-lm"],
        }
    }
}

/// Keys that only one tool has.
#[rustfmt::skip]
const OWN_KEYS: [(Tool, &[&str]); 7] = [
    (Tool::Peft, &["peft_type"]),
    (Tool::DeepSpeed, &["zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"]),
    (Tool::Accelerate, &["compute_environment", "distributed_type", "deepspeed_config", "num_machines"]),
    (Tool::Axolotl, &["base_model", "sequence_len", "micro_batch_size", "lora_target_linear", "val_set_size", "sample_packing"]),
    (Tool::Unsloth, UNSLOTH_KEYS),
    (Tool::MlxLm, MLX_KEYS),
    (Tool::LlamaFactory, &["finetuning_type", "cutoff_len", "lora_target", "quantization_bit", "dataset_dir", "template"]),
];

/// Keys of bitsandbytes and PEFT. One of them is enough to read the file as arguments of TRL.
#[rustfmt::skip]
const ARGUMENT_KEYS: [&str; 8] = [
    "peft_type", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype",
    "bnb_4bit_use_double_quant", "lora_alpha", "target_modules",
];

/// Detects the tool from the keys: those at the top, and `flat`, with known groups lifted to the top.
pub fn recognize(entries: &[Entry], flat: &[Entry]) -> Result<Origin, Unrecognized> {
    let has = |name: &str| entries.iter().any(|entry| entry.name == name);
    if has("hidden_size") && has("model_type") {
        return Err(Unrecognized("this is a model's config.json; set `model.path` to its folder".to_owned()));
    }
    let components = components(entries);
    if !components.is_empty() {
        let because = format!("{} with `_component_`", it_has(&components));
        return Ok(Origin { tool: Tool::Torchtune, because });
    }
    let v1: Vec<&Entry> = entries.iter().filter(|entry| shows_v1(entry)).collect();
    if !v1.is_empty() {
        return Ok(Origin { tool: Tool::LlamaFactory, because: it_has(&v1) });
    }
    if let Some(why) = composed(entries) {
        return Err(Unrecognized(why.to_owned()));
    }
    let found = |names: &[&str]| -> Vec<&Entry> {
        names.iter().filter_map(|name| flat.iter().find(|entry| entry.name == *name)).collect()
    };
    // A group of PEFT's settings next to those of a trainer does not make the file PEFT's.
    let is_adapter_alone = has("peft_type") && found(&TRAINING_KEYS).is_empty();
    let own: Vec<(Tool, Vec<&Entry>)> = OWN_KEYS
        .iter()
        .map(|(tool, keys)| (*tool, found(keys)))
        .filter(|(tool, found)| !found.is_empty() && (*tool != Tool::Peft || is_adapter_alone))
        .collect();
    if let [(first_tool, first), (second_tool, second), ..] = own.as_slice() {
        return Err(Unrecognized(format!(
            "line {}: `{}` is a key of {}, but `{}` (line {}) is a key of {}",
            first[0].line,
            first[0].name,
            first_tool.name(),
            second[0].name,
            second[0].line,
            second_tool.name()
        )));
    }
    if let Some((tool, keys)) = own.first() {
        return Ok(Origin { tool: *tool, because: it_has(keys) });
    }
    let arguments = found(&ARGUMENT_KEYS);
    let trainer = found(&TRAINING_KEYS).into_iter().chain(found(&TRL_KEYS)).chain(arguments.iter().copied());
    let trainer: Vec<&Entry> = trainer.collect();
    // One of the trainer's keys alone may occur in any file.
    if trainer.len() >= 2 || !arguments.is_empty() {
        return Ok(Origin { tool: Tool::Trl, because: it_has(&trainer) });
    }
    let is_deepspeed = has("train_batch_size") || (has("fp16") && has("optimizer"));
    let why = if is_deepspeed {
        "this may be a DeepSpeed configuration, but no key in it is specific to DeepSpeed"
    } else {
        "no key shows which tool this file belongs to"
    };
    Err(Unrecognized(why.to_owned()))
}

/// What to do about a file of Hydra, which is one of several that Hydra composes.
fn composed(entries: &[Entry]) -> Option<&'static str> {
    fn has_target(content: &Content) -> bool {
        match content {
            Content::Map(inside) => {
                inside.iter().any(|entry| entry.name == "_target_" || has_target(&entry.value.content))
            }
            _ => false,
        }
    }
    let is_hydra = |entry: &Entry| match entry.name.as_str() {
        "hydra" => true,
        "defaults" => matches!(entry.value.content, Content::List(_)),
        _ => has_target(&entry.value.content),
    };
    entries.iter().any(is_hydra).then_some(
        "this file is one of several that Hydra composes; write the composed one with `python SCRIPT.py --cfg job \
         --resolve > all.yaml` and import that",
    )
}

fn it_has(entries: &[&Entry]) -> String {
    let names: Vec<String> = entries.iter().take(3).map(|entry| format!("`{}`", entry.name)).collect();
    format!("it has {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::dictionaries::flattened;
    use crate::import::document::read_document;

    fn of(text: &str) -> Result<Origin, Unrecognized> {
        let entries = read_document(text).unwrap();
        recognize(&entries, &flattened(&entries))
    }

    #[test]
    fn tools_by_their_keys() {
        for (text, tool) in [
            ("zero_optimization: {stage: 2}", Tool::DeepSpeed),
            ("compute_environment: LOCAL_MACHINE", Tool::Accelerate),
            ("base_model: a/b", Tool::Axolotl),
            ("finetuning_type: lora\nmodel_name_or_path: a/b", Tool::LlamaFactory),
            ("model_name_or_path: a/b\nlearning_rate: 1", Tool::Trl),
            ("dataset_name: x\nuse_peft: true", Tool::Trl),
            ("peft_type: LORA\nr: 8", Tool::Peft),
            ("model:\n  _component_: torchtune.models.qwen2.lora_qwen2_7b\nbatch_size: 2", Tool::Torchtune),
            ("use_gradient_checkpointing: unsloth\nmax_seq_length: 2048\nr: 16", Tool::Unsloth),
            ("lora_parameters: {rank: 8}\nmodel: a/b\nlearning_rate: 1e-5", Tool::MlxLm),
            ("load_in_4bit: true", Tool::Trl),
            ("peft_config: {peft_type: LORA, r: 8}\nlearning_rate: 1e-4", Tool::Trl),
            (
                "model: a/b\npeft_config: {name: lora, r: 16}\ncutoff_len: 8\nmicro_batch_size: 1",
                Tool::LlamaFactory,
            ),
            ("model: a/b\nmodel_class: llm\ncutoff_len: 8\nmicro_batch_size: 1", Tool::LlamaFactory),
            ("training: {batch_size: 1, train_on_completions: true}\nlora: {lora_r: 8}", Tool::Unsloth),
            ("TRAINING_CONFIG: {BATCH_SIZE: 2, NUM_EPOCHS: 1}\nMAX_SEQ_LENGTH: 512", Tool::Trl),
            ("quantization_config: {load_in_4bit: true}\npeft_config: {r: 8}", Tool::Trl),
        ] {
            assert_eq!(of(text).unwrap().tool, tool, "{text}");
        }
        assert_eq!(
            of("base_model: a\nsequence_len: 5").unwrap().because,
            "it has `base_model`, `sequence_len`"
        );
    }

    #[test]
    fn unknown_files_and_two_tools() {
        assert_eq!(of("a: 1").unwrap_err().to_string(), "no key shows which tool this file belongs to");
        for hydra in [
            "defaults:\n  - model: small\nlr: 1",
            "trainer: {_target_: lit.Trainer}\nlr: 1",
            "hydra: {run: {dir: x}}",
        ] {
            assert!(of(hydra).unwrap_err().to_string().contains("--cfg job"), "{hydra}");
        }
        assert!(of("model_type: llama\nhidden_size: 8").unwrap_err().to_string().contains("config.json"));
        assert_eq!(
            of("x: 1\nfinetuning_type: lora\nbase_model: a/b").unwrap_err().to_string(),
            "line 3: `base_model` is a key of Axolotl, but `finetuning_type` (line 2) is a key of LLaMA-Factory"
        );
    }
}
