//! The metadata keys of a model: typed reads that name the key, and the refusal of unknown keys.
//! A key that is neither read nor known to change nothing is refused, because llama.cpp would compute something
//! else with it.

use super::architecture::{
    AbsentWindow, Architecture, Pattern, SHORT_CONVOLUTION_ROWS, SlidingTheta, Special, Windows,
};
use super::model_problem::GgufModelProblem;
use super::value::{Array, Metadata, MetadataProblem, Value, required};

/// Keys that all architectures have, without the architecture's prefix.
const COMMON: [&str; 22] = [
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
];
const PATTERN: &str = "attention.sliding_window_pattern";
/// Keys that change nothing, or repeat what follows from the tensors.
const HARMLESS: [&str; 3] = ["expert_used_count", "tensor_data_layout", "vocab_size"];

/// Keys that only one architecture has.
fn special_keys(special: Special) -> &'static [&'static str] {
    match special {
        Special::GrowingQueries => &["attention.temperature_scale", "rope.scaling.yarn_log_multiplier"],
        Special::Gemma4 => &[
            "attention.key_length_swa",
            "attention.shared_kv_layers",
            "attention.value_length_swa",
            "embedding_length_per_layer_input",
            "rope.dimension_count_swa",
        ],
        Special::ShortConvolutions => &[SHORT_CONVOLUTION_ROWS],
        Special::None
        | Special::LongRope
        | Special::QueryScalar { .. }
        | Special::QueryFactor
        | Special::RopeSwitch => &[],
    }
}

/// The metadata of one architecture.
pub(super) struct Keys<'a> {
    pub metadata: &'a Metadata,
    pub architecture: &'static Architecture,
}

impl Keys<'_> {
    pub fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    pub fn unsupported<T>(
        &self,
        key: &str,
        got: &str,
        supported: &'static str,
    ) -> Result<T, GgufModelProblem> {
        Err(GgufModelProblem::Unsupported { key: self.full(key), got: got.to_string(), supported })
    }

    pub fn whole(&self, key: &str) -> Result<Option<u64>, GgufModelProblem> {
        Ok(self.metadata.whole(&self.full(key))?)
    }

    /// A size: a whole number from 1 to 2^31.
    pub fn size(&self, key: &str) -> Result<u64, GgufModelProblem> {
        let full = self.full(key);
        let size = required(&full, self.metadata.whole(&full))?;
        self.check_size(key, size)
    }

    fn check_size(&self, key: &str, size: u64) -> Result<u64, GgufModelProblem> {
        if (1..=1 << 31).contains(&size) {
            Ok(size)
        } else {
            self.unsupported(key, &size.to_string(), "1 to 2^31")
        }
    }

    /// A size for each layer, from one number or from a list.
    pub fn sizes(&self, key: &str, layers: u64) -> Result<Vec<u64>, GgufModelProblem> {
        let sizes = self.counts(key, layers)?;
        sizes.into_iter().map(|size| self.check_size(key, size)).collect()
    }

    /// A whole number for each layer, from one number or from a list.
    pub fn counts(&self, key: &str, layers: u64) -> Result<Vec<u64>, GgufModelProblem> {
        let full = self.full(key);
        let sizes = required(&full, self.metadata.wholes(&full))?;
        match sizes.as_slice() {
            [size] => Ok(vec![*size; layers as usize]),
            list if list.len() as u64 == layers => Ok(sizes),
            list => {
                let what = format!("`{full}` has {} entries for {layers} layers", list.len());
                Err(GgufModelProblem::Contradiction { what })
            }
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>, GgufModelProblem> {
        Ok(self.metadata.text(&self.full(key))?)
    }

    /// A number above 0.
    pub fn number(&self, key: &str) -> Result<Option<f64>, GgufModelProblem> {
        match self.metadata.number(&self.full(key))? {
            Some(number) if !(number > 0.0 && number.is_finite()) => {
                self.unsupported(key, &number.to_string(), "numbers above 0")
            }
            number => Ok(number),
        }
    }

    /// A number that may be 0, which means none.
    pub fn number_or_none(&self, key: &str) -> Result<Option<f64>, GgufModelProblem> {
        match self.metadata.number(&self.full(key))? {
            Some(0.0) => Ok(None),
            _ => self.number(key),
        }
    }

    pub fn required_number(&self, key: &str) -> Result<f64, GgufModelProblem> {
        Ok(self.number(key)?.ok_or_else(|| MetadataProblem::Missing { key: self.full(key) })?)
    }

    /// The size of the sliding window; 0 means none.
    pub fn window(&self) -> Result<Option<u64>, GgufModelProblem> {
        let key = "attention.sliding_window";
        let window = self.whole(key)?;
        match (self.architecture.windows, window) {
            (Windows::Never, Some(1..)) => self.unsupported(key, &window.unwrap_or(0).to_string(), "0"),
            (Windows::Periodic { absent: AbsentWindow::Refused, .. }, _) => self.size(key).map(Some),
            (Windows::Periodic { absent: AbsentWindow::Default(default), .. }, None) => Ok(Some(default)),
            (_, window) => Ok(window.filter(|window| *window > 0)),
        }
    }

    /// Whether each layer has the sliding window.
    pub fn slides(&self, layers: u64, window: Option<u64>) -> Result<Vec<bool>, GgufModelProblem> {
        let full = self.full(PATTERN);
        let (Some(_), Windows::Periodic { period, pattern, .. }) = (window, self.architecture.windows) else {
            return Ok(vec![window.is_some(); layers as usize]);
        };
        let slides: Vec<bool> = match (self.metadata.get(&full), pattern) {
            (Some(Value::Array(Array::Bool(slides))), _) if slides.len() as u64 == layers => slides.clone(),
            (Some(Value::Array(Array::Bool(slides))), _) => {
                let what = format!("`{full}` has {} entries for {layers} layers", slides.len());
                return Err(GgufModelProblem::Contradiction { what });
            }
            (Some(value), Pattern::List) => {
                return self.unsupported(PATTERN, &value.to_string(), "a list of true and false");
            }
            (None, Pattern::List) => return Err(MetadataProblem::Missing { key: full }.into()),
            (_, Pattern::Period | Pattern::PeriodOrList) => {
                // No layer is a multiple of 0: every layer has the window.
                let period = self.whole(PATTERN)?.unwrap_or(period);
                (1..=layers).map(|layer| !layer.is_multiple_of(period)).collect()
            }
        };
        // In transformers the last layer of Gemma 4 sees all positions, whatever its config says.
        match (self.architecture.special, slides.last()) {
            (Special::Gemma4, Some(true)) => {
                self.unsupported(PATTERN, "true in the last layer", "false in the last layer")
            }
            _ => Ok(slides),
        }
    }

    pub fn refuse_unknown(&self) -> Result<(), GgufModelProblem> {
        let prefix = self.full("");
        let has_two_bases = self.architecture.sliding_theta != SlidingTheta::Common;
        let has_pattern = matches!(self.architecture.windows, Windows::Periodic { .. });
        let is_known = |key: &str| {
            COMMON.contains(&key)
                || HARMLESS.contains(&key)
                || special_keys(self.architecture.special).contains(&key)
                || self.architecture.numbers.iter().any(|number| number.key == key)
                || (has_two_bases && key == "rope.freq_base_swa")
                || (has_pattern && key == PATTERN)
        };
        for (key, value) in self.metadata.iter() {
            if key.strip_prefix(&prefix).is_some_and(|short| !is_known(short)) {
                return Err(GgufModelProblem::UnknownKey {
                    key: key.to_string(),
                    got: value.to_string(),
                    architecture: self.architecture.name,
                });
            }
        }
        if let Some(experts) = self.whole("expert_count")?.filter(|experts| *experts > 0) {
            return self.unsupported("expert_count", &experts.to_string(), "0");
        }
        let is_switch = self.architecture.special == Special::RopeSwitch;
        let flags = ["attention.causal"].into_iter().chain(is_switch.then_some("rope.scaling.finetuned"));
        for key in flags {
            if self.metadata.flag(&self.full(key))? == Some(false) {
                return self.unsupported(key, "false", "true");
            }
        }
        Ok(())
    }
}
