//! The objective of a recipe: which keys each one has, their defaults, and the [`Objective`] that they describe.
//!
//! Keys, defaults and loss types are those of TRL 1.16. [`APPLICABLE`] says which keys an objective reads; any other key is
//! refused by name, because it would change nothing. What TRL has and this program does not is refused too.
//! Left out: the formulas (`smidgen_ir::objective`).

use crate::reward::Reward;
use crate::sections::{Aim, Init, Recipe};
use smidgen_ir::Objective;
use smidgen_ir::objective::{AnswerLoss, Curve, LabelLoss, Measure, PairLoss, PairTerm, RowsNeeded};
use smidgen_ir::words::ObjectiveKind::{Cpo, Dpo, Grpo, Kto, Orpo, Simpo};
use smidgen_ir::words::{
    AdapterKind, Bias, DataFormat, ObjectiveKind, Overflow, RatioLevel, ReferenceMemory, ReferenceUse,
    RewardScale,
};

/// The keys that only some objectives read, and which do.
pub(crate) const APPLICABLE: [(&str, &[ObjectiveKind]); 24] = [
    ("reference", &[Dpo, Kto, Grpo]),
    ("beta", &[Dpo, Orpo, Cpo, Simpo, Kto, Grpo]),
    ("loss_type", &[Dpo, Cpo, Kto, Grpo]),
    ("loss_weights", &[Dpo]),
    ("label_smoothing", &[Dpo, Cpo, Simpo]),
    ("simpo_gamma", &[Cpo, Simpo]),
    ("cpo_alpha", &[Cpo]),
    ("alpha", &[Cpo, Simpo]),
    ("desirable_weight", &[Kto]),
    ("undesirable_weight", &[Kto]),
    ("num_generations", &[Grpo]),
    ("num_iterations", &[Grpo]),
    ("max_completion_length", &[Grpo]),
    ("temperature", &[Grpo]),
    ("top_k", &[Grpo]),
    ("top_p", &[Grpo]),
    ("stop", &[Grpo]),
    ("reward", &[Grpo]),
    ("epsilon", &[Grpo]),
    ("epsilon_high", &[Grpo]),
    ("delta", &[Grpo]),
    ("scale_rewards", &[Grpo]),
    ("importance_sampling_level", &[Grpo]),
    ("use_bias_correction_kl", &[Grpo]),
];

/// The default learning rate of all objectives but the supervised one.
pub(crate) const DEFAULT_LR: f64 = 1e-6;

/// Loss types of TRL that are known and not supported.
const UNSUPPORTED: [&str; 10] = [
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "cispo",
];

/// A key whose value does not suit the objective, with a message and a hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectiveMistake {
    pub key: &'static str,
    pub message: String,
    pub hint: String,
}

fn mistake<T>(key: &'static str, message: String, hint: impl Into<String>) -> Result<T, ObjectiveMistake> {
    Err(ObjectiveMistake { key, message, hint: hint.into() })
}

/// How the sum of token losses of an answer is divided (`train.loss_type` of GRPO).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerMean {
    /// Each answer by its own tokens, then by the number of answers.
    Answers,
    /// By all tokens of the step: of a micro-batch in TRL's `bnpo`, which pools over the step here.
    Tokens,
    /// By the number of answers times the longest that an answer may be.
    Longest,
}

/// The settings of GRPO that are not part of the loss of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AnswerSettings {
    /// Answers of a prompt.
    pub num_generations: usize,
    /// Updates that a batch of answers serves.
    pub num_iterations: u64,
    pub max_completion_length: usize,
    pub mean: AnswerMean,
    pub scale: RewardScale,
}

impl Recipe {
    /// What a step minimizes instead of the mean negative log-likelihood; `None` for `sft`.
    pub fn objective(&self) -> Result<Option<Objective>, ObjectiveMistake> {
        let aim = &self.train.aim;
        Ok(Some(match self.train.objective {
            ObjectiveKind::Sft => return Ok(None),
            Dpo => Objective::Pairs(dpo(aim)?),
            Orpo => Objective::Pairs(orpo(aim)?),
            Cpo | Simpo => Objective::Pairs(cpo(aim, self.train.objective == Simpo)?),
            Kto => Objective::Labels(kto(aim)?),
            Grpo => Objective::Answers(grpo(aim)?),
        }))
    }

    /// Whether figures are those of a DPO trainer, which does not report a negative log-likelihood.
    pub fn reports_as_dpo(&self) -> bool {
        self.train.objective == Dpo
    }

    /// The rows that the objective needs.
    pub fn rows_needed(&self) -> RowsNeeded {
        match self.train.objective {
            ObjectiveKind::Sft => RowsNeeded::Samples,
            Orpo => RowsNeeded::Pairs { counts_prompt: true },
            Dpo | Cpo | Simpo => RowsNeeded::Pairs { counts_prompt: false },
            Kto => RowsNeeded::Labels,
            Grpo if self.generates() => RowsNeeded::Prompts,
            Grpo => RowsNeeded::Answers { count: self.answer_settings().num_generations },
        }
    }

    /// How generated answers are scored; empty where nothing is generated.
    pub fn rewards(&self) -> &[Reward] {
        self.train.aim.reward.as_deref().unwrap_or_default()
    }

    /// Whether the run generates the answers that it trains on.
    pub fn generates(&self) -> bool {
        self.train.objective == Grpo && !self.rewards().is_empty()
    }

    /// What cannot be combined with generated answers, or needs them: the key, why, and what to do.
    pub(crate) fn refused_generation(&self) -> Vec<(&'static str, String, &'static str)> {
        let Recipe { train, data, memory, .. } = self;
        let mut refused = Vec::new();
        if !self.generates() {
            let aim = &train.aim;
            let given = [
                ("train.top_k", aim.top_k.is_some()),
                ("train.top_p", aim.top_p.is_some()),
                ("train.stop", aim.stop.is_some()),
            ];
            for (key, _) in given.into_iter().filter(|(_, is_given)| *is_given && train.objective == Grpo) {
                let message =
                    format!("`{key}` has no effect: without `train.reward` the rows have the answers");
                refused.push((key, message, "remove it, or add a reward"));
            }
            return refused;
        }
        let mut refuse = |key, message: &str, hint| refused.push((key, message.to_owned(), hint));
        const LATER: &str = "evaluate the finished run with `smidgen eval`";
        if !data.eval.is_empty() {
            refuse("data.eval", "`data.eval` is not evaluated where answers are generated", LATER);
        }
        if data.split > 0.0 {
            refuse("data.split", "`data.split` is not evaluated where answers are generated", LATER);
        }
        if data.format != DataFormat::Auto {
            let message = "`data.format` has no effect: rows of prompts are detected by their columns";
            refuse("data.format", message, "remove it");
        }
        if matches!(data.overflow, Overflow::Truncate) {
            let message = "`data.overflow = \"truncate\"` would cut prompts";
            refuse("data.overflow", message, "`drop` leaves long prompts out, `error` refuses them");
        }
        if self.has_reference() && memory.reference == ReferenceMemory::Cached {
            let message = "`memory.reference = \"cached\"`: answers are generated, so nothing about them is known before";
            refuse("memory.reference", message, "write `memory.reference = \"pass\"`");
        }
        if self.has_reference() && self.changes_base() {
            let message =
                "`train.beta` above 0 compares generated answers with the base, which this run changes";
            refuse("train.beta", message, "write `train.beta = 0`, or train adapters alone");
        }
        refused
    }

    /// The settings of GRPO; their defaults for other objectives.
    pub fn answer_settings(&self) -> AnswerSettings {
        let aim = &self.train.aim;
        AnswerSettings {
            num_generations: aim.num_generations.unwrap_or(8),
            num_iterations: aim.num_iterations.unwrap_or(1) as u64,
            max_completion_length: aim.max_completion_length.unwrap_or(512),
            mean: match one_type(aim, "dapo").unwrap_or("dapo") {
                "grpo" => AnswerMean::Answers,
                "dr_grpo" => AnswerMean::Longest,
                _ => AnswerMean::Tokens,
            },
            scale: aim.scale_rewards.unwrap_or(RewardScale::Group),
        }
    }

    /// Whether the objective compares with a reference.
    pub fn has_reference(&self) -> bool {
        match self.train.objective {
            ObjectiveKind::Sft | Orpo | Cpo | Simpo => false,
            Dpo => {
                let types = self.train.aim.loss_type.as_deref();
                types.is_none_or(|types| types.iter().any(|name| name != "sft"))
            }
            Kto => true,
            Grpo => self.train.aim.beta.unwrap_or(0.0) > 0.0,
        }
    }

    /// A reference that cannot be computed: the key, why, and what to do.
    pub(crate) fn refused_reference(&self) -> Option<(&'static str, String, &'static str)> {
        let (adapter, wanted) = (&self.adapter, self.train.aim.reference);
        if !self.has_reference() || !self.changes_base() {
            return None;
        }
        if let Ok(Some(Objective::Labels(loss))) = self.objective()
            && loss.compares_divergence
        {
            return Some((
                "train.objective",
                "`kto` measures the divergence from the reference in every step, and training changes the base".into(),
                "write `train.loss_type = \"apo_zero_unpaired\"`, or train adapters alone",
            ));
        }
        if adapter.kind == AdapterKind::Full && wanted == Some(ReferenceUse::Adapter) {
            let message = "`train.reference = \"adapter\"`: `adapter.kind = \"full\"` has no adapter";
            return Some(("train.reference", message.into(), "write `train.reference = \"base\"`"));
        }
        if adapter.init != Init::Default && wanted == Some(ReferenceUse::Base) {
            let message =
                "`train.reference = \"base\"`: `adapter.init` brings trained parts of the base with it";
            return Some(("train.reference", message.into(), "write `train.reference = \"adapter\"`"));
        }
        None
    }

    /// Whether training changes more than adapters, so that the base without adapters is not the base of the start.
    pub fn changes_base(&self) -> bool {
        let adapter = &self.adapter;
        adapter.kind == AdapterKind::Full || !adapter.train.is_empty() || adapter.bias != Bias::None
    }
}

/// The only loss type of a recipe.
fn one_type<'a>(aim: &'a Aim, default: &'a str) -> Result<&'a str, ObjectiveMistake> {
    match aim.loss_type.as_deref() {
        None => Ok(default),
        Some([only]) => Ok(only),
        Some(_) => mistake(
            "train.loss_type",
            "`train.loss_type` is a list, and only `dpo` adds several losses".into(),
            "name one of them",
        ),
    }
}

fn unknown_type<T>(name: &str, known: &[&str]) -> Result<T, ObjectiveMistake> {
    let message = if UNSUPPORTED.contains(&name) {
        format!("`train.loss_type = \"{name}\"` is not supported")
    } else {
        format!("`train.loss_type = \"{name}\"` is not known")
    };
    mistake("train.loss_type", message, format!("supported: {}", known.join(", ")))
}

fn beta_above_zero(aim: &Aim) -> Result<f64, ObjectiveMistake> {
    match aim.beta.unwrap_or(0.1) {
        beta if beta > 0.0 => Ok(beta),
        _ => mistake("train.beta", "`train.beta` must be above 0 for this objective".into(), "0.1 is usual"),
    }
}

const PLAIN: Curve = Curve::Logistic { right: 1.0, wrong: 0.0 };

fn dpo(aim: &Aim) -> Result<PairLoss, ObjectiveMistake> {
    let beta = beta_above_zero(aim)?;
    let smoothing = aim.label_smoothing.unwrap_or(0.0);
    let default = [String::from("sigmoid")];
    let types = aim.loss_type.as_deref().unwrap_or(&default);
    let weights = aim.loss_weights.clone().unwrap_or(vec![1.0; types.len()]);
    if weights.len() != types.len() {
        let (weights, types) = (weights.len(), types.len());
        return mistake(
            "train.loss_weights",
            format!("`train.loss_weights` has {weights} entries, `train.loss_type` has {types}"),
            "give one weight for each loss type",
        );
    }
    let mut loss = PairLoss { terms: vec![], nll: 0.0, beta, reported: Measure::Sum, alpha: 0.0 };
    for (name, weight) in types.iter().zip(weights) {
        let term = PairTerm { weight, measure: Measure::Sum, scale: beta, shift: 0.0, curve: PLAIN };
        loss.terms.push(match name.as_str() {
            "sigmoid" => term,
            "robust" if smoothing >= 0.5 => {
                return mistake(
                    "train.label_smoothing",
                    "`train.label_smoothing` must be below 0.5 with `robust`".into(),
                    "it is the share of pairs whose answers are swapped",
                );
            }
            "robust" => {
                let rest = 1.0 - 2.0 * smoothing;
                let curve = Curve::Logistic { right: (1.0 - smoothing) / rest, wrong: -smoothing / rest };
                PairTerm { curve, ..term }
            }
            "hinge" => PairTerm { curve: Curve::Hinge, ..term },
            "ipo" => PairTerm {
                measure: Measure::Mean,
                scale: 1.0,
                shift: 1.0 / (2.0 * beta),
                curve: Curve::Square,
                ..term
            },
            "sigmoid_norm" => PairTerm { measure: Measure::Mean, ..term },
            "sft" => {
                loss.nll += weight;
                continue;
            }
            other => {
                let known = ["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "sft"];
                return unknown_type(other, &known);
            }
        });
    }
    Ok(loss)
}

fn orpo(aim: &Aim) -> Result<PairLoss, ObjectiveMistake> {
    let beta = beta_above_zero(aim)?;
    let term = PairTerm { weight: beta, measure: Measure::Odds, scale: 1.0, shift: 0.0, curve: PLAIN };
    Ok(PairLoss { terms: vec![term], nll: 1.0, beta, reported: Measure::Mean, alpha: 0.0 })
}

fn cpo(aim: &Aim, is_simpo: bool) -> Result<PairLoss, ObjectiveMistake> {
    let beta = beta_above_zero(aim)?;
    let name = if is_simpo { "simpo" } else { one_type(aim, "sigmoid")? };
    let smoothing = aim.label_smoothing.unwrap_or(0.0);
    let curve = Curve::Logistic { right: 1.0 - smoothing, wrong: smoothing };
    let term = PairTerm { weight: 1.0, measure: Measure::Sum, scale: beta, shift: 0.0, curve };
    let simpo = PairTerm { measure: Measure::Mean, shift: aim.simpo_gamma.unwrap_or(0.5), ..term };
    let term = match name {
        "sigmoid" => term,
        "hinge" => PairTerm { curve: Curve::Hinge, ..term },
        "simpo" | "alphapo" => simpo,
        "ipo" => {
            let (scale, shift) = (1.0, 1.0 / (2.0 * beta));
            PairTerm { measure: Measure::Mean, scale, shift, curve: Curve::Square, ..term }
        }
        other => return unknown_type(other, &["sigmoid", "hinge", "ipo", "simpo", "alphapo"]),
    };
    if aim.simpo_gamma.is_some() && !matches!(name, "simpo" | "alphapo") {
        return mistake(
            "train.simpo_gamma",
            format!("`train.simpo_gamma` has no effect with `train.loss_type = \"{name}\"`"),
            "remove it, or set `train.loss_type = \"simpo\"`",
        );
    }
    if name == "alphapo" && aim.cpo_alpha.is_some_and(|alpha| alpha != 0.0) {
        return mistake(
            "train.cpo_alpha",
            "`train.cpo_alpha` is 0 with `train.loss_type = \"alphapo\"`".into(),
            "remove it, or set `train.loss_type = \"simpo\"` and `train.alpha`",
        );
    }
    let nll = if is_simpo || name == "alphapo" { 0.0 } else { aim.cpo_alpha.unwrap_or(1.0) };
    let alpha = aim.alpha.unwrap_or(0.0);
    Ok(PairLoss { terms: vec![term], nll, beta, reported: term.measure, alpha })
}

fn kto(aim: &Aim) -> Result<LabelLoss, ObjectiveMistake> {
    let compares_divergence = match one_type(aim, "kto")? {
        "kto" => true,
        "apo_zero_unpaired" => false,
        other => return unknown_type(other, &["kto", "apo_zero_unpaired"]),
    };
    Ok(LabelLoss {
        beta: beta_above_zero(aim)?,
        desirable: aim.desirable_weight.unwrap_or(1.0),
        undesirable: aim.undesirable_weight.unwrap_or(1.0),
        compares_divergence,
    })
}

fn grpo(aim: &Aim) -> Result<AnswerLoss, ObjectiveMistake> {
    let known = ["grpo", "dapo", "bnpo", "dr_grpo"];
    let name = one_type(aim, "dapo")?;
    if !known.contains(&name) {
        return unknown_type(name, &known);
    }
    let epsilon_low = aim.epsilon.unwrap_or(0.2);
    Ok(AnswerLoss {
        by_sequence: aim.importance_sampling_level == Some(RatioLevel::Sequence),
        epsilon_low,
        epsilon_high: aim.epsilon_high.unwrap_or(epsilon_low),
        delta: aim.delta.unwrap_or(f64::INFINITY),
        beta: aim.beta.unwrap_or(0.0),
        corrects_penalty: aim.use_bias_correction_kl.unwrap_or(true),
        temperature: aim.temperature.unwrap_or(1.0),
    })
}
