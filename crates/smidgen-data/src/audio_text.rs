//! Where the clips of a row stand in its text: `<|audio_1|>` becomes as many audio tokens as the first clip has
//! embeddings.
//!
//! A row whose text names no clip has all of them in front of the user's words. A row that names some must name each of
//! them once.
//! Leaves out rows of tokens, which hold their audio tokens themselves.

use serde_json::Value as Json;

use crate::example::Example;

/// How the texts of a row do not suit its clips.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misplaced {
    /// A clip that the row does not have, or one that is named more than once or not at all.
    Placeholder(String),
    /// The row has no text that clips could stand in front of.
    NoText,
}

/// Puts clips of these numbers of tokens into the texts of a row; `token` is the text of the audio token. Returns the
/// clips in the order in which they are heard.
pub fn place_clips(example: &mut Example, clips: &[usize], token: &str) -> Result<Vec<usize>, Misplaced> {
    let mut texts = texts_of(example);
    let named = |texts: &[Text<'_>], placeholder: &str| -> usize {
        texts.iter().map(|text| text.get().matches(placeholder).count()).sum()
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
        let first = texts.iter_mut().find(|text| text.is_of_user).ok_or(Misplaced::NoText)?;
        let sound = token.repeat(clips.iter().sum());
        let text = format!("{sound}{}", first.get());
        first.set(text);
        return Ok(order);
    }
    if let Some(wrong) = counts.iter().position(|count| *count != 1) {
        return Err(Misplaced::Placeholder(placeholder(wrong + 1)));
    }
    let place_of = |clip: &usize| {
        let placeholder = placeholder(clip + 1);
        let places = texts.iter().map(|text| text.get().find(&placeholder));
        places.enumerate().find_map(|(text, place)| Some((text, place?)))
    };
    order.sort_by_key(place_of);
    for (index, tokens) in clips.iter().enumerate() {
        let placeholder = placeholder(index + 1);
        for text in texts.iter_mut().filter(|text| text.get().contains(&placeholder)) {
            let replaced = text.get().replace(&placeholder, &token.repeat(*tokens));
            text.set(replaced);
        }
    }
    Ok(order)
}

/// The same for a prompt: its text, and the clips in the order in which they are heard.
pub fn place_in_prompt(
    prompt: &str,
    clips: &[usize],
    token: &str,
) -> Result<(String, Vec<usize>), Misplaced> {
    let mut example = Example::Text(prompt.to_owned());
    let order = place_clips(&mut example, clips, token)?;
    match example {
        Example::Text(prompt) => Ok((prompt, order)),
        _ => unreachable!("a text stays one"),
    }
}

/// What stands for a clip, counted from 1.
fn placeholder(clip: usize) -> String {
    format!("<|audio_{clip}|>")
}

/// A text of a row, in the order in which the model sees them.
struct Text<'a> {
    place: TextPlace<'a>,
    /// Whether clips may stand in front of it.
    is_of_user: bool,
}

enum TextPlace<'a> {
    Plain(&'a mut String),
    Message(&'a mut Json),
}

impl Text<'_> {
    fn get(&self) -> &str {
        match &self.place {
            TextPlace::Plain(text) => text,
            TextPlace::Message(content) => content.as_str().unwrap_or_default(),
        }
    }

    fn set(&mut self, text: String) {
        match &mut self.place {
            TextPlace::Plain(place) => **place = text,
            TextPlace::Message(content) => **content = Json::String(text),
        }
    }
}

fn texts_of(example: &mut Example) -> Vec<Text<'_>> {
    let plain = |text, is_of_user| Text { place: TextPlace::Plain(text), is_of_user };
    match example {
        Example::Tokens { .. } => Vec::new(),
        Example::Text(text) => vec![plain(text, true)],
        Example::PromptCompletion { prompt, completion } => {
            vec![plain(prompt, true), plain(completion, false)]
        }
        Example::Alpaca { before, instruction, input, output } => {
            let mut texts: Vec<Text<'_>> =
                before.iter_mut().filter_map(|message| of_message(message, false)).collect();
            texts.push(plain(instruction, true));
            texts.extend(input.iter_mut().map(|input| plain(input, false)));
            texts.push(plain(output, false));
            texts
        }
        Example::Chat(conversation) => {
            let messages = conversation.messages.iter_mut();
            let texts = messages.filter_map(|message| {
                let is_of_user = message["role"] == "user";
                of_message(message, is_of_user)
            });
            texts.collect()
        }
    }
}

fn of_message(message: &mut Json, is_of_user: bool) -> Option<Text<'_>> {
    let content = message.get_mut("content").filter(|content| content.is_string())?;
    Some(Text { place: TextPlace::Message(content), is_of_user })
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
    fn clips_stand_where_they_are_named_or_in_front() {
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
