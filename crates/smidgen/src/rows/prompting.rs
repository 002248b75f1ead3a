//! The prompt template of a trained model: the one that its training rows had.
//!
//! A run writes it into the folder of its adapter or model (`prompt.json`), where generation reads it.
//! Rows of text and of tokens do not show where a prompt ends, so their runs write nothing.

use super::keys::template_choice;
use crate::failure::Failure;
use smidgen_data::format::RowFormat;
use smidgen_data::prepare::Origin;
use smidgen_data::template::{TemplateChoice, TemplateKind, choose_template, template_source, text_prompt};
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatTemplate;
use smidgen_formats::tokenizer::prompt_file::{PROMPT_FILE, PromptFile};
use smidgen_recipe::Recipe;
use std::path::Path;

/// The prompt template of training rows, if their format shows it.
pub fn prompt_of_rows(recipe: &Recipe, origin: &Origin) -> Result<Option<PromptFile>, Failure> {
    let name = match (origin.format, &origin.template) {
        (RowFormat::Text | RowFormat::Tokens, _) => return Ok(None),
        (_, None) => return Ok(Some(PromptFile::Plain)),
        (_, Some(name)) => name.clone(),
    };
    if text_prompt(&name).is_some() {
        return Ok(Some(PromptFile::Instruction { name }));
    }
    let template = match template_choice(&recipe.data.template) {
        TemplateChoice::Auto | TemplateChoice::Model => None,
        other => Some(template_source(&other).map_err(Failure::recipe)?),
    };
    Ok(Some(PromptFile::Chat { template }))
}

/// The template that the user of `smidgen generate` chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptChoice {
    /// The template of training, else the model's own, else none.
    Auto,
    /// No template.
    Raw,
    /// The model's own template.
    Model,
    /// A built-in template or a file.
    Template(TemplateChoice),
}

/// The template for prompts; `None` uses them as they are. `folders` are those of an adapter and of a model.
pub fn prompt_template<'a>(
    choice: &PromptChoice,
    tokenizer: &Tokenizer,
    folders: impl IntoIterator<Item = &'a Path>,
) -> Result<Option<TemplateKind>, Failure> {
    let own = || {
        let template = tokenizer.chat_template().transpose().map_err(Failure::model)?;
        Ok(template.map(|template| TemplateKind::Chat(Box::new(template))))
    };
    match choice {
        PromptChoice::Raw => Ok(None),
        PromptChoice::Model if tokenizer.template_source().is_none() => {
            Err(Failure::command("`--template model`: the model has no chat template"))
        }
        PromptChoice::Model => own(),
        PromptChoice::Template(choice) => {
            let template = choose_template(choice, RowFormat::Alpaca, tokenizer).map_err(|error| {
                let hint = error.hint();
                Failure::command(error).hint_if_some(hint)
            })?;
            Ok(template.map(|template| template.kind))
        }
        PromptChoice::Auto => {
            for folder in folders {
                match PromptFile::read(folder).map_err(Failure::model)? {
                    None => continue,
                    Some(PromptFile::Plain) => return Ok(None),
                    Some(PromptFile::Chat { template: None }) => return own(),
                    Some(PromptFile::Instruction { name }) => {
                        let prompt = text_prompt(&name).ok_or_else(|| unknown_prompt(&name, folder))?;
                        return Ok(Some(TemplateKind::Text(prompt)));
                    }
                    Some(PromptFile::Chat { template: Some(source) }) => {
                        let template = ChatTemplate::new(&source, tokenizer.special_texts());
                        let template = template.map_err(Failure::model)?;
                        return Ok(Some(TemplateKind::Chat(Box::new(template))));
                    }
                }
            }
            own()
        }
    }
}

fn unknown_prompt(name: &str, folder: &Path) -> Failure {
    let file = folder.join(PROMPT_FILE);
    Failure::model(format!("`{}`: this version does not know the prompt `{name}`", file.display()))
        .hint("`--template` names another one")
}
