//! How a row becomes text: the model's own chat template, a built-in one, or a file.
//!
//! The built-in chat templates have `{% generation %}` blocks around each answer and the end of its turn, like TRL's
//! templates for training. `alpaca` and `llm-adapters` are not chat templates but plain prompts around an instruction.
//! `strftime_now` always gives 26 Jul 2024, the date that Llama's own template falls back to: with the current date
//! the tokens would change from day to day, and a run could not be resumed exactly.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use smidgen_ir::words::nearest;
use thiserror::Error;

use crate::example::RowFormat;
use smidgen_formats::json_file::{JsonFileError, read_bytes};
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::{ChatTemplate, ChatTemplateError};

struct BuiltIn {
    name: &'static str,
    source: &'static str,
    /// What it writes around turns; each marker is one token of the models that the template is for.
    markers: &'static [&'static str],
}

const PHI_MARKERS: &[&str] = &["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"];
const CHAT_TEMPLATES: [BuiltIn; 8] = [
    BuiltIn {
        name: "chatml",
        source: include_str!("templates/chatml.jinja"),
        markers: &["<|im_start|>", "<|im_end|>"],
    },
    BuiltIn {
        name: "llama3",
        source: include_str!("templates/llama3.jinja"),
        markers: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    },
    BuiltIn { name: "phi3", source: include_str!("templates/phi3.jinja"), markers: PHI_MARKERS },
    BuiltIn {
        name: "phi4",
        source: include_str!("templates/phi4.jinja"),
        markers: &["<|im_start|>", "<|im_sep|>", "<|im_end|>"],
    },
    BuiltIn { name: "phi4-mini", source: include_str!("templates/phi4-mini.jinja"), markers: PHI_MARKERS },
    BuiltIn {
        name: "gemma",
        source: include_str!("templates/gemma.jinja"),
        markers: &["<start_of_turn>", "<end_of_turn>"],
    },
    BuiltIn {
        name: "mistral",
        source: include_str!("templates/mistral.jinja"),
        markers: &["[INST]", "[/INST]"],
    },
    // Zephyr's role markers are plain text, not tokens.
    BuiltIn { name: "zephyr", source: include_str!("templates/zephyr.jinja"), markers: &[] },
];

impl BuiltIn {
    /// The markers that the vocabulary lacks, for messages.
    fn missing(&self, tokenizer: &Tokenizer) -> Vec<String> {
        let is_missing = |marker: &&&str| tokenizer.token_id(marker).is_none();
        let markers = self.markers.iter().filter(is_missing).map(|marker| format!("`{marker}`"));
        let needs_eos = self.source.contains("eos_token") && tokenizer.special_ids().eos.is_none();
        markers.chain(needs_eos.then(|| "the end of a text (EOS)".to_owned())).collect()
    }
}

/// Plain prompts by name.
const TEXT_PROMPTS: [(&str, TextPrompt); 2] =
    [("alpaca", TextPrompt::Alpaca), ("llm-adapters", TextPrompt::LlmAdapters)];

const MAX_TEMPLATE_BYTES: u64 = 1_000_000;

/// The time that `strftime_now` gives, in seconds since 1970.
const MOMENT_S: u64 = 1_721_952_000;

/// The time that every data set is rendered with.
pub fn template_time() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(MOMENT_S)
}

#[derive(Debug, Error)]
pub enum TemplateError {
    #[error("`data.template`: unknown template `{name}`")]
    Unknown { name: String },
    #[error("`data.template`: `{}` cannot be read: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    #[error("`data.template`: {origin}: {error}")]
    Unsound { origin: String, error: ChatTemplateError },
    #[error("`data.template = {name}`: the tokenizer has no token for {}", missing.join(", "))]
    NoMarkers { name: String, missing: Vec<String>, fitting: Vec<&'static str>, has_own: bool },
    #[error("the rows are conversations, but the model has no chat template")]
    ModelHasNone,
    #[error("`data.template = model`: the model has no chat template")]
    AskedForModels,
    #[error("`data.template = none`: rows of `{format}` need a template")]
    Needed { format: RowFormat },
    #[error(
        "`data.template = {name}` is a prompt for an instruction and its answer, but the rows are conversations"
    )]
    TextForChat { name: String },
    #[error("`data.template = {name}` is a prompt, and `data.format = alpaca-prompt` has one already")]
    TwoPrompts { name: String },
}

impl TemplateError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            TemplateError::Unknown { name } => {
                let all = template_names();
                let near = nearest(name, all.iter().copied());
                let near = near.map_or(String::new(), |near| format!("did you mean `{near}`? "));
                Some(format!(
                    "{near}the built-in templates are {}; `model` is the model's own, `none` is no template, and the \
                     name of a template file ends in `.jinja`",
                    all.join(", ")
                ))
            }
            TemplateError::ModelHasNone
            | TemplateError::AskedForModels
            | TemplateError::TextForChat { .. } => Some(format!(
                "`data.template` is one of {}, or a `.jinja` file; use the one that the model was trained with",
                CHAT_TEMPLATES.map(|built_in| built_in.name).join(", ")
            )),
            TemplateError::TwoPrompts { .. } => {
                Some("`data.format = \"alpaca\"` leaves the prompt to the template".to_owned())
            }
            TemplateError::Needed { format: RowFormat::Alpaca } => Some(
                "`data.template = \"alpaca\"` is a plain prompt, \"auto\" the model's own chat template".to_owned(),
            ),
            TemplateError::Needed { .. } => {
                Some("`data.template = \"auto\"` uses the model's own for conversations only".to_owned())
            }
            TemplateError::NoMarkers { fitting, has_own, .. } => {
                let own = if *has_own { "`data.template = \"auto\"` uses the model's own; " } else { "" };
                let fitting = match fitting.as_slice() {
                    [] => "it has the markers of no built-in template".to_owned(),
                    names => format!("it has the markers of {}", names.join(", ")),
                };
                Some(format!("{own}{fitting}; a `.jinja` file may use any text"))
            }
            TemplateError::Read { .. } => {
                Some("paths in a recipe are relative to the recipe, those on the command line to the working directory".to_owned())
            }
            TemplateError::Unsound { .. } => None,
        }
    }
}

/// The names that `data.template` takes.
pub fn template_names() -> Vec<&'static str> {
    CHAT_TEMPLATES
        .iter()
        .map(|built_in| built_in.name)
        .chain(TEXT_PROMPTS.iter().map(|(name, _)| *name))
        .collect()
}

/// A plain prompt around an instruction, by its name.
pub fn text_prompt(name: &str) -> Option<TextPrompt> {
    TEXT_PROMPTS.iter().find(|(known, _)| *known == name).map(|(_, prompt)| *prompt)
}

/// The template that the user asks for (`data.template`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateChoice {
    /// The model's own template, or for alpaca rows of a model without one the prompt `alpaca`. Prompts and
    /// completions that are strings stay as they are.
    Auto,
    /// The model's own template, also for prompts and completions that are strings.
    Model,
    /// No template.
    Plain,
    /// A built-in template.
    Named(String),
    /// A `.jinja` file.
    File(PathBuf),
}

/// A plain prompt around an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextPrompt {
    /// The prompt of Stanford Alpaca.
    Alpaca,
    /// The prompt of LLM-Adapters' `finetune.py`, including the indentation of that source file.
    LlmAdapters,
}

impl TextPrompt {
    /// Everything before the answer.
    pub fn render(self, instruction: &str, input: Option<&str>) -> String {
        let input = input.filter(|input| !input.is_empty());
        let task = match input {
            Some(_) => {
                "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request."
            }
            None => {
                "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            }
        };
        let mut text = String::from(task);
        // The trailing spaces of the first line, the indentation of all further lines, and the spaces on an empty
        // line between two parts.
        let (trailing, indent, between) = match (self, input) {
            (TextPrompt::Alpaca, _) => ("", "", ""),
            (TextPrompt::LlmAdapters, Some(_)) => (" ", "                ", "                "),
            (TextPrompt::LlmAdapters, None) => ("  ", "                ", "                "),
        };
        let part = |text: &mut String, name: &str, content: &str| {
            text.push_str(&format!("{indent}### {name}:\n{indent}{content}\n{between}\n"));
        };
        text.push_str(trailing);
        text.push_str("\n\n");
        part(&mut text, "Instruction", instruction);
        if let Some(input) = input {
            part(&mut text, "Input", input);
        }
        text.push_str(&format!("{indent}### Response:\n{indent}"));
        text
    }
}

#[derive(Clone, Debug)]
pub enum TemplateKind {
    Chat(Box<ChatTemplate>),
    Text(TextPrompt),
}

/// A template and its origin.
#[derive(Clone, Debug)]
pub struct DataTemplate {
    /// For messages: a name, a path, or "the model's own".
    pub name: String,
    pub kind: TemplateKind,
    /// Whether it is the model's own rather than a built-in one or a file.
    pub is_models_own: bool,
    /// Whether prompts and completions that are strings are rendered too.
    pub renders_pairs: bool,
}

/// The source of a template, which identifies it. No tokenizer is needed.
pub fn template_source(wanted: &TemplateChoice) -> Result<String, TemplateError> {
    match wanted {
        // The model's own template is part of the model's files, which are identified by themselves.
        TemplateChoice::Auto => Ok("auto".to_owned()),
        TemplateChoice::Model => Ok("model".to_owned()),
        TemplateChoice::Plain => Ok("none".to_owned()),
        TemplateChoice::Named(name) => {
            let chat = CHAT_TEMPLATES.iter().find(|built_in| built_in.name == name);
            let text = text_prompt(name);
            match (chat, text) {
                (Some(built_in), _) => Ok(built_in.source.to_owned()),
                (None, Some(prompt)) => {
                    Ok(format!("{name}\n{}", prompt.render("{instruction}", Some("{input}"))))
                }
                (None, None) => Err(TemplateError::Unknown { name: name.clone() }),
            }
        }
        TemplateChoice::File(path) => {
            let unread = |reason: String| TemplateError::Read { path: path.clone(), reason };
            let bytes = read_bytes(path, MAX_TEMPLATE_BYTES).map_err(|error| match error {
                JsonFileError::Read { source, .. } => unread(source.to_string()),
                other => unread(other.to_string()),
            })?;
            String::from_utf8(bytes).map_err(|_| unread("it is not UTF-8 text".to_owned()))
        }
    }
}

/// The template for rows of a format; `None` if they have none.
pub fn choose_template(
    wanted: &TemplateChoice,
    format: RowFormat,
    tokenizer: &Tokenizer,
) -> Result<Option<DataTemplate>, TemplateError> {
    let unsound = |origin: String| |error| TemplateError::Unsound { origin, error };
    let chat = |name: String, source: &str, is_models_own| {
        let template = ChatTemplate::new(source, tokenizer.special_texts()).map_err(unsound(name.clone()))?;
        let (kind, renders_pairs) = (TemplateKind::Chat(Box::new(template)), *wanted != TemplateChoice::Auto);
        Ok(Some(DataTemplate { name, kind, is_models_own, renders_pairs }))
    };
    let own = |source| chat("the model's own".to_owned(), source, true);
    let text = |name: &str, prompt| {
        Ok(Some(DataTemplate {
            name: name.to_owned(),
            kind: TemplateKind::Text(prompt),
            is_models_own: false,
            renders_pairs: true,
        }))
    };
    let source = template_source(wanted)?;
    match (wanted, format) {
        (_, RowFormat::Text | RowFormat::Tokens) => Ok(None),
        (TemplateChoice::Auto, _) => match (tokenizer.template_source(), format) {
            (Some(source), _) => own(source),
            (None, RowFormat::Alpaca) => text("alpaca", TextPrompt::Alpaca),
            (None, RowFormat::Chat | RowFormat::AlpacaPrompt) => Err(TemplateError::ModelHasNone),
            (None, _) => Ok(None),
        },
        (TemplateChoice::Model, _) => match tokenizer.template_source() {
            Some(source) => own(source),
            None => Err(TemplateError::AskedForModels),
        },
        (TemplateChoice::Plain, RowFormat::PromptCompletion | RowFormat::Preference) => Ok(None),
        (TemplateChoice::Plain, _) => Err(TemplateError::Needed { format }),
        (TemplateChoice::Named(name), _) => match (text_prompt(name), format) {
            (Some(_), RowFormat::Chat) => Err(TemplateError::TextForChat { name: name.clone() }),
            (Some(_), RowFormat::AlpacaPrompt) => Err(TemplateError::TwoPrompts { name: name.clone() }),
            (Some(prompt), _) => text(name, prompt),
            (None, _) => {
                check_markers(name, tokenizer)?;
                chat(name.clone(), &source, false)
            }
        },
        (TemplateChoice::File(path), _) => chat(format!("`{}`", path.display()), &source, false),
    }
}

/// Why conversations have no template: the model has none, or `data.template = "none"`.
pub fn no_chat_template(tokenizer: &Tokenizer) -> TemplateError {
    match tokenizer.template_source() {
        None => TemplateError::ModelHasNone,
        Some(_) => TemplateError::Needed { format: RowFormat::Chat },
    }
}

/// Refuses a built-in template with markers that the tokenizer would split into several tokens: the model was not
/// trained on these.
fn check_markers(name: &str, tokenizer: &Tokenizer) -> Result<(), TemplateError> {
    let wanted = CHAT_TEMPLATES.iter().find(|built_in| built_in.name == name);
    let missing = wanted.map(|built_in| built_in.missing(tokenizer)).unwrap_or_default();
    if missing.is_empty() {
        return Ok(());
    }
    let fits = |built_in: &&BuiltIn| built_in.missing(tokenizer).is_empty();
    let fitting = CHAT_TEMPLATES.iter().filter(fits).map(|built_in| built_in.name).collect();
    let has_own = tokenizer.template_source().is_some();
    Err(TemplateError::NoMarkers { name: name.to_owned(), missing, fitting, has_own })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use smidgen_formats::tokenizer::chat_template::ChatInput;
    use std::path::Path;

    fn tokenizer(name: &str) -> Tokenizer {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/sft");
        Tokenizer::from_folder(&fixtures.join(name)).unwrap()
    }

    fn named(name: &str) -> TemplateChoice {
        TemplateChoice::Named(name.to_owned())
    }

    #[test]
    fn every_built_in_template_marks_its_answers() {
        let tokenizer = tokenizer("sentence_piece");
        let messages = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        ]);
        for BuiltIn { name, .. } in CHAT_TEMPLATES {
            let template = choose_template(&named(name), RowFormat::Chat, &tokenizer).unwrap().unwrap();
            assert_eq!((template.name.as_str(), template.is_models_own), (name, false));
            let TemplateKind::Chat(chat) = template.kind else { panic!("{name} is a chat template") };
            let rendered = chat.render(&ChatInput::new(&messages, template_time())).unwrap();
            let first = &rendered.text[rendered.generated[0].clone()];
            assert!(
                first.trim_start().starts_with('b') && first.trim_end().ends_with('>'),
                "{name}: {first}"
            );
            let prompt = json!([{"role": "user", "content": "a"}]);
            let input = ChatInput { add_generation_prompt: true, ..ChatInput::new(&prompt, template_time()) };
            let prompt = chat.render(&input).unwrap().text;
            assert!(rendered.text.starts_with(prompt.trim_end()), "{name}: {prompt}");
        }
    }

    #[test]
    fn a_template_whose_markers_the_vocabulary_lacks_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let with = |tokens: &[&str], eos: &str| {
            let added: Vec<_> = (tokens.iter().enumerate())
                .map(|(id, token)| {
                    json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                        "normalized": false, "special": true})
                })
                .collect();
            let vocabulary: serde_json::Map<_, _> =
                tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
            let tokenizer = json!({"version": "1.0", "added_tokens": added,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": tokens[0]}});
            std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
            let config = json!({"eos_token": eos}).to_string();
            std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
            Tokenizer::from_folder(folder.path()).unwrap()
        };
        let said = |name: &str, tokenizer: &Tokenizer| {
            let error = choose_template(&named(name), RowFormat::Chat, tokenizer).unwrap_err();
            (error.to_string(), error.hint().unwrap())
        };
        let tokenizer = with(&["</s>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"], "</s>");
        let (error, hint) = said("chatml", &tokenizer);
        assert_eq!(error, "`data.template = chatml`: the tokenizer has no token for `<|im_start|>`");
        assert_eq!(hint, "it has the markers of gemma, zephyr; a `.jinja` file may use any text");
        assert!(choose_template(&named("gemma"), RowFormat::Chat, &tokenizer).is_ok());
        let (error, hint) = said("mistral", &with(&["<unk>"], "</s>"));
        assert_eq!(
            error,
            "`data.template = mistral`: the tokenizer has no token for `[INST]`, `[/INST]`, the end of a text (EOS)"
        );
        assert_eq!(hint, "it has the markers of no built-in template; a `.jinja` file may use any text");
    }

    #[test]
    fn prompts_are_exact() {
        let pad = " ".repeat(16);
        assert_eq!(
            TextPrompt::Alpaca.render("Add", Some("1 2")),
            "Below is an instruction that describes a task, paired with an input that provides further context. \
             Write a response that appropriately completes the request.\n\n### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n"
        );
        let without = "Below is an instruction that describes a task. Write a response that appropriately completes the request.";
        let expected = format!("{without}\n\n### Instruction:\nAdd\n\n### Response:\n");
        assert_eq!(TextPrompt::Alpaca.render("Add", None), expected);
        assert_eq!(TextPrompt::Alpaca.render("Add", Some("")), expected);
        assert_eq!(
            TextPrompt::LlmAdapters.render("Add", None),
            format!("{without}  \n\n{pad}### Instruction:\n{pad}Add\n{pad}\n{pad}### Response:\n{pad}")
        );
        assert!(TextPrompt::LlmAdapters.render("Add", Some("1")).contains("request. \n\n"));
    }

    #[test]
    fn the_choice_of_auto() {
        let (with, without) = (tokenizer("byte_level"), tokenizer("sentence_piece"));
        let name = |format, tokenizer: &Tokenizer| {
            let chosen = choose_template(&TemplateChoice::Auto, format, tokenizer).unwrap();
            chosen.map(|template| template.name)
        };
        assert_eq!(name(RowFormat::Chat, &with).unwrap(), "the model's own");
        assert_eq!(name(RowFormat::Alpaca, &with).unwrap(), "the model's own");
        assert_eq!(name(RowFormat::Alpaca, &without).unwrap(), "alpaca");
        assert_eq!(name(RowFormat::PromptCompletion, &without), None);
        assert_eq!(name(RowFormat::Text, &with), None);
        let error = choose_template(&TemplateChoice::Auto, RowFormat::Chat, &without).unwrap_err();
        assert_eq!(error.to_string(), "the rows are conversations, but the model has no chat template");
        assert_eq!(
            error.hint().unwrap(),
            "`data.template` is one of chatml, llama3, phi3, phi4, phi4-mini, gemma, mistral, zephyr, or a `.jinja` \
             file; use the one that the model was trained with"
        );
    }

    #[test]
    fn the_models_own_and_none_are_choices() {
        let (with, without) = (tokenizer("byte_level"), tokenizer("sentence_piece"));
        let own =
            choose_template(&TemplateChoice::Model, RowFormat::PromptCompletion, &with).unwrap().unwrap();
        assert!(own.is_models_own && own.renders_pairs);
        let auto =
            choose_template(&TemplateChoice::Auto, RowFormat::PromptCompletion, &with).unwrap().unwrap();
        assert!(auto.is_models_own && !auto.renders_pairs);
        let plain = choose_template(&TemplateChoice::Plain, RowFormat::PromptCompletion, &with).unwrap();
        assert!(plain.is_none());
        let said = |wanted, format, tokenizer| {
            let error = choose_template(&wanted, format, tokenizer).unwrap_err();
            format!("{error}\n{}", error.hint().unwrap())
        };
        let refused = said(TemplateChoice::Model, RowFormat::PromptCompletion, &without);
        assert!(
            refused.starts_with(
                "`data.template = model`: the model has no chat template\n`data.template` is one of"
            ),
            "{refused}"
        );
        assert_eq!(
            said(TemplateChoice::Plain, RowFormat::Chat, &with),
            "`data.template = none`: rows of `chat` need a template\n\
             `data.template = \"auto\"` uses the model's own for conversations only"
        );
        assert_eq!(
            said(TemplateChoice::Plain, RowFormat::Alpaca, &with),
            "`data.template = none`: rows of `alpaca` need a template\n\
             `data.template = \"alpaca\"` is a plain prompt, \"auto\" the model's own chat template"
        );
    }

    #[test]
    fn names_and_files_that_are_wrong() {
        let tokenizer = tokenizer("byte_level");
        let said = |wanted: &TemplateChoice| {
            let error = choose_template(wanted, RowFormat::Chat, &tokenizer).unwrap_err();
            (error.to_string(), error.hint().unwrap_or_default())
        };
        let (error, hint) = said(&named("chatlm"));
        assert_eq!(error, "`data.template`: unknown template `chatlm`");
        assert_eq!(
            hint,
            "did you mean `chatml`? the built-in templates are chatml, llama3, phi3, phi4, phi4-mini, gemma, mistral, zephyr, \
             alpaca, llm-adapters; `model` is the model's own, `none` is no template, and the name of a template file \
             ends in `.jinja`"
        );
        assert!(said(&named("banana")).1.starts_with("the built-in templates are chatml"));
        let (error, _) = said(&named("alpaca"));
        assert_eq!(
            error,
            "`data.template = alpaca` is a prompt for an instruction and its answer, but the rows are conversations"
        );
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = folder.path().join(name);
            TemplateChoice::File(path)
        };
        let (error, hint) = said(&file("gone.jinja"));
        assert!(
            error.starts_with("`data.template`: `") && error.contains("gone.jinja` cannot be read: "),
            "{error}"
        );
        assert!(hint.starts_with("paths in a recipe are relative to the recipe"));
        std::fs::write(folder.path().join("bad.jinja"), "{% if %}").unwrap();
        let (error, _) = said(&file("bad.jinja"));
        assert!(error.contains("bad.jinja`: the chat template cannot be read: syntax error"), "{error}");
    }
}
