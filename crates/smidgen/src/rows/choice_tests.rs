//! Choices: how rows give them, how they are tokenized, and scores against those of lm-evaluation-harness.
//!
//! `fixtures/eval` was recorded by the harness with a tiny model and two tokenizers. Every log-likelihood must be equal
//! to the recorded one, however the samples are packed.

use super::*;
use crate::eval::evaluator::{EvalResources, Evaluator, Subject, plan_evaluation};
use crate::plan::arithmetic::Arithmetic;
use crate::plan::devices::JobDevice;
use crate::rows::question::read_questions;
use crate::session::adapted::build_adapted_request;
use serde_json::json;
use smidgen_compile::Request;
use smidgen_formats::model::Model;
use smidgen_ir::{DeviceKind, Precision, verify};
use smidgen_recipe::{DeviceChoice, Recipe};
use smidgen_runtime::AnyDevice;
use smidgen_runtime::cpu::bf16_unit::F32Unit;
use std::path::Path;

/// Where the test runs, which may be another machine than the one that built it.
fn fixtures() -> PathBuf {
    let package = std::env::var("CARGO_MANIFEST_DIR").unwrap_or(env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).join("../../fixtures")
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_folder(&fixtures().join("sft").join(name)).unwrap()
}

fn data() -> smidgen_recipe::Data {
    let source = smidgen_recipe::RecipeSource {
        file: "recipe.toml".into(),
        folder: "/".into(),
        text: "[model]\npath = \"m\"\n[data]\ntrain = \"t.json\"\n[output]\ndir = \"o\"\n".into(),
    };
    let recipe: Recipe = smidgen_recipe::parse_recipe(&source, &[], Path::new("/")).unwrap();
    recipe.data
}

fn limits(max_tokens: u32) -> TokenLimits {
    TokenLimits { vocab_size: 672, max_tokens, overflow: Overflow::Truncate }
}

/// Rows in a file become a set.
fn build_of(rows: &Json, answer: &str, max_tokens: u32) -> Result<ChoiceSet, Failure> {
    let folder = tempfile::tempdir().unwrap();
    let files = [folder.path().join("rows.json")];
    std::fs::write(&files[0], rows.to_string()).unwrap();
    let tokenizer = tokenizer("byte_level");
    let result = read_questions(&files, &data(), 0, &tokenizer)
        .and_then(|questions| ChoiceSet::build(&questions, &files, answer, &tokenizer, limits(max_tokens)));
    result.map_err(|mut failure| {
        let place = format!("`{}`", files[0].display());
        failure.message = failure.message.replace(&place, "ROWS");
        failure
    })
}

fn said(rows: &Json, answer: &str) -> String {
    build_of(rows, answer, 100).unwrap_err().message
}

#[test]
fn scores_are_those_of_the_harness() {
    let cases: Json =
        serde_json::from_slice(&std::fs::read(fixtures().join("eval/record.json")).unwrap()).unwrap();
    let model = Model::open_folder(&fixtures().join("eval/model")).unwrap();
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap());
        let files = [fixtures().join(format!("eval/{}.json", case["rows"].as_str().unwrap()))];
        let questions = read_questions(&files, &data(), 0, &tokenizer).unwrap();
        let max_tokens = case["max_tokens"].as_u64().unwrap() as u32;
        let set = ChoiceSet::build(&questions, &files, "", &tokenizer, limits(max_tokens)).unwrap();
        assert_eq!(set.warnings.is_empty(), max_tokens > 100);
        let request = build_adapted_request(&model, None).unwrap();
        let subjects = [Subject { request, adapter: None }];
        let means = EvalResources {
            place: &JobDevice::Cpu,
            budget_bytes: 64 << 20,
            stated: true,
            data_bytes: set.heap_bytes(),
        };
        let run = |means: EvalResources<'_>, device: AnyDevice| {
            let plan = plan_evaluation(&subjects, &model, &[(&set.set, 0)], means).unwrap().remove(0);
            let peak_bytes = plan.peak_bytes;
            let mut evaluator = Evaluator::load(&subjects[0], &model, plan, device).unwrap();
            let found = evaluator.log_likelihoods(&set.set, 0, &|_| {}).unwrap();
            (peak_bytes, found, evaluator.into_device())
        };
        // One device for all plans, one after the other.
        let device =
            JobDevice::Cpu.open(subjects[0].request.threads, Arithmetic::F32(F32Unit::detect())).unwrap();
        let (peak_bytes, found, mut device) = run(means, device);
        // With less memory, logits are computed in several pieces, and samples are packed with others.
        let (mut budget_bytes, mut plans) = (peak_bytes, 0);
        while plan_evaluation(
            &subjects,
            &model,
            &[(&set.set, 0)],
            EvalResources { budget_bytes: budget_bytes - 1, ..means },
        )
        .is_ok()
        {
            let (peak_bytes, again, freed) =
                run(EvalResources { budget_bytes: budget_bytes - 1, ..means }, device);
            device = freed;
            assert!(found.iter().zip(&again).all(|(one, other)| (one - other).abs() < 1e-5));
            (budget_bytes, plans) = (peak_bytes, plans + 1);
        }
        assert!(plans >= 2, "{plans}");
        for (row, wanted) in set.rows.iter().zip(case["samples"].as_array().unwrap()) {
            for (choice, wanted_sum) in wanted["log_likelihoods"].as_array().unwrap().iter().enumerate() {
                let sample = row.first_sample + choice;
                let tokens = u64::from(set.set.supervised(sample));
                assert_eq!(Some(tokens), wanted["tokens"][choice].as_u64(), "{case:?} {row:?} {choice}");
                let error = (found[sample] - wanted_sum.as_f64().unwrap()).abs();
                assert!(error < 1e-4, "{} {}: {error}", row.place, row.texts[choice]);
            }
        }
        let scores = set.score(&found);
        let means = [("acc", scores.acc), ("acc_norm", scores.acc_norm), ("acc_bytes", scores.acc_bytes)];
        for (name, mean) in means {
            let wanted = |name: String| case["results"][name].as_f64().unwrap();
            assert!((mean.value - wanted(name.into())).abs() < 1e-12, "{name}");
            assert!((mean.stderr.unwrap() - wanted(format!("{name}_stderr"))).abs() < 1e-12, "{name}");
        }
    }
}

#[test]
fn the_right_choice_is_an_index_a_label_or_a_text() {
    let row = |name: &str, gold: Json| {
        let mut row = json!({"question": "the fox", "choices": ["a dog", "nothing", "1"]});
        row[name] = gold;
        row
    };
    let rows = json!([
        row("answer", json!(1)),
        row("answerKey", json!("B")),
        row("label", json!("nothing")),
        row("gold", json!("0")),
        // A text counts before an index: `1` is the third choice.
        row("answer", json!("1")),
    ]);
    let set = build_of(&rows, "", 100).unwrap();
    let golds: Vec<usize> = set.rows.iter().map(|row| row.gold).collect();
    assert_eq!(golds, [1, 1, 1, 0, 2]);
    assert_eq!(set.set.len(), 15);
    assert_eq!(set.rows[1].first_sample, 3);
    assert!(!set.found);
}

#[test]
fn answers_of_outputs_become_choices() {
    let rows = json!([
        {"prompt": "the fox", "completion": " it says answer2.", "answer": "answer2"},
        {"prompt": "the dog", "completion": " it says answer1.", "answer": "answer1"},
        {"prompt": "the cat", "completion": "  then answer2 of answer1"},
    ]);
    let set = build_of(&rows, "answer[1-5]", 100).unwrap();
    assert_eq!(set.rows[0].texts, ["it says answer1.", "it says answer2."]);
    assert_eq!(set.rows[2].texts, ["then answer1 of answer1", "then answer2 of answer1"]);
    let golds: Vec<usize> = set.rows.iter().map(|row| row.gold).collect();
    assert_eq!(golds, [1, 0, 1]);
    assert!(set.found);
    // Without a pattern the whole output is the answer.
    let set = build_of(&rows, "", 100).unwrap();
    assert_eq!(set.rows[0].texts.len(), 3);
    assert_eq!(set.rows[1].gold, 0);
}

#[test]
fn rows_without_valid_choices_are_refused() {
    let choices = |value: Json| json!([{"question": "q", "choices": value, "answer": 0}]);
    let either = "ROWS row 1: `choices` is neither a list of texts nor lists of `text` and `label`";
    assert_eq!(said(&choices(json!([1, 2])), ""), either);
    assert_eq!(said(&choices(json!("a, b")), ""), either);
    assert_eq!(
        said(&choices(json!(["a"])), ""),
        "ROWS row 1: `choices` has 1 entries, at least two are needed"
    );
    assert_eq!(said(&choices(json!(["a", " "])), ""), "ROWS row 1: `choices[1]` is empty");
    assert_eq!(
        said(&choices(json!({"text": ["a", "b"], "label": ["A"]})), ""),
        "ROWS row 1: `choices` has 2 entries of `text` and 1 of `label`"
    );
    let row = |gold: Json| json!([{"question": "q", "choices": ["x", "y"], "answerKey": gold}]);
    assert_eq!(
        said(&row(json!("C")), ""),
        "ROWS row 1: `answerKey` is `C`: not one of the choices A, B (0 to 1), and not the text of one"
    );
    assert_eq!(
        said(&row(json!(2)), ""),
        "ROWS row 1: `answerKey` is `2`: not one of the choices A, B (0 to 1), and not the text of one"
    );
    assert_eq!(
        said(&json!([{"question": "q", "choices": ["x", "y"]}]), ""),
        "ROWS row 1: the row has `choices`, but none of `answerKey`, `answer`, `label` and `gold`"
    );
    assert_eq!(
        said(&json!([{"question": "q", "choices": ["x", "y"], "gold": 0}, {"question": "q", "gold": 0}]), ""),
        "ROWS row 2: `choices` is missing, the first row has it"
    );
    assert_eq!(
        said(
            &json!([{"question": "q", "choices": ["x", "y"], "gold": 0}, {"choices": ["x", "y"], "gold": 0}]),
            ""
        ),
        "ROWS row 2: the row has none of `question`, `question_stem` and `query`"
    );
    let long = json!([{"question": "q", "choices": ["one two three four five six seven", "y"], "gold": 0}]);
    let error = build_of(&long, "", 4).unwrap_err().message;
    assert!(error.starts_with("ROWS row 1: the choice `one two three four five six seven` has "), "{error}");
    assert!(error.ends_with("`data.max_tokens = 4` leaves no room for the question"), "{error}");
}

#[test]
fn outputs_without_answers_are_refused() {
    let rows = json!([{"prompt": "a", "completion": "answer1"}, {"prompt": "b", "completion": "no idea"}]);
    assert_eq!(
        said(&rows, "answer[1-5]"),
        "ROWS row 2: `eval.answer` (`answer[1-5]`) finds nothing in the expected output `no idea`"
    );
    let rows = json!([{"prompt": "a", "completion": "answer1"}, {"prompt": "b", "completion": "answer1"}]);
    assert_eq!(
        said(&rows, "answer[1-5]"),
        "every row of `data.eval` has the same answer `answer1`: there is nothing to choose"
    );
    let rows = json!([
        {"prompt": "a", "completion": "answer1", "answer": "answer3"}, {"prompt": "b", "completion": "answer2"},
    ]);
    assert_eq!(
        said(&rows, "answer[1-5]"),
        "ROWS row 1: `answer` is `answer3`: not one of the answers answer1, answer2"
    );
    let rows = json!([{"text": "words"}]);
    assert_eq!(
        said(&rows, ""),
        "the rows of `data.eval` have the format `text`, which has no question and no answer"
    );
}

/// The plan needs neither the weights nor the GPU.
#[test]
fn an_evaluation_is_planned_for_a_gpu_of_another_machine() {
    let model = Model::open_folder(&fixtures().join("eval/model")).unwrap();
    let files = [fixtures().join("eval/questions.json")];
    let tokenizer = tokenizer("byte_level");
    let questions = read_questions(&files, &data(), 0, &tokenizer).unwrap();
    let set = ChoiceSet::build(&questions, &files, "", &tokenizer, limits(128)).unwrap();
    let measured = 300 << 20;
    let place = JobDevice::Cuda { ordinal: 0, facts: None, context_bytes: Some(measured) };
    let request = build_adapted_request(&model, None).unwrap();
    let (device, precision) = (place.kind(), Precision::Bf16);
    let subjects = [Subject { request: Request { device, precision, ..request }, adapter: None }];
    let means = EvalResources { place: &place, budget_bytes: 1 << 30, stated: true, data_bytes: 1 << 40 };
    let plan = plan_evaluation(&subjects, &model, &[(&set.set, 0)], means).unwrap().remove(0);
    assert_eq!((plan.plan.device, plan.plan.precision), (DeviceKind::Cuda, Precision::Bf16));
    assert_eq!(verify::plan(&plan.plan), Vec::<String>::new());
    // The samples are in host memory, which the budget does not limit.
    assert!((measured..measured + (16 << 20)).contains(&plan.context_bytes), "{}", plan.context_bytes);
    assert_eq!(plan.peak_bytes, plan.plan.reserved_bytes() as u64 + plan.context_bytes);
    let table = crate::report::evaluation_table::render_evaluation_table(&plan, means);
    assert!(table.lines().next().unwrap().ends_with(" · cuda:0 (not found on this machine)"), "{table}");
    assert!(table.contains("driver "), "{table}");
    let small = EvalResources { budget_bytes: measured, ..means };
    let refused = plan_evaluation(&subjects, &model, &[(&set.set, 0)], small).unwrap_err();
    assert!(refused.message.contains("the budget is 300.00 MiB"), "{}", refused.message);
}

/// Scores in f32 and in bf16 on a GPU against the harness's. In PyTorch's bf16, too, one in a hundred of this model's
/// tokens is off by more than 0.08.
#[test]
#[ignore = "needs a GPU"]
fn cuda_scores_as_the_harness_does() {
    let _alone = crate::plan::devices::alone();
    let cases: Json =
        serde_json::from_slice(&std::fs::read(fixtures().join("eval/record.json")).unwrap()).unwrap();
    let model = Model::open_folder(&fixtures().join("eval/model")).unwrap();
    let place = JobDevice::detect(DeviceChoice::Cuda(0)).unwrap();
    for (precision, tolerance) in [(Precision::F32, 1e-4), (Precision::Bf16, 0.1)] {
        let mut device = place.open(1, Arithmetic::Cuda(precision)).unwrap();
        for case in cases.as_array().unwrap() {
            let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap());
            let files = [fixtures().join(format!("eval/{}.json", case["rows"].as_str().unwrap()))];
            let questions = read_questions(&files, &data(), 0, &tokenizer).unwrap();
            let max_tokens = case["max_tokens"].as_u64().unwrap() as u32;
            let set = ChoiceSet::build(&questions, &files, "", &tokenizer, limits(max_tokens)).unwrap();
            let request = build_adapted_request(&model, None).unwrap();
            let request = Request { device: place.kind(), precision, ..request };
            let subjects = [Subject { request, adapter: None }];
            let means = EvalResources { place: &place, budget_bytes: 2 << 30, stated: true, data_bytes: 0 };
            let plan = plan_evaluation(&subjects, &model, &[(&set.set, 0)], means).unwrap().remove(0);
            let mut evaluator = Evaluator::load(&subjects[0], &model, plan, device).unwrap();
            let found = evaluator.log_likelihoods(&set.set, 0, &|_| {}).unwrap();
            for (row, wanted) in set.rows.iter().zip(case["samples"].as_array().unwrap()) {
                for (choice, wanted) in wanted["log_likelihoods"].as_array().unwrap().iter().enumerate() {
                    let sample = row.first_sample + choice;
                    let error = (found[sample] - wanted.as_f64().unwrap()).abs();
                    let allowed = tolerance * f64::from(set.set.supervised(sample));
                    assert!(error < allowed, "{precision:?} {} {}: {error}", row.place, row.texts[choice]);
                }
            }
            device = evaluator.into_device();
        }
    }
}
