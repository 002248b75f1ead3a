//! The kind of an adapter on disk: LoRA, rsLoRA, DoRA, DoRA with rsLoRA, or LS-LoRA.
//! PEFT has no single key for it; the kind follows from `peft_type`, `use_dora` and `use_rslora`.
//! PEFT allows DoRA with rsLoRA: the scale is that of rsLoRA, `alpha / sqrt(r)`, and everything else is DoRA.
//! Left out: the kinds that a recipe may use, which are fewer.

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
    /// An LS-LoRA may also have the scale of rsLoRA; its kind does not show it.
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
