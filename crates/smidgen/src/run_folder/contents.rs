//! Fingerprints of what a run is made of (data, weights, config, tokenizer, template, program), compared on resume.
//!
//! Contents are compared, not names and times. A checkpoint holds a hash of the tokenized samples, of the stored
//! bytes of each weight (computed while they are loaded) and of each tokenizer file. It holds the whole config, so
//! that an error can name the key that changed.
//! Left out: the recipe, whose keys are compared one by one (`resume.rs`).

use crate::console::colour::WARNING;
use crate::failure::{Failure, FailureKind};
use crate::plan::job::Job;
use crate::rows::data::Data;
use crate::rows::prompts::Prompt;
use crate::session::encoding::hash_encoder;
use crate::session::weights::WeightHashes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use smidgen_data::tokens::TokenSet;
use smidgen_formats::content_hash::ContentHash;
use smidgen_formats::digest::Hasher;
use smidgen_formats::folder_files::is_tokenizer_file;
use smidgen_formats::model::Model;
use smidgen_recipe::Template;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The version of this program.
pub const PROGRAM: &str = env!("CARGO_PKG_VERSION");

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Contents {
    /// The version of the program that wrote the checkpoint.
    pub program: String,
    /// The samples of each data key of the recipe.
    data: BTreeMap<String, Samples>,
    config: Map<String, Value>,
    /// SHA-256 of each file, by its name.
    tokenizer: BTreeMap<String, String>,
    /// SHA-256 of the file that `data.template` names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    template: Option<String>,
    weights: WeightHashes,
    /// Hashes of the audio encoder, if the data has sound. They are needed before the weights are loaded, to encode
    /// clips.
    #[serde(default, skip_serializing_if = "WeightHashes::is_empty")]
    encoder: WeightHashes,
    /// Changes that were accepted with `--accept-changes`.
    #[serde(default)]
    pub accepted: Vec<Accepted>,
}

/// The size and the hash of a token set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Samples {
    samples: u64,
    tokens: u64,
    hash: String,
}

/// Changes accepted after a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    pub after_step: u64,
    pub changes: Vec<String>,
}

/// A difference from the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    kind: FailureKind,
    words: String,
}

impl Contents {
    /// Facts that all ranks must agree on. The weights are left out, because their hashes are not known yet.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let text = |value: &dyn Fn() -> serde_json::Result<Value>| {
            let text = value().map(|value| value.to_string()).unwrap_or_default();
            let mut hasher = Hasher::sha256();
            hasher.update(text.as_bytes());
            if text.len() > 80 { hasher.finish_hex() } else { text }
        };
        vec![
            ("program version", self.program.clone()),
            ("data", text(&|| serde_json::to_value(&self.data))),
            ("config of the model", text(&|| serde_json::to_value(&self.config))),
            ("tokenizer", text(&|| serde_json::to_value(&self.tokenizer))),
            ("template", self.template.clone().unwrap_or_default()),
            ("audio encoder", text(&|| serde_json::to_value(&self.encoder))),
        ]
    }

    pub fn encoder(&self) -> &WeightHashes {
        &self.encoder
    }

    /// Reads everything except the weights, which are not loaded yet.
    pub fn read(job: &Job) -> Result<Contents, Failure> {
        let mut contents = Contents { program: PROGRAM.into(), ..Contents::default() };
        if let Data::Rows(rows) = &job.data {
            let choices = rows.choices.as_ref().map(|choices| &choices.set);
            let sets = [
                ("data.train", Some(&rows.train)),
                ("data.eval", rows.eval.as_ref()),
                ("data.eval (choices)", choices),
            ];
            for (key, set) in sets {
                if let Some(set) = set {
                    contents.data.insert(key.into(), Samples::of(set)?);
                }
            }
        }
        if let Some(prompts) = job.data.prompts() {
            contents.data.insert("data.train (columns)".into(), Samples::of_columns(&prompts.rows));
        }
        contents.config = job.model.config().as_object().cloned().unwrap_or_default();
        contents.tokenizer = hash_tokenizer(&job.model)?;
        contents.encoder = hash_encoder(job)?;
        if let Template::File(path) = &job.recipe.data.template {
            contents.template = Some(hash_file(&path.resolved)?);
        }
        Ok(contents)
    }

    /// All differences from an earlier state, except those of the weights.
    pub fn changes_since(&self, before: &Contents, model: Option<&Model>) -> Vec<Change> {
        let data = changed(&before.data, &self.data).into_iter().map(|(key, was, is)| Change {
            kind: FailureKind::Data,
            words: format!("`{key}` has different samples: {}, before {}", words(is), words(was)),
        });
        let config: [BTreeMap<&String, &Value>; 2] = [before, self].map(|it| it.config.iter().collect());
        let config = changed(&config[0], &config[1]).into_iter().map(|(key, was, is)| {
            model_change(format!("the config's `{key}` was {}, is {}", words(was), words(is)))
        });
        let tokenizer = changed(&before.tokenizer, &self.tokenizer).into_iter().map(|(name, was, is)| {
            let part = if is_template(name) { "template" } else { "tokenizer" };
            let how = match (was, is) {
                (None, _) => "is new",
                (_, None) => "is gone",
                _ => "changed",
            };
            model_change(format!("the {part} file `{name}` {how}"))
        });
        let template = (before.template != self.template)
            .then(|| model_change("the file of `data.template` changed".into()));
        let encoder = changed_weights(&before.encoder, &self.encoder, model);
        data.chain(config).chain(tokenizer).chain(template).chain(encoder).collect()
    }

    /// Takes the hashes of the loaded weights and compares them with those of the checkpoint. A weight that only one
    /// of the two has is trained in the other, so its values come from the checkpoint.
    pub fn see_weights(&mut self, hashes: WeightHashes, model: &Model) -> Option<Change> {
        let change = changed_weights(&self.weights, &hashes, Some(model));
        self.weights = hashes;
        change
    }

    /// Records changes with which the run continues after a step.
    pub fn accept(&mut self, after_step: u64, changes: Vec<String>, say: &dyn Fn(&str)) {
        if changes.is_empty() {
            return;
        }
        changes.iter().for_each(|change| say(&format!("{WARNING} accepted: {change}")));
        match self.accepted.last_mut().filter(|last| last.after_step == after_step) {
            Some(last) => last.changes.extend(changes),
            None => self.accepted.push(Accepted { after_step, changes }),
        }
    }

    /// The changes that were accepted when the run resumed after this step.
    pub fn accepted_after(&self, step: u64) -> Vec<String> {
        let accepted = self.accepted.iter().filter(|accepted| accepted.after_step == step);
        accepted.flat_map(|accepted| accepted.changes.clone()).collect()
    }

    /// Takes over the checkpoint's weight hashes and accepted changes. The weights are compared once they are loaded.
    pub fn continue_from(&mut self, before: &Contents) {
        self.weights = before.weights.clone();
        self.accepted = before.accepted.clone();
    }
}

/// Describes the changes if they are accepted, and refuses the run otherwise.
pub fn accept_or_refuse(changes: Vec<Change>, folder: &Path, accepts: bool) -> Result<Vec<String>, Failure> {
    let Some(first) = changes.first() else { return Ok(vec![]) };
    let kind = first.kind;
    let words: Vec<String> = changes.into_iter().map(|change| change.words).collect();
    if accepts {
        return Ok(words);
    }
    let message =
        format!("the data or model of the run in `{}` changed\n  {}", folder.display(), words.join("\n  "));
    Err(Failure::new(kind, message).hint(
        "restore what was changed, or continue with `--accept-changes`: the checkpoints and the report then say so",
    ))
}

/// Weights that are in both and have other values.
fn changed_weights(before: &WeightHashes, now: &WeightHashes, model: Option<&Model>) -> Option<Change> {
    let differs = |(name, hash): &(&String, &String)| before.get(*name).is_some_and(|was| was != *hash);
    let changed: Vec<&String> = now.iter().filter(differs).map(|(name, _)| name).collect();
    let first = changed.first()?;
    let place =
        model.and_then(|model| model.weight(first)).map(|weight| weight.file_path().display().to_string());
    let place = place.map_or(String::new(), |place| format!(" in `{place}`"));
    let more = match changed.len() {
        1 => String::new(),
        count => format!(" ({count} of {} weights differ)", now.len()),
    };
    Some(model_change(format!("`{first}`{place} has different values{more}")))
}

fn model_change(words: String) -> Change {
    Change { kind: FailureKind::Model, words }
}

/// The entries that differ, with the old and the new value.
fn changed<'a, K: Ord, V: PartialEq>(
    before: &'a BTreeMap<K, V>,
    now: &'a BTreeMap<K, V>,
) -> Vec<(&'a K, Option<&'a V>, Option<&'a V>)> {
    let keys: std::collections::BTreeSet<&K> = before.keys().chain(now.keys()).collect();
    let pairs = keys.into_iter().map(|key| (key, before.get(key), now.get(key)));
    pairs.filter(|(_, was, is)| was != is).collect()
}

fn words(value: Option<impl std::fmt::Display>) -> String {
    const MOST: usize = 80;
    let Some(value) = value else { return "not set".into() };
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl std::fmt::Display for Samples {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} with {} tokens", self.samples, self.tokens)
    }
}

impl Samples {
    /// What rewards read of prompts, whose tokens are hashed with the samples.
    fn of_columns(prompts: &[Prompt]) -> Samples {
        let (hash, mut offset) = (ContentHash::default(), 0u64);
        for prompt in prompts {
            let text = serde_json::json!([prompt.shown, prompt.fields]).to_string() + "\n";
            hash.add(offset, text.as_bytes());
            offset += text.len() as u64;
        }
        let hash = hash.finish(offset).unwrap_or_default();
        Samples { samples: prompts.len() as u64, tokens: 0, hash }
    }

    fn of(set: &TokenSet) -> Result<Samples, Failure> {
        let (hash, mut offset) = (ContentHash::default(), 0u64);
        let (mut ids, mut bytes) = (Vec::new(), Vec::new());
        for index in 0..set.len() {
            ids.clear();
            bytes.clear();
            bytes.extend(set.length(index).to_le_bytes());
            set.read(index, &mut ids, |position, label| {
                bytes.extend((position as u32).to_le_bytes());
                bytes.extend(label.to_le_bytes());
            })
            .map_err(Failure::disk)?;
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            hash.add(offset, &bytes);
            offset += bytes.len() as u64;
        }
        if let Some(clips) = set.clips() {
            bytes.clear();
            bytes.extend(clips.store().hash().as_bytes());
            let of_samples = (0..set.len()).flat_map(|sample| clips.of_sample(sample));
            bytes.extend(of_samples.flat_map(|clip| clip.to_le_bytes()));
            hash.add(offset, &bytes);
            offset += bytes.len() as u64;
        }
        let hash = hash.finish(offset).unwrap_or_default();
        Ok(Samples { samples: set.len() as u64, tokens: set.stats().tokens, hash })
    }
}

fn is_template(name: &str) -> bool {
    name.starts_with("chat_template") || name.ends_with(".jinja")
}

/// Hashes of the files of a model's tokenizer. In a GGUF file, that is everything before the weights.
fn hash_tokenizer(model: &Model) -> Result<BTreeMap<String, String>, Failure> {
    let folder = match model {
        Model::Folder { folder, .. } => folder.path(),
        Model::Gguf { file, .. } => {
            let path = file.path();
            let head = File::open(path).map(|opened| opened.take(file.data_offset()));
            let hash = head.and_then(hash_reader).map_err(|error| Failure::file("read", path, error))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            return Ok(BTreeMap::from([(format!("header of {name}"), hash)]));
        }
    };
    let unread = |error| Failure::file("read", folder, error);
    let mut hashes = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(unread)? {
        let path = entry.map_err(unread)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if is_tokenizer_file(&name) && path.is_file() {
            hashes.insert(name, hash_file(&path)?);
        }
    }
    Ok(hashes)
}

fn hash_file(path: &Path) -> Result<String, Failure> {
    File::open(path).and_then(hash_reader).map_err(|error| Failure::file("read", path, error))
}

fn hash_reader(mut reader: impl Read) -> io::Result<String> {
    let mut hasher = Hasher::sha256();
    io::copy(&mut reader, &mut hasher)?;
    Ok(hasher.finish_hex())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn contents(edit: impl FnOnce(&mut Contents)) -> Contents {
        let samples = Samples { samples: 10, tokens: 211, hash: "a".into() };
        let config = json!({"rope_theta": 10000.0, "hidden_size": 48});
        let mut contents = Contents {
            program: PROGRAM.into(),
            data: BTreeMap::from([("data.train".to_owned(), samples)]),
            config: config.as_object().cloned().unwrap(),
            tokenizer: BTreeMap::from([("tokenizer.json".to_owned(), "t".to_owned())]),
            ..Contents::default()
        };
        edit(&mut contents);
        contents
    }

    #[test]
    fn every_change_is_named() {
        let before = contents(|_| {});
        let check = |edit: &dyn Fn(&mut Contents), expected: &[&str]| {
            let changes = contents(edit).changes_since(&before, None);
            let words: Vec<&str> = changes.iter().map(|change| change.words.as_str()).collect();
            assert_eq!(words, expected);
        };
        check(&|_| {}, &[]);
        check(
            &|now| {
                drop(
                    now.data
                        .insert("data.train".into(), Samples { samples: 9, tokens: 200, hash: "b".into() }),
                )
            },
            &["`data.train` has different samples: 9 with 200 tokens, before 10 with 211 tokens"],
        );
        check(
            &|now| drop(now.config.insert("rope_theta".into(), json!(5e5))),
            &["the config's `rope_theta` was 10000.0, is 500000.0"],
        );
        check(
            &|now| drop(now.config.remove("hidden_size")),
            &["the config's `hidden_size` was 48, is not set"],
        );
        check(
            &|now| {
                now.tokenizer = BTreeMap::from([("chat_template.jinja".to_owned(), "c".to_owned())]);
                now.template = Some("x".into());
            },
            &[
                "the template file `chat_template.jinja` is new",
                "the tokenizer file `tokenizer.json` is gone",
                "the file of `data.template` changed",
            ],
        );
        check(
            &|now| drop(now.tokenizer.insert("tokenizer.json".into(), "u".into())),
            &["the tokenizer file `tokenizer.json` changed"],
        );
    }

    #[test]
    fn changed_weights_are_named_and_counted() {
        let model = Model::from_config("m", json!({}));
        let hashes = |pairs: &[(&str, &str)]| -> WeightHashes {
            pairs.iter().map(|(name, hash)| (name.to_string(), hash.to_string())).collect()
        };
        let mut run = contents(|_| {});
        assert_eq!(run.see_weights(hashes(&[("a", "1"), ("b", "2"), ("c", "3")]), &model), None);
        // A weight that is trained now is not compared.
        assert_eq!(run.see_weights(hashes(&[("a", "1"), ("b", "2"), ("d", "3")]), &model), None);
        let change = run.see_weights(hashes(&[("a", "1"), ("b", "9")]), &model).unwrap();
        assert_eq!(change.words, "`b` has different values");
        let change = run.see_weights(hashes(&[("a", "5"), ("b", "5")]), &model).unwrap();
        assert_eq!(change.words, "`a` has different values (2 of 2 weights differ)");
    }

    #[test]
    fn changes_are_refused_unless_accepted() {
        let folder = Path::new("run");
        assert_eq!(accept_or_refuse(vec![], folder, false).unwrap(), [""; 0]);
        let change = || vec![model_change("the tokenizer file `x` is gone".into())];
        assert_eq!(accept_or_refuse(change(), folder, true).unwrap(), ["the tokenizer file `x` is gone"]);
        let refused = accept_or_refuse(change(), folder, false).unwrap_err();
        assert!(refused.to_string().contains("the run in `run` changed\n  the tokenizer file `x` is gone"));
        assert_eq!(refused.exit_code(), 1);
    }
}
