//! A conversation in the terminal, formatted by the model's chat template.
//!
//! The KV cache is kept between the turns, so only new tokens are computed. `/reset` clears the conversation; `/exit`
//! or the end of the input ends it. Nothing is written to disk.
//! Left out: editing earlier messages, and attachments.

use crate::console::progress::say;
use crate::console::stdout::print_data;
use crate::failure::Failure;
use crate::generate::session::{Generated, Settings, Timing, TokenSession};
use crate::generate::stop::StoppedBy;
use crate::library::generate::stream_answer;
use serde_json::{Value as Json, json};
use smidgen_data::template::TemplateKind;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatInput;
use std::io::{BufRead, Write};
use std::time::SystemTime;

/// The settings of a conversation.
#[derive(Clone, Copy, Debug)]
pub struct ChatOptions<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Without a template, messages are concatenated.
    pub template: Option<&'a TemplateKind>,
    pub system: Option<&'a str>,
    pub quiet: bool,
    pub now: SystemTime,
}

pub fn run_chat(
    session: &mut TokenSession,
    settings: &Settings,
    options: &ChatOptions<'_>,
) -> Result<(), Failure> {
    if !options.quiet {
        match options.template {
            None => say("no chat template is used: every line is continued as plain text"),
            Some(TemplateKind::Text(_)) => {
                say("this is an instruction prompt without turns: every line is answered on its own")
            }
            Some(TemplateKind::Chat(_)) => {}
        }
        say("`/reset` clears the conversation, `/exit` quits");
    }
    let mut messages = first_messages(options);
    let mut lines = std::io::stdin().lock().lines();
    loop {
        let _ = write!(std::io::stderr(), "> ");
        let _ = std::io::stderr().flush();
        let line = match lines.next() {
            None => return Ok(()),
            Some(line) => line.map_err(|error| Failure::disk(error).context("cannot read stdin"))?,
        };
        match line.trim() {
            "" => continue,
            "/exit" => return Ok(()),
            "/reset" => {
                session.reset();
                messages = first_messages(options);
                continue;
            }
            _ => {}
        }
        messages.push(json!({"role": "user", "content": line}));
        let ids = match options.template {
            Some(TemplateKind::Chat(template)) => {
                let all = Json::Array(messages.clone());
                let input = ChatInput { add_generation_prompt: true, ..ChatInput::new(&all, options.now) };
                let text = template.render(&input).map_err(Failure::model)?.text;
                options.tokenizer.encode(&text, false)
            }
            Some(TemplateKind::Text(prompt)) => {
                session.reset();
                options.tokenizer.encode(&prompt.render(&line, None), true)
            }
            None => options.tokenizer.encode(&line, true),
        }
        .map_err(Failure::model)?;
        let room = session.shape().positions;
        if ids.len() >= room {
            messages.pop();
            say(&format!(
                "the conversation needs {} tokens, the context has {room}: `/reset` it, or set a larger `--context`",
                ids.len()
            ));
            continue;
        }
        let answer = answer(session, settings, options, &ids)?;
        messages.push(json!({"role": "assistant", "content": answer}));
    }
}

fn first_messages(options: &ChatOptions<'_>) -> Vec<Json> {
    options.system.map(|text| json!({"role": "system", "content": text})).into_iter().collect()
}

/// Prints the answer while it is generated, and returns its text.
fn answer(
    session: &mut TokenSession,
    settings: &Settings,
    options: &ChatOptions<'_>,
    ids: &[u32],
) -> Result<String, Failure> {
    let (generated, timing, text) = stream_answer(session, options.tokenizer, ids, settings, |piece| {
        print_data(piece)?;
        let _ = std::io::stdout().flush();
        Ok(())
    })?;
    print_data("\n")?;
    if !options.quiet && !matches!(generated.stopped_by, StoppedBy::Token(_)) {
        say(&render_timing(&generated, &timing));
    }
    Ok(text)
}

/// The number of tokens, why generation stopped, and the speeds.
pub fn render_timing(generated: &Generated, timing: &Timing) -> String {
    let count = generated.ids.len();
    let stopped = match generated.stopped_by {
        StoppedBy::Token(_) => "stopped at EOS",
        StoppedBy::MaxTokens => "stopped at `--max-new`",
        StoppedBy::Context => "stopped at the end of the context",
        StoppedBy::Caller => "stopped",
    };
    let mut text = format!("{count} tokens, {stopped}");
    let rates = [("prompt", timing.prompt_tokens_per_s()), ("generation", timing.answer_tokens_per_s())];
    for (what, rate) in rates {
        if let Some(rate) = rate {
            text += &format!(" · {what} {rate:.0} tokens/s");
        }
    }
    text
}
