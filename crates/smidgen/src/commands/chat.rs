//! A conversation at the terminal: each message is answered as the model's template has it.
//!
//! Keys and values stay in the cache between the turns, so only what is new is read. `/reset` begins anew and `/exit`,
//! or the end of the input, ends it. What is said stays in memory alone.
//! Left out: editing earlier messages, and files.

use crate::console::progress::say;
use crate::console::stdout::print;
use crate::failure::Failure;
use crate::generate::session::{Generated, Settings, Timing, TokenSession};
use crate::generate::stop::StoppedBy;
use crate::library::generate::stream_answer;
use serde_json::{Value as Json, json};
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatInput;
use std::io::{BufRead, Write};
use std::time::SystemTime;

/// What a conversation is held with.
#[derive(Clone, Copy, Debug)]
pub struct Talk<'a> {
    pub tokenizer: &'a Tokenizer,
    pub system: Option<&'a str>,
    /// Messages are taken as they are, one behind the other.
    pub raw: bool,
    pub quiet: bool,
    pub now: SystemTime,
}

pub fn run_chat(session: &mut TokenSession, settings: &Settings, talk: &Talk<'_>) -> Result<(), Failure> {
    let template = match talk.raw {
        true => None,
        false => talk.tokenizer.chat_template().transpose().map_err(Failure::model)?,
    };
    if template.is_none() && !talk.quiet {
        say("without a chat template: every line is continued as it stands");
    }
    if !talk.quiet {
        say("`/reset` begins anew, `/exit` ends");
    }
    let mut messages = beginning(talk);
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
                messages = beginning(talk);
                continue;
            }
            _ => {}
        }
        messages.push(json!({"role": "user", "content": line}));
        let ids = match &template {
            Some(template) => {
                let all = Json::Array(messages.clone());
                let input = ChatInput { add_generation_prompt: true, ..ChatInput::new(&all, talk.now) };
                let text = template.render(&input).map_err(Failure::model)?.text;
                talk.tokenizer.encode(&text, false)
            }
            None => talk.tokenizer.encode(&line, true),
        }
        .map_err(Failure::model)?;
        let room = session.shape().positions;
        if ids.len() >= room {
            messages.pop();
            say(&format!(
                "this would be token {} of a context of {room}: `/reset`, or a larger `--context`",
                ids.len()
            ));
            continue;
        }
        let answer = answer(session, settings, talk, &ids)?;
        messages.push(json!({"role": "assistant", "content": answer}));
    }
}

fn beginning(talk: &Talk<'_>) -> Vec<Json> {
    talk.system.map(|text| json!({"role": "system", "content": text})).into_iter().collect()
}

/// Prints the answer as it comes, and returns its text.
fn answer(
    session: &mut TokenSession,
    settings: &Settings,
    talk: &Talk<'_>,
    ids: &[u32],
) -> Result<String, Failure> {
    let (generated, timing, text) = stream_answer(session, talk.tokenizer, ids, settings, |piece| {
        print(piece)?;
        let _ = std::io::stdout().flush();
        Ok(())
    })?;
    print("\n")?;
    if !talk.quiet && !matches!(generated.stopped_by, StoppedBy::Token(_)) {
        say(&render_timing(&generated, &timing));
    }
    Ok(text)
}

/// How an answer ended and how fast it came.
pub fn render_timing(generated: &Generated, timing: &Timing) -> String {
    let count = generated.ids.len();
    let mut text = format!("{count} tokens, ended by {}", generated.stopped_by.name().replace('_', " "));
    let rates = [("read", timing.prompt_tokens_per_s()), ("written", timing.answer_tokens_per_s())];
    for (what, rate) in rates {
        if let Some(rate) = rate {
            text += &format!(" · {rate:.0} tokens/s {what}");
        }
    }
    text
}
