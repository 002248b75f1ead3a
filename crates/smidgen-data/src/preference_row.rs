//! Rows whose answers are compared: pairs, labelled completions, and answers with rewards.
//!
//! | what | as text | as tokens |
//! |---|---|---|
//! | pairs | `prompt`, `chosen`, `rejected`; or `chosen` and `rejected` with their prompt | `prompt_ids`, `chosen_ids`, `rejected_ids` |
//! | labels | `prompt`, `completion`, `label` | `prompt_ids`, `completion_ids`, `label` |
//! | answers | | `prompt_ids`, `completions`, `rewards` |
//!
//! Texts are strings or lists of messages. Two whole conversations, or two whole strings, share their prompt: it ends
//! where they first differ, as in TRL.

use serde_json::Value as Json;

use crate::chat_row::{read_messages, wrong_type};
use crate::example::{Example, Group, GroupKind};
use crate::format_error::FormatError;
use crate::row_fields::{Fields, read_whole_numbers};
use crate::token_record::NOT_SUPERVISED;

pub(crate) fn read_preference(row: &mut Fields<'_>) -> Result<Example, FormatError> {
    let prompt = row.fields.shift_remove("prompt").filter(|prompt| !prompt.is_null());
    if row.fields.contains_key("completion") || row.fields.contains_key("label") {
        let prompt = prompt.ok_or_else(|| row.missing("`prompt`"))?;
        let (_, completion) = row.take(&["completion"], "`completion`")?;
        let label = read_label(row)?;
        let member = answer(row, prompt, ("completion", completion))?;
        return Ok(Example::Group(Group { kind: GroupKind::Labelled, members: vec![(member, label)] }));
    }
    let (_, chosen) = row.take(&["chosen"], "`chosen`")?;
    let (_, rejected) = row.take(&["rejected"], "`rejected`")?;
    if chosen == rejected {
        return Err(FormatError::EqualAnswers { place: row.place.to_string() });
    }
    // A prompt in another form than the answers only repeats the beginning of whole conversations.
    let prompt = prompt.filter(|prompt| prompt.is_array() == chosen.is_array());
    let (prompt, chosen, rejected) = match prompt {
        Some(prompt) => (prompt, chosen, rejected),
        None => shared_prompt(row, chosen, rejected)?,
    };
    let chosen = answer(row, prompt.clone(), ("chosen", chosen))?;
    let rejected = answer(row, prompt, ("rejected", rejected))?;
    let members = vec![(chosen, 0.0), (rejected, 0.0)];
    Ok(Example::Group(Group { kind: GroupKind::Pair, members }))
}

pub(crate) fn read_token_group(row: &mut Fields<'_>) -> Result<Example, FormatError> {
    let (name, prompt) = row.take(&["prompt_ids"], "`prompt_ids`")?;
    let prompt = read_whole_numbers(row.place, name, prompt)?;
    if prompt.is_empty() {
        return Err(FormatError::Empty { place: row.place.to_string(), field: name.to_owned() });
    }
    let place = row.place;
    let answer = |name: &str, value: Json| {
        let completion = read_whole_numbers(place, name, value)?;
        if completion.is_empty() {
            return Err(FormatError::Empty { place: place.to_string(), field: name.to_owned() });
        }
        let silent = vec![i64::from(NOT_SUPERVISED); prompt.len()];
        Ok(Example::Tokens {
            ids: [&prompt[..], &completion].concat(),
            labels: Some([silent, completion].concat()),
        })
    };
    if row.fields.contains_key("completions") {
        let (name, completions) = row.take(&["completions"], "`completions`")?;
        let (other, rewards) = row.take(&["rewards"], "`rewards`")?;
        let (completions, rewards) = (list(row, name, completions)?, list(row, other, rewards)?);
        if completions.len() != rewards.len() {
            let (place, completions, rewards) = (place.to_string(), completions.len(), rewards.len());
            return Err(FormatError::RewardsDiffer { place, completions, rewards });
        }
        let members =
            completions.into_iter().zip(rewards).enumerate().map(|(index, (completion, reward))| {
                let number = reward.as_f64().filter(|number| number.is_finite());
                let number = number.ok_or_else(|| {
                    wrong_type(place, format!("rewards[{index}]"), &reward, "a finite number")
                })?;
                Ok((answer(&format!("completions[{index}]"), completion)?, number as f32))
            });
        let members = members.collect::<Result<_, FormatError>>()?;
        return Ok(Example::Group(Group { kind: GroupKind::Rewarded, members }));
    }
    if row.fields.contains_key("completion_ids") || row.fields.contains_key("label") {
        let (name, completion) = row.take(&["completion_ids"], "`completion_ids`")?;
        let members = vec![(answer(name, completion)?, read_label(row)?)];
        return Ok(Example::Group(Group { kind: GroupKind::Labelled, members }));
    }
    let (name, chosen) = row.take(&["chosen_ids"], "`chosen_ids`")?;
    let (other, rejected) = row.take(&["rejected_ids"], "`rejected_ids`")?;
    if chosen == rejected {
        return Err(FormatError::EqualAnswers { place: place.to_string() });
    }
    let members = vec![(answer(name, chosen)?, 0.0), (answer(other, rejected)?, 0.0)];
    Ok(Example::Group(Group { kind: GroupKind::Pair, members }))
}

/// 1 for a desirable completion, -1 for another.
fn read_label(row: &mut Fields<'_>) -> Result<f32, FormatError> {
    let (name, label) = row.take(&["label"], "`label`")?;
    match (label.as_bool(), label.as_i64()) {
        (Some(true), _) | (_, Some(1)) => Ok(1.0),
        (Some(false), _) | (_, Some(0)) => Ok(-1.0),
        _ => Err(wrong_type(row.place, name.to_owned(), &label, "true or false")),
    }
}

fn list(row: &Fields<'_>, name: &str, value: Json) -> Result<Vec<Json>, FormatError> {
    match crate::chat_row::parse_cell(row.place, name, value)? {
        Json::Array(items) => Ok(items),
        other => Err(wrong_type(row.place, name.to_owned(), &other, "a list")),
    }
}

/// A prompt and one of its answers: both strings, or both messages.
fn answer(
    row: &mut Fields<'_>,
    prompt: Json,
    (name, answer): (&'static str, Json),
) -> Result<Example, FormatError> {
    let place = row.place;
    let empty = |field: &str| FormatError::Empty { place: place.to_string(), field: field.to_owned() };
    match (prompt, answer) {
        (Json::String(prompt), Json::String(_)) if prompt.trim().is_empty() => Err(empty("prompt")),
        (Json::String(_), Json::String(answer)) if answer.trim().is_empty() => Err(empty(name)),
        (Json::String(prompt), Json::String(completion)) => {
            Ok(Example::PromptCompletion { prompt, completion })
        }
        (prompt @ Json::Array(_), answer @ Json::Array(_)) => {
            let mut messages = read_messages(place, "prompt", prompt, false)?;
            let prompt_messages = messages.len();
            messages.extend(read_messages(place, name, answer, true)?);
            row.conversation_like_others(messages, prompt_messages)
        }
        (Json::String(_), other) => {
            Err(wrong_type(place, name.to_owned(), &other, "a string, as `prompt` is"))
        }
        (Json::Array(_), other) => {
            Err(wrong_type(place, name.to_owned(), &other, "a list of messages, as `prompt` is"))
        }
        (other, _) => Err(wrong_type(place, "prompt".to_owned(), &other, "a string or a list of messages")),
    }
}

/// The common beginning of two answers, and what each adds to it.
fn shared_prompt(row: &Fields<'_>, chosen: Json, rejected: Json) -> Result<(Json, Json, Json), FormatError> {
    let place = row.place;
    let none = || FormatError::NoSharedPrompt { place: place.to_string() };
    match (chosen, rejected) {
        (Json::Array(mut chosen), Json::Array(mut rejected)) => {
            let shared = chosen.iter().zip(&rejected).take_while(|(one, other)| one == other).count();
            if shared == 0 || shared == chosen.len() || shared == rejected.len() {
                return Err(none());
            }
            let rejected = rejected.split_off(shared);
            let answer = chosen.split_off(shared);
            Ok((Json::Array(chosen), Json::Array(answer), Json::Array(rejected)))
        }
        (Json::String(chosen), Json::String(rejected)) => {
            let same =
                chosen.char_indices().zip(rejected.chars()).take_while(|((_, one), other)| one == other);
            let mut shared = same.map(|((at, sign), _)| at + sign.len_utf8()).last().unwrap_or(0);
            // The space before the first different word belongs to the answer, as tokenizers have it.
            if chosen[..shared].ends_with(' ') {
                shared -= 1;
            }
            if shared == 0 {
                return Err(none());
            }
            let [prompt, chosen, rejected] = [&chosen[..shared], &chosen[shared..], &rejected[shared..]];
            Ok((prompt.into(), chosen.into(), rejected.into()))
        }
        (Json::String(_), other) => {
            Err(wrong_type(place, "rejected".to_owned(), &other, "a string, as `chosen` is"))
        }
        (Json::Array(_), other) => {
            Err(wrong_type(place, "rejected".to_owned(), &other, "a list of messages, as `chosen` is"))
        }
        (other, _) => Err(wrong_type(place, "chosen".to_owned(), &other, "a string or a list of messages")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::{ExampleRow, RowFormat};
    use crate::format::example_of;
    use crate::row_place::{RowPlace, RowUnit};
    use serde_json::json;
    use std::path::Path;

    fn read(format: RowFormat, row: Json) -> Result<Group, String> {
        let place = RowPlace { file: Path::new("a.jsonl"), unit: RowUnit::Line, number: 7 };
        match example_of(format, place, row) {
            Ok(ExampleRow { example: Example::Group(group), .. }) => Ok(group),
            Ok(other) => panic!("{other:?} is no group"),
            Err(error) => Err(error.to_string()),
        }
    }

    fn strings(group: &Group) -> Vec<(&str, &str)> {
        let texts = group.members.iter().map(|(member, _)| match member {
            Example::PromptCompletion { prompt, completion } => (prompt.as_str(), completion.as_str()),
            other => panic!("{other:?} is no pair of strings"),
        });
        texts.collect()
    }

    #[test]
    fn strings_with_and_without_a_prompt() {
        let given = read(RowFormat::Preference, json!({"prompt": "2+2?", "chosen": " 4", "rejected": " 5"}));
        assert_eq!(strings(&given.unwrap()), [("2+2?", " 4"), ("2+2?", " 5")]);
        let whole = json!({"chosen": "Q: two? A: yes it is", "rejected": "Q: two? A: no"});
        let whole = read(RowFormat::Preference, whole).unwrap();
        assert_eq!(strings(&whole), [("Q: two? A:", " yes it is"), ("Q: two? A:", " no")]);
        let labelled = json!({"prompt": "2+2?", "completion": "5", "label": false});
        let labelled = read(RowFormat::Preference, labelled).unwrap();
        assert_eq!((labelled.kind, labelled.members[0].1), (GroupKind::Labelled, -1.0));
    }

    #[test]
    fn conversations_share_their_beginning() {
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let asked = turn("user", "2+2?");
        // The prompt as a string repeats the first turn of both answers.
        let row = json!({
            "prompt": "2+2?",
            "chosen": [asked, turn("assistant", "4")],
            "rejected": [asked, turn("assistant", "5")],
        });
        let group = read(RowFormat::Preference, row).unwrap();
        for ((member, _), answer) in group.members.iter().zip(["4", "5"]) {
            let Example::Chat(conversation) = member else { panic!("{member:?} is no conversation") };
            assert_eq!(conversation.prompt_messages, Some(1));
            assert_eq!(conversation.messages[1]["content"], answer);
        }
    }

    #[test]
    fn tokens_have_silent_prompts() {
        let row = json!({"prompt_ids": [1, 2], "completions": [[3], [4, 5]], "rewards": [0.5, -1]});
        let group = read(RowFormat::Tokens, row).unwrap();
        let expected = |ids: Vec<i64>, labels: Vec<i64>| Example::Tokens { ids, labels: Some(labels) };
        assert_eq!(group.members[0], (expected(vec![1, 2, 3], vec![-100, -100, 3]), 0.5));
        assert_eq!(group.members[1], (expected(vec![1, 2, 4, 5], vec![-100, -100, 4, 5]), -1.0));
    }

    #[test]
    fn rows_without_a_preference_are_named() {
        let text = |row: Json| read(RowFormat::Preference, row).unwrap_err();
        let tokens = |row: Json| read(RowFormat::Tokens, row).unwrap_err();
        assert!(text(json!({"prompt": "a", "chosen": "b"})).contains("`rejected` is missing"));
        assert!(
            text(json!({"prompt": "a", "chosen": "b", "rejected": "b"}))
                .contains("both answers are the same")
        );
        assert!(text(json!({"prompt": "a", "chosen": "b", "rejected": " "})).contains("`rejected` is empty"));
        assert!(text(json!({"chosen": "b", "rejected": "c"})).contains("do not begin with the same prompt"));
        assert!(
            text(json!({"prompt": "a", "completion": "b", "label": "yes"}))
                .contains("expected true or false")
        );
        assert!(
            tokens(json!({"prompt_ids": [], "chosen_ids": [1], "rejected_ids": [2]}))
                .contains("`prompt_ids` is empty")
        );
        assert!(
            tokens(json!({"prompt_ids": [1], "chosen_ids": [1], "rejected_ids": []}))
                .contains("`rejected_ids` is empty")
        );
        assert!(
            tokens(json!({"prompt_ids": [1], "completions": [[1]], "rewards": []}))
                .contains("has 1 entries, `rewards` has 0")
        );
        assert!(
            tokens(json!({"prompt_ids": [1], "completions": [[1]], "rewards": [null]}))
                .contains("a finite number")
        );
    }
}
