//! Training on preferences in the files of other tools: Axolotl's `rl`, LLaMA-Factory's `stage`, TRL's trainers.
//!
//! A file that names an objective of `train.objective` is translated: the objective, its loss type and its numbers. All
//! others about preferences or rewards are refused as before (`purpose.rs`), reinforcement among them, because rewards are
//! functions in Python. Rows of these objectives are recognized by their columns, so formats of tools are left out.

use super::document::Content;
use super::draft::Draft;
use super::fields::Fields;
use super::mistakes::Mistakes;
use super::origin::Tool;
use super::values::{put_number, word};
use crate::value::Value;

/// An objective that a file names.
pub struct NamedObjective {
    /// The setting that names it.
    key: &'static str,
    objective: &'static str,
    /// The loss type, where the objective's default is another one.
    loss_type: Option<&'static str>,
}

/// Values of `rl` in Axolotl, of `pref_loss` in LLaMA-Factory and of `trainer_type` in files for TRL, with the objective
/// and the loss type.
const NAMES: &[(&str, &str, Option<&str>)] = &[
    ("dpo", "dpo", None),
    ("sigmoid", "dpo", None),
    ("hinge", "dpo", Some("hinge")),
    ("ipo", "dpo", Some("ipo")),
    ("orpo", "orpo", None),
    ("cpo", "cpo", None),
    ("simpo", "cpo", Some("simpo")),
    ("kto", "kto", None),
];

/// Settings with a number, and the key that it goes to.
const NUMBERS: &[(&[&str], &str)] = &[
    (&["rl_beta", "pref_beta", "dpo_beta", "orpo_alpha", "beta"], "train.beta"),
    (&["simpo_gamma"], "train.simpo_gamma"),
    (&["cpo_alpha"], "train.cpo_alpha"),
    (&["kto_desirable_weight", "desirable_weight", "kto_chosen_weight"], "train.desirable_weight"),
    (&["kto_undesirable_weight", "undesirable_weight", "kto_rejected_weight"], "train.undesirable_weight"),
];

/// The settings that objectives have, for `purpose.rs`.
pub const SETTINGS: [&str; 14] = [
    "rl",
    "rl_beta",
    "pref_beta",
    "pref_loss",
    "dpo_beta",
    "orpo_alpha",
    "simpo_gamma",
    "cpo_alpha",
    "kto_desirable_weight",
    "kto_undesirable_weight",
    "desirable_weight",
    "undesirable_weight",
    "trainer_type",
    "max_prompt_length",
];

/// The objective that a file names, if `train.objective` has it.
pub fn named_objective(fields: &Fields<'_>, tool: Tool) -> Option<NamedObjective> {
    let text = |key: &str| match fields.get(key) {
        Some(Content::Text(text)) => Some(text.to_lowercase()),
        _ => None,
    };
    let (key, name) = match tool {
        Tool::Axolotl => ("rl", text("rl")?),
        Tool::LlamaFactory => match text("stage")?.as_str() {
            "dpo" => ("stage", text("pref_loss").unwrap_or_else(|| "sigmoid".into())),
            "kto" => ("stage", "kto".into()),
            _ => return None,
        },
        Tool::Trl => ("trainer_type", text("trainer_type")?),
        _ => return None,
    };
    let &(_, objective, loss_type) = NAMES.iter().find(|(known, ..)| *known == name)?;
    Some(NamedObjective { key, objective, loss_type })
}

impl NamedObjective {
    /// Writes the lines of the objective.
    pub fn put(&self, fields: &Fields<'_>, draft: &mut Draft, mistakes: &Mistakes) {
        let Some(from) = fields.take(self.key) else { return };
        draft.put("train.objective", word(self.objective), &[&from]);
        if let Some(loss_type) = self.loss_type {
            let given = fields.take("pref_loss");
            draft.put("train.loss_type", word(loss_type), &[given.as_ref().unwrap_or(&from)]);
        } else {
            fields.skip(&["pref_loss"]);
        }
        for (names, key) in NUMBERS {
            put_number(draft, key, fields.take_first(names));
        }
        // Axolotl and LLaMA-Factory train SimPO without the negative log-likelihood, unless a weight is set.
        if self.loss_type == Some("simpo") && !draft.has("train.cpo_alpha") {
            draft.put("train.cpo_alpha", Value::Integer(0), &[&from]);
        }
        if let Some(found) = fields.take_on("precompute_ref_log_probs") {
            draft.put("memory.reference", word("cached"), &[&found]);
        }
        for name in [
            "ref_model",
            "ref_model_name_or_path",
            "pref_ftx",
            "rpo_alpha",
            "dpo_label_smoothing",
            "ld_alpha",
        ] {
            if let Some(found) = fields.take_on(name) {
                let key = &found.key;
                mistakes.note(found.line, format!("`{key}` is not supported with `train.objective`"));
            }
        }
        if let Some(found) = fields.take("max_prompt_length") {
            draft.leave_out(&found, "a prompt and its answer together have at most `data.max_tokens`");
        }
        if let Some(found) = fields.take_first(&["lora_dropout"]).filter(|found| found.is_on()) {
            draft.leave_out(&found, "trainers of preferences switch dropout off (`disable_dropout`)");
        }
    }
}
