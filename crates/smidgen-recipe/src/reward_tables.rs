//! Tables `[[train.reward]]`: how a generated answer is scored.
//!
//! Each kind has its own keys ([`KEYS_OF_KINDS`]); any other key of a table is refused by name. [`explain_reward`] says which
//! part of a refused value is wrong. Not checked here: whether a pattern is a regular expression.

use smidgen_ir::words::{ClosedWord, RewardKind, nearest};

use crate::read::{ABOVE_ZERO, ANY_F32, Reader, count_from, reader};
use crate::reward::{Reward, RewardRule};
use crate::toml_text::{RenderValue, table};
use crate::value::{Given, Value};

/// The keys that a kind reads besides `kind` and `weight`.
const KEYS_OF_KINDS: [(RewardKind, &[&str]); 7] = [
    (RewardKind::Exact, &["column", "pattern"]),
    (RewardKind::Number, &["column", "pattern"]),
    (RewardKind::Regex, &["pattern"]),
    (RewardKind::Format, &["pattern"]),
    (RewardKind::Length, &["min", "max"]),
    (RewardKind::Json, &["keys"]),
    (RewardKind::Command, &["command", "workers", "timeout"]),
];

/// The column with the expected answer, if a table names none.
const ANSWER_COLUMN: &str = "answer";
/// Seconds that a command has for one answer.
const TIMEOUT_S: f64 = 60.0;

pub(crate) const REWARDS: Reader<Vec<Reward>> =
    reader("a list of tables with a `kind` or a `command`, such as `[{ kind = \"exact\" }]`", &[], |given| {
        given.list()?.iter().map(|item| read_reward(&given.with(item)).ok()).collect()
    });

/// The hint for refused rewards, if it is clear which part is wrong.
pub(crate) fn explain_reward(given: &Given<'_>) -> Option<String> {
    given.list()?.iter().find_map(|item| read_reward(&given.with(item)).err())
}

fn read_reward(given: &Given<'_>) -> Result<Reward, String> {
    let fields = given.fields().ok_or("each reward is a table, such as `{ kind = \"exact\" }`")?;
    let field = |name: &str| fields.iter().find(|(own, _)| own == name).map(|(_, value)| value);
    let kind = match field("kind") {
        Some(value) => {
            let word = given.with(value).text().unwrap_or_default();
            RewardKind::from_word(&word).ok_or_else(|| {
                let known = RewardKind::WORDS.join("`, `");
                match nearest(&word, RewardKind::WORDS.iter().copied()) {
                    Some(near) => format!("`{word}` is not a kind of reward: did you mean `{near}`?"),
                    None => format!("`{word}` is not a kind of reward; the kinds are `{known}`"),
                }
            })?
        }
        None if field("command").is_some() => RewardKind::Command,
        None => return Err("a reward needs a `kind`, or a `command`".to_owned()),
    };
    let own = KEYS_OF_KINDS.iter().find(|(known, _)| *known == kind).map_or(&[][..], |(_, keys)| keys);
    for (number, (name, _)) in fields.iter().enumerate() {
        if !["kind", "weight"].contains(&name.as_str()) && !own.contains(&name.as_str()) {
            let own = own.join("`, `");
            return Err(format!("a reward of kind `{kind}` has `weight`, `{own}`, not `{name}`"));
        }
        if fields[..number].iter().any(|(before, _)| before == name) {
            return Err(format!("`{name}` is given twice"));
        }
    }
    let weight = read(given, field("weight"), ("weight", ANY_F32))?.unwrap_or(1.0);
    if weight == 0.0 {
        return Err("a `weight` of 0 has no effect: remove the reward".to_owned());
    }
    let text = |name: &'static str| read(given, field(name), (name, FILLED_TEXT));
    let needed =
        |name: &'static str| text(name)?.ok_or_else(|| format!("a reward of kind `{kind}` needs a `{name}`"));
    let count = |name: &'static str| read(given, field(name), (name, count_from::<usize, 1>()));
    let column = || Ok::<_, String>(text("column")?.unwrap_or_else(|| ANSWER_COLUMN.to_owned()));
    let rule = match kind {
        RewardKind::Exact => RewardRule::Exact { column: column()?, pattern: text("pattern")? },
        RewardKind::Number => RewardRule::Number { column: column()?, pattern: text("pattern")? },
        RewardKind::Regex => RewardRule::Regex { pattern: needed("pattern")? },
        RewardKind::Format => RewardRule::Format { pattern: needed("pattern")? },
        RewardKind::Length => match (count("min")?, count("max")?) {
            (None, None) => return Err("a reward of kind `length` needs a `min` or a `max`".to_owned()),
            (least, most) if least.unwrap_or(1) > most.unwrap_or(usize::MAX) => {
                return Err("the `min` of a reward is above its `max`".to_owned());
            }
            (least, most) => {
                RewardRule::Length { least: least.unwrap_or(1), most: most.unwrap_or(MOST_LENGTH) }
            }
        },
        RewardKind::Json => {
            RewardRule::Json { keys: read(given, field("keys"), ("keys", TEXTS))?.unwrap_or_default() }
        }
        RewardKind::Command => RewardRule::Command {
            command: needed("command")?,
            workers: count("workers")?.unwrap_or(1),
            timeout_s: read(given, field("timeout"), ("timeout", ABOVE_ZERO))?.unwrap_or(TIMEOUT_S),
        },
    };
    Ok(Reward { rule, weight })
}

/// No answer is longer.
const MOST_LENGTH: usize = i32::MAX as usize;

const FILLED_TEXT: Reader<String> =
    reader("a string", &[], |given| given.text().filter(|text| !text.is_empty()));

const TEXTS: Reader<Vec<String>> = reader("a list of strings", &[], |given| {
    given.list()?.iter().map(|item| given.with(item).text()).collect()
});

fn read<T>(
    given: &Given<'_>,
    value: Option<&Value>,
    (name, reader): (&str, Reader<T>),
) -> Result<Option<T>, String> {
    let Some(value) = value else { return Ok(None) };
    match (reader.read)(&given.with(value)) {
        Some(read) => Ok(Some(read)),
        None => Err(format!("`{name}` of a reward must be {}", reader.accepts.describe())),
    }
}

impl RenderValue for Reward {
    fn render(&self) -> String {
        let mut fields = vec![("kind", self.rule.kind().render())];
        let found = |column: &String, pattern: &Option<String>| {
            let pattern = pattern.as_ref().map(|pattern| ("pattern", pattern.render()));
            std::iter::once(("column", column.render())).chain(pattern).collect::<Vec<_>>()
        };
        fields.extend(match &self.rule {
            RewardRule::Exact { column, pattern } | RewardRule::Number { column, pattern } => {
                found(column, pattern)
            }
            RewardRule::Regex { pattern } | RewardRule::Format { pattern } => {
                vec![("pattern", pattern.render())]
            }
            RewardRule::Length { least, most } => vec![("min", least.render()), ("max", most.render())],
            RewardRule::Json { keys } if keys.is_empty() => vec![],
            RewardRule::Json { keys } => vec![("keys", keys.render())],
            RewardRule::Command { command, workers, timeout_s } => vec![
                ("command", command.render()),
                ("workers", workers.render()),
                ("timeout", timeout_s.render()),
            ],
        });
        fields.push(("weight", self.weight.render()));
        table(fields.into_iter().map(|(name, value)| format!("{name} = {value}")))
    }
}
