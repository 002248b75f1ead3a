//! What an adapter on disk computes, as its config says it: LoRA, rsLoRA, DoRA, both together, or LS-LoRA.
//! PEFT has no name for it; the kind follows from `peft_type`, `use_dora` and `use_rslora`.
//! DoRA together with rsLoRA is legal in PEFT: the scale is rsLoRA's, `alpha / sqrt(r)`, the rest is DoRA's.
//! Left out: what a recipe may ask for, which is less.

use std::fmt;

use super::config::AdapterConfig;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredKind {
    Lora,
    RsLora,
    Dora,
    RsLoraDora,
    LsLora,
}

impl StoredKind {
    pub fn name(self) -> &'static str {
        match self {
            StoredKind::Lora => "lora",
            StoredKind::RsLora => "rslora",
            StoredKind::Dora => "dora",
            StoredKind::RsLoraDora => "rslora+dora",
            StoredKind::LsLora => "ls-lora",
        }
    }

    /// Whether each module has a magnitude vector.
    pub fn has_magnitude(self) -> bool {
        matches!(self, StoredKind::Dora | StoredKind::RsLoraDora)
    }
}

impl fmt::Display for StoredKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl AdapterConfig {
    /// LS-LoRA may have rsLoRA's scale as well, which its name does not show.
    pub fn kind(&self) -> StoredKind {
        match (self.fourier, self.use_dora, self.use_rslora) {
            (Some(_), _, _) => StoredKind::LsLora,
            (None, true, true) => StoredKind::RsLoraDora,
            (None, true, false) => StoredKind::Dora,
            (None, false, true) => StoredKind::RsLora,
            (None, false, false) => StoredKind::Lora,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peft::config::FourierConfig;

    #[test]
    fn the_kind_follows_from_the_config() {
        let of = |fourier, use_dora, use_rslora| {
            AdapterConfig { fourier, use_dora, use_rslora, ..AdapterConfig::default() }.kind().name()
        };
        assert_eq!(of(None, false, false), "lora");
        assert_eq!(of(None, false, true), "rslora");
        assert_eq!(of(None, true, false), "dora");
        assert_eq!(of(None, true, true), "rslora+dora");
        assert_eq!(of(Some(FourierConfig::default()), false, true), "ls-lora");
    }
}
