//! Puts audio tokens into the texts of a row: `<|audio_1|>` becomes as many audio tokens as the first clip has
//! embeddings.
//!
//! If a row's texts name no clip, all clips are placed before the user's first text. If they name any, they must name
//! each clip exactly once.
//! Rows of tokens are not handled here: they already contain their audio tokens.

use serde_json::Value as Json;

use crate::example::Example;

/// Why clips cannot be placed in the texts of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misplaced {
    /// This placeholder names a clip that the row does not have, or it occurs more than once, or it is missing.
    Placeholder(String),
    /// The row has no text of the user before which clips could be placed.
    NoText,
}

/// Places clips in the texts of a row. `clips` has the number of tokens of each clip, `token` is the text of the audio
/// token. Returns the indices of the clips in the order in which the text names them.
pub fn place_clips(example: &mut Example, clips: &[usize], token: &str) -> Result<Vec<usize>, Misplaced> {
    let mut texts = texts_of(example);
    let named = |texts: &[Text<'_>], placeholder: &str| -> usize {
        texts.iter().map(|text| text.content.matches(placeholder).count()).sum()
    };
    let counts: Vec<usize> = (1..=clips.len()).map(|clip| named(&texts, &placeholder(clip))).collect();
    let one_more = placeholder(clips.len() + 1);
    if named(&texts, &one_more) > 0 {
        return Err(Misplaced::Placeholder(one_more));
    }
    let mut order: Vec<usize> = (0..clips.len()).collect();
    if clips.is_empty() {
        return Ok(order);
    }
    if counts.iter().all(|count| *count == 0) {
        let first = texts.iter_mut().find(|text| text.is_users).ok_or(Misplaced::NoText)?;
        first.content.insert_str(0, &token.repeat(clips.iter().sum()));
        return Ok(order);
    }
    if let Some(wrong) = counts.iter().position(|count| *count != 1) {
        return Err(Misplaced::Placeholder(placeholder(wrong + 1)));
    }
    let place_of = |clip: &usize| {
        let placeholder = placeholder(clip + 1);
        let places = texts.iter().map(|text| text.content.find(&placeholder));
        places.enumerate().find_map(|(text, place)| Some((text, place?)))
    };
    order.sort_by_key(place_of);
    for (index, tokens) in clips.iter().enumerate() {
        let placeholder = placeholder(index + 1);
        for text in texts.iter_mut().filter(|text| text.content.contains(&placeholder)) {
            *text.content = text.content.replace(&placeholder, &token.repeat(*tokens));
        }
    }
    Ok(order)
}

/// Places clips in a prompt. Returns its text, and the indices of the clips in the order in which the text names them.
pub fn place_in_prompt(
    prompt: &str,
    clips: &[usize],
    token: &str,
) -> Result<(String, Vec<usize>), Misplaced> {
    let mut example = Example::Text(prompt.to_owned());
    let order = place_clips(&mut example, clips, token)?;
    match example {
        Example::Text(prompt) => Ok((prompt, order)),
        _ => unreachable!("`place_clips` keeps the kind of an example"),
    }
}

/// The placeholder of a clip, counted from 1.
fn placeholder(clip: usize) -> String {
    format!("<|audio_{clip}|>")
}

/// A text of a row.
struct Text<'a> {
    content: &'a mut String,
    /// Whether it is the user's, so that clips may be placed before it.
    is_users: bool,
}

/// The texts of a row, in the order in which the model sees them.
fn texts_of(example: &mut Example) -> Vec<Text<'_>> {
    let plain = |content, is_users| Text { content, is_users };
    match example {
        Example::Tokens { .. } | Example::Group(_) => Vec::new(),
        Example::Text(text) => vec![plain(text, true)],
        Example::PromptCompletion { prompt, completion } => {
            vec![plain(prompt, true), plain(completion, false)]
        }
        Example::Alpaca { before, instruction, input, output } => {
            let mut texts: Vec<Text<'_>> =
                before.iter_mut().filter_map(|message| text_of_message(message, false)).collect();
            texts.push(plain(instruction, true));
            texts.extend(input.iter_mut().map(|input| plain(input, false)));
            texts.push(plain(output, false));
            texts
        }
        Example::Chat(conversation) => {
            // Clips are placed in the joined texts.
            conversation.parts.clear();
            let messages = conversation.messages.iter_mut();
            let texts = messages.filter_map(|message| {
                let is_users = message["role"] == "user";
                text_of_message(message, is_users)
            });
            texts.collect()
        }
    }
}

fn text_of_message(message: &mut Json, is_users: bool) -> Option<Text<'_>> {
    match message.get_mut("content") {
        Some(Json::String(content)) => Some(Text { content, is_users }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::Conversation;
    use serde_json::json;

    fn pair(prompt: &str) -> Example {
        Example::PromptCompletion { prompt: prompt.into(), completion: "a".into() }
    }

    fn placed(prompt: &str, clips: &[usize]) -> Result<String, Misplaced> {
        let mut example = pair(prompt);
        place_clips(&mut example, clips, "@").map(|_| match example {
            Example::PromptCompletion { prompt, .. } => prompt,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn clips_are_placed_where_they_are_named_or_at_the_beginning() {
        assert_eq!(placed("hear <|audio_1|>!", &[3]).unwrap(), "hear @@@!");
        assert_eq!(placed("<|audio_2|> then <|audio_1|>", &[1, 2]).unwrap(), "@@ then @");
        let swapped = place_in_prompt("<|audio_2|> then <|audio_1|>", &[1, 2], "@").unwrap();
        assert_eq!(swapped, ("@@ then @".to_owned(), vec![1, 0]));
        assert_eq!(placed("what is said?", &[2, 1]).unwrap(), "@@@what is said?");
        assert_eq!(placed("no sound", &[]).unwrap(), "no sound");
    }

    #[test]
    fn each_clip_is_named_once() {
        let missing = |number: usize| Misplaced::Placeholder(placeholder(number));
        assert_eq!(placed("<|audio_1|>", &[]).unwrap_err(), missing(1));
        assert_eq!(placed("<|audio_1|> <|audio_2|>", &[1]).unwrap_err(), missing(2));
        assert_eq!(placed("<|audio_1|>", &[1, 1]).unwrap_err(), missing(2));
        assert_eq!(placed("<|audio_1|> <|audio_1|>", &[1]).unwrap_err(), missing(1));
    }

    #[test]
    fn a_conversation_has_them_before_the_first_words_of_the_user() {
        let messages = vec![
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": "u"}),
            json!({"role": "assistant", "content": "a"}),
        ];
        let conversation = Conversation {
            messages,
            parts: vec![],
            silent: vec![],
            prompt_messages: None,
            tools: None,
            more: serde_json::Map::new(),
        };
        let mut example = Example::Chat(conversation);
        place_clips(&mut example, &[2], "@").unwrap();
        let Example::Chat(conversation) = &example else { unreachable!("it is a conversation") };
        assert_eq!(conversation.messages[1]["content"], "@@u");
        let mut silent = Example::Chat(Conversation { messages: vec![], ..conversation.clone() });
        assert_eq!(place_clips(&mut silent, &[2], "@"), Err(Misplaced::NoText));
    }
}
