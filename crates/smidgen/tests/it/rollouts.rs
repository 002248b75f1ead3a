//! GRPO with generated answers, from the command line: learned, scored by programs, resumed, previewed, and refused.
//!
//! The tokenizer is one of words. A tiny random model writes any of 211 tokens, of which eight are words that rewards know.

use crate::scratch::Scratch;
use crate::text_data::with_tokenizer;
use serde_json::{Value, json};

/// Answers of up to six tokens to two prompts per step.
const RUN: [&str; 10] = [
    "data.train=prompts.jsonl",
    "data.format=auto",
    "train.objective=grpo",
    "train.num_generations=4",
    "train.max_completion_length=6",
    "train.batch=2",
    "train.lr=1e-2",
    "train.warmup=0",
    "train.log_every=0",
    WORDS,
];
/// A reward for any known word.
const WORDS: &str = "train.reward=[{kind=regex,pattern='one|two|three|what|is|the|answer'}]";

fn scratch() -> Scratch {
    let scratch = Scratch::new();
    with_tokenizer(&scratch);
    let words = ["one", "two", "three", "a", "b", "c"];
    let row = |word: &&str| {
        let asked = json!([{"role": "user", "content": format!("what is {word}")}]);
        json!({"prompt": asked, "answer": word, "level": 3}).to_string() + "\n"
    };
    scratch.write("prompts.jsonl", words.iter().map(row).collect::<String>());
    scratch
}

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&RUN[..], more].concat()
}

fn rollouts(scratch: &Scratch, output: &str) -> Vec<Value> {
    let text = scratch.text(&format!("{output}/rollouts.jsonl"));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let numbers: Vec<f64> = numbers.collect();
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

#[test]
fn a_reward_is_learned() {
    let scratch = scratch();
    scratch.train("run", &with(&["train.steps=30", "train.num_generations=8", "train.lr=2e-2"]));
    let rewards: Vec<f64> =
        scratch.metrics("run").iter().map(|row| row["reward"].as_f64().unwrap()).collect();
    let (first, last) = (mean(rewards[..4].iter().copied()), mean(rewards[26..].iter().copied()));
    assert!(first < 0.5 && last > 0.8, "{rewards:?}");
    let rows = scratch.metrics("run");
    let row = &rows[0];
    assert_eq!(row["rewards_regex_mean"], row["reward"]);
    let length = row["completions_mean_length"].as_f64().unwrap();
    assert!((1.0..=6.0).contains(&length), "{length}");
    let answers = rollouts(&scratch, "run");
    assert_eq!(answers.len(), 30 * 2 * 8);
    let reward = mean(answers.iter().filter(|it| it["step"] == 1).map(|it| it["reward"].as_f64().unwrap()));
    assert!((reward - row["reward"].as_f64().unwrap()).abs() < 1e-6);
    // The advantages of a group cancel.
    let advantages = answers[..8].iter().map(|it| it["advantage"].as_f64().unwrap());
    assert!(advantages.sum::<f64>().abs() < 1e-6);
    assert!(answers.iter().all(|it| (1..=6).contains(&it["tokens"].as_u64().unwrap())));
}

/// The same answers however a step is split, wherever activations are, and however many are generated at the same time,
/// since each depends on its own numbers alone.
#[test]
fn memory_changes_no_answer() {
    let scratch = scratch();
    scratch.train("run", &with(&["train.steps=3"]));
    let texts = |output: &str| -> Vec<Value> {
        rollouts(&scratch, output).into_iter().map(|it| it["completion"].clone()).collect()
    };
    let run = scratch.losses("run");
    let least = scratch.plan(&with(&["memory.budget=1B"]))["peak_bytes"].as_u64().unwrap();
    let tight = format!("memory.budget={}", least + 4096);
    for pins in [
        &[tight.as_str()][..],
        &["memory.micro_tokens=24", "memory.recompute=all"],
        &["memory.order=breadth", "memory.micro_tokens=24", "memory.weights=disk"],
        &["memory.weights=disk", "memory.activations=disk", "memory.tile_tokens=8"],
    ] {
        scratch.train("lean", &with(&[&["train.steps=3"], pins].concat()));
        assert_eq!(texts("run"), texts("lean"), "{pins:?}");
        let lean = scratch.losses("lean");
        assert!(run.iter().zip(&lean).all(|(one, other)| (one - other).abs() < 1e-5), "{run:?} {lean:?}");
        std::fs::remove_dir_all(scratch.path("lean")).unwrap();
    }
    scratch.train("again", &with(&["train.steps=3", "memory.threads=1"]));
    assert!(scratch.adapter("run") == scratch.adapter("again"));
    scratch.train("other", &with(&["train.steps=3", "train.seed=8"]));
    assert_ne!(texts("run"), texts("other"));
}

/// Also between two updates with the same answers, of which the checkpoint has the log-probabilities.
#[test]
fn a_run_resumes_in_the_middle_of_its_answers() {
    let scratch = scratch();
    for more in [&["train.num_iterations=3", "train.beta=0.1"][..], &["train.num_iterations=1"]] {
        let run = with(&[&["train.steps=9", "train.save_every=1", "train.keep=9"], more].concat());
        for (clean, output) in [("clean", "run")] {
            scratch.train(clean, &run);
            for step in [4, 6] {
                scratch.train(output, &run);
                scratch.forget_end(output, step);
                scratch.train(output, &[&run[..], &["--resume"]].concat());
                assert!(scratch.adapter(clean) == scratch.adapter(output), "{more:?} after step {step}");
                assert_eq!(scratch.losses(clean), scratch.losses(output), "{more:?} after step {step}");
                assert_eq!(
                    rollouts(&scratch, clean),
                    rollouts(&scratch, output),
                    "{more:?} after step {step}"
                );
                std::fs::remove_dir_all(scratch.path(output)).unwrap();
            }
            std::fs::remove_dir_all(scratch.path(clean)).unwrap();
        }
    }
}

/// A program that gives 1 for answers with a known word, and ends after some answers where a file says so.
const PROGRAM: &str = r#"n=0
while read -r line; do
  n=$((n+1))
  if [ -e ends ] && [ $n -gt 12 ]; then echo 'no more memory' >&2; exit 3; fi
  if echo "$line" | grep -Eq '"completion":"[^"]*(one|two)'; then echo '{"reward": 1}'; else echo 0; fi
done
"#;

#[cfg(unix)]
#[test]
fn a_program_scores_answers_and_its_end_loses_nothing() {
    let scratch = scratch();
    scratch.write("reward.sh", PROGRAM);
    let command =
        "train.reward=[{command='sh reward.sh',workers=2,timeout=60},{kind=length,max=3,weight=0.5}]";
    let run = with(&["train.steps=5", command]);
    scratch.train("clean", &run);
    for answer in rollouts(&scratch, "clean") {
        let (command, length) = (answer["rewards"]["command"].as_f64(), answer["rewards"]["length"].as_f64());
        let (command, length) = (command.unwrap(), length.unwrap());
        assert_eq!(answer["reward"].as_f64().unwrap(), command + 0.5 * length, "{answer}");
        let text = answer["completion"].as_str().unwrap();
        assert_eq!(command == 1.0, text.contains("one") || text.contains("two"), "{answer}");
    }
    // Each of the two has four answers of a step.
    scratch.write("ends", "");
    let ended = scratch.run(&[&["train", "recipe.toml"][..], &run].concat());
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    for words in [
        "the reward command `sh reward.sh` ended with exit status: 3 after 12 answers",
        "no more memory",
        "step 3 is saved",
    ] {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    assert_eq!(scratch.checkpoints("run"), [3]);
    std::fs::remove_file(scratch.path("ends")).unwrap();
    scratch.train("run", &[&run[..], &["--resume"]].concat());
    assert!(scratch.adapter("clean") == scratch.adapter("run"));
    assert_eq!(rollouts(&scratch, "clean"), rollouts(&scratch, "run"));
}

#[test]
fn groups_with_equal_rewards_are_counted() {
    let scratch = scratch();
    let ended = scratch.train("run", &with(&["train.steps=5", "train.reward=[{kind=regex,pattern=never}]"]));
    assert!(
        ended.stderr.contains("step 1: all answers to each prompt have the same reward"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("10 of 10 groups of answers had equal rewards"), "{}", ended.stderr);
    let rows = scratch.metrics("run");
    assert!(rows.iter().all(|row| row["frac_reward_zero_std"] == 1.0 && row["grad_norm"] == 0.0), "{rows:?}");
}

#[test]
fn an_answer_ends_at_a_text() {
    let scratch = scratch();
    let words = "train.stop=[one,two,three,what,is,the,answer]";
    scratch.train("run", &with(&["train.steps=4", words]));
    let answers = rollouts(&scratch, "run");
    let stopped: Vec<&Value> = answers.iter().filter(|it| it["stopped_by"] == "stop").collect();
    assert!(!stopped.is_empty());
    for answer in stopped {
        let text = answer["completion"].as_str().unwrap();
        let word = text.split_whitespace().next_back().unwrap();
        assert!(words.contains(word), "{answer}");
    }
    scratch.train("likely", &with(&["train.steps=2", "train.top_k=1"]));
    // The most likely token is always the same one, so all answers of a group are.
    let rows = scratch.metrics("likely");
    assert_eq!(rows[0]["frac_reward_zero_std"], 1.0, "{rows:?}");
}

#[test]
fn one_plan_has_a_row_for_each_phase() {
    let scratch = scratch();
    let plan = scratch.plan(&RUN);
    let names: Vec<&str> = plan["phases"]
        .as_object()
        .map(|phases| phases.keys().map(String::as_str).collect())
        .unwrap_or_default();
    assert!(plan.to_string().contains("\"rollout\""), "{names:?}");
    let ended = scratch.train("run", &with(&["train.steps=3", "train.log_every=1"]));
    assert!(ended.stderr.contains(" reward 0."), "{}", ended.stderr);
    let phases = scratch.json("run/phases.json");
    assert!(phases["rollout"]["measured"].is_object(), "{phases}");
    let ended = scratch.run(&[&["preview", "recipe.toml", "--rows", "1"][..], &RUN].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("what is one"), "{}", ended.stdout);
}

#[test]
fn what_cannot_be_generated_or_scored_is_refused() {
    let scratch = scratch();
    for (code, overrides, words) in [
        (1, &["data.max_tokens=7"][..], &["no prompts left", "at most 1 tokens", "`data.max_tokens = "][..]),
        (2, &["data.max_tokens=6"], &["leaves no room for a prompt"]),
        (2, &["train.reward=[{kind=regex,pattern='a('}]"], &["is not a regular expression: unclosed group"]),
        (2, &["train.reward=[{kind=exakt}]"], &["did you mean `exact`?"]),
        (2, &["train.reward=[{kind=exact,patern=a}]"], &["`weight`, `column`, `pattern`, not `patern`"]),
        (2, &["train.reward=[{weight=1}]"], &["needs a `kind`, or a `command`"]),
        (2, &["train.reward=[{kind=length}]"], &["needs a `min` or a `max`"]),
        (2, &["train.reward=[{kind=json,weight=0}]"], &["a `weight` of 0 has no effect"]),
        (
            1,
            &["train.reward=[{kind=exact,column=gold}]"],
            &["prompts.jsonl` line 1 has no column `gold`", "the row has `answer`, `level`"],
        ),
        (1, &["train.reward=[{kind=number}]"], &["line 1 has no number in column `answer`"]),
        (2, &["data.split=0.5"], &["`data.split` is not evaluated where answers are generated"]),
        (2, &["train.reward=[]", "train.top_p=0.5"], &["`train.top_p` has no effect"]),
        (2, &["data.overflow=truncate"], &["would cut prompts"]),
        (2, &["train.beta=0.1", "memory.reference=cached"], &["answers are generated"]),
        (2, &["train.beta=0.1", "adapter.kind=full"], &["`train.beta` above 0 compares"]),
        (2, &["train.objective=sft"], &["`train.reward` has no effect with `train.objective = \"sft\"`"]),
    ] {
        scratch.train_refused(code, &with(overrides), words);
    }
    let ended =
        scratch.run(&[&["train", "recipe.toml"][..], &with(&["train.reward=[{command='exit 4'}]"])].concat());
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("`exit 4` ended with exit status: 4 after 0 answers"), "{}", ended.stderr);
}

/// Answers that are given: an evaluation between two updates with the same answers changes neither of them.
#[test]
fn an_evaluation_between_updates_changes_nothing() {
    let scratch = Scratch::new();
    let row = |number: u64| {
        let answers: Vec<Vec<u64>> =
            (0..3).map(|answer| vec![5 + number, 20 + answer, 30 + number]).collect();
        let rewards = [number as f64, 1.0, 0.25];
        json!({"prompt_ids": [1, 2, 3 + number], "completions": answers, "rewards": rewards}).to_string()
            + "\n"
    };
    scratch.write("train.jsonl", (0..6).map(row).collect::<String>());
    scratch.write("eval.jsonl", (6..8).map(row).collect::<String>());
    let run = [
        "data.train=train.jsonl",
        "data.eval=eval.jsonl",
        "train.objective=grpo",
        "train.num_generations=3",
        "train.num_iterations=3",
        "train.epsilon=0.05",
        "train.batch=2",
        "train.steps=6",
        "train.warmup=0",
    ];
    scratch.train("plain", &run);
    scratch.train("evaluated", &[&run[..], &["train.eval_every=1", "train.save_every=2"]].concat());
    assert_eq!(scratch.losses("plain"), scratch.losses("evaluated"));
    assert!(scratch.adapter("plain") == scratch.adapter("evaluated"));
    scratch.forget_end("evaluated", 4);
    let resumed = [&run[..], &["train.eval_every=1", "train.save_every=2", "--resume"]].concat();
    scratch.train("evaluated", &resumed);
    assert!(scratch.adapter("plain") == scratch.adapter("evaluated"));
}

/// Prompts that meet longer completions of other rows are cut at `data.max_tokens`, whatever the plan has room for.
#[test]
fn memory_does_not_change_the_divergence_of_kto() {
    let scratch = Scratch::new();
    let row = |number: u64| {
        let (prompt, answer) = if number.is_multiple_of(2) { (18, 3) } else { (3, 18) };
        let ids =
            |count: u64, first: u64| (0..count).map(|at| (first + 7 * at + number) % 211).collect::<Vec<_>>();
        json!({"prompt_ids": ids(prompt, 3), "completion_ids": ids(answer, 50), "label": number != 3})
            .to_string()
            + "\n"
    };
    scratch.write("labels.jsonl", (0..8).map(row).collect::<String>());
    let run = [
        "data.train=labels.jsonl",
        "data.max_tokens=24",
        "train.objective=kto",
        "train.batch=4",
        "train.lr=1e-2",
        "train.warmup=0",
        "train.beta=0.5",
    ];
    scratch.train("whole", &run);
    scratch.train("split", &[&run[..], &["memory.micro_tokens=24"]].concat());
    let divergences = |output: &str| -> Vec<f64> {
        scratch.metrics(output).iter().map(|row| row["kl"].as_f64().unwrap()).collect()
    };
    let (whole, split) = (divergences("whole"), divergences("split"));
    assert!(whole.iter().any(|kl| *kl > 1e-3), "{whole:?}");
    assert!(whole.iter().zip(&split).all(|(one, other)| (one - other).abs() < 1e-4), "{whole:?} {split:?}");
    scratch.train_refused(
        1,
        &[&run[..], &["train.batch=7", "output.dir=lonely"]].concat(),
        &["8 rows in steps of 7 leave a step with one row", "compares each row with another one"],
    );
}
