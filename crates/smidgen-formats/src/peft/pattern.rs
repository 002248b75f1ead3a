//! Keys of `rank_pattern` and `alpha_pattern`: KEY matches a module path if `^(.*\.)?(KEY)$` does, as in
//! PEFT. Names and dotted paths are compared as suffixes; only keys with other characters become regexes. In
//! a dotted path a dot matches only a dot. In PEFT it matches any character, which makes no difference for
//! real module names.
//! Left out: features that only Python's regexes have (look-around, back-references); such keys are refused.

use regex::bytes::{Regex, RegexBuilder};
use thiserror::Error;

/// The most memory that a compiled pattern may take.
const MAX_COMPILED_BYTES: usize = 1 << 20;

#[derive(Clone, Debug)]
pub struct ModulePattern(Matcher);

#[derive(Clone, Debug)]
enum Matcher {
    Suffix(String),
    Regex(Regex),
}

#[derive(Debug, Error)]
#[error("the module pattern `{key}` cannot be read as a regular expression: {reason}")]
pub struct PatternError {
    pub key: String,
    pub reason: String,
}

impl ModulePattern {
    pub fn new(key: &str) -> Result<ModulePattern, PatternError> {
        let is_plain = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '-' | '.');
        if key.chars().all(is_plain) {
            return Ok(ModulePattern(Matcher::Suffix(key.to_string())));
        }
        ModulePattern::expression(key, &format!(r"^(.*\.)?({key})$"))
    }

    /// A text in `target_modules`, which has to match whole paths.
    pub fn whole(text: &str) -> Result<ModulePattern, PatternError> {
        ModulePattern::expression(text, &format!("^({text})$"))
    }

    fn expression(key: &str, anchored: &str) -> Result<ModulePattern, PatternError> {
        // Matches bytes and ASCII classes, so that the tables of Unicode classes are not needed.
        RegexBuilder::new(anchored)
            .unicode(false)
            .size_limit(MAX_COMPILED_BYTES)
            .dfa_size_limit(MAX_COMPILED_BYTES)
            .build()
            .map(|regex| ModulePattern(Matcher::Regex(regex)))
            .map_err(|error| PatternError { key: key.to_string(), reason: last_line(&error.to_string()) })
    }

    pub fn matches(&self, module_path: &str) -> bool {
        match &self.0 {
            Matcher::Suffix(key) => module_path
                .strip_suffix(key.as_str())
                .is_some_and(|before| before.is_empty() || before.ends_with('.')),
            Matcher::Regex(regex) => regex.is_match(module_path.as_bytes()),
        }
    }
}

/// The last line of a syntax error, which says what is wrong. The lines before it show the pattern.
fn last_line(text: &str) -> String {
    let line = text.lines().last().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "model.layers.1.self_attn.q_proj";

    #[test]
    fn plain_keys_match_whole_names_at_the_end() {
        let matches = |key: &str| ModulePattern::new(key).unwrap().matches(PATH);
        for key in ["q_proj", "self_attn.q_proj", "1.self_attn.q_proj", PATH] {
            assert!(matches(key), "{key}");
        }
        for key in ["proj", "_proj", "layers.1", "x.model.layers.1.self_attn.q_proj", "q_proj.weight"] {
            assert!(!matches(key), "{key}");
        }
        assert!(!ModulePattern::new("1.q").unwrap().matches("layers.11.q"));
    }

    #[test]
    fn other_keys_are_regexes_anchored_as_in_peft() {
        let matches = |key: &str| ModulePattern::new(key).unwrap().matches(PATH);
        for key in [
            r"layers\.\d+\.self_attn\.q_proj",
            "q_proj|v_proj",
            "(q|k)_proj",
            "^model.layers.1.*",
            r".*\.q_proj",
            "layers.[0-3].self_attn.[qv]_proj",
        ] {
            assert!(matches(key), "{key}");
        }
        for key in ["q_pro", r"\d+", "v_proj|k_proj", "^layers.1.*", "(q|k)", "layers.[2-9].*"] {
            assert!(!matches(key), "{key}");
        }
    }

    #[test]
    fn target_expressions_match_whole_paths() {
        let matches = |text: &str| ModulePattern::whole(text).unwrap().matches(PATH);
        assert!(matches(r".*\.(q_proj|v_proj)") && matches(r"model\.layers\.1\..*"));
        assert!(!matches("q_proj|v_proj") && !matches(r"layers\.1\..*"));
    }

    #[test]
    fn regexes_that_only_python_supports_are_refused() {
        let error = ModulePattern::new("(?!q_proj).*").unwrap_err().to_string();
        assert_eq!(
            error,
            "the module pattern `(?!q_proj).*` cannot be read as a regular expression: \
             look-around, including look-ahead and look-behind, is not supported"
        );
        assert!(ModulePattern::new("(").is_err());
        assert!(ModulePattern::new("((a{1000}){1000}){1000}").is_err());
    }
}
