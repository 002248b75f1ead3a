//! Readers: from an untyped value to the type of a key, with a description of what is accepted.
//!
//! A reader accepts or refuses a value; the message of a refusal is always "must be ..., got ...", built from
//! [`Accepts`], so that every refusal says what the key accepts.
//! Which key uses which reader is in `keys.rs`. Whether a file or a module exists is not checked here.

use std::path::Path;

use smidgen_ir::bytes::parse_bytes;

use crate::dataset_name::DatasetName;
use crate::model_name::parse_model_path;
use crate::sections::{
    Budget, DeviceChoice, Init, Layers, ModelPath, ProfileChoice, RecipePath, Targets, Template, Warmup,
};
use crate::value::{Given, LARGEST_COUNT, parse_count_from_zero};
use smidgen_ir::words::ClosedWord;
use strsim::osa_distance;

/// What a key accepts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accepts {
    /// Completes "must be ..."; empty if the words are enough.
    pub phrase: &'static str,
    /// The accepted words, for the hint about a mistyped one.
    pub words: &'static [&'static str],
}

/// How a key reads its value.
pub(crate) struct Reader<T> {
    pub accepts: Accepts,
    pub read: fn(&Given<'_>) -> Option<T>,
}

impl Accepts {
    /// Completes "must be ...".
    pub fn describe(&self) -> String {
        match (self.phrase, self.words) {
            ("", [only]) => format!("`{only}`"),
            ("", words) => format!("one of `{}`", words.join("`, `")),
            (phrase, _) => phrase.to_owned(),
        }
    }
}

pub(crate) const fn reader<T>(
    phrase: &'static str,
    words: &'static [&'static str],
    read: fn(&Given<'_>) -> Option<T>,
) -> Reader<T> {
    Reader { accepts: Accepts { phrase, words }, read }
}

/// One of the words of `W`.
pub(crate) const fn words<W: ClosedWord>() -> Reader<W> {
    reader("", W::WORDS, |given| W::from_word(&given.text()?))
}

/// A whole number of at least `LEAST`.
pub(crate) const fn count_from<T: TryFrom<i128>, const LEAST: i128>() -> Reader<T> {
    let phrase = match LEAST {
        0 => "a whole number of at least 0",
        1 => "a whole number of at least 1",
        2 => "a whole number of at least 2",
        _ => panic!("no phrase for this bound"),
    };
    reader(phrase, &[], read_count::<T, LEAST>)
}

pub(crate) fn read_count<T: TryFrom<i128>, const LEAST: i128>(given: &Given<'_>) -> Option<T> {
    let number = given.integer().filter(|number| (LEAST..=LARGEST_COUNT).contains(number))?;
    T::try_from(number).ok()
}

/// No matrix of a model that can be trained is wider.
const MOST_RANK: usize = 65_536;

pub(crate) const RANK: Reader<usize> = reader("a whole number from 1 to 65536", &[], read_rank);

fn read_rank(given: &Given<'_>) -> Option<usize> {
    read_count::<usize, 1>(given).filter(|rank| *rank <= MOST_RANK)
}

pub(crate) const SEED: Reader<u64> = reader("a whole number of at least 0", &[], |given| {
    let number = given.integer()?;
    u64::try_from(number).ok().filter(|seed| *seed <= i64::MAX as u64)
});

pub(crate) const ABOVE_ZERO: Reader<f64> =
    reader("a number above 0", &[], |given| given.number().filter(|number| *number > 0.0));

pub(crate) const FRACTION_BELOW_ONE: Reader<f64> =
    reader("a number of at least 0 and below 1", &[], read_fraction_below_one);

pub(crate) const SHARE: Reader<f64> = reader("a number above 0 and at most 1", &[], |given| {
    given.number().filter(|number| *number > 0.0 && *number <= 1.0)
});

pub(crate) const EPOCHS: Reader<f64> = reader("a number above 0 and at most 2147483647", &[], |given| {
    given.number().filter(|number| *number > 0.0 && *number <= LARGEST_COUNT as f64)
});

/// For numbers that are computed with in f32: 1e39 would be infinite, and 0.9999999999 would be 1.
pub(crate) const F32_ABOVE_ZERO: Reader<f64> = reader("a number above 0", &[], |given| {
    given.number().filter(|number| is_in_f32(*number) && *number >= f64::from(f32::MIN_POSITIVE))
});

pub(crate) const F32_AT_LEAST_ZERO: Reader<f64> = reader("a number of at least 0", &[], |given| {
    given.number().filter(|number| is_in_f32(*number) && *number >= 0.0)
});

pub(crate) const F32_BELOW_ONE: Reader<f64> =
    reader("a number of at least 0 and below 1", &[], read_f32_below_one);

pub(crate) const ANY_F32: Reader<f64> =
    reader("a number", &[], |given| given.number().filter(|number| is_in_f32(*number)));

pub(crate) const NUMBERS: Reader<Vec<f64>> = reader("a list of numbers", &[], |given| match given.list() {
    Some(items) => items.iter().map(|item| (ANY_F32.read)(&given.with(item))).collect(),
    None => Some(vec![(ANY_F32.read)(given)?]),
});

pub(crate) const TEXTS: Reader<Vec<String>> = reader("a name, or a list of different names", &[], |given| {
    read_texts(given).filter(|names| !names.is_empty() && all_different(names))
});

pub(crate) const TWO_FRACTIONS_BELOW_ONE: Reader<[f64; 2]> =
    reader("a list of two numbers of at least 0 and below 1", &[], |given| {
        let numbers: Option<Vec<f64>> =
            given.list()?.iter().map(|item| read_f32_below_one(&given.with(item))).collect();
        numbers?.try_into().ok()
    });

pub(crate) const BOOLEAN: Reader<bool> = reader("true or false", &["true", "false"], |given| given.boolean());

pub(crate) const ANY_TEXT: Reader<String> = reader("a string", &[], |given| given.text());

pub(crate) const MODEL_PATH: Reader<ModelPath> =
    reader("`hf:org/name`, `pypi:package`, a folder or a .gguf file", &[], |given| {
        parse_model_path(&read_some_text(given)?, given.folder)
    });

pub(crate) const TRAIN_FILES: Reader<Vec<RecipePath>> =
    reader("a file, or a list of files", &[], |given| read_files(given).filter(|files| !files.is_empty()));

pub(crate) const EVAL_FILES: Reader<Vec<RecipePath>> =
    reader("a file, or a list of files (empty for none)", &[], |given| match given.text() {
        Some(text) if text.is_empty() => Some(Vec::new()),
        _ => read_files(given),
    });

pub(crate) const AUDIO_FOLDER: Reader<Option<RecipePath>> = reader("a folder", &[], |given| {
    let text = given.text()?;
    Some((!text.is_empty()).then(|| RecipePath::resolve(&text, given.folder)))
});

pub(crate) const OUTPUT_FOLDER: Reader<RecipePath> = reader("a folder", &[], |given| {
    Some(RecipePath::resolve(&read_some_text(given)?, given.working_directory))
});

pub(crate) const TARGETS: Reader<Targets> = reader(
    "`all-linear`, a list of different module names or a regular expression",
    &["all-linear"],
    |given| {
        let names = read_texts(given)?;
        if let (None, [text]) = (given.list(), names.as_slice())
            && Targets::is_expression(text)
        {
            return Some(Targets::Expression(text.clone()));
        }
        if names == ["all-linear"] {
            return Some(Targets::AllLinear);
        }
        // A misspelt `all-linear` must not count as the name of a module.
        let meant_all = |name: &String| name == "all" || osa_distance(name, "all-linear") <= 3;
        let fine = !names.is_empty() && are_module_names(&names) && !names.iter().any(meant_all);
        fine.then_some(Targets::Names(names))
    },
);

pub(crate) const PARTS: Reader<Vec<String>> =
    reader("a list of different module names, `norms` or `projector`", &[], |given| {
        read_texts(given).filter(|names| are_module_names(names))
    });

pub(crate) const LAYERS: Reader<Layers> =
    reader("`all`, `last:8`, or a list of different layer numbers", &["all", "last:8"], |given| {
        if let Some(list) = read_layer_list(given) {
            return (!list.is_empty()).then_some(Layers::List(list));
        }
        let text = given.text()?;
        match text.split_once(':') {
            None => (text == "all").then_some(Layers::All),
            Some(("last", count)) => Some(Layers::Last(parse_count_from_one(count)?)),
            Some(_) => None,
        }
    });

pub(crate) const INIT: Reader<Init> =
    reader("`default`, `builtin:speech`, or the folder of an adapter", &["default"], |given| {
        let text = read_some_text(given)?;
        Some(match text.as_str() {
            "default" => Init::Default,
            "builtin:speech" => Init::BuiltinSpeech,
            path => Init::Adapter(RecipePath::resolve(path, given.folder)),
        })
    });

pub(crate) const RANK_PATTERN: Reader<Vec<(String, usize)>> =
    reader("a table of patterns and whole numbers from 1 to 65536", &[], |given| {
        read_patterns(given, read_rank)
    });

pub(crate) const ALPHA_PATTERN: Reader<Vec<(String, f64)>> =
    reader("a table of patterns and numbers above 0", &[], |given| read_patterns(given, F32_ABOVE_ZERO.read));

pub(crate) const TEMPLATE: Reader<Template> = reader(
    "`auto`, `model`, `none`, the name of a built-in template, or a .jinja file",
    &["auto"],
    |given| {
        let text = read_some_text(given)?;
        Some(match text.as_str() {
            "auto" => Template::Auto,
            "model" => Template::Model,
            "none" => Template::Plain,
            path if ends_in(path, "jinja") => Template::File(RecipePath::resolve(path, given.folder)),
            name => Template::Named(name.to_owned()),
        })
    },
);

pub(crate) const PROFILE: Reader<ProfileChoice> =
    reader("`auto`, the name of a device, or a .json file of `smidgen doctor`", &["auto"], |given| {
        let text = read_some_text(given)?;
        Some(match text.as_str() {
            "auto" => ProfileChoice::Auto,
            path if ends_in(path, "json") => ProfileChoice::File(RecipePath::resolve(path, given.folder)),
            name => ProfileChoice::Named(name.to_owned()),
        })
    });

pub(crate) const WARMUP: Reader<Warmup> =
    reader("a whole number of steps, or a fraction of at least 0 and below 1", &[], |given| {
        match given.integer() {
            Some(_) => Some(Warmup::Steps(read_count::<u64, 0>(given)?)),
            None => Some(Warmup::Fraction(read_fraction_below_one(given)?)),
        }
    });

pub(crate) const DEVICE: Reader<DeviceChoice> =
    reader("`auto`, `cpu` or `cuda:N` with the number of a GPU", &["auto", "cpu", "cuda:0"], |given| {
        DeviceChoice::parse(given.text()?.as_str())
    });

pub(crate) const BUDGET: Reader<Budget> =
    reader("`auto`, or a size above 0 such as `24GiB`, `512MiB` or `8GB`", &["auto"], |given| {
        match given.text() {
            Some(text) if text == "auto" => Some(Budget::Auto),
            _ => Some(Budget::Bytes(read_size(given)?)),
        }
    });

pub(crate) const PEAK: Reader<Option<u64>> =
    reader("a size above 0 such as `22.4GiB`, or empty for none", &[], |given| match given.text() {
        Some(text) if text.is_empty() => Some(None),
        _ => Some(Some(read_size(given)?)),
    });

/// Why a number is refused that only f64 can hold.
pub(crate) fn explain_f32(given: &Given<'_>) -> Option<String> {
    let numbers = match given.list() {
        Some(items) => items.iter().filter_map(|item| given.with(item).number()).collect(),
        None => Vec::from_iter(given.number()),
    };
    numbers.into_iter().find_map(|number| {
        let there = match number as f32 {
            large if large.is_infinite() => "infinite",
            one if one == 1.0 && number < 1.0 => "1",
            small if number > 0.0 && small < f32::MIN_POSITIVE => "0",
            _ => return None,
        };
        Some(format!("it is used in f32, where {number:?} is {there}"))
    })
}

fn is_in_f32(number: f64) -> bool {
    (number as f32).is_finite()
}

fn read_f32_below_one(given: &Given<'_>) -> Option<f64> {
    read_fraction_below_one(given).filter(|number| (*number as f32) < 1.0)
}

fn read_fraction_below_one(given: &Given<'_>) -> Option<f64> {
    given.number().filter(|number| (0.0..1.0).contains(number))
}

fn read_some_text(given: &Given<'_>) -> Option<String> {
    given.text().filter(|text| !text.trim().is_empty())
}

/// A size without a unit below this is a size whose unit was forgotten.
const LEAST_WITHOUT_UNIT: u64 = 1_000_000;

/// Bytes above 0, as a number of bytes or as a size with a unit.
fn read_size(given: &Given<'_>) -> Option<u64> {
    match unitless(given) {
        Some(number) => {
            u64::try_from(number).ok().filter(|bytes| (LEAST_WITHOUT_UNIT..=i64::MAX as u64).contains(bytes))
        }
        None => parse_bytes(&given.text()?).filter(|bytes| *bytes > 0),
    }
}

/// The number of a size without a unit.
pub(crate) fn unitless(given: &Given<'_>) -> Option<i128> {
    given.integer().or_else(|| given.text()?.trim().parse().ok())
}

/// A list of texts, or one text as a list of one. Empty texts are refused.
fn read_texts(given: &Given<'_>) -> Option<Vec<String>> {
    match given.list() {
        Some(items) => items.iter().map(|item| read_some_text(&given.with(item))).collect(),
        None => Some(vec![read_some_text(given)?]),
    }
}

fn read_files(given: &Given<'_>) -> Option<Vec<RecipePath>> {
    let texts = read_texts(given)?;
    let is_wrong_name =
        |text: &String| text.strip_prefix("hf:").is_some_and(|name| DatasetName::parse(name).is_none());
    if texts.iter().any(is_wrong_name) {
        return None;
    }
    Some(texts.iter().map(|text| RecipePath::resolve(text, given.folder)).collect())
}

/// `None` if the value is not a list of different layer numbers; the caller then tries words.
pub(crate) fn read_layer_list(given: &Given<'_>) -> Option<Vec<usize>> {
    let items = given.list()?;
    let layers: Option<Vec<usize>> =
        items.iter().map(|item| read_count::<usize, 0>(&given.with(item))).collect();
    layers.filter(|layers| all_different(layers))
}

fn read_patterns<T>(given: &Given<'_>, read: fn(&Given<'_>) -> Option<T>) -> Option<Vec<(String, T)>> {
    let entries = given.table()?;
    let names: Vec<&String> = entries.iter().map(|(name, _)| name).collect();
    if !all_different(&names) || names.iter().any(|name| name.is_empty()) {
        return None;
    }
    entries.iter().map(|(name, value)| Some((name.clone(), read(&given.with(value))?))).collect()
}

pub(crate) fn parse_count_from_one(text: &str) -> Option<usize> {
    parse_count_from_zero(text).filter(|count| *count >= 1)
}

/// All different, and none with a comma: several names without brackets must not count as one.
fn are_module_names(names: &[String]) -> bool {
    all_different(names) && !names.iter().any(|name| name.contains(','))
}

fn all_different<T: PartialEq>(items: &[T]) -> bool {
    items.iter().enumerate().all(|(index, item)| !items[..index].contains(item))
}

fn ends_in(text: &str, extension: &str) -> bool {
    Path::new(text).extension().is_some_and(|it| it.eq_ignore_ascii_case(extension))
}
