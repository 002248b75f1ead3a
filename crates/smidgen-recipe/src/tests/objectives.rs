//! Objectives: which keys each reads, their defaults, and what cannot be combined.

use super::*;
use crate::objective::APPLICABLE;
use smidgen_ir::Objective;
use smidgen_ir::objective::{Curve, Measure, RowsNeeded};

fn said(lines: &str) -> String {
    parse(&format!("{REQUIRED}{lines}"), &[]).expect_err("a mistake").to_string()
}

#[test]
fn defaults_are_those_of_trl() {
    let recipe = with("[train]\nobjective = \"dpo\"\n");
    assert_eq!(recipe.train.lr, 1e-6);
    let Ok(Some(Objective::Pairs(loss))) = recipe.objective() else { panic!("dpo compares pairs") };
    let [term] = loss.terms[..] else { panic!("one loss type") };
    assert_eq!((term.weight, term.measure, term.scale, term.shift), (1.0, Measure::Sum, 0.1, 0.0));
    assert_eq!((loss.nll, loss.beta), (0.0, 0.1));
    assert_eq!(with("[train]\nobjective = \"dpo\"\nlr = 0.5\n").train.lr, 0.5);
    let Ok(Some(Objective::Answers(loss))) =
        with("[train]\nobjective = \"grpo\"\nepsilon = 0.3\n").objective()
    else {
        panic!("grpo compares answers")
    };
    assert_eq!((loss.epsilon_low, loss.epsilon_high, loss.beta), (0.3, 0.3, 0.0));
    assert!(with("").objective().unwrap().is_none());
}

#[test]
fn simpo_is_a_form_of_cpo() {
    let short = with("[train]\nobjective = \"simpo\"\nbeta = 2.0\nsimpo_gamma = 0.7\n");
    let long = "objective = \"cpo\"\nloss_type = \"simpo\"\ncpo_alpha = 0.0\nbeta = 2.0\nsimpo_gamma = 0.7\n";
    assert_eq!(short.objective(), with(&format!("[train]\n{long}")).objective());
    assert_eq!(short.rows_needed(), RowsNeeded::Pairs { counts_prompt: false });
}

#[test]
fn several_losses_are_added() {
    let text = "[train]\nobjective = \"dpo\"\nloss_type = [\"ipo\", \"sft\"]\nloss_weights = [0.5, 0.25]\nbeta = 0.5\n";
    let Ok(Some(Objective::Pairs(loss))) = with(text).objective() else { panic!("dpo compares pairs") };
    assert_eq!((loss.terms.len(), loss.nll), (1, 0.25));
    assert_eq!((loss.terms[0].weight, loss.terms[0].shift), (0.5, 1.0));
    assert_eq!(loss.terms[0].curve, Curve::Square);
    let only_sft = with("[train]\nobjective = \"dpo\"\nloss_type = \"sft\"\n");
    assert!(!only_sft.has_reference());
}

#[test]
fn keys_that_an_objective_does_not_read_are_refused() {
    for (name, kinds) in APPLICABLE {
        let value = match name {
            "reference" => "\"base\"",
            "loss_type" => "\"sigmoid\"",
            "scale_rewards" => "\"batch\"",
            "importance_sampling_level" => "\"token\"",
            "use_bias_correction_kl" => "true",
            "num_generations" | "num_iterations" | "max_completion_length" => "2",
            _ => "0.5",
        };
        let said = said(&format!("[train]\n{name} = {value}\n"));
        assert!(
            said.contains(&format!("`train.{name}` has no effect with `train.objective = \"sft\"`")),
            "{said}"
        );
        assert!(!kinds.is_empty());
    }
    let said = said("[train]\nobjective = \"orpo\"\nlabel_smoothing = 0.1\n");
    assert!(said.contains("`train.label_smoothing` has no effect"), "{said}");
}

#[test]
fn what_cannot_be_trained_is_named() {
    for (lines, words) in [
        (
            "[train]\nobjective = \"dpo\"\nloss_type = \"nca_pair\"\n",
            "`train.loss_type = \"nca_pair\"` is not supported",
        ),
        ("[train]\nobjective = \"dpo\"\nloss_type = \"sgmoid\"\n", "is not known"),
        (
            "[train]\nobjective = \"dpo\"\nloss_weights = [1.0, 2.0]\n",
            "has 2 entries, `train.loss_type` has 1",
        ),
        (
            "[train]\nobjective = \"kto\"\nloss_type = [\"kto\", \"apo_zero_unpaired\"]\n",
            "only `dpo` adds several",
        ),
        ("[train]\nobjective = \"dpo\"\nbatch_tokens = 512\n", "`train.batch_tokens` cannot be used"),
        (
            "[train]\nobjective = \"orpo\"\n[memory]\nreference = \"cached\"\n",
            "`memory.reference` has no effect",
        ),
        ("[adapter]\nkind = \"full\"\n[train]\nobjective = \"kto\"\n", "`kto` measures the divergence"),
        (
            "[adapter]\nkind = \"full\"\n[train]\nobjective = \"dpo\"\n[memory]\nreference = \"pass\"\n",
            "training changes the base",
        ),
    ] {
        let said = said(lines);
        assert!(said.replace("\n    ", " ").contains(words), "{words} is not in\n{said}");
    }
}
